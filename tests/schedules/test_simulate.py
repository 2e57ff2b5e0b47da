"""The simulator: golden numbers, examples by hand, and a second, slower way to the same times."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vpipe.errors import CheckError, UserError
from vpipe.schedules.assignment import Layout, Placement, Size
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs, Link, Number, StageCosts
from vpipe.schedules.kinds import Action, Op, backward, forward
from vpipe.schedules.lowering import lower
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.timeline import Timeline, simulate

HALF = Fraction(1, 2)


def built(name: str, ranks: int, microbatches: int, every: int | None = None,
          ties: dict[int, tuple[int, ...]] | None = None) -> Schedule:
    recipe = RegisteredSchedule.named(name)
    return build(name, recipe.layout(ranks, recipe.chunks), microbatches, every, ties)


def size(schedule: Schedule) -> Size:
    return Size(schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks, schedule.update_every)


def run(name: str, ranks: int, microbatches: int, times: tuple[Number, ...] = (1, 1, 1)) -> Timeline:
    schedule = built(name, ranks, microbatches)
    return simulate(schedule, Costs.uniform(size(schedule), *times))


def by_hand(*programs: str, microbatches: int, placement: Placement | None = None) -> Schedule:
    actions = tuple(tuple(map(Action.parse, program.split())) for program in programs)
    placement = placement or Layout.LOOP(len(programs))
    return Schedule("by_hand", placement, actions, microbatches, microbatches, True, (99,) * len(programs),
                    (99,) * len(placement), {})


def times(timeline: Timeline, rank: int) -> str:
    return " ".join(f"{event.action}:{event.start_s}-{event.end_s}" for event in timeline.events[rank])


def transfers(timeline: Timeline) -> list[str]:
    return [f"{way.action} {way.source}>{way.target} {way.start_s}-{way.end_s}" for way in timeline.transfers]


# Costs of stages and links

def test_a_transfer_takes_the_latency_and_the_bytes_through_the_bandwidth() -> None:
    assert Link().transfer_s(1000) == 0
    assert Link(2).transfer_s(1000) == 2
    assert Link(latency_s=2, bytes_per_s=400).transfer_s(1000) == Fraction(9, 2)
    assert Link(latency_s=0.5, bytes_per_s=400.0).transfer_s(1000) == 3.0


def test_exact_numbers_stay_exact() -> None:
    assert isinstance(Link(2).transfer_s(1000.0), int)
    assert isinstance(Link(2, 500).transfer_s(1000), int)
    assert isinstance(Link(Fraction(1, 3), 3).transfer_s(1), Fraction)
    assert isinstance(Link(2, 500.0).transfer_s(1000), float)


def test_uniform_costs_share_a_rank_among_its_chunks() -> None:
    costs = Costs.uniform(Size(ranks=3, microbatches=6, chunks=2, update_every=6), 1, 2, 3, transfer=4, step=5)
    assert costs.stages == (StageCosts(Fraction(1, 2), 1, Fraction(3, 2), step_s=Fraction(5, 2)),) * 6
    assert costs.link(0, 1) == Link(4)


def test_links_by_ranks_and_direction() -> None:
    slow = Link(9)
    costs = Costs((StageCosts(1, 1, 1),) * 2, Link(1), {(0, 1): slow})
    assert costs.link(0, 1) == slow
    assert costs.link(1, 0) == Link(1)


# Golden numbers

def held(name: str, ranks: int, microbatches: int, activations: Number, weight_half: Number) -> tuple[Number, ...]:
    """Peaks with the given M_B and M_W of a whole rank."""
    schedule = built(name, ranks, microbatches)
    chunks = size(schedule).chunks
    stage = StageCosts(*[Fraction(1, chunks)] * 3, activation_bytes=Fraction(activations) / chunks,
                       weight_half_bytes=Fraction(weight_half) / chunks)
    return simulate(schedule, Costs((stage,) * schedule.stages)).peak_bytes


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 24)])
def test_golden_peaks(ranks: int, microbatches: int) -> None:
    assert held("gpipe", ranks, microbatches, 5, 3) == (5 * microbatches,) * ranks
    assert held("1f1b", ranks, microbatches, 5, 3) == tuple(5 * (ranks - s) for s in range(ranks))
    assert held("zb_h1", ranks, microbatches, 5, 3) == tuple(5 * (ranks - s) + 3 * s for s in range(ranks))
    assert held("zb_h2", ranks, microbatches, 5, 3) == tuple(5 * (2 * (ranks - s) - 1) + 6 * s for s in range(ranks))
    assert max(held("zb_v", ranks, microbatches, 1, 0)) == ranks
    assert held("interleaved", ranks, microbatches, 1, 1)[0] == Fraction({4: "5.5", 8: "11.5"}[ranks])


# Examples by hand

def test_without_overlap_both_ranks_are_busy_with_a_transfer() -> None:
    costs = Costs((StageCosts(1, 1, 1),) * 2, Link(1), overlap=False)
    timeline = simulate(built("gpipe", 2, 2), costs)
    assert transfers(timeline) == ["0SEND_F0 0>1 1-2", "0SEND_F1 0>1 3-4", "1SEND_B0 1>0 7-8", "1SEND_B1 1>0 10-11"]
    assert times(timeline, 0) == "0F0:0-1 0F1:2-3 0B0:8-10 0B1:11-13 0STEP0:13-13"
    assert times(timeline, 1) == "1F0:2-3 1F1:4-5 1B0:5-7 1B1:8-10 1STEP0:11-11"
    assert (timeline.work_s, timeline.busy_s, timeline.idle_s, timeline.bubble_s) == ((6, 6), (10, 10), (3, 0), 7)


def test_without_overlap_a_transfer_goes_before_the_next_action() -> None:
    """At second 3 rank 1 could begin B0, but rank 0 stands there with F1."""
    timeline = simulate(built("1f1b", 2, 2), Costs((StageCosts(1, 1, 1),) * 2, Link(1), overlap=False))
    assert transfers(timeline)[:2] == ["0SEND_F0 0>1 1-2", "0SEND_F1 0>1 3-4"]
    assert times(timeline, 1).startswith("1F0:2-3 1B0:4-6 1F1:7-8")


@given(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb_v", "pipedream"]), st.integers(2, 4), st.integers(1, 3),
       st.integers(1, 4))
def test_without_overlap_every_transfer_happens(name: str, ranks: int, batches: int, latency: int) -> None:
    schedule = built(name, ranks, batches * ranks)
    for program in (schedule, lower(schedule)):
        timeline = simulate(program, Costs((StageCosts(1, 1, 1),) * schedule.stages, Link(latency), overlap=False))
        for rank in range(ranks):
            here = [*timeline.events[rank], *(way for way in timeline.transfers if rank in (way.source, way.target))]
            spans = sorted((one.start_s, one.end_s) for one in here)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_lowered_schedule_starts_a_transfer_when_its_receive_is_posted() -> None:
    """A receive posted behind the action before is in time; one posted when it is needed is not."""
    schedule, costs = built("1f1b", 2, 2), Costs((StageCosts(1, 1, 1),) * 2, Link(2))
    late = by_hand(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0STEP0",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1STEP0", microbatches=2)
    for form, second, start in (schedule, "3-5", 6), (lower(schedule), "4-6", 6), (late, "6-8", 8):
        timeline = simulate(form, costs)
        assert f"0SEND_F1 0>1 {second}" in transfers(timeline)
        assert timeline.events[1][2].start_s == start


def test_norms_make_every_step_wait_for_all_stages() -> None:
    schedule = built("1f1b", 3, 4)
    costs = Costs((StageCosts(1, 1, 1, step_s=2),) * 3)
    alone = simulate(schedule, costs)
    assert [events[-1].start_s for events in alone.events] == [18, 16, 14]
    normed = simulate(lower(schedule, norm=True), costs)
    assert [events[-1].start_s for events in normed.events] == [18, 18, 18]
    assert normed.makespan_s == 20


def test_tied_weights_have_transfers_of_their_own() -> None:
    schedule = built("gpipe", 2, 1, ties={0: (1,)})
    costs = Costs((StageCosts(1, 1, 1, tied_bytes=4), StageCosts(1, 1, 1)), Link(1, bytes_per_s=1))
    for form in (schedule, lower(schedule)):
        timeline = simulate(form, costs)
        assert transfers(timeline) == ["0SEND_F0 0>1 1-2", "1SEND_B0 1>0 5-6", "0SEND_TIED_G0 1>0 6-11",
                                       "0SEND_TIED_W1 0>1 11-16"]
        assert times(timeline, 0) == "0F0:0-1 0B0:6-8 0STEP0:11-11"
        assert timeline.makespan_s == 16


def test_a_borrowers_forward_waits_for_the_version_that_its_owner_used() -> None:
    costs = Costs((StageCosts(1, 1, 1, tied_bytes=4),) * 2, Link(0, bytes_per_s=1))
    free = simulate(built("pipedream", 2, 3), costs)
    tied = simulate(built("pipedream", 2, 3, ties={0: (1,)}), costs)
    third = next(event for event in tied.events[1] if event.action == forward(1, 2))
    arrival = next(way for way in tied.transfers if str(way.action) == "0SEND_TIED_W1")
    assert third.start_s == arrival.end_s > next(e for e in free.events[1] if e.action == forward(1, 2)).start_s


# Replicas

def replicas(*widths: int) -> Placement:
    """So many ranks of every stage, numbered one after the other."""
    return tuple(tuple(range(sum(widths[:stage]), sum(widths[:stage + 1]))) for stage in range(len(widths)))


def test_the_parts_of_a_sum_and_what_comes_of_them_have_transfers() -> None:
    """Of 8 bytes each of 2 replicas sends the other 4, twice; at 0.5 s and 8 bytes/s."""
    stage = StageCosts(1, 1, 1, step_s=1, reduce_bytes=8)
    for form in (build("gpipe", replicas(2), 3), lower(build("gpipe", replicas(2), 3))):
        timeline = simulate(form, Costs((stage,), Link(HALF, bytes_per_s=8)))
        assert transfers(timeline) == ["0REDUCE_GRAD0 1>0 3-4", "0REDUCE_GRAD0 0>1 6-7", "0REDUCE_GRAD0 0>1 7-8",
                                       "0REDUCE_GRAD0 1>0 7-8"]
        assert times(timeline, 0) == "0F0:0-1 0F2:1-2 0B0:2-4 0B2:4-6 0STEP0:8-9"
        assert times(timeline, 1) == "0F1:0-1 0B1:1-3 0STEP0:8-9"
    apart = simulate(form, Costs((stage,), Link(HALF, bytes_per_s=8), overlap=False))
    assert transfers(apart) == ["0REDUCE_GRAD0 1>0 4-5", "0REDUCE_GRAD0 0>1 7-8", "0REDUCE_GRAD0 1>0 8-9",
                                "0REDUCE_GRAD0 0>1 9-10"]
    assert times(apart, 0) == "0F0:0-1 0F2:1-2 0B0:2-4 0B2:5-7 0STEP0:10-11"


def test_a_replica_without_a_microbatch_sends_no_gradients_but_its_part_of_the_sum() -> None:
    timeline = simulate(build("pipedream", replicas(3), 4), Costs((StageCosts(1, 1, 1),), Link(1)))
    last = [way for way in transfers(timeline) if way.startswith("0REDUCE_GRAD1")]
    assert last == ["0REDUCE_GRAD1 0>1 8-9", "0REDUCE_GRAD1 0>2 8-9", "0REDUCE_GRAD1 0>1 9-10",
                    "0REDUCE_GRAD1 0>2 9-10", "0REDUCE_GRAD1 1>0 9-10", "0REDUCE_GRAD1 1>2 9-10",
                    "0REDUCE_GRAD1 2>0 9-10", "0REDUCE_GRAD1 2>1 9-10"]
    assert times(timeline, 1) == "0F1:0-1 0B1:1-3 0STEP0:5-5 0STEP1:10-10"


def test_norms_are_sent_once_per_stage_and_follow_the_sums() -> None:
    """Rank 2 steps when both replicas of stage 0 have their gradients; these have the same norm."""
    costs = Costs((StageCosts(1, 1, 1), StageCosts(1, 1, 1)))
    alone = simulate(build("gpipe", replicas(2, 1), 2), costs)
    normed = simulate(lower(build("gpipe", replicas(2, 1), 2), norm=True), costs)
    assert [events[-1].start_s for events in alone.events] == [9, 9, 7]
    assert [events[-1].start_s for events in normed.events] == [9, 9, 9]
    slow_back = Costs((StageCosts(1, 1, 1),), links={(1, 0): Link(3)})  # the gradients of rank 1, and its sum
    for norm in (False, True):
        one = simulate(lower(build("gpipe", replicas(2), 2), norm=norm), slow_back)
        assert [events[-1].start_s for events in one.events] == [9, 6]


def test_every_replica_holds_versions_and_activations_of_its_own() -> None:
    timeline = simulate(build("pipedream", replicas(2, 1), 8),
                        Costs((StageCosts(1, 1, 1, version_bytes=10), StageCosts(1, 1, 1, version_bytes=100))))
    assert timeline.peak_bytes == (22, 22, 101)


def test_the_wrong_number_of_stages_is_refused() -> None:
    with pytest.raises(UserError, match="costs for 3 stages, but schedule '1f1b' has 2") as error:
        simulate(built("1f1b", 2, 2), Costs((StageCosts(1, 1, 1),) * 3))
    assert "one entry per stage" in str(error.value)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    schedule = by_hand("0B0 0F0 0STEP0", "1F0 1B0 1STEP0", microbatches=1)
    with pytest.raises(CheckError, match="rank 0 stands before 0B0; rank 1 stands before 1F0"):
        simulate(schedule, Costs((StageCosts(1, 1, 1),) * 2))


# Memory

def test_memory_of_halves() -> None:
    schedule = by_hand("0F0 0F1 0I0 0W0 0I1 0W1 0STEP0", microbatches=2)
    stage = StageCosts(1, 2, 1, activation_bytes=4, weight_half_bytes=3)
    timeline = simulate(schedule, Costs((stage,)))
    assert timeline.memory == (((0, 0), (0, 4), (1, 8), (4, 7), (5, 4), (7, 3), (8, 0)),)
    assert timeline.peak_bytes == (8,)


def test_memory_and_time_of_recompute_early_and_in_the_backward() -> None:
    schedule = by_hand("0F0 0F1 0R0 0B0 0B1 0STEP0", microbatches=2)
    stage = StageCosts(1, 1, 1, recompute_s=1, activation_bytes=4, kept_bytes=1)
    timeline = simulate(schedule, Costs((stage,)))
    assert times(timeline, 0) == "0F0:0-1 0F1:1-2 0R0:2-3 0B0:3-5 0B1:5-8 0STEP0:8-8"
    assert timeline.memory == (((0, 0), (0, 1), (1, 2), (2, 5), (5, 1), (5, 4), (8, 0)),)
    free = simulate(schedule, Costs((StageCosts(1, 1, 1, activation_bytes=4, kept_bytes=1),)))
    assert free.memory == (((0, 0), (0, 1), (1, 5), (2, 8), (4, 4), (6, 0)),)  # only microbatch 0 is recomputed


def test_copies_to_the_host_and_back_take_the_time_of_their_rank() -> None:
    plain = by_hand("0F0 0F1 0B0 0B1", microbatches=2)
    away = by_hand("0F0 0OFFLOAD0 0F1 0FETCH0 0B0 0B1", microbatches=2)
    costs = replace(Costs((StageCosts(2, 1, 1, activation_bytes=3),)), host_link=Link(Fraction(1, 2), 1))
    for cores in (None, 1):
        found = simulate(away, replace(costs, cores=cores))
        assert found.work_s == (simulate(plain, costs).work_s[0] + 2 * Fraction(7, 2),)
        assert found.makespan_s == 15
        assert found.idle_s == (0,)
        assert not found.transfers
    away_s, back_s = Fraction(11, 2), Fraction(15, 2)  # when a copy has left, and when it is asked for
    assert found.memory == (((0, 0), (0, 3), (away_s, 0), (away_s, 3), (back_s, 6), (13, 3), (15, 0)),)
    copied = {(str(kind), 0): 4 for kind in (Op.OFFLOAD, Op.FETCH)}  # as a run has recorded them
    assert simulate(away, replace(costs, seconds=copied)).makespan_s == 16


def test_memory_of_weight_versions() -> None:
    schedule = built("pipedream", 2, 3)
    timeline = simulate(schedule, Costs((StageCosts(1, 1, 1, version_bytes=10),) * 2))
    assert timeline.memory[0] == ((0, 10), (0, 11), (1, 12), (6, 11), (6, 21), (6, 22), (9, 11), (9, 21), (12, 10))
    assert timeline.peak_bytes == (22, 11)


def test_memory_of_a_version_kept_for_later() -> None:
    program = "0USE0 0F0 0B0 0STEP0 0F1 0B1 0STEP1 0USE1 0F2 0B2 0STEP2"
    timeline = simulate(by_hand(program, microbatches=3), Costs((StageCosts(1, 1, 0, version_bytes=10),)))
    assert timeline.memory == (((0, 10), (0, 11), (2, 10), (2, 20), (2, 21), (4, 20), (4, 30), (4, 20), (4, 21),
                                (6, 20), (6, 30)),)


# Against each other

NAMES = st.sampled_from(["gpipe", "1f1b", "zb_h1", "interleaved", "zb_v", "pipedream"])
NUMBERS = st.one_of(st.integers(0, 5), st.fractions(0, 5, max_denominator=6))


@st.composite
def stage_costs(draw: st.DrawFn, stages: int) -> tuple[StageCosts, ...]:
    return tuple(StageCosts(*(draw(NUMBERS) for _ in range(5)), output_bytes=draw(st.integers(0, 3)))
                 for _ in range(stages))


@st.composite
def built_somewhere(draw: st.DrawFn, tied: bool = False) -> Schedule:
    """On a placement of its own, or with replicas of any width."""
    if draw(st.booleans()):
        ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        recipe = RegisteredSchedule.named(draw(NAMES))
        placement, microbatches = recipe.layout(ranks, recipe.chunks), microbatches * ranks
    else:
        recipe = RegisteredSchedule.named(draw(st.sampled_from(["gpipe", "1f1b", "zb_h1", "pipedream"])))
        widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        placement, microbatches = replicas(*widths), draw(st.integers(3, 9))
    ties = {0: (len(placement) - 1,)} if tied and len(placement) > 1 and draw(st.booleans()) else {}
    return build(recipe.name, placement, microbatches, ties=ties)


@given(st.data(), built_somewhere(tied=True), st.booleans())
def test_lowered_and_compute_only_agree_when_transfers_are_free(data: st.DataObject, schedule: Schedule,
                                                                overlap: bool) -> None:
    free = Costs(data.draw(stage_costs(schedule.stages)), overlap=overlap)
    only, lowered = simulate(schedule, free), simulate(lower(schedule), free)
    assert only.events == lowered.events
    assert only.memory == lowered.memory
    for form in (schedule, lower(schedule)):  # what takes time arrives, too
        timeline = simulate(form, replace(free, default_link=Link(1)))
        assert len(timeline.transfers) == len({(way.action, way.source, way.target, way.start_s)
                                               for way in timeline.transfers})


@given(NAMES, st.integers(1, 4), st.integers(1, 3))
def test_memory_counts_what_the_facts_count(name: str, ranks: int, batches: int) -> None:
    schedule = built(name, ranks, batches * ranks)
    activations, halves = (
        simulate(schedule, Costs((StageCosts(1, 1, 1, **one),) * schedule.stages)).peak_bytes
        for one in ({"weight_half_bytes": 0}, {"activation_bytes": 0}))
    facts = schedule.rank_peaks
    assert activations == tuple(fact.peak_activations for fact in facts)
    assert halves == tuple(fact.peak_weight_halves for fact in facts)


@given(st.data(), built_somewhere(), NUMBERS)
def test_times_by_relaxation(data: st.DataObject, schedule: Schedule, latency: Number) -> None:
    stages = tuple(replace(stage, reduce_bytes=data.draw(st.integers(0, 3)))
                   for stage in data.draw(stage_costs(schedule.stages)))
    costs = Costs(stages, Link(latency, bytes_per_s=2))
    assert ends(simulate(schedule, costs)) == relaxed(schedule, costs)


def ends(timeline: Timeline) -> dict[tuple[int, Action], Number]:
    return {(rank, event.action): event.end_s for rank, events in enumerate(timeline.events) for event in events}


def relaxed(schedule: Schedule, costs: Costs) -> dict[tuple[int, Action], Number]:
    """The end of every action of every rank: all start at 0 and are put off until nothing contradicts."""
    assignment = schedule.assignment
    ends: dict[tuple[int, Action], Number] = {}
    arrivals: dict[tuple[int, Action], dict[int, Number]] = defaultdict(dict)  # of what an action needs, by source
    last = {(rank, action.stage, action.microbatch // assignment.per_update(action.stage)): action
            for rank, program in enumerate(schedule.programs) for action in program
            if action.op in (Op.BACKWARD, Op.WEIGHT)}
    while True:
        before = dict(ends)
        for rank, program in enumerate(schedule.programs):
            now: Number = 0
            link: dict[int, Number] = defaultdict(int)

            def send(target: int, size: Number, *needing: Action) -> None:
                takes = 0 if target == rank else costs.link(rank, target).transfer_s(size)  # noqa: B023
                arrival = max(now, link[target] if takes else 0) + takes  # noqa: B023
                link[target] = arrival if takes else link[target]  # noqa: B023
                for action in needing:
                    arrivals[target, action][rank] = arrival  # noqa: B023

            for action in program:
                stage, cost = action.stage, costs.stages[action.stage]
                whole = cost.input_s + cost.weight_s
                alone = cost.recompute_s if action.op in (Op.BACKWARD, Op.INPUT) else 0
                update = action.microbatch if action.op is Op.STEP else assignment.update_of(stage, action.microbatch)
                others = [other for other in schedule.placement[stage] if other != rank]
                reduce, part = Action(Op.REDUCE, stage, update), Fraction(cost.reduce_bytes) / (len(others) + 1)
                if action.op is Op.STEP:
                    now = max(now, *arrivals[rank, reduce].values(), 0)
                    for other in others:
                        send(other, part, action)
                now = max(now, *arrivals[rank, action].values(), 0) + alone + {
                    Op.FORWARD: cost.forward_s, Op.INPUT: cost.input_s, Op.WEIGHT: cost.weight_s,
                    Op.BACKWARD: whole, Op.STEP: cost.step_s}[action.op]
                ends[rank, action] = now
                if last.get((rank, stage, update)) == action:
                    for other in others:
                        send(other, part, reduce)
                after = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.INPUT: -1}.get(action.op, 0)
                if after and 0 <= stage + after < schedule.stages:
                    users = (Op.FORWARD,) if after == 1 else (Op.BACKWARD, Op.INPUT)
                    send(assignment.rank_of(stage + after, action.microbatch),
                         cost.output_bytes if after == 1 else cost.gradient_bytes,
                         *(Action(op, stage + after, action.microbatch) for op in users))
        if ends == before:
            return ends


def test_floats_are_taken_as_they_are() -> None:
    timeline = run("1f1b", 4, 8, (1.5, 1.25, 0.5))
    assert timeline.bubble_s == pytest.approx(3 * 3.25)
    assert next(event for event in timeline.events[3] if event.action == backward(3, 0)).start_s == 6.0
