"""An error in a layer names the layer, and what the layer was given, whatever runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import MeanSquare
from oracles import pipeline_of
from torch import Tensor, nn

from vpipe import Layer, Model, Pipeline
from vpipe.errors import RunError
from vpipe.runtime.layer_errors import describe_tensors, hint_of

WIDTH, MICROBATCHES = 6, 4  # as pipeline_of has them

FORWARD_HINT = "\nhint: make the layer accept these inputs, or change the outputs of the layers before it"
BACKWARD_HINT = "\nhint: torch.autograd.set_detect_anomaly(True) prints the line of the forward that it belongs to"

EXECUTORS = [("naive", "gpipe"), ("overlapped", "1f1b"), ("overlapped", "pipedream"), ("overlapped", "zb_h1"),
             pytest.param("async_threaded", "gpipe", marks=pytest.mark.extras("async_threaded"))]


class Broken(nn.Module):
    """Raises where it is told: in forward, in forward without a graph, in a forward that recomputes, in backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.forwards = 0
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.where == ("forward" if torch.is_grad_enabled() else "evaluation") or \
                (self.where == "recompute" and self.forwards > 1):
            raise IndexError("out of luck")
        if self.where == "seventh" and self.forwards == 7:
            raise ValueError("the seventh")
        x = self.linear(x)
        if self.where == "backward" and x.requires_grad:
            x.register_hook(self.refuse)
        return x

    def refuse(self, gradient: Tensor) -> None:
        raise ZeroDivisionError("no gradient today")


def model(*middle: Callable[[], nn.Module]) -> Model:
    """A first layer, those in the middle, numbered from 1, and a loss."""
    layers = [Layer("first", lambda: nn.Linear(WIDTH, WIDTH), ("x",))]
    layers += [Layer(f"middle{i}", build) for i, build in enumerate(middle)]
    return Model([*layers, Layer("loss", MeanSquare, outputs=("loss",))], batch=("x",))


def pipeline(of: Model, **words: Any) -> Pipeline:
    return pipeline_of(of, **{"stages": 2, "schedule": "1f1b", "optimizer": torch.optim.SGD, **words})


def error_of(pipe: Pipeline, batch: dict[str, Tensor] | None = None) -> RunError:
    with pytest.raises(RunError) as caught:
        list(pipe.train([batch or {"x": torch.ones(2 * MICROBATCHES, WIDTH)}] * 2))
    assert caught.value.__cause__ is not None
    return caught.value


@pytest.mark.parametrize(("executor", "schedule"), EXECUTORS)
def test_the_forward_of_a_layer(executor: str, schedule: str) -> None:
    error = error_of(pipeline(model(nn.Identity, lambda: Broken("forward")), executor=executor, schedule=schedule,
                              partition=[2, 2]))
    assert str(error) == ("error: the forward of layer 2 'middle1' on h float32[2, 6] raised IndexError: out of luck "
                          f"(rank 1, stage 1, microbatch 0, action 1F0){FORWARD_HINT}")
    assert isinstance(error.__cause__, IndexError)
    assert (error.rank, error.stage, error.microbatch, error.action) == (1, 1, 0, "1F0")


@pytest.mark.parametrize(("executor", "schedule"), EXECUTORS)
def test_the_backward_of_a_stage(executor: str, schedule: str) -> None:
    error = error_of(pipeline(model(lambda: Broken("backward"), nn.ReLU, nn.Dropout), executor=executor,
                              schedule=schedule, partition=[4, 1]))
    last_first = executor == "async_threaded"
    assert str(error) == (
        "error: the backward of one of the layers 0 'first' to 3 'middle2' on the gradient of h float32[2, 6] raised "
        f"ZeroDivisionError: no gradient today (rank 0, stage 0, microbatch {3 if last_first else 0}, action "
        f"0{'I' if schedule == 'zb_h1' else 'B'}{3 if last_first else 0}){BACKWARD_HINT}")
    assert isinstance(error.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(("broken", "words", "text"), [
    ("backward", {"partition": [3, 1], "recompute": 1.0},
     "the backward of one of the layers 0 'first' to 2 'middle1' on the gradient of h float32[2, 6] raised "),
    ("backward", {"partition": [3, 1], "recompute": [[0, 2], []]},
     "the backward of layer 1 'middle0' on the gradient of h float32[2, 6] raised "),
    ("recompute", {"partition": [3, 1], "recompute": 1.0, "microbatches": 1},
     "recomputing for a backward, the forward of layer 1 'middle0' on h float32[8, 6] raised IndexError: out of luck "
     "(rank 0, stage 0, microbatch 0, action 0"),
    ("seventh", {"partition": [3, 1]}, "the forward of layer 1 'middle0' on h float32[2, 6] raised ValueError: the "
                                     "seventh (rank 0, stage 0, microbatch 6, action 0F2)")])
def test_layers_that_are_recomputed_together_and_microbatches_of_the_run_are_named(
        broken: str, words: dict[str, Any], text: str) -> None:
    assert str(error_of(pipeline(model(lambda: Broken(broken), nn.ReLU), **words))).startswith(f"error: {text}")


def test_an_evaluation() -> None:
    pipe = pipeline(model(lambda: Broken("evaluation")))
    with pytest.raises(RunError) as caught:
        pipe.evaluate([{"x": torch.ones(2 * MICROBATCHES, WIDTH)}])
    assert str(caught.value).startswith("error: the forward of layer 1 'middle0' on h float32[2, 6] raised IndexError: "
                                        "out of luck (rank 1, stage 1, microbatch 0, action 1F0 of an evaluation)\n")


@pytest.mark.parametrize(("sharded", "what"), [
    (False, "of the layer 'linear.weight', 'linear.bias' are plain tensors: "),
    (True, "all parameters of the layer are DTensors, and an input or a buffer is not: ")])
def test_a_plain_tensor_that_meets_a_dtensor(sharded: bool, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixed(Broken):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("aten.addmm.default got mixed torch.Tensor and DTensor")

    monkeypatch.setattr("vpipe.runtime.layer_errors.is_sharded", lambda tensor: sharded)
    assert str(error_of(pipeline(model(lambda: Mixed(""))))).rpartition("hint: ")[2] == (
        f"{what}name every module that meets DTensors in the plan of parallelize_module, or let those before it return "
        "plain tensors (use_local_output=True)")


def test_errors_outside_layers_name_the_action(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: torch.optim.SGD) -> None:
        raise OverflowError("too far")

    pipe = pipeline(model())
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    assert str(error_of(pipe)) == ("error: the optimizer step raised OverflowError: too far (rank 0, stage 0, action "
                                   "0STEP0)\nhint: fix what raised it")


def test_a_layer_that_cannot_be_built() -> None:
    def build() -> nn.Module:
        raise OverflowError("too wide")

    with pytest.raises(OverflowError, match="too wide") as caught:
        pipeline(model(build))
    assert caught.value.__notes__ == ["raised by what builds layer 'middle0'"]


def test_the_loss_of_a_sequential_model_is_of_its_last_layer() -> None:
    whole = Model.sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), loss=nn.CrossEntropyLoss())
    error = error_of(pipeline(whole), {"input": torch.ones(8, 3), "target": torch.full((8,), 3)})
    assert str(error).startswith("error: the forward of layer 2 '2' on h float32[2, 3], target int64[2] raised "
                                 "IndexError: Target 3 is out of bounds. (rank 1, stage 1, microbatch 0, ")
    assert str(error).endswith("change the outputs of the layers before it or the batch's field 'target'")


def test_float_ids_are_the_batchs_and_no_layers() -> None:
    embed = Layer("embed", lambda: nn.Embedding(4, WIDTH), ("x",))
    of = Model([embed, Layer("loss", MeanSquare, outputs=("loss",))], batch=("x",))
    assert str(error_of(pipeline(of))).endswith(
        "\nhint: make the layer accept these inputs, or change the batch's field 'x'")


def test_another_device_is_shown() -> None:
    tensors = {"h": torch.empty(2, 3, dtype=torch.bfloat16, device="meta"), "ids": torch.empty(4, dtype=torch.int64)}
    assert describe_tensors(tensors) == "h bfloat16[2, 3] on meta, ids int64[4]"


def test_what_takes_less_memory_is_said_without_memory() -> None:
    for lack in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
                 RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 B")):
        assert hint_of(lack) == "smaller microbatches, more recompute, or fewer layers in this stage take less memory"
