"""Write a report per rank that fails, and tell the failure of a run from the reports and from how its ranks ended."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vpipe.distributed.excepthook import user_frames
from vpipe.distributed.fault import End, Fault, cause
from vpipe.distributed.watchdog import current_watchdog
from vpipe.errors import LastingError, Problem, RunError, StartError, UserError, VpipeError
from vpipe.train.run_folder import failure_path, log_path


def write_report(folder: Path, rank: int, error: VpipeError) -> dict[str, Any]:
    """Write the report of a rank that fails, for its launcher, and return it; printed if the disk is full."""
    if isinstance(error, UserError):
        problems = [[p.what, p.hint, p.where] for p in error.problems]
    else:
        assert isinstance(error, RunError)
        problems = [[error.located, error.hint, None]]
    watch = current_watchdog()
    fault = None if watch is None else watch.fault
    own = fault is None or (fault.reported and rank in fault.ranks)
    blames = not own or (isinstance(error, RunError) and error.peer is not None)
    report = {"rank": rank, "time": time.time(), "user": isinstance(error, UserError), "blames": blames,
              "fault": None if fault is None else asdict(fault), "reporter": watch is None or watch.is_reporter,
              "starting": isinstance(error, StartError), "lasting": isinstance(error, LastingError),
              "problems": problems, "frames": user_frames(error),
              "traceback": not blames and error.__cause__ is not None}
    partial = failure_path(folder, rank).with_suffix(f".{threading.get_ident()}.tmp")  # the watchdog may write one, too
    try:
        partial.write_text(json.dumps(report))
        partial.replace(failure_path(folder, rank))
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        print(error, file=sys.stderr, flush=True)
    return report


def read_report(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return the report of a rank; None without one, or if it is incomplete or of another vpipe."""
    try:
        report = json.loads(failure_path(folder, rank).read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return report if isinstance(report, dict) and "fault" in report else None


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Return the reports of a run in the order in which they are believed.

    First come those of ranks that failed by themselves, then that of the rank which reports for all others, then by
    time: those who failed first saw most.
    """
    ranks = (int(path.name[4:].partition(".")[0]) for path in folder.glob("rank*.failure.json"))
    return sorted((report for rank in ranks if (report := read_report(folder, rank)) is not None),
                  key=lambda report: (report["blames"], not report["reporter"], report["time"]))


def reported_fault(report: Mapping[str, Any]) -> Fault | None:
    """Return the failure of the job as the rank of a report knows it; None if it watched no others."""
    return None if report["fault"] is None else Fault.from_message(report["fault"])


def find_failure(folder: Path, describe: Callable[[int], str], statuses: Mapping[int, int | None] | None = None,
                 lost: Mapping[int, str] | None = None) -> RunError | UserError | None:
    """Return the cause of a failed run; None where nothing failed.

    Args:
        describe: ``rank -> "rank 2 (stage 2)"``.
        statuses: per rank its exit status, negative for a signal; None for one that still runs or was on a lost host.
        lost: ranks of lost hosts, with how the host was lost.
    """
    reports = read_reports(folder)
    told = {report["rank"] for report in reports}
    ends = {rank: End.with_status(status) for rank, status in (statuses or {}).items() if status and rank not in told}
    ends |= {rank: End(how, forced=True) for rank, how in (lost or {}).items() if rank not in told}
    found = cause([fault for report in reports if (fault := reported_fault(report)) is not None], ends)
    if reports and (found is None or (reports[0]["fault"] is None and not reports[0]["blames"])):
        return reported_error(reports[0], describe, folder)
    if found is None:
        return None
    for report in reports:
        fault, (what, _, where) = reported_fault(report), report["problems"][0]
        if found.reported and report["rank"] in found.ranks:
            return reported_error(report, describe, folder)
        if fault is not None and fault.ranks == found.ranks and fault.what in what:  # and what this rank was doing
            told_so = [[what.replace(fault.what, found.what, 1), found.hint, where]]
            return reported_error({**report, "problems": told_so}, describe, folder)
    return RunError(found.sentence(describe), hint=found.hint + _logs(found, folder))


def _logs(fault: Fault, folder: Path) -> str:
    return f"; log{'s' * (len(fault.ranks) > 1)}: {', '.join(str(log_path(folder, rank)) for rank in fault.ranks)}"


def reported_error(report: Mapping[str, Any], describe: Callable[[int], str],
                   folder: Path) -> RunError | UserError:
    """Return the error of a report: the failure of the run, or a mistake found before it trained.

    Args:
        folder: where the logs of the ranks are.
    """
    if report.get("starting"):
        return UserError.all_of([Problem(*problem) for problem in report["problems"]])
    what, hint, where = report["problems"][0]
    if report["user"]:  # what the user could mend before the run was found before: by now the run has failed
        what = f"{describe(report['rank'])}: {what}" + (f" ({where})" if where else "")
    error = (LastingError if report["user"] or report.get("lasting") else RunError)(what, hint=hint)
    fault = reported_fault(report)
    if report.get("traceback"):
        error.hint += f"; the traceback is in {log_path(folder, report['rank'])}"
    elif report["blames"] and fault is not None:
        error.hint += _logs(fault, folder)
    error.frames = report.get("frames", "")
    return error
