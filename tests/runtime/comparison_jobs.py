"""Jobs about batches that ranks read alike, or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from pipelines import parts
from torch import nn

from vpipe import Model, Pipeline
from vpipe.errors import RunError
from vpipe.runtime.microbatches import Batch


def pipeline(**arguments: Any) -> Pipeline:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    return Pipeline(Model.sequential(net, nn.CrossEntropyLoss()),
                    **parts(optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                            **{"microbatches": 2, "timeout_s": 30, **arguments}))


def loader(samples: int = 4, shuffled: bool = False) -> Iterator[Batch]:
    """As a DataLoader, whose import takes seconds."""
    random = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(24, 3, generator=random), torch.randint(2, (24,), generator=random)
    for indices in (torch.randperm(24) if shuffled else torch.arange(24)).split(samples):
        yield {"input": inputs[indices], "target": targets[indices]}


def torn(read: int) -> Iterator[Batch]:
    for number, batch in enumerate(loader()):
        if number == read:
            raise OSError("the disk is gone")
        yield batch


def differing(*, schedule: str, case: str) -> None:
    """Train on batches of which rank 0 has others."""
    first = dist.get_rank() == 0
    pipe = pipeline(stages=2, schedule=schedule)

    def batches() -> Iterator[Batch]:
        if case == "shuffled":
            torch.manual_seed(dist.get_rank())  # as in a script without a seed
            yield from loader(shuffled=True)
        elif case == "larger":  # of a size that was seen before
            yield from (next(loader(8)), next(loader(4)), next(loader(8 if first else 4)))
        else:
            yield from (batch for number, batch in enumerate(loader()) if number < 2 or not first)

    try:
        list(pipe.train(batches()))
    except RunError as error:
        if error.__cause__ is error:
            raise AssertionError("who follows causes would not come to an end") from None
        raise


def other_tails(*, sizes: list[int]) -> None:
    """Evaluate on batches whose last one has another size on each rank, so another number of microbatches."""
    pipe = pipeline(stages=2, schedule="1f1b", microbatches=4)
    pipe.evaluate(next(loader(samples)) for samples in (8, 8, sizes[dist.get_rank()]))


def ends_alike() -> list[Any]:
    """Train, evaluate and save the state after batches could not be read, on any rank."""
    found: list[Any] = []
    for schedule in ("1f1b", "pipedream"):
        pipe = pipeline(stages=4, schedule=schedule)
        for batches in (torn(2), torn(3), loader(7)):
            for use in (pipe.evaluate, lambda batches, pipe=pipe: list(pipe.train(batches))):
                try:
                    use(batches)
                    found.append("no error")
                except (OSError, ValueError) as error:
                    found.append(str(error))
        found += [pipe.evaluate(loader()), sum(float(t.sum()) for t in pipe.state_dict().values()),
                  [step.index for step in pipe.train(loader())]]
    return found


def one_cannot_read() -> None:
    pipe = pipeline(stages=2, schedule="pipedream")
    list(pipe.train(torn(1) if dist.get_rank() == 0 else loader()))
