"""Run ``vpipe trace``: write the timeline and the report of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from vpipe.errors import UserError
from vpipe.report.page import page
from vpipe.report.perfetto import write_trace
from vpipe.report.report_data import load_report_data

_PATIENCE_S = 2.0


def run_trace(options: argparse.Namespace) -> None:
    """Write ``trace.json`` and ``report.html`` into the folder of a run.

    Raises:
        UserError: there is no such run, it was not recorded, or a file in it is damaged.
    """
    folder, progress = options.folder, _Progress()
    evidence = load_report_data(folder, _config(folder), progress.say)
    try:
        left_out = write_trace(evidence.recording, evidence.producers, folder / "trace.json", say=progress.say)
        progress.say("writing report.html")
        (folder / "report.html").write_text(page(evidence), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write into '{folder}': {error.strerror}",
                        hint="copy the run's folder to a place with room that you may write to") from None
    progress.end()
    for note in (*evidence.notes, *([left_out] if left_out else [])):
        print(f"note: {note}")
    print(f"{folder / 'trace.json'}: open it in Perfetto\n{folder / 'report.html'}: open it in a browser")


def _config(folder: Path) -> Mapping[str, Any]:
    """Return the run's resolved config as plain values; empty where it has none."""
    if not (folder / "config.yaml").is_file():
        return {}
    from vpipe.config.yaml_tree import read_yaml  # PyYAML, only where there is something to read

    tree = read_yaml(folder / "config.yaml")
    if tree.problems:
        raise UserError.all_of(tree.problems)
    return tree.value if isinstance(tree.value, dict) else {}


class _Progress:
    """Show the work at hand on stderr after two seconds: one line in a terminal, else one every ten seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = perf_counter() + _PATIENCE_S
        self._shown = False

    def say(self, text: str) -> None:
        if (now := perf_counter()) < self._next:
            return
        self._next, self._shown = now + (0.1 if self._terminal else 10.0), True
        print(f"\r\x1b[K{text}" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr,
              flush=True)

    def end(self) -> None:
        if self._shown and self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
