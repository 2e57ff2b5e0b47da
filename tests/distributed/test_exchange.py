"""Ranks exchange values: what each learns, what becomes of one that does not take part, and of large values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import pytest
from lines import Lines, ThreadLine, exchanges
from watched_ranks import WITHIN_S, Ranks, hello, until

from vpipe.distributed.value_exchange import DOING, Exchange
from vpipe.errors import RunError


def together(of_rank: list[Callable[..., Any]], *arguments: object) -> list[Any]:
    """The results of all ranks' calls, or the errors that they raised."""
    found: list[Any] = [None] * len(of_rank)

    def call(rank: int) -> None:
        try:
            found[rank] = of_rank[rank](*arguments)
        except Exception as error:
            found[rank] = error

    threads = [Thread(target=call, args=(rank,), daemon=True) for rank in range(len(of_rank))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
        assert not thread.is_alive()
    return found


def of_all(call: Callable[[Exchange], Any], ranks: int = 3) -> list[Any]:
    return together([partial(call, one) for one in exchanges(ranks)])


def test_every_rank_learns_what_each_one_has() -> None:
    assert of_all(lambda one: one.all_gather({"rank": one.rank})) == [[{"rank": rank} for rank in range(3)]] * 3
    assert of_all(lambda one: one.from_rank(one.rank, 1)) == [1] * 3
    assert of_all(lambda one: one.united({str(one.rank): one.rank})) == [{"0": 0, "1": 1, "2": 2}] * 3


def test_one_alone_has_its_own() -> None:
    alone = Exchange()
    assert (alone.all_gather(7), alone.from_rank(7, 3), alone.united({"a": 7}), alone.gather(7)()) == \
        ([7], 7, {"a": 7}, [7])
    assert alone.agree("yes", " ".join) == "yes"


def test_only_rank_0_waits_for_what_it_gathers() -> None:
    first, second = exchanges(2)
    late, later = second.gather("a"), second.gather("b")
    assert late() == later() == []
    early, then = first.gather("c"), first.gather("d")
    assert [then(), early()] == [["d", "b"], ["c", "a"]]


def test_what_a_rank_gives_is_no_longer_among_a_thousand_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 receives it from all of them in every update."""
    given: list[str] = []
    monkeypatch.setattr(ThreadLine, "give", lambda line, message: given.append(json.dumps(message)))
    for ranks in (2, 1000):
        exchanges(ranks)[1].begin(None, "step 3 of train()", hears=False)
    assert len(given[0]) == len(given[1])


def test_rank_0_decides_on_the_votes_of_all() -> None:
    assert of_all(lambda one: one.agree(str(one.rank), " ".join)) == ["0 1 2"] * 3


def test_rank_0_that_cannot_decide_says_so_to_the_others() -> None:
    def fail(votes: list[str]) -> str:
        raise KeyError("size")

    first, *others = of_all(lambda one: one.agree("", fail))
    assert isinstance(first, KeyError)
    assert [str(error) for error in others] == ["rank 0 could not decide: KeyError: 'size'"] * 2


@pytest.mark.parametrize("before", [True, False])
def test_nobody_waits_for_a_rank_that_has_ended(before: bool) -> None:
    lines = Lines(3)
    waiting = [partial(Exchange(lines.of_rank[rank]).all_gather, rank) for rank in (0, 1)]
    if before:
        lines.leave(2)

    def leave() -> None:
        if not before:
            until(lambda: len(lines.relay._given.get(" 1", ())) == 2)
            lines.leave(2)

    found = together([*waiting, leave])
    assert [str(error).splitlines()[0] for error in found[:2]] == [
        f"error: rank 2 has ended (rank {rank})" for rank in (0, 1)]


# -- over the connections of the watchdogs -------------------------------------------------------------------------


def test_values_of_many_megabytes_pass_beside_the_heartbeats(ranks: Ranks) -> None:
    ranks.start(3)
    vote = '"model.weight": {"shape": [1], "dtype": "float32"}, ' * 80_000
    mine = [Exchange(watch, "checkpoints") for watch in ranks.watches.values()]
    assert together([one.agree for one in mine], vote, min) == [vote] * 3
    assert ranks.ended[0].empty()


def test_values_given_before_a_rank_ends_arrive(ranks: Ranks) -> None:
    ranks.start(2)
    mine = Exchange(ranks.watches[0]).gather("mine")
    Exchange(ranks.watches[1]).gather("theirs" * 300_000)  # more than a socket holds; 0.3 s for it
    ranks.watches.pop(1).leave()
    assert [len(value) for value in mine()] == [4, 1_800_000]
    until(lambda: 1 in ranks.watches[0].left)
    assert ranks.ended[0].empty()


def test_a_rank_that_ends_before_it_takes_part_is_named(ranks: Ranks) -> None:
    ranks.start(3)
    ranks.watches.pop(2).leave()
    found = together([Exchange(watch).all_gather for watch in ranks.watches.values()], None)
    assert [str(error).splitlines()[0] for error in found] == [
        f"error: rank 2 (stage 2) on b has ended its program; rank {rank} (stage {rank}) on a was sharing what each "
        f"has (rank {rank}, peer rank 2)" for rank in (0, 1)]


def test_one_that_is_killed_is_named_and_the_others_still_agree(ranks: Ranks) -> None:
    """A checkpoint is complete in spite of a failure, if all ranks have voted."""
    detector = ranks.start(3, without=(2,))
    line = hello(detector, 2)
    voters = [Exchange(watch, "checkpoints") for watch in ranks.watches.values()]
    line.send({"give": "checkpoints 1", "value": [DOING, None, "mine"], "of": [0, 1, 2], "hears": False})
    line.send({"give": "checkpoints 2", "value": [DOING, None, None], "of": [0, 1, 2], "hears": True})
    until(lambda: len(detector._relay._given) == 2)
    line.close()
    until(lambda: all(watch.fault is not None for watch in ranks.watches.values()))
    for watch in ranks.watches.values():
        watch._go_on("raise")
    assert together([one.agree for one in voters], "mine", " ".join) == ["mine mine mine"] * 2
    late = together([one.agree for one in voters], "mine", " ".join)
    assert [str(error).splitlines()[0] for error in late] == [
        f"error: rank 2 (stage 2) on b died without a message; rank {rank} (stage {rank}) on a was sharing what each "
        f"has (rank {rank}, peer rank 2)" for rank in (0, 1)]


def test_one_that_does_not_take_part_in_time_is_named(ranks: Ranks) -> None:
    ranks.start(2)
    with pytest.raises(RunError, match=re.escape("rank 1 (stage 1) is running but did not answer in time; rank 0 "
                                                 "(stage 0) gave up sharing what each has after 0.3 s")):
        Exchange(ranks.watches[0], timeout_s=0.3).all_gather(1)
