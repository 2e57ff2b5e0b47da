"""What ranks and stages hold."""

from __future__ import annotations

from proved import prove

from vpipe.schedules.assignment import Layout
from vpipe.schedules.kinds import HALF, SAVED, Action
from vpipe.schedules.schedule import RankPeaks, Schedule, StagePeaks, count_of, moments, stage_loads


def parsed(program: str) -> list[Action]:
    return [Action.parse(text) for text in program.split()]


def test_memory_of_a_rank_after_each_action() -> None:
    program = parsed("0F0 0SEND_F0 3F0 3R0 3B0 0I0 0F1 0W0 0STEP0")
    assert [[moment.size for moment in moments(program, count_of(value))] for value in (SAVED, HALF)] == [
        [0, 1, 2, 2, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1, 1, 0]]  # of both its stages


def test_memory_of_a_stage_after_each_action() -> None:
    program = parsed("0F0 0SEND_F0 0F1 0B0 0STEP0 0F2 0B1 0STEP1 0B2 0STEP2")
    assert list(stage_loads(program, 0)) == [
        (0, 1, 0), (2, 1, 0), (3, 1, 0),
        (4, 2, 0),  # version 1, and version 0 for microbatch 1
        (5, 2, 0), (6, 1, 1),
        (7, 2, 0), (8, 1, 1), (9, 1, 0)]
    assert list(stage_loads(program, 1)) == []


def test_a_weight_half_needs_its_version_until_it_has_run() -> None:
    program = parsed("0F0 0I0 0F1 0W0 0STEP0 0I1 0W1")
    assert [load[1:] for load in stage_loads(program, 0)] == [(1, 0), (1, 0), (1, 0), (1, 0), (2, 0), (2, 1), (1, 0)]


def test_every_version_from_the_one_in_use_to_the_latest_is_held() -> None:
    program = parsed("0USE0 0F0 0B0 0STEP0 0F1 0B1 0STEP1 0USE1 0F2 0USE2 0B2")
    assert [load[1:] for load in stage_loads(program, 0)] == [
        (1, 0), (1, 0), (1, 0), (2, 0), (2, 0), (2, 1),
        (3, 0),  # the next forward may use version 1
        (2, 0), (2, 0),
        (2, 0), (1, 1)]  # version 1 for microbatch 2


def test_halves_as_in_their_paper() -> None:
    """Stage s of p holds p-s activations and s weight halves, and one more between an I and the W behind it."""
    facts = prove("zb_h1", Layout.LOOP(4), 8).rank_peaks
    assert facts == (RankPeaks(4, 1), RankPeaks(3, 2), RankPeaks(2, 3), RankPeaks(1, 4))


def test_placement_does_not_matter() -> None:
    def held(placement: tuple[tuple[int, ...], ...]) -> tuple[list[RankPeaks], tuple[StagePeaks, ...]]:
        schedule: Schedule = prove("pipedream", placement, 12)
        ranks = schedule.rank_peaks
        return [ranks[rank] for (rank,) in placement], schedule.stage_peaks

    assert held(((2,), (0,), (1,))) == held(((0,), (1,), (2,)))
