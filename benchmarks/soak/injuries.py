"""Launch a long run again and again, each time with an injury, until it is done, and compare it with its oracle."""

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

from launch import Launch, a_moment, damage, strike
from long_run import Arrangement, LongRun, described

START_S, GONE_S = 900.0, 120.0
"""Longest waits of the soak itself, for a machine that is busy with other things: for a start, for an end."""

STOPPED_TIMEOUT_S = 20
"""``timeout_s`` of a launch in which a rank is stopped (SIGSTOP)."""

INJURIES = ("kill a rank", "kill the launcher", "end in good order", "stop a rank", "damage a checkpoint",
            "kill a rank under --restarts 3")


@dataclass
class Figures:
    """What a soak has seen."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # to the end, by injury
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


class Injuries:
    """Injures a long run again and again.

    Args:
        run: the long run.
        draw: all that is random.
        deal: the next injury.
        figures: where to count.
        others: processes that are not the long run's.
        tell: told a line per launch.
    """

    def __init__(self, run: LongRun, draw: random.Random, deal: Callable[[], str], figures: Figures,
                 others: Callable[[], set[int]], tell: Callable[[str], None]) -> None:
        self._long_run, self._draw, self._deal, self._figures = run, draw, deal, figures
        self._others, self._tell = others, tell
        self._arrangement: Arrangement | None = None
        self._damaged: int | None = None  # the inode of the checkpoint that was, as long as it lies there

    def run(self, until: float) -> None:
        """Launch until the run is done, from ``until`` (monotonic seconds) on without injuries; then compare."""
        before = len(self._figures.differences)
        launches = self._draw.randrange(3, 7)
        while self._long_run.steps_done() < self._long_run.steps or not self._whole():
            injury = "none" if time.monotonic() > until else self._deal() if launches else INJURIES[-1]
            launches -= 1
            self._live(injury)
            if len(self._figures.differences) > before or launches < -6:
                break
        began = time.monotonic()
        found = ([] if len(self._figures.differences) > before else
                 [f"{self._long_run.name}: {what}" for what in self._long_run.differences()])
        self._figures.differences += found
        self._figures.counts["steps compared"] += self._long_run.steps
        self._figures.counts["runs compared"] += 1
        for what in self._figures.differences[before:]:
            self._tell(f"DIFFERENT: {what}")
        wrong = len(self._figures.differences) > before
        self._tell(f"{self._long_run.name}: {self._long_run.steps} steps, {len(self._long_run.drained)} resumes, "
                   f"{len(self._long_run.used)} arrangements: " + ("DIFFERENT" if wrong else "equal to the oracle, bit "
                   f"for bit ({time.monotonic() - began:.1f} s)"))
        if not wrong:
            shutil.rmtree(self._long_run.folder)

    def _whole(self) -> bool:
        return any(path.name == f"step-{self._long_run.steps}" for path in self._long_run.checkpoints)

    def _live(self, injury: str) -> None:
        """One launch, from its start to the end of its last process."""
        figures, run, draw = self._figures, self._long_run, self._draw
        arguments, words = self._start(injury)
        if injury == "stop a rank":
            arguments += ["--set", f"parallel.timeout_s={STOPPED_TIMEOUT_S}"]
        if injury == INJURIES[-1]:
            arguments += ["--restarts", "3"]
        launch = Launch(run, arguments, self._others)
        figures.counts["launches"] += 1
        when, moment = a_moment(run, draw)
        # A slow machine may start more slowly than a rank is waited for where one is to be stopped.
        done, expected = "", {0, 1} if injury == "stop a rank" else {0}
        if injury != "none" and launch.wait_for(moment, START_S):
            done, expected = self._strike(launch, injury)
            done = f"{done} {when}"
            if injury == INJURIES[-1]:
                done += self._strike_again(launch)
        limit = START_S if injury in ("none", INJURIES[-1]) or not done else GONE_S
        status, seconds = launch.gone(limit)
        reached = run.steps_done()
        if done and injury != INJURIES[-1]:
            figures.seconds[injury].append(seconds)
        # It may have been over before the injury came.
        over = reached >= run.steps and self._whole()
        if status is None:
            figures.differences.append(f"{run.name}: after '{done}' processes are left: "
                                       f"{sorted(launch.ranks().items()) or launch.pid}; see {launch.output}")
        elif status not in expected and not (over and status == 0):
            figures.differences.append(f"{run.name}: after '{done or 'no injury'}' the exit status is {status}, not "
                                       f"{sorted(expected)}; see {launch.output}")
        newest = [path.name for path in run.checkpoints[-1:]]
        if status is not None and "stopped by SIG" in launch.said and newest != [f"step-{reached}"]:
            figures.differences.append(f"{run.name}: after '{done}' the newest checkpoint is {newest}, not that of "
                                       f"step {reached}; see {launch.output}")
        self._tell(f"{run.name}: {words}; {done or 'undisturbed'}; "
                   f"status {status} after {seconds:.1f} s at step {reached}")

    def _start(self, injury: str) -> tuple[list[str], str]:
        """The arguments of the next launch, and what it goes on from, in words."""
        run, draw, figures = self._long_run, self._draw, self._figures
        before = self._arrangement
        self._arrangement = draw.choice(run.arrangements)
        config = run.write_config(self._arrangement)
        words = described(self._arrangement)
        if not run.checkpoints:
            shutil.rmtree(run.runs, ignore_errors=True)
            run.drained.clear()
            return [str(config)], f"{words} from the beginning"
        if before is not None and before != self._arrangement:
            figures.counts["re-splits"] += 1
        figures.counts["resumes"] += 1
        assert run.run is not None
        named, newest = run.run, run.checkpoints[-1]
        if injury == "damage a checkpoint" and len(run.checkpoints) > 1:
            what = damage(newest, draw)
            self._damaged = newest.stat().st_ino
            named = self._refused([str(config), "--resume", str(run.run)], newest, what)
            words = f"{what}: refused; {words}"
            step = run.checkpoints[-2].name
        elif newest.stat().st_ino == self._damaged:  # the launch before ended before it had put it aside
            named = run.checkpoints[-2]
            step = named.name
        else:
            step = newest.name
        run.resumes_from(int(step.removeprefix("step-")))
        # With the arrangement of the launch before, the run's own config says all.
        same = before == self._arrangement and draw.random() < 0.5
        return [*([] if same else [str(config)]), "--resume", str(named)], f"{words} from {step}"

    def _refused(self, arguments: list[str], newest: Path, what: str) -> Path:
        """A damaged checkpoint must be named and refused, and the one before offered: which is returned."""
        run, figures = self._long_run, self._figures
        launch = Launch(run, arguments, self._others)
        status, seconds = launch.gone(START_S)
        figures.seconds["damage a checkpoint"].append(seconds)
        before = run.checkpoints[-2]
        offered = re.search(r"--resume (\S+)", launch.said)
        if status != 2 or newest.name not in launch.said or offered is None or Path(offered[1]).name != before.name:
            figures.differences.append(f"{run.name}: {what}, but the resume ended with status {status} and offered "
                                       f"{offered and offered[1]}; see {launch.output}")
            return before
        return Path(offered[1])

    def _strike(self, launch: Launch, injury: str) -> tuple[str, set[int]]:
        """Do it; what was done in words, and the exit statuses that are right after it."""
        draw, figures = self._draw, self._figures
        ranks = launch.ranks()
        if injury == "end in good order":
            number = draw.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
            strike(launch.pid, number)
            figures.counts[injury] += 1
            # Before it has a rank it may not have heard of signals yet.
            return f"{number.name} to the launcher", {128 + number} | (set() if ranks else {-number})
        if injury == "kill the launcher" or not ranks:
            strike(launch.pid, signal.SIGKILL)
            figures.counts["kill the launcher"] += 1
            return "SIGKILL to the launcher", {-signal.SIGKILL}
        rank = draw.choice(sorted(ranks))
        number = signal.SIGSTOP if injury == "stop a rank" else signal.SIGKILL
        strike(ranks[rank], number)
        figures.counts[injury] += 1
        return f"{number.name} to rank {rank}", {0} if injury == INJURIES[-1] else {1}

    def _strike_again(self, launch: Launch) -> str:
        """Kill a rank of the next attempt, too, once it has got somewhere; what was done in words."""
        before = set(launch.ranks().values())
        step = self._long_run.steps_done() + self._draw.randrange(1, 30)

        def again() -> bool:
            return self._long_run.steps_done() >= step and not before & set(launch.ranks().values())

        if not launch.wait_for(again, START_S) or not (ranks := launch.ranks()):
            return ""
        rank = self._draw.choice(sorted(ranks))
        strike(ranks[rank], signal.SIGKILL)
        self._figures.counts[INJURIES[-1]] += 1
        return f", then to rank {rank} at step {step}"
