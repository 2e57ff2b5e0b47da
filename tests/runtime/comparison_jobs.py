"""Jobs about batches that ranks read alike, or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from pipelines import parts
from torch import nn

from vpipe import Model, Pipeline
from vpipe.distributed.watchdog import watch
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


def one_cannot_read() -> None:
    pipe = pipeline(stages=2, schedule="pipedream")
    list(pipe.train(torn(1) if dist.get_rank() == 0 else loader()))


def updates_before_confirmed(*, schedule: str) -> list[int]:
    """The updates with a microbatch of which this rank did not know whether all have read the same."""
    pipe = pipeline(stages=2, schedule=schedule)
    comparison, early, known = pipe.engine.training._loaders.comparison, list[int](), [0]
    confirm = comparison.confirm

    def confirmed(until: float = 0) -> None:
        confirm(until)
        known.append(int(until))

    comparison.confirm = confirmed  # type: ignore[method-assign]
    [worker] = pipe.engine.workers.values()
    per_update = pipe.engine.schedule.assignment.per_update(0)

    def gradients(number: int, gradients: Any) -> None:
        if (number + 1) * per_update > known[-1]:
            early.append(number)

    worker.optimizer_steps.observer = Mock(gradients=gradients)
    list(pipe.train(loader()))
    assert len(known) > 1
    return early


def left_streams() -> tuple[list[float], list[int]]:
    """Losses of streams that are left, and how much is kept of what was exchanged about their batches."""
    pipe, losses = pipeline(stages=4, schedule="pipedream", microbatches=1), []
    for steps in (2, 1, 3):
        for step in pipe.train(loader()):
            losses.append(step.loss)
            if len(losses) % steps == 0:
                break
    losses += [step.loss for step in pipe.train(loader(), updates=2)]
    losses += [pipe.evaluate(loader()), *(step.loss for step in pipe.train(loader()))]
    watchdog, left = watch.watchdog, [0, 0]
    if watchdog is not None and dist.is_initialized():
        left = [len(watchdog._arrived), len(pipe.engine.training._loaders.comparison._expected)]
    return losses, left
