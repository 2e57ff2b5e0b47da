"""Write a report per rank that fails, and find the cause of a failed run among the reports."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vpipe.distributed.environment import HOST
from vpipe.distributed.excepthook import user_frames
from vpipe.distributed.signals import STOPS
from vpipe.errors import LastingError, Problem, RunError, StartError, UserError, VpipeError
from vpipe.train.run_folder import failure_path, log_path


def write_report(folder: Path, rank: int, error: VpipeError) -> dict[str, Any]:
    """Write the report of a rank that fails, for its launcher, and return it; printed if the disk is full."""
    if isinstance(error, UserError):
        problems = [[p.what, p.hint, p.where] for p in error.problems]
        blames = False
    else:
        assert isinstance(error, RunError)
        problems = [[_with_host(error, rank), error.hint, None]]
        blames = error.peer is not None
    report = {"rank": rank, "time": time.time(), "user": isinstance(error, UserError), "blames_peer": blames,
              "starting": isinstance(error, StartError), "lasting": isinstance(error, LastingError),
              "problems": problems, "frames": user_frames(error),
              "traceback": not blames and error.__cause__ is not None}
    partial = failure_path(folder, rank).with_suffix(".tmp")
    try:
        partial.write_text(json.dumps(report))
        partial.replace(failure_path(folder, rank))
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        print(error, file=sys.stderr, flush=True)
    return report


def _with_host(error: RunError, rank: int) -> str:
    """Return an error with its place and the host: ``... (rank 2, stage 1, host b, action 1F0)``."""
    host = os.environ.get(HOST)
    if host is None or error.rank != rank:
        return error.located
    before, place, after = error.located.rpartition(f"(rank {rank}")
    stage = f", stage {error.stage}" if error.stage is not None else ""
    return f"{before}{place}{stage}, host {host}{after.removeprefix(stage)}"


def read_report(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return the report of a rank; None without one, or if it is incomplete."""
    try:
        report = json.loads(failure_path(folder, rank).read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return report if isinstance(report, dict) else None


def first_report(folder: Path) -> dict[str, Any] | None:
    """Return, of the reports of a run, that of the rank to blame; None where nothing failed."""
    reports = [report for path in folder.glob("rank*.failure.json")
               if (report := read_report(folder, int(path.name[4:].partition(".")[0]))) is not None]
    return min(reports, key=_priority, default=None)


def first_failure(statuses: Mapping[int, int | None], lost: list[VpipeError], folder: Path,
                  describe: Callable[[int], str]) -> VpipeError:
    """Return the cause of a failed run: the error that a rank reports of itself, else a rank or a host that ended
    without a report, else what others report of them.

    Args:
        statuses: per rank its exit status, negative for a signal; None for one that still runs or was on a lost host.
        lost: hosts that were lost.
        describe: ``rank -> "rank 2 (stage 2)"``.
    """
    reports = {rank: report for rank in statuses if (report := read_report(folder, rank)) is not None}
    first = min(reports.values(), key=_priority, default=None)
    if first is not None and not first["blames_peer"]:
        return reported_error(first, describe, folder)
    for rank, status in statuses.items():
        if status and rank not in reports:
            return _silent(rank, status, log_path(folder, rank), describe)
    if lost:
        return lost[0]
    assert first is not None, "else nothing has failed"
    return reported_error(first, describe, folder)


def _priority(report: Mapping[str, Any]) -> tuple[bool, float]:
    """Return the order in which reports are believed: those that blame no other rank first, then by time."""
    return report["blames_peer"], report["time"]


def _silent(rank: int, status: int, log: Path, describe: Callable[[int], str]) -> RunError:
    how = f"ended with exit status {status}"
    if status < 0 or status - 128 in STOPS:
        how = f"was killed by {signal_name(-status if status < 0 else status - 128)}"
    hint = f"its log: {log}"
    if status == -signal.SIGKILL:
        hint = f"Linux kills a process so when memory runs out; {hint}"
    return RunError(f"{describe(rank)} {how}", hint=hint)


def signal_name(number: int) -> str:
    """Return ``signal 9 (SIGKILL)``."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal
        return f"signal {number}"


def reported_error(report: Mapping[str, Any], describe: Callable[[int], str], folder: Path) -> VpipeError:
    """Return the error of a report: the failure of the run, or a mistake found before it trained.

    Args:
        folder: where the logs of the ranks are.
    """
    if report.get("starting"):
        return UserError.all_of([Problem(*problem) for problem in report["problems"]])
    error = as_error(report, describe)
    if report.get("traceback"):
        error.hint += f"; the traceback is in {log_path(folder, report['rank'])}"
    error.frames = report.get("frames", "")
    return error


def as_error(report: Mapping[str, Any], describe: Callable[[int], str]) -> RunError:
    """Return a report as the failure of the run."""
    what, hint, where = report["problems"][0]
    if report["user"]:  # what the user could mend before the run was found before: by now the run has failed
        what = f"{describe(report['rank'])}: {what}" + (f" ({where})" if where else "")
    return (LastingError if report["user"] or report.get("lasting") else RunError)(what, hint=hint)
