"""One run has one MFU, HFU, bubble and memory: on the screen, in its files and in its report."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from small_run import only_run, write_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vpipe.app.cli import main
from vpipe.app.metric_formulas import share_text
from vpipe.app.report.page import page
from vpipe.app.report.report_data import load_report_data
from vpipe.app.visualize.table import milliseconds
from vpipe.units import size_text

pytestmark = pytest.mark.jobs


@pytest.mark.usefixtures("forked")
def test_screen_files_and_report_give_one_number(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    config = write_config(tmp_path, training__max_steps=7, metrics__tensorboard=True, parallel__recompute=1.0,
                          metrics__peak_tflops=0.001)
    assert main(["train", str(config), "--set", "trace=true"]) == 0
    [head, row] = re.findall(r"^ *samples/s.*\n(?:.*\n)", capfd.readouterr().out, re.MULTILINE)[0].splitlines()
    screen = dict(zip(head.split(), re.findall(r"\S+(?: (?:%|ms|\w?i?B))?", row), strict=True))

    run = only_run(tmp_path / "runs")
    [*lines, last] = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    figures = last["summary"]
    assert 0 < figures["bubble"] < 1
    assert 0 < figures["mfu"] < figures["hfu"] < 1
    assert {name: screen[name] for name in ("MFU", "HFU", "bubble", "memory", "median")} == {
        "MFU": share_text(figures["mfu"]), "HFU": share_text(figures["hfu"]), "bubble": share_text(figures["bubble"]),
        "memory": size_text(figures["memory_bytes"]), "median": milliseconds(figures["step_median_s"])}

    [cells] = csv.DictReader((run / "summary.csv").read_text().splitlines())
    [events] = (run / "tensorboard").iterdir()
    scalars = EventAccumulator(str(events)).Reload()
    names = ("mfu", "hfu", "bubble", "memory_bytes", "samples_per_s", "tokens_per_s", "step_median_s")
    for name in names:
        assert float(cells[name]) == figures[name]
        assert scalars.Scalars(f"summary/{name}")[0].value == pytest.approx(figures[name], rel=1e-6)

    evidence = load_report_data(run, {})
    assert [getattr(evidence.totals, "step_s" if name == "step_median_s" else name) for name in names] == [
        figures[name] for name in names]
    cards = dict(re.findall(r'<dt>([^<]*)</dt><dd class="big">([^<]*)</dd>', page(evidence)))
    assert {name: cards[name] for name in ("MFU", "bubble", "memory", "median update", "samples per second")} == {
        **{name: screen[name] for name in ("MFU", "bubble", "memory")}, "median update": screen["median"],
        "samples per second": screen["samples/s"]}
    assert f"HFU {screen['HFU']}" in page(evidence)

    # The lines of single updates are of the same kind: their mean over time is the run's.
    updates = [line for line in lines if "mfu" in line][2:]
    assert sum(line["mfu"] * line["step_s"] for line in updates) / sum(
        line["step_s"] for line in updates) == pytest.approx(figures["mfu"], rel=1e-3)
