"""Overflows, checkpoints and evaluations in every precision, bit for bit; runs are in test_every_pair.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import Embed, Head, Mixed, RawMatmul, checkpointed_model, rich_batches, rich_model
from oracles import DECAY_AND_CLIP, AdamW, assert_same, equals_its_oracle, oracle_of, pipeline_of, saved
from torch import Tensor

from vpipe import Layer, Model
from vpipe.app.train.optimizers import OptimizerSettings, hidden_matrices
from vpipe.testing import InitialState, reference_optimizer

REDUCED = ["bf16", "bf16_pure", "fp16"]


def arranged(precision: str, **words: Any) -> dict[str, Any]:
    return {"precision": precision, **DECAY_AND_CLIP, **words}


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


@pytest.mark.parametrize(("schedule", "placement", "scale", "optimizer", "skipped"), [
    ("1f1b", None, None, AdamW(), {0, 2, 3}), ("gpipe", [[0, 1], [2]], None, AdamW(), {0, 2, 3}),
    ("zb_h1", None, 4096.0, OptimizerSettings("nadam", 0.01, weight_decay=0.1), {2, 3})])
def test_with_a_flush_an_overflow_stops_the_step_on_all_stages(
        schedule: str, placement: list[list[int]] | None, scale: float | None, optimizer: Any,
        skipped: set[int]) -> None:
    batches = pushed([20.0, 1.0, 4000.0, 4000.0, 1.0])
    pipe, steps = equals_its_oracle(pushed_model, batches, **arranged(
        "fp16", loss_scale=scale, schedule=schedule, partition=[2, 4], placement=placement, optimizer=optimizer))
    assert {step.index for step in steps if step.skipped} == skipped
    if scale is None:
        assert float(pipe.engine.checkpoint_state()["loss_scale.0.value"]) == 65536 / 8
    assert torch.isfinite(torch.cat([value.flatten() for value in pipe.state_dict().values()])).all()


@pytest.mark.parametrize(("tied", "arguments"), [
    (False, {"partition": [6]}), (True, {"partition": [2, 4], "placement": [[0, 1], [2]]}),
    (False, {"partition": [2, 4], "placement": [[0], [1, 2]]}),
    (True, {"partition": [2, 2, 2], "update_every": 2, "recompute": 1.0}),
    (False, {"partition": [2, 4], "placement": [[0, 1], [2]], "optimizer": OptimizerSettings(
        "muon", 0.01, weight_decay=0.1, matrices=hidden_matrices(pushed_model()))})])
def test_without_a_flush_each_stage_leaves_out_its_own_updates(tied: bool, arguments: dict[str, Any]) -> None:
    _, steps = equals_its_oracle(pushed_model(tied), pushed([20.0, 1.0, 4000.0, 1.0]),
                                 **arranged("fp16", schedule="pipedream", loss_scale=4096, **arguments))
    assert any(step.skipped for step in steps)


def test_what_a_layer_computes_again_in_a_backward_is_cast_anew_after_an_update() -> None:
    equals_its_oracle(checkpointed_model, rich_batches(2, 4), schedule="pipedream", partition=[2, 3], precision="bf16")


def test_the_scale_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_optimizer, "GROWS_AFTER", 3)
    monkeypatch.setattr("vpipe.runtime.optimizer_step.GROWTH_UPDATES", 3)
    pipe, _ = equals_its_oracle(rich_model(), rich_batches(3, 8), **arranged("fp16", schedule="1f1b", partition=[3, 5]))
    assert float(pipe.engine.checkpoint_state()["loss_scale.0.value"]) == 2 * 65536


# -- going on, and evaluation


@pytest.mark.parametrize("precision", ["bf16_pure", "fp16"])
@pytest.mark.parametrize("schedules", [("1f1b", "zb_h1"), ("pipedream", "2bw")])
def test_a_run_goes_on_under_another_partition(schedules: tuple[str, str], precision: str) -> None:
    """Masters unrounded, and with a flush the scale that was found."""
    batches, model = pushed([20.0, 4000.0, 20.0, 4000.0]), pushed_model(tied=True)
    scale = 1024 if precision == "fp16" and "2bw" in schedules else None
    first = pipeline_of(model, **arranged(precision, schedule=schedules[0], loss_scale=scale, partition=[2, 2, 2]))
    list(first.train(batches[:2]))
    position, tensors = saved(first)
    assert any(name.startswith("loss_scale.") for name in tensors) == (precision == "fp16" and scale is None)
    second = pipeline_of(model, **arranged(precision, schedule=schedules[1], loss_scale=scale, partition=[3, 2, 1]))
    second.engine.restore(position, tensors)
    steps = list(second.train(batches[2:]))
    start = InitialState(position.steps, position.microbatches, 0, tensors)
    assert_same(second, steps, oracle_of(second, batches[2:], start=start))
