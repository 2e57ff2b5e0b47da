"""Write a report per rank that fails, and tell the failure of a run from the reports and from how its ranks ended."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from vpipe import files
from vpipe.app.errors import LastingError, StartError
from vpipe.app.train.run_folder import failure_path, log_path
from vpipe.distributed import Fault, watch
from vpipe.errors import Problem, RunError, UserError, VpipeError


@dataclass(frozen=True)
class Report:
    """Why a rank failed, for its launcher."""

    rank: int
    time: float
    blames: bool
    fault: Fault | None
    reporter: bool
    starting: bool
    lasting: bool
    problems: Annotated[list[tuple[str, str, str | None]], Field(min_length=1)]
    frames: str


def write_report(folder: Path, rank: int, error: VpipeError) -> Report:
    """Write the report of a rank that fails, for its launcher, and return it; printed if the disk is full."""
    watchdog = watch.watchdog
    fault = None if watchdog is None else watchdog.fault
    blames = isinstance(error, RunError) and error.peer is not None if fault is None else \
        not (fault.reported and rank in fault.ranks)
    if isinstance(error, UserError):
        problems = [(p.what, p.hint, p.where) for p in error.problems]
        if not isinstance(error, StartError):  # what the user could mend before the run was found before: it has failed
            what, hint, where = problems[0]
            me = f"rank {rank}" if watchdog is None else watchdog.place(rank)
            problems = [(f"{me}: {what}" + (f" ({where})" if where else ""), hint, None)]
    else:
        assert isinstance(error, RunError)
        logs = _logs(fault, folder) if blames and fault is not None else "" if error.__cause__ is None else \
            f"; the traceback is in {log_path(folder, rank)}"
        problems = [(error.located, error.hint + logs, None)]
    report = Report(rank, time.time(), blames, fault, watchdog is None or watchdog.is_reporter,
                    isinstance(error, StartError), isinstance(error, (LastingError, UserError)), problems, error.frames)
    try:
        files.replace_text(failure_path(folder, rank), json.dumps(asdict(report)))  # the watchdog may write one, too
    except OSError:
        print(error, file=sys.stderr, flush=True)
    return report


def read_report(folder: Path, rank: int) -> Report | None:
    """Return the report of a rank; None without one, or if it is damaged or of another vpipe."""
    try:
        return TypeAdapter(Report).validate_json(failure_path(folder, rank).read_bytes())
    except (OSError, ValueError):
        return None


def read_reports(folder: Path) -> list[Report]:
    """Return the reports of a run in the order in which they are believed: those of ranks that failed by themselves
    first, then that of the rank which reports for others, then by time.
    """
    ranks = (int(path.name[4:].partition(".")[0]) for path in folder.glob("rank*.failure.json")
             if path.name[4:].partition(".")[0].isdecimal())
    return sorted((report for rank in ranks if (report := read_report(folder, rank)) is not None),
                  key=lambda report: (report.blames, not report.reporter, report.time))


@dataclass(frozen=True)
class End:
    """The end of a rank that told nobody why, as its starter sees it.

    Attributes:
        how: ``killed by signal 9 (SIGKILL)``.
        forced: whether it came from outside: by a signal, or with its host.
    """

    how: str
    forced: bool

    @classmethod
    def with_status(cls, status: int) -> End:
        """Build the end with an exit status: negative for a signal; a shell or a container makes 128 + its number."""
        number = -status if status < 0 else status - 128
        try:
            return cls(f"killed by signal {number} ({signal.Signals(number).name})", forced=True)
        except ValueError:
            return cls(f"killed by signal {number}", forced=True) if status < 0 else \
                cls(f"with exit status {status}", forced=False)


def cause(faults: Sequence[Fault], ends: Mapping[int, End]) -> Fault | None:
    """Return the failure from which the others follow; None where nothing failed.

    First comes an error that a rank raised, if the failure detector heard of it first: after it others may even end by
    a signal, as gloo aborts; but one that tells of a lost connection may itself follow. Then a rank whose process was
    ended from outside: what others say of it follows from that. Then what the ranks found, and last a rank that ended
    by itself and said nothing: its disk may have been full.

    Args:
        faults: as the ranks know them, in the order in which they are believed.
        ends: of ranks that ended without a word.
    """
    found = min(faults, key=lambda fault: not fault.reported, default=None)
    if found is not None and found.reported and not found.may_follow:
        return found
    if found is not None and (named := [rank for rank in found.ranks if rank in ends]):
        return (found if found.is_death else Fault.ended(*named)).knowing(*(ends[rank].how for rank in named))
    silent = [rank for rank, end in ends.items() if end.forced] or ([] if found is not None else list(ends)[:1])
    return Fault.ended(*silent).knowing(*(ends[rank].how for rank in silent)) if silent else found


def find_failure(folder: Path, describe: Callable[[int], str], ends: Mapping[int, End]) -> RunError | UserError | None:
    """Return the cause of a failed run; None where nothing failed.

    Args:
        describe: ``rank -> "rank 2 (stage 2)"``.
        ends: of ranks, as their starter sees them; those that have reported why they end are left out.
    """
    reports = read_reports(folder)
    told = {report.rank for report in reports}
    found = cause([report.fault for report in reports if report.fault is not None],
                  {rank: end for rank, end in ends.items() if rank not in told})
    for report in reports:
        fault, what = report.fault, report.problems[0][0]
        if found is None or (fault is None and not report.blames) or (found.reported and report.rank in found.ranks):
            return reported_error(report)
        if fault is not None and fault.ranks == found.ranks and fault.what in what:  # and what this rank was doing
            return RunError(what.replace(fault.what, found.what, 1), hint=found.hint + _logs(found, folder))
    return None if found is None else RunError(found.sentence(describe), hint=found.hint + _logs(found, folder))


def _logs(fault: Fault, folder: Path) -> str:
    return f"; log{'s' * (len(fault.ranks) > 1)}: {', '.join(str(log_path(folder, rank)) for rank in fault.ranks)}"


def reported_error(report: Report) -> RunError | UserError:
    """Return the error of a report: the failure of the run, or a mistake found before it trained."""
    if report.starting:
        return UserError.all_of([Problem(*problem) for problem in report.problems])
    what, hint, _ = report.problems[0]
    error = (LastingError if report.lasting else RunError)(what, hint=hint)
    error.frames = report.frames
    return error
