"""The words for who waits for whom, and how a chain ends."""

from __future__ import annotations

import pytest

from vpipe.distributed.failure_detector import RankState, Wait
from vpipe.distributed.fault import Fault
from vpipe.distributed.wait_graph import WaitChain, chains

AT_WORK = RankState()


def place(rank: int) -> str:
    return f"rank {rank}"


def waits(peer: int | None, seconds: float, at: str | None = None) -> RankState:
    return RankState(waits=Wait(peer, seconds, "for F17 from"), at=(at, seconds))


def told(*seen: RankState, enough_s: float = 15.0) -> list[list[str]]:
    return [chain.sentences(place) for chain in chains(seen, enough_s, beat_s=1.0)]


def test_a_straggler() -> None:
    slow = RankState(at=("running 0B12", 33.4))
    assert told(slow, waits(0, 32), waits(1, 31.2, "running 2F17")) == [[
        "rank 2 has waited 31 s for F17 from rank 1, while running 2F17",
        "rank 1 has waited 32 s for F17 from rank 0",
        "rank 0 has been running 0B12 for 33 s: the slow one"]]


@pytest.mark.parametrize(("end", "words"), [
    (RankState(at=("reading a batch", 40)), "rank 0 has been reading a batch for 40 s: the slow one"),
    (RankState(at=(None, 40)), "rank 0 has been outside of the pipeline, in the program that runs it, for 40 s: the "
                                  "slow one"),
    (AT_WORK, "rank 0 is busy, with nothing for long"),
    (RankState(waits=Wait(1, 0.1)), "rank 0 is busy, with nothing for long"),
    (RankState(left=True, waits=Wait(1, 99.0)), "rank 0 has ended its program"),
    (RankState(silent_s=20.0, waits=Wait(1, 99.0)), "rank 0 has given no sign of life for 20 s: it is stopped, or its "
                                                     "host is down or cut off"),
    (RankState(silent_s=2.5, at=("running 0F1", 50)), "rank 0 has been running 0F1 for 50 s: the slow one"),
    (waits(None, 50), "rank 0 has waited 50 s for F17 from all ranks")])
def test_the_ends_of_a_chain(end: RankState, words: str) -> None:
    assert told(end, waits(0, 31)) == [["rank 1 has waited 31 s for F17 from rank 0", words]]


def test_a_deadlock_is_a_circle_in_which_all_have_waited() -> None:
    (sentences,) = told(waits(1, 40), waits(2, 31), waits(1, 32))
    assert sentences[-1] == "rank 2 has waited 32 s for F17 from rank 1: they wait for one another, a deadlock"
    assert len(sentences) == 3
    (sentences,) = told(waits(1, 40), waits(0, 5))  # it began later: something else came before
    assert sentences[-1] == "rank 1 has waited 5.0 s for F17 from rank 0"


def test_every_end_is_told_of_by_its_longest_chain() -> None:
    assert [len(chain) for chain in told(AT_WORK, waits(0, 40), waits(1, 40), waits(0, 50), AT_WORK, waits(4, 31))] \
        == [3, 2]
    assert told(AT_WORK, waits(0, 14)) == []


def test_of_a_long_chain_the_middle_is_counted() -> None:
    (sentences,) = told(AT_WORK, *(waits(rank, 40) for rank in range(63)))
    assert sentences == [
        "rank 63 has waited 40 s for F17 from rank 62", "rank 62 has waited 40 s for F17 from rank 61",
        "60 more in between wait in the same way", "rank 1 has waited 40 s for F17 from rank 0",
        "rank 0 is busy, with nothing for long"]


@pytest.mark.parametrize(("end", "fault"), [
    (AT_WORK, Fault.busy(0)), (RankState(left=True), Fault.left(0)), (RankState(silent_s=20.0), Fault.silent(20.0, 0)),
    (waits(1, 31), Fault.circle(1, 0))])
def test_who_is_to_blame(end: RankState, fault: Fault) -> None:
    assert WaitChain.follow([end, waits(0, 31)], 1, 15.0, 1.0).fault == fault
