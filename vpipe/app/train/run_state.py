"""Read how far a run is from the files in its folder, while it trains or later. Whatever its length, little is read."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from statistics import fmean

from vpipe.app.metric_formulas import RECENT
from vpipe.app.run_log import METRICS, Line, RunLog, mean_figure, number
from vpipe.app.train.run_folder import CONFIG, FACTS, LAUNCHED, RANK_TIMES, RUNNING
from vpipe.errors import UserError

SILENT_S, SILENT_UPDATES = 60.0, 20
"""A run that has written nothing for so long, and for as long as so many of its updates take, may have stopped."""

OF_STAGE = ("forward_s", "backward_s", "step_s", "others_s")
"""Seconds that a summary has for each stage of a rank; those of transfers and waiting are the rank's."""


@dataclass(frozen=True)
class MeanTime:
    """The mean seconds per update of one rank; ``idle_s`` is None where it is NaN in a StageUsage."""

    rank: int
    forward_s: float
    backward_s: float
    step_s: float
    communication_s: float
    others_s: float
    idle_s: float | None

    @property
    def work_s(self) -> float:
        """Return the seconds of its own actions, transfers excluded."""
        return self.forward_s + self.backward_s + self.step_s + self.others_s

    @classmethod
    def of_values(cls, rank: int, values: Line, per: float = 1.0) -> MeanTime:
        """Take the seconds of an object of ``rank_times.jsonl``, or of so many updates of one in a summary."""
        spent = {name: number(values, name) / per for name in (*OF_STAGE, "communication_s")}
        idle_s = None if values.get("idle_s") is None else number(values, "idle_s") / per
        return cls(rank=rank, idle_s=idle_s, **spent)


@dataclass(frozen=True)
class MeanTimes:
    """The times of all ranks in the updates ``first`` to ``last``, counted from 1."""

    first: int
    last: int
    ranks: Sequence[MeanTime]

    @property
    def slowest(self) -> MeanTime:
        """Return the rank that works longest."""
        return max(self.ranks, key=lambda rank: rank.work_s)


@dataclass(frozen=True)
class RunState:
    """The state of a run, as its files say it.

    Attributes:
        lines: of the latest updates.
        evaluation: the latest line of an evaluation, if it is not too far back.
        summary: the run's; None where the attempt has not ended well.
        facts: of ``run.json``; empty where a script made the folder.
        rank_times: of the latest updates, of an ended run of all that count; None where nobody wrote them.
        silent_s: seconds since something was written.
        holder: ``process 12 on host``, which trains, or started those that do; None where none says so.
        is_alive: whether that process is there; None where that cannot be seen from here.
    """

    folder: Path
    lines: Sequence[Line]
    evaluation: Line | None
    summary: Line | None
    facts: Line
    rank_times: MeanTimes | None
    silent_s: float
    holder: str | None
    is_alive: bool | None

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Read the state of the run in ``folder``.

        Raises:
            UserError: this is no run's folder.
        """
        if not any((folder / name).is_file() for name in (CONFIG, METRICS)):
            raise UserError(f"there is no {'run in' if folder.is_dir() else 'folder'} '{folder}'",
                            where=f"looked for {CONFIG} and {METRICS}",
                            hint="give the folder that 'vpipe train' prints as its run folder")
        lines, evaluation = list[Line](), None
        last: Line = {}
        for last in RunLog(folder).tail():
            if "loss" in last:
                lines.append(last)
            elif "evaluation_loss" in last:
                evaluation = last
        holder, is_alive = _holder(folder)
        summary = last.get("summary")
        if not isinstance(summary, dict) or is_alive or (folder / RUNNING).exists():
            summary = None  # or of the attempt before this one, which has made no update yet
        facts: Line = {}
        with suppress(OSError, ValueError, TypeError):  # one that is damaged is as none
            found = json.loads((folder / FACTS).read_text())
            facts = {**found, "ranks": [list(map(int, ranks)) for ranks in found.get("ranks", ())],
                     "planned_s": list(map(float, found.get("planned_s") or ()))}
        times = _of_summary(summary, facts) if summary is not None else None
        written = [path.stat().st_mtime for name in (METRICS, CONFIG) if (path := folder / name).exists()]
        silent_s = max(0.0, time.time() - max(written, default=0.0))
        return cls(folder, lines, evaluation, summary, facts, times or _reported(folder), silent_s, holder, is_alive)

    @property
    def steps(self) -> int:
        """Return the number of updates that are done."""
        return int(number(self.lines[-1], "step")) + 1 if self.lines else 0

    @property
    def updates(self) -> int | None:
        """Return how many there will be; None where only time ends the run, or nobody has said."""
        value = self.facts.get("updates")
        return value if type(value) is int else None

    @property
    def update_s(self) -> float | None:
        """Return the mean seconds of a recent update."""
        return fmean(number(line, "step_s") for line in self.lines[-RECENT:]) if self.lines else None

    def figure(self, key: str) -> float:
        """Return a figure of the summary; of a run that goes on the mean of a rate or share over recent updates,
        weighted by their times. NaN where it is not known.
        """
        if self.summary is not None:
            return number(self.summary, key)
        return mean_figure(self.lines[-RECENT:], key)

    @property
    def limit_s(self) -> float | None:
        """Return the seconds of training after which the run ends; None where there is no such limit."""
        return None if self.facts.get("max_minutes") is None else 60 * number(self.facts, "max_minutes")

    @property
    def left_s(self) -> float | None:
        """Return the seconds of training that are left at the present speed; None where nothing says how many."""
        found = []
        if self.lines and self.limit_s is not None:
            found.append(self.limit_s - number(self.lines[-1], "time_s"))
        if self.update_s is not None and self.updates is not None:
            found.append(self.update_s * (self.updates - self.steps))
        return max(0.0, min(found)) if found and all(map(isfinite, found)) else None

    @property
    def is_silent(self) -> bool:
        """Return whether it has written nothing for longer than updates explain."""
        return self.silent_s > max(SILENT_S, SILENT_UPDATES * (self.update_s or 0.0))

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank; none where nobody has said."""
        return [stage for stage, ranks in enumerate(self.facts.get("ranks", ())) if rank in ranks]

    def describe(self, rank: int) -> str:
        """Return ``rank 2 (stage 2)``."""
        stages = self.stages_of(rank)
        return f"rank {rank}" + (f" (stage{'s' * (len(stages) > 1)} {' '.join(map(str, stages))})" if stages else "")

    @cached_property
    def planned_s(self) -> Mapping[int, float]:
        """Return the seconds per update that each rank was planned to work; empty without a plan."""
        return dict(enumerate(self.facts.get("planned_s", ())))


def _holder(folder: Path) -> tuple[str | None, bool | None]:
    """Return the process that trains a run or has started it, and whether it is alive.

    Its lock is not tried: that would refuse a run which is just being resumed.
    """
    found: tuple[str | None, bool | None] = (None, None)
    for name in (LAUNCHED, RUNNING):
        with suppress(OSError, ValueError):
            text = (folder / name).read_text().strip()
            _, process, _, host = text.split(maxsplit=3)
            alive = None if host != socket.gethostname() else int(process) > 0 and _exists(int(process))
            if found[0] is None or alive:
                found = text, alive
    return found


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    return True


def _reported(folder: Path) -> MeanTimes | None:
    """Return the latest report of ``rank_times.jsonl``."""
    for report in reversed(RunLog(folder, RANK_TIMES).tail()):
        with suppress(KeyError, TypeError):  # of a damaged line
            first, last = report["first_step"], report["last_step"]
            if ranks := [MeanTime.of_values(values["rank"], values) for values in report["ranks"]]:
                return MeanTimes(first + 1, last + 1, ranks)
    return None


def _of_summary(summary: Line, facts: Line) -> MeanTimes | None:
    """Return the times of all updates that the summary of a run counts."""
    with suppress(KeyError, TypeError, ValueError):
        stages: dict[int, list[Line]] = {}
        for rank, usage in zip((rank for ranks in facts["ranks"] for rank in ranks), summary["stages"], strict=True):
            stages.setdefault(rank, []).append(usage)
        last, per = summary["steps_done"], summary["usage_steps"]
        united = {rank: {**own[0], **{key: sum(number(usage, key) for usage in own) for key in OF_STAGE}}
                  for rank, own in stages.items()}
        return MeanTimes(last - per + 1, last, [MeanTime.of_values(rank, united[rank], per) for rank in sorted(united)])
    return None
