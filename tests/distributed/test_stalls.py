"""What is shown and written of waits that last long: ranks as threads of this process, on a fast clock."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from watched_ranks import PACE, Ranks, Waiting, until

from vpipe.distributed.failure_detector import RankState, Wait, WatchdogTiming
from vpipe.distributed.wait_graph import MOST_SHOWN, LongWaits
from vpipe.distributed.watchdog import Activity
from vpipe.schedules.kinds import backward, forward

SOON = replace(PACE, silent_s=20.0, long_s=0.4)


@pytest.fixture
def soon() -> Iterator[Ranks]:
    some = Ranks(SOON)
    yield some
    some.stop()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """The log of this process, as a launcher's worker has one."""
    root, handler = logging.getLogger(), logging.FileHandler(tmp_path / "rank0.log")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield tmp_path / "rank0.log"
    root.setLevel(level)
    root.removeHandler(handler)
    handler.close()


def test_the_first_rank_shows_the_chain_once_and_its_end_once(soon: Ranks, log: Path) -> None:
    soon.start(4)
    soon.watches[0].activity.now = (backward(0, 12), soon.watches[0].activity.now[1])
    for rank in (1, 2, 3):
        soon.watches[rank].transfer = Waiting(rank - 1)
    until(lambda: len(soon.shown) == 1)
    assert re.fullmatch(
        r"a wait of 0\.\d+ s, longer than half of timeout_s:\n"
        r"  rank 3 \(stage 3\) on b has waited 0\.\d+ s for the activations from rank 2 \(stage 2\) on b;\n"
        r"  rank 2 \(stage 2\) on b has waited 0\.\d+ s for the activations from rank 1 \(stage 1\) on a;\n"
        r"  rank 1 \(stage 1\) on a has waited 0\.\d+ s for the activations from rank 0 \(stage 0\) on a;\n"
        r"  rank 0 \(stage 0\) on a has been running 0B12 for \d\.?\d* s: the slow one", soon.shown[0]), soon.shown[0]
    for rank in (1, 2, 3):
        soon.watches[rank].transfer = None
    until(lambda: len(soon.shown) == 2)
    assert re.fullmatch(r"rank [123] \(stage [123]\) on [ab] went on after 0\.\d+ s", soon.shown[1])
    until(lambda: log.read_text().count("went on after") == 4)
    written = log.read_text()
    assert written.count("a wait of") == 4  # once by each
    assert "here: rank 2 (stage 2) on b has waited 0." in written
    assert "here: rank 0 (stage 0) on a has been running 0B12 for " in written
    assert "in test_the_first_rank_shows_the_chain" in written or "in until" in written  # the stack of the main thread


def test_two_that_wait_for_one_another_are_a_deadlock_in_the_error_too(soon: Ranks) -> None:
    soon.start(2)
    for rank in (0, 1):
        soon.watches[rank].transfer = Waiting(1 - rank)
    until(lambda: soon.shown)
    assert soon.shown[0].endswith(": they wait for one another, a deadlock")
    until(lambda: soon.watches[1]._states[0].waited_s > 1.5 * SOON.long_s)
    fault = soon.watches[1].explain(0, 2 * SOON.long_s)
    for rank in (0, 1):
        assert soon.watches[rank].explain(1 - rank, None) == fault
        said = str(soon.watches[rank].error(fault, "..."))
        assert re.match(r"error: rank \d \(stage \d\), rank \d \(stage \d\) wait for one another: a deadlock; \.\.\.; "
                        r"rank 1 \(stage 1\) has waited \d\.?\d* s for the activations from rank 0 \(stage 0\); "
                        r"rank 0 \(stage 0\) has waited \d\.?\d* s for the activations from rank 1 \(stage 1\): they "
                        r"wait for one another, a deadlock \(rank \d\)\n", said), said


def test_a_short_wait_is_not_worth_a_word(soon: Ranks) -> None:
    shown: list[str] = []
    stalls = LongWaits(0, WatchdogTiming.from_timeout(60.0), str, shown.append)
    for seconds in (0.0, 10.0, 29.0, 0.0):
        stalls.update([RankState(), RankState(waits=Wait(0, seconds))])
    stalls.end()
    assert not shown


def test_who_waits_again_and_again_does_not_fill_the_screen() -> None:
    shown: list[str] = []
    stalls = LongWaits(0, WatchdogTiming.from_timeout(60.0), str, shown.append)
    for seconds in [31.0, 32.0, 0.0] * (MOST_SHOWN + 2):
        stalls.update([RankState(at=("running 0F0", seconds)), RankState(waits=Wait(0, seconds, "for"))])
    stalls.end()
    assert len(shown) == 2 * MOST_SHOWN
    assert shown[-2].endswith("\n  further long waits are written to the logs only")
    assert shown[-1] == "1 went on after 32 s"


def test_a_screen_that_takes_nothing_does_not_silence_the_watch(soon: Ranks) -> None:
    soon.start(2)
    stuck: list[str] = []

    def show(text: str) -> None:
        stuck.append(text)
        until(lambda: len(stuck) > 1)
        raise OSError("closed")

    soon.watches[0].note = show
    soon.watches[1].transfer = Waiting(0)
    until(lambda: stuck)
    heard = soon.watches[1]._states[0]
    until(lambda: soon.watches[1]._states[0] is not heard and soon.watches[1]._states[0].silent_s < 0.5)
    stuck.append("go on")


def test_activity_names_the_current_work() -> None:
    work = Activity()
    assert work.describe()[0] is None
    work.now = (forward(0, 1), 0.0)
    assert work.describe()[0] == "running 0F1"
    with work.during("evaluating"):
        assert work.describe()[0] == "evaluating"
        work.now = (forward(0, 2), 0.0)
        assert work.describe()[0] == "running 0F2 (evaluating)"
        with work.during("reading a batch"):
            assert work.describe()[0] == "reading a batch"
        assert work.describe()[0] == "evaluating"
    assert work.describe()[0] is None
