"""Every precision computes what its oracle says, bit for bit: it shares no code with the engine but the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from models import Embed, Head, Mixed, RawMatmul, rich_batches, rich_model, thrice_tied_model
from pipelines import parts
from test_every_schedule import FLUSH, STREAMS, copies, cut
from test_exact import AdamW, decay
from torch import Tensor, nn

from vpipe import Layer, Model, Pipeline
from vpipe.checkpoint.manifest import Position
from vpipe.runtime.step_results import Step
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.testing import (
    InitialState,
    ReferencePrecision,
    ReferenceRun,
    TrainingRecipe,
    asynchronous_oracle,
    evaluate_oracle,
    flush_oracle,
    reference_optimizer,
    version_rule,
)
from vpipe.testing.reference import FROM_SCRATCH

MICROBATCHES = 4
REDUCED = ["bf16", "bf16_pure", "fp16"]


def pipeline(model: Model, precision: str, **arguments: Any) -> Pipeline:
    return Pipeline(model,
                    **parts(precision=precision, **{ "microbatches": MICROBATCHES, "optimizer": AdamW(), "seed": 2,
                                                    "learning_rate_factor": decay, "grad_clip": 0.5, **arguments}))


def recipe(precision: str, scale: float | None = None, **changes: Any) -> TrainingRecipe:
    return TrainingRecipe(**{"optimizer": AdamW().from_named, "microbatches": MICROBATCHES, "seed": 2, "factor": decay,
                       "clip": 0.5, "precision": ReferencePrecision(precision, scale), **changes})


def oracle(model: Model, batches: Sequence[Mapping[str, Tensor]], how: TrainingRecipe, pipe: Pipeline,
           start: InitialState = FROM_SCRATCH) -> ReferenceRun:
    """Of a pipeline's arrangement."""
    widths = list(map(len, pipe.placement))
    if not RegisteredSchedule.named(pipe.schedule).flush:
        return asynchronous_oracle(model, batches, how, pipe.partition, pipe.update_every,
                                   version_of=version_rule(pipe.schedule, pipe.engine._schedule.warmup),
                                   widths=widths, start=start)
    return flush_oracle(model, batches, how, pipe.partition, widths, start)


def assert_same(pipe: Pipeline, steps: Sequence[Step], run: ReferenceRun) -> None:
    """Losses, norms, which steps were skipped, and all that a checkpoint holds; bits, so NaN is itself."""
    assert [step.loss for step in steps] == run.losses
    if run.gradient_norms:
        assert torch.equal(torch.tensor([step.gradient_norm for step in steps]).view(torch.int32),
                           torch.tensor(run.gradient_norms).view(torch.int32))
    assert {step.index for step in steps if step.skipped} == run.skipped
    ours = pipe.engine.checkpoint_state()
    assert sorted(ours) == sorted(run.tensors)
    assert not [name for name, value in run.tensors.items()
                if ours[name].dtype != value.dtype or not torch.equal(ours[name], value)]
    state = pipe.state_dict()
    assert not [name for name, value in run.state.items() if not torch.equal(state[name], value)]


@cache
def plain(precision: str, partition: tuple[int, ...] | None = None,
          widths: tuple[int, ...] | None = None) -> ReferenceRun:
    """Plain PyTorch, gradients in the order of the microbatches; of copies of a stage, those of each, then the sum."""
    return flush_oracle(rich_model(tied=False), rich_batches(2, 8), recipe(precision), partition, widths)


@pytest.mark.parametrize("name", FLUSH)
def test_bf16_under_every_schedule_with_a_flush(name: str) -> None:
    pipe = pipeline(rich_model(tied=False), "bf16", schedule=name, partition=cut(name), recompute=0.5)
    expected = plain("bf16", tuple(cut(name)), widths) if (widths := copies(name)) else plain("bf16")
    assert_same(pipe, list(pipe.train(rich_batches(2, 8))), expected)


@pytest.mark.parametrize("name", STREAMS)
def test_bf16_under_every_schedule_without_a_flush(name: str) -> None:
    pipe = pipeline(rich_model(), "bf16", schedule=name, partition=[3, 3, 2], recompute=0.5, update_every=4)
    steps = list(pipe.train(rich_batches(3, 8)))
    assert_same(pipe, steps, oracle(rich_model(), rich_batches(3, 8), recipe("bf16"), pipe))


@pytest.mark.parametrize("precision", ["bf16_pure", "fp16"])
@pytest.mark.parametrize(("arguments", "scale"), [
    ({"schedule": "gpipe", "partition": [3, 5]}, None),
    ({"schedule": "zb_v", "partition": [2, 2, 2, 2]}, 1000.0),
    ({"schedule": "1f1b", "partition": [2, 4, 2], "placement": [[0, 1], [2], [3, 4, 5]], "recompute": 1.0}, None),
    ({"schedule": "pipedream", "partition": [2, 4, 2], "placement": [[0, 1], [2], [3, 4, 5]]}, None),
    ({"schedule": "pipedream", "partition": [3, 5], "recompute": 0.6, "update_every": 2}, 1000.0),
    ({"schedule": "2bw", "partition": [3, 3, 2], "update_every": 4}, None)])
def test_pure_and_fp16(precision: str, arguments: dict[str, Any], scale: float | None) -> None:
    """Replicas, ties, recompute, incomplete updates at the end, a scale that is no power of two."""
    scale = scale if precision == "fp16" else None
    pipe = pipeline(rich_model(), precision, loss_scale=scale, **arguments)
    steps = list(pipe.train(rich_batches(3, 8)))
    assert_same(pipe, steps, oracle(rich_model(), rich_batches(3, 8), recipe(precision, scale), pipe))


@pytest.mark.parametrize(("schedule", "precision"), [("1f1b", "bf16"), ("1f1b", "bf16_pure"), ("pipedream", "fp16"),
                                                     ("zb_h1", "bf16")])
def test_a_weight_that_three_stages_share(schedule: str, precision: str) -> None:
    pipe = pipeline(thrice_tied_model(), precision, schedule=schedule, partition=[2, 1, 2, 1])
    steps = list(pipe.train(rich_batches(2, 8)))
    assert_same(pipe, steps, oracle(thrice_tied_model(), rich_batches(2, 8), recipe(precision), pipe))


# -- overflows that really happen


class Pushed(Head):
    """Gradients are ``push`` times as large as they would be; the loss, too."""

    def forward(self, hidden: Tensor, labels: Tensor, push: Tensor) -> Tensor:
        return super().forward(hidden, labels) * push.float().mean()


def pushed_model(tied: bool = False) -> Model:
    ties = {"decoder.weight": "embed.word.weight"} if tied else {}
    return Model([Layer("embed", Embed, ("ids",), ("h", "skip", "mask")), Layer("raw0", RawMatmul),
                  Layer("mix0", Mixed, ("h", "skip", "mask"), ("h",)), Layer("raw1", RawMatmul),
                  Layer("mix1", Mixed, ("h", "skip", "mask"), ("h",)),
                  Layer("head", Pushed, ("h", "labels", "push"), ("loss",), ties)], batch=("ids", "labels", "push"))


def pushed(pushes: Sequence[float]) -> list[dict[str, Tensor]]:
    """A batch for each number; its third microbatch is pushed."""
    made = rich_batches(len(pushes), 8)
    for batch, push in zip(made, pushes, strict=True):
        batch["push"] = torch.ones(8)
        batch["push"][4:6] = push
    return made


@pytest.mark.parametrize(("schedule", "placement", "scale", "skipped"), [
    ("1f1b", None, None, {0, 2, 3}), ("gpipe", [[0, 1], [2]], None, {0, 2, 3}), ("zb_h1", None, 4096.0, {2, 3})])
def test_with_a_flush_an_overflow_stops_the_step_on_all_stages(
        schedule: str, placement: list[list[int]] | None, scale: float | None, skipped: set[int]) -> None:
    batches = pushed([20.0, 1.0, 4000.0, 4000.0, 1.0])
    pipe = pipeline(pushed_model(), "fp16", loss_scale=scale, schedule=schedule, partition=[2, 4], placement=placement)
    steps = list(pipe.train(batches))
    run = oracle(pushed_model(), batches, recipe("fp16", scale), pipe)
    assert run.skipped == skipped
    assert_same(pipe, steps, run)
    if scale is None:
        assert float(run.tensors["loss_scale.0.value"]) == 65536 / 8
    assert torch.isfinite(torch.cat([value.flatten() for value in run.state.values()])).all()


@pytest.mark.parametrize(("tied", "arguments"), [
    (False, {"partition": [6]}), (True, {"partition": [2, 4], "placement": [[0, 1], [2]]}),
    (False, {"partition": [2, 4], "placement": [[0], [1, 2]]}),
    (True, {"partition": [2, 2, 2], "update_every": 2, "recompute": 1.0})])
def test_without_a_flush_each_stage_has_a_scale_of_its_own(tied: bool, arguments: dict[str, Any]) -> None:
    batches = pushed([20.0, 1.0, 4000.0, 1.0])
    pipe = pipeline(pushed_model(tied), "fp16", schedule="pipedream", **arguments)
    steps = list(pipe.train(batches))
    run = oracle(pushed_model(tied), batches, recipe("fp16"), pipe)
    assert run.skipped
    assert_same(pipe, steps, run)


class Steep(nn.Module):
    """Trains nothing; what it hands back is 1000 times what comes."""

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return (hidden[..., :5].float().mean((0, 1)) * labels.float().mean() * 1000).sum()


def test_a_stage_that_trains_nothing_answers_for_what_it_hands_back() -> None:
    model = Model([Layer("embed", Embed, ("ids",), ("h", "skip", "mask")), Layer("raw0", RawMatmul),
                   Layer("mix0", Mixed, ("h", "skip", "mask"), ("h",)),
                   Layer("end", Steep, ("h", "labels"), ("loss",))], batch=("ids", "labels"))
    pipe = pipeline(model, "fp16", schedule="pipedream", partition=[2, 1, 1])
    steps = list(pipe.train(rich_batches(5, 8)))
    run = oracle(model, rich_batches(5, 8), recipe("fp16"), pipe)
    assert 0 < len(run.skipped) < len(run.losses)
    assert 65536 > float(run.tensors["loss_scale.3.value"]) > float(run.tensors["loss_scale.0.value"])
    assert_same(pipe, steps, run)


class Steepened(nn.Module):
    """Its weight gets a fair gradient, and what it hands back is 300 times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(12))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden * 300.0) + self.bias


@pytest.mark.parametrize("placement", [[[0], [1], [2]], [[0], [1, 2], [3]]])
def test_a_stage_whose_own_gradients_are_finite_answers_for_what_it_hands_back(placement: list[list[int]]) -> None:
    """All of its replicas agree, though one of them alone sees it."""
    model = Model([Layer("embed", Embed, ("ids",), ("h", "skip", "mask")), Layer("raw0", RawMatmul),
                   Layer("steep", Steepened), Layer("head", Head, ("h", "labels"), ("loss",),
                                                    {"decoder.weight": "embed.word.weight"})], batch=("ids", "labels"))
    pipe = pipeline(model, "fp16", schedule="pipedream", partition=[2, 1, 1], placement=placement)
    steps = list(pipe.train(rich_batches(4, 8)))
    run = oracle(model, rich_batches(4, 8), recipe("fp16"), pipe)
    assert run.skipped
    assert float(run.tensors["loss_scale.2.value"]) < float(run.tensors["loss_scale.3.value"])
    assert_same(pipe, steps, run)


def test_the_scale_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_optimizer, "GROWS_AFTER", 3)
    monkeypatch.setattr("vpipe.runtime.loss_scaler.GROWTH_UPDATES", 3)
    for schedule in ("1f1b", "pipedream"):
        pipe = pipeline(rich_model(), "fp16", schedule=schedule, partition=[3, 5])
        steps = list(pipe.train(rich_batches(3, 8)))
        run = oracle(rich_model(), rich_batches(3, 8), recipe("fp16"), pipe)
        assert_same(pipe, steps, run)
        assert schedule == "pipedream" or float(run.tensors["loss_scale.0.value"]) == 2 * 65536


# -- going on, and evaluation


def saved(pipe: Pipeline) -> tuple[Position, dict[str, Tensor]]:
    return pipe.engine.position, {name: tensor.clone() for name, tensor in pipe.engine.checkpoint_state().items()}


@pytest.mark.parametrize("precision", ["bf16_pure", "fp16"])
@pytest.mark.parametrize("schedules", [("1f1b", "zb_h1"), ("pipedream", "2bw")])
def test_a_run_goes_on_under_another_partition(schedules: tuple[str, str], precision: str) -> None:
    """Masters unrounded, and every stage with the scale of the layers that it takes over."""
    batches, model = pushed([20.0, 4000.0, 20.0, 4000.0]), pushed_model(tied=True)
    first = pipeline(model, precision, schedule=schedules[0], partition=[2, 2, 2])
    list(first.train(batches[:2]))
    position, tensors = saved(first)
    assert any(name.startswith("loss_scale.") for name in tensors) == (precision == "fp16")
    second = pipeline(model, precision, schedule=schedules[1], partition=[3, 2, 1])
    second.engine.restore(position, tensors)
    steps = list(second.train(batches[2:]))
    start = InitialState(position.steps, position.microbatches, 0, tensors)
    run = oracle(model, batches[2:], recipe(precision), second, start)
    assert_same(second, steps, run)


@pytest.mark.parametrize("precision", REDUCED)
def test_with_a_flush_a_run_goes_on_as_if_it_had_not_stopped(precision: str) -> None:
    place: tuple[Position, dict[str, Tensor]] | None = None
    losses = []
    for arguments, batch in zip(({"schedule": "1f1b", "partition": [3, 5]},
                                 {"schedule": "zb_v", "partition": [2, 1, 4, 1]}), rich_batches(2, 8), strict=True):
        pipe = pipeline(rich_model(tied=False), precision, **arguments)
        if place is not None:
            pipe.engine.restore(*place)
        losses += [step.loss for step in pipe.train([batch])]
        place = saved(pipe)
    assert losses == plain(precision).losses
    assert not [name for name, value in plain(precision).tensors.items() if not torch.equal(value, place[1][name])]


@pytest.mark.parametrize("precision", REDUCED)
def test_evaluation_is_that_of_the_whole_model_and_changes_nothing(precision: str) -> None:
    model, held_out = rich_model(tied=False), rich_batches(2, 8, seed=9)
    pipe, steps, evaluated = pipeline(model, precision, schedule="1f1b", partition=[3, 3, 2]), [], []
    for step in pipe.train(rich_batches(2, 8)):
        steps.append(step)
        evaluated.append(pipe.evaluate(held_out))
    assert_same(pipe, steps, plain(precision))
    assert evaluated[-1] == evaluate_oracle(model, pipe.state_dict(), held_out, MICROBATCHES,
                                            ReferencePrecision(precision))
