"""The store of values: the page's picture of it, that nothing else holds tensors, and the bytes in it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from models import rich_batches, rich_model
from pipelines import parts
from torch import Tensor, nn

from vpipe import Layer, Model, Pipeline
from vpipe.runtime import values
from vpipe.runtime.activations import Record
from vpipe.runtime.worker import Worker
from vpipe.schedules import kinds
from vpipe.schedules.kinds import Action

ROOT = Path(__file__).parents[2]


def tensors_of(found: object) -> Iterator[Tensor]:
    """The tensors of an entry, without those that only a graph holds."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Record):
        yield from found.tensors()
    elif isinstance(found, list | tuple | dict):
        for part in found.values() if isinstance(found, dict) else found:
            yield from tensors_of(part)


class Skip(nn.Module):
    """h [B,4] -> h [B,4], and h doubled, which the last layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(h)
        return h, 2 * h


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h: Tensor, skip: Tensor) -> Tensor:
        return (self.linear(h) * skip).square().mean()


def test_the_picture_of_the_page_is_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    picture = page.split("## The life of a value")[1].split("```")[1].splitlines()
    drawn: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for column in ([line[:58] for line in picture], [line[58:] for line in picture]):
        action = verb = ""
        for begins, does, value in re.findall(r"\b(\d[A-Z_]+|results)\b|\b(takes|puts|reads)\b|\b([A-Z_]+ \d)\b",
                                              " ".join(column)):
            action, verb = begins or action, does or verb
            if value and verb != "reads":
                drawn[action].add((verb, value))
    seen: dict[str, set[tuple[str, str]]] = defaultdict(set)
    now = ["results"]
    execute = Worker.execute

    def noting(worker: Worker, action: Action) -> None:
        now[0] = f"{action.stage}{action.op}"
        execute(worker, action)
        now[0] = "results"

    class Noted(values.Values):
        def __setitem__(self, key: Any, entry: Any) -> None:
            if list(tensors_of(entry)) or isinstance(entry, Record):
                seen[now[0]].add(("puts", f"{named[key[0]]} {key[1]}"))
            super().__setitem__(key, entry)

        def pop(self, key: Any, *default: Any) -> Any:
            entry = self.get(key)
            if list(tensors_of(entry)) or isinstance(entry, Record):
                seen[now[0]].add(("takes", f"{named[key[0]]} {key[1]}"))
            return super().pop(key, *default)

        def __delitem__(self, key: Any) -> None:
            self.pop(key)

    named = {value: name for module in (kinds, values) for name, value in vars(module).items()
             if isinstance(value, kinds.Value)}
    monkeypatch.setattr("vpipe.runtime.build_workers.Values", Noted)
    monkeypatch.setattr(Worker, "execute", noting)
    model = Model([Layer("first", Skip, ("x",), ("h", "skip")),
                   *(Layer(f"linear{i}", lambda: nn.Linear(4, 4)) for i in range(2)),
                   Layer("loss", Loss, ("h", "skip"), ("loss",))], batch=("x",))
    pipe = Pipeline(model, lambda own: torch.optim.SGD(own, lr=0.1), stages=4, schedule="zb_v", microbatches=4)
    list(pipe.train([{"x": torch.randn(8, 4)}]))
    assert drawn == seen


LASTING = ("worker", "p2p", "tied_weights", "outputs", "step_results", "optimizer_step", "action_recorder")


def test_nothing_else_holds_tensors_of_microbatches() -> None:
    """No attribute of what lives as long as a worker is declared to hold tensors, but for these."""
    found = set()
    for name in LASTING:
        tree = ast.parse((ROOT / f"vpipe/runtime/{name}.py").read_text())
        for holder in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(holder):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute) and re.search(
                        r"\b(Tensor|Record|SavedTensors|Holder|Any)\b", ast.unparse(node.annotation)):
                    found.add(f"{holder.name}.{node.target.attr}")
    assert found == {
        "TiedWeights._arriving",  # the rank's own weights, which copies of others replace
        "OptimizerSteps.gradient_norm", "OptimizerSteps.norms", "OptimizerSteps._norms",  # of an update
        "Recorder._now", "Recorder._records"}


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_whoever_clears_the_store_frees_all_that_was_in_it(schedule: str) -> None:
    pipe = Pipeline(rich_model(), **parts(microbatches=4, stages=4, schedule=schedule,
                                          optimizer=lambda own: torch.optim.SGD(own, lr=0.1)))
    steps = pipe.train(rich_batches(12, 8))
    next(steps)
    there = [ref(tensor) for worker in pipe.engine.workers.values() for entry in worker.values.values()
             for tensor in tensors_of(entry) if not tensor.is_leaf or not isinstance(tensor, nn.Parameter)]
    assert len(there) > 8
    for worker in pipe.engine.workers.values():
        worker.values.clear()
    assert [tensor() for tensor in there if tensor() is not None] == []
