"""``vpipe verify``: runs beside their oracles, and runs that are not what they should be."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from small_run import job_of, write_config

from vpipe.cli import main
from vpipe.errors import RunError
from vpipe.runtime.weights import Weights
from vpipe.schedules.registry import recipe_named, schedule_names
from vpipe.train.trail import Trail
from vpipe.train.verify import Difference, compare, in_process, references, updates_of


@pytest.mark.parametrize("name", schedule_names())
def test_bert_under_every_schedule_is_what_its_oracle_says(name: str, tmp_path: Path) -> None:
    """BERT ties its head to its embeddings, and its mask skips every layer."""
    recipe = recipe_named(name)
    job = job_of(tmp_path, parallel__schedule=name, parallel__model_parallel_size=2 * recipe.chunks,
                 parallel__recompute=0.5, training__grad_clip=0.5 if recipe.flush else None)
    updates = updates_of(job, 2)
    exact, *plain = references(job, updates)
    differences = list(compare(in_process(job, updates), exact.trail))
    assert exact.bound == 0
    assert len(differences) == updates >= 2
    assert all(difference.within(0) and difference.weight_difference == 0 for difference in differences)
    assert len(plain) == recipe.flush
    for reference in plain:
        assert reference.bound > 0
        assert all(difference.within(reference.bound)
                   for difference in compare(in_process(job, updates), reference.trail))


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, parallel__schedule="zb_v", parallel__model_parallel_size=4)
    assert main(["verify", str(config), "--steps", "2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "bert: 5 layers in 4 stages on 2 ranks, schedule zb_v, 2 updates"
    assert lines[-1] == "equal: 2 updates give the same losses, gradient norms and weights to the last bit"
    rows = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"])]
    assert len({(update, loss) for update, loss, *_ in rows}) == 2
    assert [row[-1] for row in rows if len(row) == 4] == ["0"] * 4
    assert not (tmp_path / "runs").exists()


def test_a_run_that_differs_ends_with_one_and_the_place(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    step = Weights.step

    def wrong(self: Weights, optimizer: torch.optim.Optimizer | None) -> None:
        step(self, optimizer)
        for name, value in self.masters.items():
            if name == "block0.mlp.expand.weight":
                value.data[0, 0] += 1e-3

    monkeypatch.setattr(Weights, "step", wrong)
    assert main(["verify", str(write_config(tmp_path))]) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: in one process, update 0 is not what plain PyTorch on one device")
    assert "weights by 1.0e-03 (block0.mlp.expand.weight); allowed are 0.0e+00" in err
    assert "hint: " in err


def test_what_counts_as_a_difference() -> None:
    def trail(loss: float, weight: float) -> Trail:
        trail = Trail([loss])
        trail.gradients(0, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0]), "c": None})
        trail.weights(0, {"a": torch.tensor([weight])})
        return trail

    [same] = compare(trail(2.0, 1.0), trail(2.0, 1.0))
    assert same == Difference(0, 2.0, 5.0, 0.0, 0.0, 0.0, None)
    [off] = compare(trail(2.0, 1.0), trail(2.5, 1.25))
    assert off == Difference(0, 2.0, 5.0, 0.2, 0.0, 0.25, "a")
    assert not off.within(0.1)
    assert off.within(0.2)
    [nan] = compare(trail(math.nan, math.nan), trail(2.0, 1.0))
    assert nan.weight == "a"
    assert not nan.within(1.0)
    assert not nan.within(0.0)
    for first, second in ((math.nan, 1.0), (1.0, math.nan)):
        ours, theirs = trail(2.0, first), trail(2.0, 1.0)
        ours.weights(0, {"b": torch.tensor([second])})
        theirs.weights(0, {"b": torch.tensor([1.0])})
        [hidden] = compare(ours, theirs)
        assert hidden.weight_difference == math.inf
        assert not hidden.within(1.0)
        assert not hidden.within(0.0)
    with pytest.raises(RunError, match="the run made 1 updates, its oracle 2"):
        list(compare(trail(2.0, 1.0), Trail([2.0, 2.0])))
    [both_nan] = compare(trail(math.nan, 1.0), trail(math.nan, 1.0))
    assert not both_nan.within(1.0)


def test_a_trail_on_disk_is_the_same(tmp_path: Path) -> None:
    first, second = Trail([1.5, 1.25]), Trail([1.5, 1.25])
    for update in range(2):
        first.gradients(update, {"a.w": torch.full((2,), 0.1 + update)})
        first.weights(update, {"a.w": torch.full((2,), 0.3 + update)})
        second.weights(update, {"b.w": torch.full((3, 1), 0.7 + update)})
    first.save(tmp_path, 0)
    second.save(tmp_path, 1)
    whole = Trail.load(tmp_path, range(2))
    assert whole.losses == [1.5, 1.25]
    assert whole.norms == {0: first.norms[0], 1: first.norms[1]}
    assert torch.equal(whole.values[1]["b.w"], second.values[1]["b.w"])
    assert list(whole.values[0]) == ["a.w", "b.w"]
