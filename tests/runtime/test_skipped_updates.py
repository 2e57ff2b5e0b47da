"""Updates left out because a loss or a gradient is not finite: as the oracles leave them out, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from oracles import equals_its_oracle, pipeline_of
from torch import Tensor, nn

from vpipe import Layer, Model, Pipeline

WIDTH, SAMPLES, MICROBATCHES, BATCHES = 5, 8, 4, 6
FINE, HURT = 1.0, 0.0


class Adam:
    def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        return torch.optim.Adam(named.values(), lr=0.05) if named else None


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, h: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(h)))


class Root(Mix):
    """Finite whatever it is given; where ``flag`` is 0 its gradient is not."""

    def forward(self, h: Tensor, flag: Tensor) -> Tensor:
        return super().forward(h) + (flag * self.linear.weight[0]).abs().sqrt()


class Loss(Mix):
    """Where ``spoiled`` is infinite or NaN so is the loss, while autograd alone would give finite gradients."""

    def forward(self, h: Tensor, spoiled: Tensor) -> Tensor:
        return super().forward(h).square().mean() + spoiled.sum()


def model() -> Model:
    return Model([Layer("l0", Mix, ("x",)), Layer("l1", Mix), Layer("l2", Root, ("h", "flag"), ("h",)),
                  Layer("l3", Mix), Layer("l4", Loss, ("h", "spoiled"), ("loss",))], batch=("x", "flag", "spoiled"))


def batches(x: Mapping[int, float] = {}, flag: Mapping[int, float] = {}, spoiled: Mapping[int, float] = {}
            ) -> list[dict[str, Tensor]]:
    """By number of the microbatch: what stands in its first sample."""
    random = torch.Generator().manual_seed(1)
    made = {"x": torch.randn(BATCHES * SAMPLES, WIDTH, generator=random),
            "flag": torch.full((BATCHES * SAMPLES, 1), FINE), "spoiled": torch.zeros(BATCHES * SAMPLES, 1)}
    for name, odd in (("x", x), ("flag", flag), ("spoiled", spoiled)):
        for microbatch, value in odd.items():
            made[name][microbatch * SAMPLES // MICROBATCHES] = value
    return [dict(zip(made, parts, strict=True))
            for parts in zip(*(t.split(SAMPLES) for t in made.values()), strict=True)]


SKIPPING: dict[str, Any] = {"microbatches": MICROBATCHES, "optimizer": Adam(), "seed": 3, "skip_not_finite": True}


def pipeline(schedule: str, skip: bool = True, **how: Any) -> Pipeline:
    return pipeline_of(model, **SKIPPING | {"schedule": schedule, "skip_not_finite": skip, **how})


@pytest.mark.parametrize("how", [{"schedule": "1f1b", "stages": 2},
                                 {"schedule": "pipedream", "placement": [[0, 1], [2]], "partition": [3, 2]}])
def test_a_step_tells_its_first_microbatch_whose_loss_is_not_finite(how: dict[str, Any]) -> None:
    pipe = pipeline(**how, skip=True)
    spoiled = [6, 7, 13]
    steps = [*pipe.train(batches(spoiled=dict.fromkeys(spoiled, math.inf)))]
    each = BATCHES * MICROBATCHES // len(steps)
    assert [step.not_finite for step in steps] == [
        next((i for i in range(number * each, (number + 1) * each) if i in spoiled), None)
        for number in range(len(steps))]


ODD = {"activations": {"x": {5: math.nan, 21: math.inf}}, "gradients": {"flag": {5: HURT, 21: HURT}},
       "loss": {"spoiled": {5: math.inf, 21: math.nan}}}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(("schedule", "partition", "placement", "clip"), [
    ("1f1b", [2, 2, 1], None, None), ("zb_h1", [1, 2, 2], None, 0.1), ("interleaved", [1, 1, 2, 1], None, None),
    ("gpipe", [3, 2], [[0, 1], [2]], None), ("1f1b", [2, 3], [[0], [1, 2]], 0.1), ("1f1b", [5], None, None)])
def test_with_a_flush_no_stage_makes_the_update(schedule: str, partition: list[int],
                                                placement: list[list[int]] | None, clip: float | None, odd: str
                                                ) -> None:
    pipe, steps = equals_its_oracle(model, batches(**ODD[odd]), **SKIPPING, schedule=schedule, partition=partition,
                                    placement=placement, grad_clip=clip)
    assert [step.skipped for step in steps] == [False, True, False, False, False, True]
    assert all(value.isfinite().all() for value in pipe.state_dict().values())
    assert {stage.weights.latest for stage in pipe.engine.local_stages} == {BATCHES}


@pytest.mark.parametrize(("schedule", "every", "placement", "odd"), [
    *(("pipedream", 1, None, odd) for odd in ODD), ("pipedream", 2, None, "gradients"),
    ("pipedream_vertical_sync", 1, None, "activations"), ("pipedream_vertical_sync", 1, None, "loss"),
    ("2bw", 4, None, "gradients"), ("pipedream", 1, [[0, 1], [2], [3]], "gradients"),
    ("pipedream", 1, [[0, 1], [2], [3]], "loss")])
def test_without_a_flush_each_stage_decides_for_itself(schedule: str, every: int, placement: list[list[int]] | None,
                                                       odd: str) -> None:
    """With and without a correction of late gradients, which leaves an update out as well."""
    corrected = odd != "activations"
    pipe, steps = equals_its_oracle(model, batches(**ODD[odd]), **SKIPPING, schedule=schedule, partition=[2, 1, 2],
                                    update_every=every, placement=placement, grad_clip=0.1,
                                    delay_correction=1.0 if corrected else 0.0)
    assert all(value.isfinite().all() for value in pipe.state_dict().values())
    per_step = every * max(map(len, pipe.placement))
    assert [step.index for step in steps if step.skipped] == [5 // per_step, 21 // per_step]


@pytest.mark.parametrize(("schedule", "changed"), [("1f1b", set()), ("pipedream", {"l0", "l1", "l3", "l4"})])
def test_updates_skipped_for_the_gradient_of_one_stage(schedule: str, changed: set[str]) -> None:
    pipe, pristine = pipeline(schedule, partition=[2, 1, 2]), pipeline(schedule, partition=[2, 1, 2]).state_dict()
    assert all(step.skipped for step in pipe.train(batches(flag=dict.fromkeys(range(4), HURT))[:1]))
    different = {name for name, value in pipe.state_dict().items() if not torch.equal(value, pristine[name])}
    assert {name.partition(".")[0] for name in different} == changed


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_skipped_update_moves_no_average(schedule: str) -> None:
    pipe = pipeline(schedule, partition=[2, 3], average=0.5)
    list(pipe.train(batches()[:2]))
    before = pipe.state_dict(averaged=True)
    assert any(not torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
    assert all(step.skipped for step in pipe.train(batches(spoiled=dict.fromkeys(range(4), math.nan))[:1]))
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict(averaged=True).items())


def test_coding_does_not_carry_it_on() -> None:
    pipe = pipeline("1f1b", partition=[2, 3], compress="int8")
    steps = list(pipe.train(batches(x={5: math.nan})))
    assert [step.skipped for step in steps] == [False, True, False, False, False, False]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_unless_asked_for_nothing_is_skipped(schedule: str) -> None:
    pipe = pipeline(schedule, skip=False, partition=[2, 3])
    assert not [step for step in pipe.train(batches(x={5: math.nan})) if step.skipped]
    assert not all(value.isfinite().all() for value in pipe.state_dict().values())
