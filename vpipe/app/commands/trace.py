"""Run ``vpipe trace``: write the timeline and the report of a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vpipe.app.errors import os_errors
from vpipe.app.progress import stage_progress
from vpipe.app.report.page import page
from vpipe.app.report.perfetto import write_trace
from vpipe.app.report.report_data import load_report_data
from vpipe.app.train.run_folder import run_in
from vpipe.errors import UserError


def run_trace(options: argparse.Namespace) -> None:
    """Write ``trace.json`` and ``report.html`` into the folder of a run."""
    write_report(run_in(options.folder), options.lane)


def write_report(folder: Path, lane: int = 0) -> None:
    """Write ``trace.json`` and ``report.html`` into the folder of a run, of a later lane ``trace-lane1.json`` and
    ``report-lane1.html``. After two seconds stderr shows progress.
    """
    behind = f"-lane{lane}" if lane else ""
    trace, report = folder / f"trace{behind}.json", folder / f"report{behind}.html"
    with stage_progress() as show:
        data = load_report_data(folder, _config(folder), show, lane)
        with os_errors(f"cannot write into '{folder}'",
                       "copy the run's folder to a place with room that you may write to"):
            left_out = write_trace(data.recording, data.producers, trace, say=show)
            show(f"writing {report.name}")
            report.write_text(page(data), encoding="utf-8")
    for note in (*data.notes, *([left_out] if left_out else [])):
        print(f"note: {note}")
    print(f"{trace}: open it in Perfetto\n{report}: open it in a browser")


def _config(folder: Path) -> Mapping[str, Any]:
    """Return the run's resolved config as plain values; empty where it has none."""
    if not (folder / "config.yaml").is_file():
        return {}
    from vpipe.app.config.yaml_tree import read_yaml  # PyYAML, only where there is something to read

    tree = read_yaml(folder / "config.yaml")
    if tree.problems:
        raise UserError.all_of(tree.problems)
    return tree.value if isinstance(tree.value, dict) else {}
