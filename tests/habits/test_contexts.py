"""What a script has around the loop is around each layer, or as if it were not there, under every kind of schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_map
from world import World

from vpipe import Cut, Execution, Layer, Model, Pipeline
from vpipe.errors import UserError

Context = Callable[[], AbstractContextManager[Any]]
Batch = dict[str, Tensor]
autocast = partial(torch.autocast, "cpu", torch.bfloat16)


class Body(nn.Module):
    """Statistics, a derived weight, a weight that is used twice, and a part that is not cast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = parametrizations.weight_norm(nn.Linear(16, 16)), nn.BatchNorm1d(16)
        self.exact = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(torch.relu(self.first(x)))))
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.exact(x.float()))


class Casting(nn.Linear):
    """A layer with an autocast of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with autocast():
            return torch.relu(super().forward(x)).float()


class End(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(super().forward(x).float(), y)


class Within(nn.Module):
    """A layer within a context."""

    context: Context = nullcontext

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *tensors: Tensor) -> Tensor:
        with Within.context():
            found: Tensor = self.layer(*tensors)
        return found


@cache
def made() -> tuple[list[nn.Module], list[Batch]]:
    """Layers to copy, and batches."""
    torch.manual_seed(0)
    return ([Within(layer) for layer in (Body(), nn.Linear(16, 16), Casting(16, 16), End(16, 4))],
            [{"x": torch.randn(8, 16), "y": torch.randint(4, (8,))} for _ in range(4)])


def pipeline(schedule: str = "1f1b", precision: str = "fp32", executor: str = "overlapped") -> Pipeline:
    """Two stages, the first of them recomputed."""
    *layers, end = [partial(deepcopy, layer) for layer in made()[0]]
    model = Model([*(Layer(f"l{i}", layer, ("h" if i else "x",), ("h",)) for i, layer in enumerate(layers)),
                   Layer("end", end, ("h", "y"), ("loss",))], batch=("x", "y"))
    return Pipeline(model, partial(torch.optim.Adam, lr=0.01), Cut([2, 2], recompute=[1.0, 0.0]),
                    schedule, 2, precision=precision, execution=Execution(executor=executor))


def losses(pipe: Pipeline, batches: Iterable[Batch]) -> list[float]:
    return [step.loss for step in pipe.train(batches)]


# -- the contexts

def rounded(tensor: Tensor) -> Tensor:
    return tensor.half().float() if tensor.dtype is torch.float32 and not tensor.is_leaf else tensor


AROUND_LAYERS: dict[str, Context] = {
    "autocast": autocast, "autocast fp16": partial(torch.autocast, "cpu", torch.float16),
    "autocast uncached": partial(autocast, cache_enabled=False),
    "saved_tensors_hooks": partial(graph.saved_tensors_hooks, rounded, lambda tensor: tensor)}
NOWHERE: dict[str, Context] = {
    "no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "default device": partial(torch.device, "meta")}
CELLS = [("1f1b", "fp32", "overlapped"), ("1f1b", "bf16", "naive"), ("zb_h1", "fp32", "overlapped"),
         ("zb_h1", "bf16", "naive"), ("pipedream", "fp32", "overlapped"), ("gpipe", "fp32", "async_threaded")]


def run(cell: tuple[str, str, str], loop: str = "", layers: str = "") -> list[float]:
    """Train, evaluate and train within a context around all of it, or around every call of a layer."""
    pipe, batches, contexts = pipeline(*cell), made()[1], {"": nullcontext, **AROUND_LAYERS, **NOWHERE}
    Within.context = contexts[layers]
    with contexts[loop]():
        found = [*losses(pipe, batches[:2]), pipe.evaluate(batches[2:3]), *losses(pipe, batches[3:])]
    Within.context = nullcontext
    return found


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
@pytest.mark.parametrize("context", [*AROUND_LAYERS, *NOWHERE])
def test_training_and_evaluation_are_within_it_or_as_without(two: World, context: str,
                                                             cell: tuple[str, str, str]) -> None:
    schedule, precision, executor = cell
    layers = context if context in AROUND_LAYERS and not (precision == "bf16" and "autocast" in context) else ""
    want = run((schedule if schedule == "pipedream" else "1f1b", precision, "overlapped"), layers=layers)
    assert run(cell, loop=context) == want
    if executor == "overlapped":
        assert two.run(run, cell=cell, loop=context) == [want] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_an_autocast_may_change_between_updates(schedule: str) -> None:
    """So do the dtypes between stages: with a flush at any update, without one after a drain."""
    batches, contexts = made()[1], (autocast, nullcontext, autocast, torch.no_grad)
    pipe, steps, want, got = pipeline(schedule), pipeline(schedule).train(batches, pauses=2), [], []
    for batch, context in zip(batches, contexts, strict=True):
        with context():
            want += losses(pipe, [batch])
            got += [next(steps).loss for _ in range(2 if schedule == "pipedream" else 1)]
    assert got == want


# -- the script's own code

@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, autocast])
def test_code_of_the_script_sees_what_is_around_the_loop(context: Context) -> None:
    def seeing(result: Any) -> Any:
        seen.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        return result

    def read() -> Iterator[Batch]:
        with context():
            yield from made()[1]

    pipe, seen = pipeline(), set()
    with context():
        list(pipe.train(map(seeing, made()[1]), stop=lambda: seeing(False)))
        _, outputs = pipe.evaluate(made()[1], lambda tensors: seeing({"h": tensors["h"] * 2}))
        seeing(None)
    assert len(seen) == 1
    assert not outputs["h"].is_inference()
    assert losses(pipeline(), read()) == losses(pipeline(), made()[1]), "what a generator is within stays with it"


def test_pipelines_may_be_built_saved_and_loaded_within_inference_mode(tmp_path: Path) -> None:
    """Optimizer states and batches that were made there train on."""
    batches, pipe = made()[1], pipeline("pipedream")
    losses(pipe, batches[:2])
    want = losses(pipe, batches[2:])
    with torch.inference_mode():
        saved, loaded, again = (pipeline("pipedream") for _ in range(3))
        inferred = [tree_map(Tensor.clone, batch) for batch in batches]
    losses(saved, inferred[:2])
    with torch.inference_mode():
        saved.save(tmp_path / "saved")
        loaded.load(tmp_path / "saved")
        again.load_state_dict(tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value,
                                       saved.state_dict(sharded=True)))
    assert losses(saved, inferred[2:]) == losses(loaded, batches[2:]) == losses(again, batches[2:]) == want


# -- what is refused

def under_another_autocast(*, evaluates: bool, schedule: str) -> None:
    """Rank 0 has an autocast around the call, rank 1 has none."""
    pipe, batches = pipeline(schedule), made()[1]
    losses(pipe, batches)  # the shapes are known when it differs
    with autocast() if dist.get_rank() == 0 else nullcontext():
        if evaluates:
            pipe.evaluate(batches)
        losses(pipe, batches)


@pytest.mark.parametrize(("evaluates", "schedule", "in_flight"), [
    (False, "1f1b", True), (False, "pipedream", False), (True, "1f1b", False)])
def test_ranks_with_different_autocasts_are_told(two: World, evaluates: bool, schedule: str, in_flight: bool) -> None:
    call = "evaluate()" if evaluates else "step 0 of train()"
    two.begin(under_another_autocast, evaluates=evaluates, schedule=schedule)
    outcomes = [two.outcome(rank, 20) for rank in range(2)]
    two.kill()
    assert [kind for kind, _ in outcomes] == ["error", "error"]
    for _, error in outcomes:
        assert (f"rank 0{' (stage 0)' * in_flight} is at {call} under torch.autocast(torch.bfloat16), rank 1 at {call}"
                in error["text"])


def test_an_autocast_that_changes_with_microbatches_in_flight_is_refused() -> None:
    steps = pipeline("pipedream").train(made()[1])
    next(steps)
    with autocast(), pytest.raises(UserError, match=r"off and is torch.bfloat16 after 1 step, while 'pipedream' has"):
        next(steps)
