"""Ranks that call different things, the same with other arguments, or build different pipelines: one refusal on all
of them, at once, after which the next call works."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import nn
from world import World

from vpipe import Cut, Execution, Model, Pipeline, Transfers, Update
from vpipe.distributed.init import exchange
from vpipe.errors import VpipeError


def net(width: int = 8, depth: int = 3, act: type[nn.Module] = nn.Tanh) -> Model:
    torch.manual_seed(0)
    return Model.sequential(nn.Sequential(*(nn.Sequential(nn.Linear(4 if not i else width, width), act())
                                            for i in range(depth)), nn.Linear(width, 3)), loss=nn.CrossEntropyLoss())


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def data(count: int) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(count)
    return [{"input": torch.randn(8, 4, generator=made), "target": torch.randint(3, (8,), generator=made)}
            for _ in range(count)]


def build(**words: Any) -> Pipeline:
    given = {"model": net(), "optimizer": Update(adam, grad_clip=1.0, average=0.9), "stages": 2, "microbatches": 4,
             "transfers": Transfers(timeout_s=20), **words}
    return Pipeline(**given)


def of_matrices(parameters: list[nn.Parameter], matrices: set[int]) -> torch.optim.Optimizer:
    assert len(matrices) == 2
    return adam(parameters)


def only_on_rank_0(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if dist.get_rank():
        raise ValueError("lr")
    return adam(parameters)


def refused(call: Callable[[], Any]) -> str:
    """The error of a call, which every rank has at once."""
    began = time.monotonic()
    try:
        call()
    except VpipeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}" + (
            f" after {time.monotonic() - began:.0f} s" if time.monotonic() - began > 5 else "")
    return "none"


def calls(pipe: Pipeline, folder: str) -> dict[str, Callable[[], Any]]:
    """All calls that ranks make together, as they are named in a refusal."""
    zeros = {name: torch.zeros_like(value) for name, value in pipe.state_dict().items()}
    return {"evaluate()": lambda: pipe.evaluate(data(1)),
            "evaluate(averaged=True)": lambda: pipe.evaluate(data(1), averaged=True),
            "evaluate(outputs=['output'])": lambda: pipe.evaluate(data(1), ["output"]),
            "state_dict()": pipe.state_dict, "state_dict(corrected=False)": lambda: pipe.state_dict(corrected=False),
            "state_dict(sharded=True)": lambda: pipe.state_dict(sharded=True), "gradient_norms()": pipe.gradient_norms,
            "usage()": pipe.usage, "clock_offset()": pipe.clock_offset, "drain()": pipe.drain,
            "check_replicas()": pipe.check_replicas, "local_state()": pipe.local_state,
            f"save(folder={folder}/a)": lambda: pipe.save(f"{folder}/a"),
            f"save(folder={folder}/b)": lambda: pipe.save(Path(f"{folder}/b")),
            f"load(folder={folder}/a)": lambda: pipe.load(f"{folder}/a"),
            "load_state_dict(state=8 tensors, checksum ": lambda: pipe.load_state_dict(zeros),
            "load_state_dict(state=7 tensors, checksum ": lambda: pipe.load_state_dict(dict(list(zeros.items())[1:])),
            "train()": lambda: pipe.train(data(1)), "train(updates=1)": lambda: pipe.train(data(2), updates=1),
            "Pipeline()": build, "sharing what each has": lambda: exchange().all_gather(1)}


def out_of_step(*, folder: str, **words: Any) -> list[Any]:
    """The errors of calls that are made beside each other, each beside several, and the losses around them."""
    pipe = build(**words)
    losses = [step.loss for step in pipe.train(data(1))]
    known = calls(pipe, folder)
    pairs = [pair[::1 if number % 2 else -1] for number, pair in enumerate(combinations(known, 2)) if number % 3 == 0]
    errors = {" | ".join(pair): refused(known[pair[dist.get_rank()]]) for pair in pairs}
    return [errors, [*losses, *(step.loss for step in pipe.train(data(2)))]]


def test_different_calls_are_refused_on_both_ranks_and_the_next_one_works(pair: World, tmp_path: Path) -> None:
    found = pair.run(out_of_step, folder=str(tmp_path))
    (errors, _), (others, _) = found
    assert len(errors) == 70
    assert errors == others
    for calls, error in errors.items():
        first, second = calls.split(" | ")
        assert error.startswith(f"UserError: error: rank 0 is at {first}")
        assert f", rank 1 at {second}" in error
        assert "after" not in error
    pipe = build()
    expected = [*(step.loss for step in pipe.train(data(1))), *(step.loss for step in pipe.train(data(2)))]
    assert [own for _, own in found] == [expected, expected]


BUILDS: dict[str, Callable[[], dict[str, Any]]] = {  # arguments of rank 1, by what is refused
    "seed is 0 on rank 0 and 1 on rank 1": lambda: {"seed": 1},
    "layer '0'": lambda: {"model": net(act=nn.ReLU)}, "out_features=16": lambda: {"model": net(16)},
    "cut is Cut(stages=(2, 2)": lambda: {"model": net(depth=4)}, "microbatches": lambda: {"microbatches": 2},
    "order": lambda: {"schedule": "gpipe"}, "optimizer": lambda: {"optimizer": Update(sgd, grad_clip=1.0, average=0.9)},
    "grad_clip is 1.0 on rank 0 and None on rank 1": lambda: {"optimizer": Update(adam, average=0.9)},
    "precision": lambda: {"precision": "bf16"}, "no schedule is called 'none'": lambda: {"schedule": "none"},
    "compress is": lambda: {"transfers": Transfers(compress="bf16", timeout_s=20)},
    "rank 0 and Cut(stages=(1, 3)": lambda: {"stages": Cut([1, 3])},
    "executor": lambda: {"execution": Execution(executor="naive")}}


def built_apart() -> list[Any]:
    """The errors of builds that differ, or fail on one rank, and the losses of the next one."""
    second = dist.get_rank() == 1
    errors = [refused(lambda words=words: build(**words() if second else {})) for words in BUILDS.values()]
    with patch("vpipe.runtime.collectives.distributions", lambda name: [Mock(version=f"0.{dist.get_rank()}")]):
        errors.append(refused(build))
    errors.append(refused(lambda: build(optimizer=Update(only_on_rank_0, grad_clip=1.0, average=0.9))))
    alike = partial(of_matrices, matrices={8, 0} if second else {0, 8})  # equal sets of two orders
    return [errors, [step.loss for step in build(optimizer=Update(alike, grad_clip=1.0, average=0.9)).train(data(2))]]


def test_builds_that_differ_are_refused_on_both_ranks_and_the_next_one_trains(pair: World) -> None:
    expected = [step.loss for step in build().train(data(2))]
    for errors, losses in pair.run(built_apart):
        for error, text in zip(errors, [*BUILDS, "vpipe is 0.0 on rank 0 and 0.1 on rank 1",
                                        "of stage 1 cannot be made: ValueError: lr"], strict=True):
            assert text in error
            assert "after" not in error
        assert losses == expected
