"""After a failure before any stage has made its step, a pipeline in one process goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import AdamW, fingerprint
from models import rich_batches, rich_model
from pipelines import parts
from torch import Tensor, nn

from vpipe import Layer, Model, Pipeline
from vpipe.errors import RunError, UserError
from vpipe.runtime.microbatches import Batch


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, breaker: Breaker) -> Tensor:
        context.breaker = breaker
        breaker.passed("forward")
        return hidden.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.breaker.passed("backward")
        return gradient, None


class Breaker:
    """Raises an error in the n-th pass from when it is armed on."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.error: BaseException = RuntimeError("broken")

    def arm(self, direction: str, passes: int, error: BaseException | None = None) -> None:
        self.left, self.error = {direction: passes}, error or RuntimeError("broken")

    def passed(self, direction: str) -> None:
        if direction in self.left:
            self.left[direction] -= 1
            if not self.left[direction]:
                del self.left[direction]
                raise self.error


class Breakable(nn.Module):
    def __init__(self, breaker: Breaker) -> None:
        super().__init__()
        self._breaker = breaker

    def forward(self, hidden: Tensor) -> Tensor:
        return _Breaks.apply(hidden, self._breaker)


def pipeline(breaker: Breaker, at: int = 3, tied: bool = True, **arguments: Any) -> Pipeline:
    """A model with a layer that can break behind as many others; ties, dropout, fields for later stages."""
    layers = list(rich_model(tied=tied).layers)
    name = layers[at - 1].outputs[0]
    layers.insert(at, Layer("breakable", lambda: Breakable(breaker), (name,), (name,)))
    return Pipeline(Model(layers, rich_model().batch),
                    **parts(**{"stages": 3, "microbatches": 4, "optimizer": AdamW(), "seed": 2, **arguments}))


def train(pipe: Pipeline, batches: list[Batch]) -> list[float]:
    return [step.loss for step in pipe.train(batches)]


@pytest.mark.parametrize("arguments", [
    {"schedule": "gpipe"}, {"schedule": "1f1b", "recompute": 0.5}, {"schedule": "zb_h1", "stages": 2},
    {"schedule": "1f1b", "replicas": 2}, {"schedule": "interleaved", "stages": 4, "chunks": 2},
    {"schedule": "zb_v", "stages": 4, "grad_clip": 0.1},
    pytest.param({"schedule": "gpipe", "executor": "async_threaded"}, marks=pytest.mark.extras("async_threaded")),
    {"schedule": "1f1b", "precision": "fp16", "stages": 2}, {"schedule": "1f1b", "executor": "naive", "stages": 1},
    {"schedule": "gpipe", "compress": "bf16"}])
def test_a_failed_batch_is_as_if_it_had_not_been(arguments: dict[str, Any]) -> None:
    """Four batches fail, each after another batch that did not."""
    batches, broken = rich_batches(5, 8), Breaker()
    whole, pipe = pipeline(Breaker(), **arguments), pipeline(broken, **arguments)
    for number, failure in enumerate([("forward", 1), ("forward", 4), ("backward", 1), ("backward", 4)]):
        assert train(pipe, batches[number:number + 1]) == train(whole, batches[number:number + 1])
        state = fingerprint(whole.state_dict())
        assert fingerprint(pipe.state_dict()) == state
        broken.arm(*failure)
        with pytest.raises(RunError, match="broken"):
            train(pipe, batches[4:])
        assert fingerprint(pipe.state_dict()) == state
    assert train(pipe, batches[4:]) == train(whole, batches[4:])
    assert fingerprint(pipe.state_dict()) == fingerprint(whole.state_dict())


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
@pytest.mark.parametrize("trained", [0, 2])
def test_a_stream_that_fails_before_its_first_step_has_not_been(schedule: str, trained: int, tmp_path: Path) -> None:
    breaker, batches = Breaker(), rich_batches(5, 8)
    whole, pipe = pipeline(Breaker(), schedule=schedule), pipeline(breaker, schedule=schedule)
    assert train(pipe, batches[:trained]) == train(whole, batches[:trained])
    breaker.arm("forward", 1)
    with pytest.raises(RunError, match="broken"):
        train(pipe, batches[trained:])
    assert pipe.engine.training.position == whole.engine.training.position
    pipe.save(tmp_path / "saved")
    assert pipe.engine.training.position == whole.engine.training.position
    assert train(pipe, batches[trained:]) == train(whole, batches[trained:])
    assert fingerprint(pipe.state_dict()) == fingerprint(whole.state_dict())


class Raises(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].data.add_(1)
        raise RuntimeError("broken")


@pytest.mark.parametrize(("passes", "arguments"), [
    (4, {"schedule": "pipedream"}), (5, {"schedule": "1f1b", "optimizer": Raises})])
def test_stages_that_made_steps_cannot_go_back(passes: int, arguments: dict[str, Any]) -> None:
    breaker = Breaker()
    pipe = pipeline(breaker, **arguments)
    breaker.arm("backward", passes)
    with pytest.raises(RunError, match="broken"):
        train(pipe, rich_batches(1, 8))
    with pytest.raises(RunError, match="this pipeline failed in the middle of an update: its stages are at different"):
        pipe.state_dict()
    with pytest.raises(RunError, match="this pipeline failed in the middle of an update"):
        train(pipe, rich_batches(1, 8))


def torn(batches: list[Batch]) -> Iterator[Batch]:
    yield from batches
    raise OSError("the disk is gone")


@pytest.mark.parametrize("arguments", [
    {"schedule": "1f1b"}, {"schedule": "pipedream"}, {"schedule": "pipedream", "replicas": 2}, {"schedule": "2bw"},
    {"schedule": "pipedream", "stages": 2, "update_every": 4}])
def test_batches_read_before_an_error_are_trained_on(arguments: dict[str, Any]) -> None:
    batches = rich_batches(4, 8)
    whole, pipe = (pipeline(Breaker(), **arguments) for _ in range(2))
    made, losses = pipe.train(torn(batches[:3])), train(whole, batches[:3])
    assert [next(made).loss for _ in losses] == losses
    with pytest.raises(OSError, match="the disk is gone"):
        next(made)
    assert fingerprint(pipe.state_dict()) == fingerprint(whole.state_dict())
    assert pipe.engine.training.position == whole.engine.training.position
    with pytest.raises(UserError, match="a batch of 6 samples cannot be cut into 4 equal microbatches"):
        train(pipe, [batches[3], *rich_batches(1, 6)])
    train(whole, batches[3:])
    assert fingerprint(pipe.state_dict()) == fingerprint(whole.state_dict())


def test_an_error_found_while_draining_comes_when_training_goes_on() -> None:
    pipe = pipeline(Breaker(), schedule="pipedream")
    steps = pipe.train(torn(rich_batches(2, 8)))
    for _ in range(6):
        next(steps)
    assert len(pipe.state_dict()) > 0
    assert pipe.engine.training.position.microbatches == 8
    assert [step.index for step in (next(steps), next(steps))] == [6, 7]
    with pytest.raises(OSError, match="the disk is gone"):
        next(steps)
