"""What happens to a course: life after life, each with an injury, until the run is done and compared."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from course import Arrangement, Course, described
from life import Life, a_moment, damage, strike

START_S, GONE_S = 900.0, 120.0
"""Longest waits of the soak itself, for a machine that is busy with other things: for a start, for an end."""

STOPPED_TIMEOUT_S = 20
"""``timeout_s`` of a life in which a rank is stopped (SIGSTOP)."""

INJURIES = ("kill a rank", "kill the launcher", "end in good order", "stop a rank", "damage a checkpoint",
            "kill a rank under --restarts 3")


@dataclass
class Figures:
    """What a soak has seen."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # to the end, by injury
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


class Cycles:
    """Deals injuries to a course.

    Args:
        course: which.
        draw: all that is random.
        deal: the next injury.
        figures: where to count.
        others: processes that are not the course's.
        tell: told a line per life.
    """

    def __init__(self, course: Course, draw: random.Random, deal: Callable[[], str], figures: Figures,
                 others: Callable[[], set[int]], tell: Callable[[str], None]) -> None:
        self._course, self._draw, self._deal, self._figures = course, draw, deal, figures
        self._others, self._tell = others, tell
        self._arrangement: Arrangement | None = None
        self._damaged: int | None = None  # the inode of the checkpoint that was, as long as it lies there

    def run(self, until: float) -> None:
        """Lives until the run is done, from ``until`` (monotonic seconds) on without injuries; then the comparison."""
        before = len(self._figures.differences)
        lives = self._draw.randrange(3, 7)
        while self._course.steps_done() < self._course.steps or not self._whole():
            injury = "none" if time.monotonic() > until else self._deal() if lives else INJURIES[-1]
            lives -= 1
            self._live(injury)
            if len(self._figures.differences) > before or lives < -6:
                break
        began = time.monotonic()
        found = ([] if len(self._figures.differences) > before else
                 [f"{self._course.name}: {what}" for what in self._course.differences()])
        self._figures.differences += found
        self._figures.counts["steps compared"] += self._course.steps
        self._figures.counts["runs compared"] += 1
        for what in self._figures.differences[before:]:
            self._tell(f"DIFFERENT: {what}")
        wrong = len(self._figures.differences) > before
        self._tell(f"{self._course.name}: {self._course.steps} steps, {len(self._course.drained)} resumes, "
                   f"{len(self._course.used)} arrangements: " + ("DIFFERENT" if wrong else "equal to the oracle, bit "
                   f"for bit ({time.monotonic() - began:.1f} s)"))
        if not wrong:
            shutil.rmtree(self._course.folder)

    def _whole(self) -> bool:
        return any(path.name == f"step-{self._course.steps}" for path in self._course.checkpoints)

    def _live(self, injury: str) -> None:
        """One life, from its start to the end of its last process."""
        figures, course, draw = self._figures, self._course, self._draw
        arguments, words = self._start(injury)
        if injury == "stop a rank":
            arguments += ["--set", f"parallel.timeout_s={STOPPED_TIMEOUT_S}"]
        if injury == INJURIES[-1]:
            arguments += ["--restarts", "3"]
        life = Life(course, arguments, self._others)
        figures.counts["lives"] += 1
        when, moment = a_moment(course, draw)
        # A slow machine may start more slowly than a rank is waited for where one is to be stopped.
        done, expected = "", {0, 1} if injury == "stop a rank" else {0}
        if injury != "none" and life.wait_for(moment, START_S):
            done, expected = self._strike(life, injury)
            done = f"{done} {when}"
            if injury == INJURIES[-1]:
                done += self._strike_again(life)
        limit = START_S if injury in ("none", INJURIES[-1]) or not done else GONE_S
        status, seconds = life.gone(limit)
        reached = course.steps_done()
        if done and injury != INJURIES[-1]:
            figures.seconds[injury].append(seconds)
        # It may have been over before the injury came.
        over = reached >= course.steps and self._whole()
        if status is None:
            figures.differences.append(f"{course.name}: after '{done}' processes are left: "
                                       f"{sorted(life.ranks().items()) or life.pid}; see {life.output}")
        elif status not in expected and not (over and status == 0):
            figures.differences.append(f"{course.name}: after '{done or 'no injury'}' the exit status is {status}, not "
                                       f"{sorted(expected)}; see {life.output}")
        newest = [path.name for path in course.checkpoints[-1:]]
        if status is not None and "stopped by SIG" in life.said and newest != [f"step-{reached}"]:
            figures.differences.append(f"{course.name}: after '{done}' the newest checkpoint is {newest}, not that of "
                                       f"step {reached}; see {life.output}")
        self._tell(f"{course.name}: {words}; {done or 'undisturbed'}; "
                   f"status {status} after {seconds:.1f} s at step {reached}")

    def _start(self, injury: str) -> tuple[list[str], str]:
        """The arguments of the next life, and what it goes on from, in words."""
        course, draw, figures = self._course, self._draw, self._figures
        before = self._arrangement
        self._arrangement = draw.choice(course.arrangements)
        config = course.write_config(self._arrangement)
        words = described(self._arrangement)
        if not course.checkpoints:
            shutil.rmtree(course.runs, ignore_errors=True)
            course.drained.clear()
            return [str(config)], f"{words} from the beginning"
        if before is not None and before != self._arrangement:
            figures.counts["re-splits"] += 1
        figures.counts["resumes"] += 1
        assert course.run is not None
        named, newest = course.run, course.checkpoints[-1]
        if injury == "damage a checkpoint" and len(course.checkpoints) > 1:
            what = damage(newest, draw)
            self._damaged = newest.stat().st_ino
            named = self._refused([str(config), "--resume", str(course.run)], newest, what)
            words = f"{what}: refused; {words}"
            step = course.checkpoints[-2].name
        elif newest.stat().st_ino == self._damaged:  # the life before ended before it had put it aside
            named = course.checkpoints[-2]
            step = named.name
        else:
            step = newest.name
        course.resumes_from(int(step.removeprefix("step-")))
        # With the arrangement of the life before, the run's own config says all.
        same = before == self._arrangement and draw.random() < 0.5
        return [*([] if same else [str(config)]), "--resume", str(named)], f"{words} from {step}"

    def _refused(self, arguments: list[str], newest: Path, what: str) -> Path:
        """A damaged checkpoint must be named and refused, and the one before offered: which is returned."""
        course, figures = self._course, self._figures
        life = Life(course, arguments, self._others)
        status, seconds = life.gone(START_S)
        figures.seconds["damage a checkpoint"].append(seconds)
        before = course.checkpoints[-2]
        offered = re.search(r"--resume (\S+)", life.said)
        if status != 2 or newest.name not in life.said or offered is None or Path(offered[1]).name != before.name:
            figures.differences.append(f"{course.name}: {what}, but the resume ended with status {status} and offered "
                                       f"{offered and offered[1]}; see {life.output}")
            return before
        return Path(offered[1])

    def _strike(self, life: Life, injury: str) -> tuple[str, set[int]]:
        """Do it; what was done in words, and the exit statuses that are right after it."""
        draw, figures = self._draw, self._figures
        ranks = life.ranks()
        if injury == "end in good order":
            number = draw.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
            strike(life.pid, number)
            figures.counts[injury] += 1
            # Before it has a rank it may not have heard of signals yet.
            return f"{number.name} to the launcher", {128 + number} | (set() if ranks else {-number})
        if injury == "kill the launcher" or not ranks:
            strike(life.pid, signal.SIGKILL)
            figures.counts["kill the launcher"] += 1
            return "SIGKILL to the launcher", {-signal.SIGKILL}
        rank = draw.choice(sorted(ranks))
        number = signal.SIGSTOP if injury == "stop a rank" else signal.SIGKILL
        strike(ranks[rank], number)
        figures.counts[injury] += 1
        return f"{number.name} to rank {rank}", {0} if injury == INJURIES[-1] else {1}

    def _strike_again(self, life: Life) -> str:
        """Kill a rank of the next attempt, too, once it has got somewhere; what was done in words."""
        before = set(life.ranks().values())
        step = self._course.steps_done() + self._draw.randrange(1, 30)

        def again() -> bool:
            return self._course.steps_done() >= step and not before & set(life.ranks().values())

        if not life.wait_for(again, START_S) or not (ranks := life.ranks()):
            return ""
        rank = self._draw.choice(sorted(ranks))
        strike(ranks[rank], signal.SIGKILL)
        self._figures.counts[INJURIES[-1]] += 1
        return f", then to rank {rank} at step {step}"
