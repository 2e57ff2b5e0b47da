"""``training.precision`` and ``training.loss_scale``: what is refused where it is written, and a run in fp16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attempts import begin, go_on
from small_run import job_of, metrics, only_run

from vpipe.app.errors import LastingError
from vpipe.app.train import loop
from vpipe.app.train.checkpoint_model import checkpoint_config
from vpipe.app.train.resume import run_config
from vpipe.checkpoint import Manifest
from vpipe.errors import UserError
from vpipe.runtime import optimizer_step as scaling
from vpipe.schedules.kinds import Op


@pytest.mark.parametrize(("changes", "what"), [
    ({"training__precision": "half"}, "training.precision must be 'fp32', 'bf16', 'bf16_pure' or 'fp16'"),
    ({"training__loss_scale": 1024}, "training.loss_scale is 1024, but the precision is fp32"),
    ({"training__precision": "fp16", "training__loss_scale": 0}, "training.loss_scale must be a number above 0, or "
     "dynamic, got 0"),
    ({"training__precision": "fp16", "parallel__schedule": "pipedream"}, "training.loss_scale is dynamic, but the "
     "schedule has no flush"),
    ({"training__precision": "bf16", "parallel__compress": "bf16"}, "parallel.compress is bf16, but in precision "
     "bf16")])
def test_refusals_name_the_place(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError) as caught:
        job_of(tmp_path, **changes)
    [problem] = caught.value.problems
    assert problem.what.startswith(what)
    assert f"{tmp_path}/c.yaml:" in problem.where


def test_fp16_is_proved_with_the_exchange_of_norms(tmp_path: Path) -> None:
    def norms(**changes: Any) -> bool:
        return any(action.op is Op.NORM for program in job_of(tmp_path, **changes).schedule.programs
                   for action in program)

    assert not norms()
    assert not norms(training__precision="bf16")
    assert norms(training__precision="fp16", training__loss_scale=1024)
    assert not norms(training__precision="fp16", training__loss_scale=1024, parallel__schedule="pipedream")


def test_overflows_are_skipped_whatever_on_nan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run goes on at the scale that was found; where no scale helps, bf16 is named."""
    monkeypatch.setattr(scaling, "INITIAL_SCALE", 2.0**22)
    run = begin(tmp_path, training__precision="fp16", training__max_steps=12, checkpoint__every_steps=10)
    skipped = [line.get("skipped", False) for line in metrics(run)[0]]
    assert skipped[0]
    assert not skipped[11]
    assert "update 1 was skipped: a gradient is beyond fp16's range at this loss scale" in capsys.readouterr().err
    assert begin_again(run) == skipped[10:]
    monkeypatch.setattr(loop, "MOST_OVERFLOWS", 2)
    with pytest.raises(LastingError, match="2 updates in a row were skipped; a gradient is beyond") as caught:
        begin(tmp_path / "fixed", training__precision="fp16", training__loss_scale=2.0**30)
    assert caught.value.hint == ("lower training.loss_scale, which is 1.07374e+09, or let it be found; there is no "
                                 "checkpoint before it")
    monkeypatch.setattr(scaling, "INITIAL_SCALE", 2.0**30)
    with pytest.raises(LastingError) as caught:
        begin(tmp_path / "found", training__precision="fp16")
    assert caught.value.hint == "bf16 has fp32's range; there is no checkpoint before it"
    assert len(metrics(only_run(tmp_path / "fixed" / "runs"))[0]) == 2


def test_a_scale_found_without_a_flush_by_an_older_version(tmp_path: Path) -> None:
    """Its run can be read and, at a fixed scale, resumed."""
    run = begin(tmp_path, training__precision="fp16", training__loss_scale=1024, parallel__schedule="pipedream",
                training__max_steps=4, checkpoint__every_steps=2)
    losses = [line["loss"] for line in metrics(run)[0]]
    written = (run / "config.yaml").read_text().replace("loss_scale: 1024.0", "loss_scale: dynamic")
    (run / "config.yaml").write_text(written)
    assert run_config(run).training.computed.dynamic
    before = checkpoint_config(replace(Manifest.load(run / "checkpoints" / "step-2"), config=written))
    assert before is not None
    assert before.training.computed.dynamic
    with pytest.raises(UserError) as caught:
        go_on(run, at=2)
    [problem] = caught.value.problems
    assert problem.what.startswith("training.loss_scale is dynamic, but the schedule has no flush")
    assert problem.where.startswith(f"{run}/config.yaml:")
    go_on(run, "training.loss_scale=1024", at=2)
    assert [line["loss"] for line in metrics(run)[0]] == losses


def begin_again(run: Path) -> list[bool]:
    """Go on from step 10; whether each of the last two steps was skipped."""
    go_on(run, at=10)
    return [line.get("skipped", False) for line in metrics(run)[0][-2:]]
