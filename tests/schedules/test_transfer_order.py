"""Receives placed so that a device which carries out one transfer at a time never stands still."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from serial_device import SerialDevices

from vpipe.errors import UserError
from vpipe.schedules.action import RECEIVES, Action, Op
from vpipe.schedules.build import build_evaluation, replica_views, stream_program
from vpipe.schedules.check import prove
from vpipe.schedules.dependencies import Dependencies
from vpipe.schedules.lower import Lowering, lower
from vpipe.schedules.receive_order import TransferOrder, in_one_order
from vpipe.schedules.registry import recipe_named, schedule_names
from vpipe.schedules.replication import Rounds
from vpipe.schedules.schedule import Schedule, stages_of_rank
from vpipe.schedules.size import Placement, widened

MODES = [(rendezvous, blocking) for rendezvous in (False, True) for blocking in (False, True)]


def ordered(schedule: Schedule) -> Schedule:
    placed, stuck = in_one_order(Dependencies.from_schedule(schedule))
    assert not stuck
    return placed


def check_serial(schedule: Schedule) -> None:
    for rendezvous, blocking in MODES:
        assert SerialDevices(schedule, rendezvous=rendezvous, blocking=blocking).run() == []


@pytest.mark.parametrize("name", schedule_names())
def test_every_schedule_reaches_its_end(name: str) -> None:
    recipe = recipe_named(name)
    for ranks, replicas, norm, tied in ((2, 1, False, True), (4, 1, True, True), (2, 2, True, False)):
        placement = widened(recipe.layout.placement(ranks, recipe.chunks), replicas)
        ties = {0: tuple(range(1, len(placement)))} if tied else {}
        check_serial(ordered(prove(name, placement, 8, None, ties, norm and recipe.flush)))


@given(name=st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_h2", "pipedream", "2bw"]),
       widths=st.lists(st.integers(1, 3), min_size=1, max_size=4), microbatches=st.sampled_from([6, 12, 24]),
       tied=st.booleans(), norm=st.booleans())
@settings(max_examples=60, deadline=None)
def test_replicas_of_any_width(name: str, widths: list[int], microbatches: int, tied: bool, norm: bool) -> None:
    first = [sum(widths[:stage]) for stage in range(len(widths))]
    placement = tuple(tuple(range(at, at + width)) for at, width in zip(first, widths, strict=True))
    try:
        schedule = prove(name, placement, microbatches, None, {0: tuple(range(1, len(widths)))} if tied else {},
                         norm and recipe_named(name).flush)
    except UserError:
        assume(False)
    check_serial(ordered(schedule))


def test_evaluations_reach_their_end() -> None:
    for placement in (((0,), (1,), (0,), (1,)), ((0, 1), (2,), (3, 4, 5))):
        check_serial(ordered(lower(build_evaluation(placement, 12))))


def test_without_the_order_the_model_of_a_device_stands_still() -> None:
    """The model finds what nccl would do: GPU.md's settings, but for those whose transfers go one way at a time."""
    placements = {name: recipe_named(name).layout.placement(2, recipe_named(name).chunks) for name in schedule_names()}
    stands_still = {name for name, placement in placements.items()
                    if SerialDevices(prove(name, placement, 8), rendezvous=True).run()}
    assert {"1f1b", "zb_v", "interleaved", "pipedream"} <= stands_still


def test_actions_keep_their_order_and_only_receives_move() -> None:
    schedule = prove("zb_v", ((0,), (1,), (1,), (0,)), 8, None, {0: (3,)}, True)
    for before, after in zip(schedule.programs, ordered(schedule).programs, strict=True):
        assert [a for a in before if a.op not in RECEIVES] == [a for a in after if a.op not in RECEIVES]
        assert sorted(map(str, before)) == sorted(map(str, after))


def lazily(name: str, placement: Placement, microbatches: int, rank: int) -> list[Action]:
    """The actions of a rank of a stream that is ordered while it comes, as the engine does it."""
    recipe = recipe_named(name)
    found = replica_views(recipe, placement, 4 * len(placement), 1 if name == "pipedream" else None)
    rounds = Rounds(placement, found[0].size.update_every, False, lambda number: number < microbatches)
    ties = {0: (len(placement) - 1,)}
    lowered = [Lowering(rounds, each, lambda of: stream_program(
        recipe, found[of], rounds, stages_of_rank(placement, of)), ties) for each in range(len(found))]
    order = TransferOrder(rounds, ties, [one.program() for one in lowered],
                          lambda of, owner, number: lowered[of].version_of(owner, number), normed=False, ranks=[rank])
    return list(order.program(rank))


@pytest.mark.parametrize("name", ["pipedream", "2bw"])
@pytest.mark.parametrize("placement", [((0,), (1,), (2,)), ((0, 1), (2,)), ((0,), (1, 2))])
def test_a_stream_is_ordered_as_the_same_schedule_of_known_length(name: str, placement: Placement) -> None:
    """Every rank orders the whole stream by itself, as far as it has come: all must find the same order."""
    microbatches = 24
    every = replica_views(recipe_named(name), placement, 4 * len(placement), 1 if name == "pipedream" else None)[0].size
    whole = ordered(prove(name, placement, microbatches, every.update_every, {0: (len(placement) - 1,)}))
    for rank, program in enumerate(whole.programs):
        assert lazily(name, placement, microbatches, rank) == list(program)


def test_a_stream_asks_for_no_microbatch_much_before_it_comes() -> None:
    asked: list[int] = []
    placement = ((0,), (1,), (2,))
    recipe = recipe_named("pipedream")
    found = replica_views(recipe, placement, 12, 1)

    def exists(number: int) -> bool:
        asked.append(number)
        return True

    rounds = Rounds(placement, 1, False, exists)
    lowered = [Lowering(rounds, each, lambda of: stream_program(recipe, found[of], rounds, [of]), {})
               for each in range(3)]
    order = TransferOrder(rounds, {}, [one.program() for one in lowered], lambda of, owner, number: 0, normed=False,
                          ranks=[2])
    for action in islice(order.program(2), 200):
        if action.op is Op.FORWARD:
            assert max(asked) <= action.microbatch + len(placement)
