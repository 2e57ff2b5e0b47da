"""How many files of the library a flow passes, and how many know a feature."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from test_rooms import FILES, LIBRARY, ROOT, nodes, room_of, tier_of
from torch import Tensor, nn

from vpipe import Layer, Model, Pipeline
from vpipe.runtime import prepare_schedule
from vpipe.schedules import Action

CEILINGS = {"actions of microbatches": 9, "an update": 23, "description to programs": 13,
            "makers of a schedule's graph": 1, "slices": 20, "ZeRO-1": 18}
"""They fall, never rise; aims are 12 for an update, 10, 1, 20 and 20."""

SOURCES = [file for file in FILES if tier_of(room_of(file)) == LIBRARY]


class Loss(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()


def entered(call: Callable[[], object], at: set[str]) -> None:
    """Add the files of the library of which a call runs functions."""
    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(f"{ROOT}/"):
            at.add(name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)


@pytest.fixture(scope="module")
def counts() -> dict[str, int]:
    model = Model([Layer("first", lambda: nn.Linear(4, 4), ["x"], ["h"]), Layer("loss", Loss, ["h", "y"], ["loss"])],
                  ["x", "y"])
    pipe = Pipeline(model, lambda parameters: torch.optim.SGD(parameters or [torch.zeros(1)]), 2, "1f1b", 4)
    steps, description = pipe.train([{"x": torch.ones(8, 4), "y": torch.ones(8, 4)}] * 3), pipe.description
    prepared, update, actions = set[str](), set[str](), set[str]()
    entered(lambda: prepare_schedule(model, description.cut, description.order, 4, description.execution,
                                     needs_norms=False), prepared)
    next(steps)  # the first update looks at the layers
    entered(lambda: next(steps), update)

    def around(action: Action, run: Callable[[], None]) -> None:
        if action.op.per_microbatch:
            entered(run, actions)
        else:
            run()

    for worker in pipe.engine.workers.values():
        worker.around.append(around)
    next(steps)
    graphs = [node for file in SOURCES for node in nodes(file) if isinstance(node, ast.Call)
              and ast.unparse(node.func) == "Graph"]

    def knowing(words: str) -> int:
        return sum(re.search(rf"\b({words})\b", file.read_text()) is not None for file in SOURCES)

    return {"actions of microbatches": len(actions), "an update": len(update),
            "description to programs": len(prepared), "makers of a schedule's graph": len(graphs),
            "slices": knowing("slices|sliced|SequenceSlice"), "ZeRO-1": knowing("zero1|owners|GATHER_W")}


def test_a_constructor_has_eight_arguments_at_most() -> None:
    """But for two that scripts call: to group their keywords would change these calls."""
    found = {node.name for file in FILES for node in nodes(file) if isinstance(node, ast.ClassDef)
             for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"
             and len(each.args.posonlyargs + each.args.args + each.args.kwonlyargs) > len(["self"]) + 8}
    assert found == {"Pipeline", "RecordedRun"}


@pytest.mark.parametrize("what", CEILINGS)
def test_no_more_files_take_part_than_before(counts: dict[str, int], what: str) -> None:
    assert 0 < counts[what] <= CEILINGS[what], "lower its ceiling where it fell; merge what only passes values on"
