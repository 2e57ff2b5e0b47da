"""Where the time of every rank goes, as ``metrics.rank_times_every`` asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attempts import begin, go_on
from small_run import job_of, only_run, write_config

from vpipe.app.cli import main
from vpipe.app.train.loop import train
from vpipe.app.train.rank_times import FIGURES

pytestmark = pytest.mark.jobs


def reports(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rank_times.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("schedule", "every", "covered"), [("1f1b", 2, [[0, 1], [2, 3], [4, 5]]),
                                                            ("pipedream", 3, [[0, 2], [3, 5]])])
def test_every_rank_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str], schedule: str, every: int,
                                covered: list[list[int]]) -> None:
    config = write_config(tmp_path, training__max_steps=7, parallel__schedule=schedule,
                          parallel__stage_to_rank_map={"0": [1], "1": [0]}, metrics__rank_times_every=every)
    assert main(["train", str(config)]) == 0
    run, shown = only_run(tmp_path / "runs"), capfd.readouterr().err
    found = reports(run)
    assert [[report["first_step"], report["last_step"]] for report in found] == covered
    for report in found:
        assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
        for rank in report["ranks"]:
            assert list(rank) == ["rank", *FIGURES]
            assert min(rank[name] for name in FIGURES if name != "others_s") > 0
            assert rank["others_s"] == 0, "no package has added a kind"
    *_, summary = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    # One update after the other sends as much: what the whole run says of an update is what a report says.
    sent = sum(rank["bytes_sent"] for rank in found[-1]["ranks"])
    assert sent == pytest.approx(summary["summary"]["sent_bytes"], rel=0.3)
    first, last = covered[0][0] + 1, covered[0][1] + 1
    table = shown[shown.index(f"updates {first} to {last}, in milliseconds per update:\n"):].splitlines()
    assert table[1].split() == ["rank", "stage", "forward", "backward", "step", "comm", "idle", "sent"]
    assert [line.split()[:2] for line in table[2:4]] == [["0", "1"], ["1", "0"]]
    for rank in range(2):
        log = (run / f"rank{rank}.log").read_text()
        assert log.count(f"rank {rank}, updates ") == len(covered)
        assert f"rank {rank}, updates {first} to {last}, in milliseconds per update: forward " in log


@pytest.mark.parametrize(("pause_s", "covered"), [(5.0, [[0, 1]]), (0.0, [[0, 1], [2, 3]])])
def test_reports_that_nobody_asked_for_are_few_and_in_the_file_alone(
        tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch, pause_s: float, covered: list[list[int]]) -> None:
    monkeypatch.setattr("vpipe.app.train.rank_times.AFTER_S", pause_s)
    monkeypatch.setattr("vpipe.app.train.rank_times.UNASKED", 2)
    with caplog.at_level("INFO"):
        train(job_of(tmp_path), tmp_path)
    assert [[report["first_step"], report["last_step"]] for report in reports(tmp_path)] == covered
    assert [rank["rank"] for rank in reports(tmp_path)[0]["ranks"]] == [0, 1]
    assert "in milliseconds per update:" not in capfd.readouterr().err + caplog.text


def test_an_attempt_that_goes_on_counts_on(tmp_path: Path) -> None:
    run = begin(tmp_path, training__max_steps=3, metrics__rank_times_every=2, checkpoint__at_end=True)
    go_on(run, "training.max_steps=6")
    assert [[report["first_step"], report["last_step"]] for report in reports(run)] == [[3, 3], [4, 5]]
    [first] = reports(run / "earlier" / "1")
    assert (first["first_step"], first["last_step"]) == (0, 1)
