"""``vpipe verify``: runs beside their oracles, and runs that are not what they should be."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import job_of, write_config
from torch import Tensor, nn

from vpipe import Layer, Model, Pipeline
from vpipe.app.cli import main
from vpipe.app.commands.verify import _compared
from vpipe.app.train.job import Job
from vpipe.app.train.loop import build_pipeline
from vpipe.app.verify import batches_for_steps, run_in_process, steps_in_batches
from vpipe.app.verify import references as references_of
from vpipe.errors import RunError
from vpipe.runtime.weight_versions import WeightVersions
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.testing import (
    Difference,
    Reference,
    ReplicaMismatch,
    TrainingRecipe,
    Trajectory,
    assert_equals_oracle,
    compare,
    flush_oracle,
    record_ranks,
    references,
)


def compared(job: Job, updates: int = 2) -> tuple[Reference, list[Reference], list[Difference], Trajectory]:
    """The exact oracle, the others, the differences from the exact one, and the run; all are near enough."""
    batches = batches_for_steps(job, updates)
    exact, *plain = references_of(job, batches)
    ours = run_in_process(job, batches)
    assert not ours.mismatches
    for reference in (exact, *plain):
        differences = list(compare(ours, reference.trajectory))
        assert len(differences) == steps_in_batches(job, batches) >= 2
        assert all(difference.within(reference.bound) for difference in differences)
    return exact, plain, list(compare(ours, exact.trajectory)), ours


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_v", "chimera", "pipedream", "2bw", "auto"])
def test_bert_under_each_kind_of_schedule_is_what_its_oracle_says(name: str, tmp_path: Path) -> None:
    """BERT ties its head to its embeddings, and its mask skips every layer."""
    recipe = RegisteredSchedule.named(name)
    job = job_of(tmp_path, parallel__schedule=name, parallel__model_parallel_size=2 * recipe.chunks,
                 parallel__recompute=0.5, training__grad_clip=0.5 if recipe.flush else None)
    exact, plain, differences, _ = compared(job)
    assert exact.bound == 0
    assert all(difference.weight_difference == 0 for difference in differences)
    assert [reference.bound > 0 for reference in plain] == [True] * recipe.flush


class Sensitive(nn.Module):
    """To the last bit of its weight, as a ReLU of 0 is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = nn.functional.linear(x, self.weight) * (1e8 * self.weight.detach()).sin()
        return h if y is None else nn.functional.mse_loss(h, y)


def test_plain_pytorch_is_compared_where_it_would_soon_be_another_run() -> None:
    """It begins every update with the weights of the run: the gradients of one are as near as sums in two orders."""
    model = Model([Layer("first", Sensitive, ("x",), ("h",)),
                   Layer("last", Sensitive, ("h", "y"), ("loss",), ties={"weight": "first.weight"})], ("x", "y"))
    generator = torch.Generator().manual_seed(2)
    batches = [{name: torch.randn(12, 3, generator=generator) for name in ("x", "y")} for _ in range(3)]
    pipe = Pipeline(model, partial(torch.optim.SGD, lr=0.1), stages=[1, 1], microbatches=4, seed=1)
    assert_equals_oracle(pipe, batches)
    exact, plain = references(pipe.model, pipe.description, pipe.lowered, batches)
    assert 0 < plain.bound < 1e-5
    apart = flush_oracle(model, batches, TrainingRecipe(lambda named: torch.optim.SGD(named.values(), lr=0.1), 4, 1))
    assert apart.losses[0] == exact.run.losses[0]
    assert abs(apart.losses[-1] - exact.run.losses[-1]) > 0.01 * exact.run.losses[-1]


@pytest.mark.parametrize(("name", "precision", "words"), [
    ("1f1b", "bf16", " under torch.autocast(bfloat16)"),
    ("pipedream", "bf16_pure", " with bfloat16 layers and float32 master weights"),
    ("1f1b", "fp16", " under torch.autocast(float16) with loss scaling")])
def test_bert_in_every_precision_is_what_its_oracle_says(name: str, precision: str, words: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, parallel__schedule=name, training__precision=precision)
    exact, plain, *_ = compared(job)
    assert exact.name.startswith(("plain PyTorch" if name == "1f1b" else "the sequential oracle") + words)
    assert exact.bound == 0
    assert len(plain) == (name == "1f1b")


@pytest.mark.usefixtures("forked")
def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, parallel__schedule="zb_v", parallel__model_parallel_size=4)
    assert main(["verify", str(config), "--steps", "2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "bert: 5 layers in 4 stages on 2 ranks, schedule zb_v, 2 steps"
    assert lines[-1] == ("equal: 2 steps give to the last bit the losses, gradient norms and weights of plain "
                         "PyTorch on one device, tied gradients summed by stage")
    rows = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"])]
    assert len({(step, loss) for step, loss, *_ in rows}) == 2
    assert [row[-1] for row in rows if len(row) == 4] == ["0"] * 4
    assert not (tmp_path / "runs").exists()


def test_a_run_that_differs_ends_with_one_and_the_place(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes would not have the mistake: what they leave is made here, with it."""
    step = WeightVersions.step

    def wrong(self: WeightVersions, *arguments: Any) -> None:
        step(self, *arguments)
        for name, value in self.masters.items():
            if name == "block0.mlp.expand.weight":
                value.data[0, 0] += 1e-3

    monkeypatch.setattr(WeightVersions, "step", wrong)
    def saved(job: Job, batches: int, folder: Path) -> None:
        read = islice(job.training_batches(job.model.batch), batches)
        for rank, trajectory in record_ranks(build_pipeline(job), list(read)).items():
            trajectory.save(folder, rank)

    monkeypatch.setattr("vpipe.app.commands.verify._over_gloo", saved)
    assert main(["verify", str(write_config(tmp_path))]) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: in one process, step 0 is not what plain PyTorch on one device")
    assert "; over gloo, step 0 is not what plain PyTorch on one device" in err
    assert "weights by 1.0e-03 (block0.mlp.expand.weight); allowed are 0.0e+00" in err
    assert "hint: " in err


@pytest.mark.parametrize(("schedule", "widths"), [("1f1b", (2, 1)), ("pipedream", (1, 3, 2)), ("pipedream", (2, 1))])
def test_replicas_are_what_their_oracle_says(schedule: str, widths: tuple[int, ...], tmp_path: Path) -> None:
    ranks = iter(range(sum(widths)))
    placement = [[next(ranks) for _ in range(width)] for width in widths]
    job = job_of(tmp_path, parallel__schedule=schedule, parallel__model_parallel_size=len(widths),
                 parallel__stage_to_rank_map={str(stage): on for stage, on in enumerate(placement)})
    exact, plain, differences, ours = compared(job)
    assert exact.bound == 0
    assert [reference.name for reference in plain] == ["plain PyTorch on one device, one update at a time"] * (
        schedule == "1f1b")
    if schedule == "pipedream":  # in a step a stage of one replica makes the more updates
        for layer, width in ((job.model.layers[0], widths[0]), (job.model.layers[-1], widths[-1])):
            made = {update for update, name in ours.updates() if name.startswith(layer.name)}
            assert len(made) == len(differences) * math.lcm(*widths) // width


def test_a_replica_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, made, name = WeightVersions.step, Counter[int](), "block0.mlp.expand.weight"

    def wrong(self: WeightVersions, *arguments: Any) -> None:
        step(self, *arguments)
        if name in self.masters:
            made[id(self)] += 1
            if made[id(self)] == 2 and id(self) != next(iter(made)):
                self.masters[name].data[0, 0] += 1e-7

    monkeypatch.setattr(WeightVersions, "step", wrong)
    job = job_of(tmp_path, parallel__stage_to_rank_map={"0": [0], "1": [1, 2]}, parallel__partition=[1, 4])
    assert _compared("in one process", run_in_process(job, 3), [], job) == [
        "in one process, rank 2 (stage 1) differs from its replica, rank 1 (stage 1), after update 1 of "
        "block0.mlp.expand.weight"]


def trajectory_of(loss: float, weight: float) -> Trajectory:
    """Of one step with one update."""
    trajectory = Trajectory()
    trajectory.gradients(0, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0]), "c": None})
    trajectory.weights(0, {"a": torch.tensor([weight]), "b": torch.tensor([0.0])})
    trajectory.end_step(loss)
    return trajectory


def test_differences_are_measured() -> None:
    [same] = compare(trajectory_of(2.0, 1.0), trajectory_of(2.0, 1.0))
    assert same == Difference(0, 2.0, 5.0, 0.0, 0.0, 0.0, None)
    [off] = compare(trajectory_of(2.0, 1.0), trajectory_of(2.5, 1.25))
    assert off == Difference(0, 2.0, 5.0, 0.2, 0.0, 0.25, "a")
    assert not off.within(0.1)
    assert off.within(0.2)
    [nan] = compare(trajectory_of(math.nan, math.nan), trajectory_of(2.0, 1.0))
    assert nan.weight == "a"
    assert not nan.within(1.0)
    assert not nan.within(0.0)
    for first, second in ((math.nan, 1.0), (1.0, math.nan)):
        ours, theirs = trajectory_of(2.0, first), trajectory_of(2.0, 1.0)
        ours.weights(0, {"b": torch.tensor([second])})
        theirs.weights(0, {"b": torch.tensor([1.0])})
        [hidden] = compare(ours, theirs)
        assert hidden.weight_difference == math.inf
        assert not hidden.within(1.0)
        assert not hidden.within(0.0)
    overflowed, other = trajectory_of(2.0, 1.0), trajectory_of(2.0, 1.0)
    overflowed.norms[0]["a"], other.norms[0]["a"] = math.inf, math.nan
    [skipped] = compare(overflowed, other)
    assert skipped.within(0)
    [alone] = compare(overflowed, trajectory_of(2.0, 1.0))
    assert not alone.within(1.0)
    with pytest.raises(RunError, match="the run made 1 steps, its oracle 2"):
        list(compare(trajectory_of(2.0, 1.0), Trajectory([2.0, 2.0])))
    [both_nan] = compare(trajectory_of(math.nan, 1.0), trajectory_of(math.nan, 1.0))
    assert not both_nan.within(1.0)
    more = trajectory_of(2.0, 1.0)
    more.weights(1, {"b": torch.tensor([1.0])})
    for ours, theirs, who in ((more, trajectory_of(2.0, 1.0), "run, but not its oracle"),
                              (trajectory_of(2.0, 1.0), more, "oracle, but not the run")):
        with pytest.raises(RunError, match=f"the {who}, made update 1 of b"):
            list(compare(ours, theirs))


def test_a_step_takes_in_all_updates_of_a_narrow_stage() -> None:
    def trajectory(last: float) -> Trajectory:
        trajectory = Trajectory()
        for update, value in enumerate((1.0, last)):
            trajectory.gradients(update, {"narrow": torch.tensor([2.0])})
            trajectory.weights(update, {"narrow": torch.tensor([value])})
        trajectory.gradients(0, {"wide": torch.tensor([1.0])})
        trajectory.weights(0, {"wide": torch.tensor([1.0])})
        trajectory.end_step(1.0)
        return trajectory

    [difference] = compare(trajectory(2.0), trajectory(2.5))
    assert difference == Difference(0, 1.0, 3.0, 0.0, 0.0, 0.5, "narrow")


def test_replicas_that_differ_are_named_with_the_first_update() -> None:
    def trajectory(values: list[float], gradients: list[float]) -> Trajectory:
        trajectory = Trajectory([1.0])
        for update, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            trajectory.gradients(update, {"w": torch.tensor([gradient])})
            trajectory.weights(update, {"w": torch.tensor([value])})
        return trajectory

    good = trajectory([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    assert Trajectory.join({2: good, 0: good}).mismatches == []
    whole = Trajectory.join({0: good, 1: trajectory([1.0, 2.5, 3.5], [1.0] * 3),
                             2: trajectory([1.0, 2.0, 3.0], [1.0, 1.0, 9.0]),
                             3: trajectory([1.0, 2.0], [1.0] * 2), 4: good})
    assert whole.mismatches == [ReplicaMismatch(1, "w", 1, 0), ReplicaMismatch(2, "w", 2, 0),
                                ReplicaMismatch(2, "w", 3, 0)]
    assert [float(whole.values[update]["w"]) for update in range(3)] == [1.0, 2.0, 3.0]


def test_a_trail_on_disk_is_the_same(tmp_path: Path) -> None:
    first, second = Trajectory([1.5, 1.25]), Trajectory([1.5, 1.25])
    for update in range(2):
        first.gradients(update, {"a.w": torch.full((2,), 0.1 + update)})
        first.weights(update, {"a.w": torch.full((2,), 0.3 + update)})
        second.gradients(update, {"b.w": torch.full((3, 1), 0.5)})
        second.weights(update, {"b.w": torch.full((3, 1), 0.7 + update)})
    first.save(tmp_path, 0)
    second.save(tmp_path, 1)
    whole = Trajectory.join({rank: Trajectory.load(tmp_path, rank) for rank in range(2)})
    assert whole.losses == [1.5, 1.25]
    assert whole.norms == {update: first.norms[update] | second.norms[update] for update in range(2)}
    assert torch.equal(whole.values[1]["b.w"], second.values[1]["b.w"])
    assert list(whole.values[0]) == ["a.w", "b.w"]
