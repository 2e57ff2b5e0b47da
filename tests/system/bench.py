"""Failures of runs, made in the background, several at a time; a test that is marked with one waits for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from failures import Ended, Failure, Run

AT_ONCE = 4
"""Runs at a time: they wait for each other more than they compute."""

SOON_S = 15.0
"""Within which all has ended, where nobody must wait for a timeout."""

MOMENTS = {
    # By 4 microbatches a step; the failure comes in the fifth step, after the checkpoint of step 4.
    "1f1b": {"warm-up": ("forward", 16), "steady": ("backward", 17), "cooldown": ("backward", 19), "step": ("step", 4),
             "write": ("write", 1), "evaluation": ("evaluation", 5)},
    # By one microbatch a step; the pipeline runs empty after 5, 7, 10, 14 and 15.
    "pipedream": {"warm-up": ("forward", 10), "steady": ("backward", 11), "cooldown": ("backward", 13),
                  "step": ("step", 11), "write": ("write", 1), "evaluation": ("evaluation", 5)}}
"""What a rank does for the how manieth time, counted from 0."""

Place = tuple[str, str, int]
"""Schedule, moment and rank."""

Outcome = tuple[Run, Ended, float, Ended]
"""The run, how it ended, how many seconds after the failure, and how it went on."""


class Bench:
    """Has a pool that carries out what it is given."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pool = folder, ThreadPoolExecutor(AT_ONCE)
        self._work: dict[Any, Future[Any]] = {}

    def begin(self, key: Any, job: Callable[[Path], Any]) -> None:
        """Have ``job`` done in a folder of its own."""
        self._work[key] = self._pool.submit(job, self._folder / str(len(self._work)))

    def result(self, key: Any) -> Any:
        return self._work[key].result(timeout=110)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


# -- jobs ----------------------------------------------------------------------------------------------


def whole(failure: Failure, folder: Path) -> Run:
    """A run to which nothing happens."""
    run = Run(folder, failure)
    ended = run.begin()
    assert ended.status == 0, ended.err
    return run


def failed_and_resumed(failure: Failure, folder: Path) -> Outcome:
    run = Run(folder, failure)
    ended = run.begin()
    assert run.fired is not None, ended.err
    return run, ended, run.ended_at - run.fired, run.go_on()


# -- how a test names its failure, and what it sees of it -------------------------------------------------


def failure(do: str, schedule: str, moment: str, rank: int, **more: Any) -> Failure:
    what, count = MOMENTS[schedule][moment]
    return Failure(schedule, {"rank": rank, "moment": what, "count": count, "do": do}, **more)


def failures_at(do: str, places: list[Place], **more: Any) -> Any:
    return pytest.mark.parametrize("place", [
        pytest.param(place, id="-".join(map(str, place)), marks=alone(failure(do, *place, **more)))
        for place in places])


def alone(failure: Failure) -> pytest.MarkDecorator:
    """Marks the test that looks at a failure."""
    return pytest.mark.failure(failed_and_resumed, failure)


def check_resumed(run: Run, resumed: Ended, bench: Bench) -> None:
    """It equals the run of its schedule to which nothing happened."""
    assert resumed.status == 0, resumed.err
    run.check_equals(bench.result(run.failure.schedule))
