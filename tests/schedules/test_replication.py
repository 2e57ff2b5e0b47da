"""Replicated stages: any widths are proved, and every replica does what the definition says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from proved import prove

from vpipe.description.cut import Cut
from vpipe.description.order import Asynchronous
from vpipe.errors import CheckError, UserError
from vpipe.schedules.assignment import Assignment, Placement, both_ways, widened
from vpipe.schedules.builder import build, described, proved
from vpipe.schedules.checker import check
from vpipe.schedules.costs import Costs, Link, StageCosts
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.kinds import Action, Op
from vpipe.schedules.lowering import lower
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.timeline import simulate
from vpipe.testing import placements, ties

ANY_WIDTHS = ("gpipe", "1f1b", "zb_h1", "zb_h2", "pipedream", "2bw")
STREAMS = ("pipedream", "2bw")


def depth(widths: list[int], stage: int) -> int:
    """D: forwards of a replica before it takes turns with backwards."""
    return (sum(widths[stage:]) - 1) // widths[stage]


@dataclass(frozen=True)
class Case:
    """What to build."""

    name: str
    widths: list[int]
    placement: Placement
    microbatches: int
    every: int | None
    ties: dict[int, tuple[int, ...]]
    norm: bool

    def built(self) -> Schedule:
        return build(self.name, self.placement, self.microbatches, self.every, self.ties)

    def span(self, stage: int) -> int:
        return self.microbatches if self.every is None else self.every * self.widths[stage]


@st.composite
def cases(draw: st.DrawFn, names: tuple[str, ...] = ANY_WIDTHS) -> Case:
    """Widths of 1 to 3 on 1 to 4 stages, ranks in any order, last rounds whole or not, with and without ties."""
    name = draw(st.sampled_from(names))
    placement = draw(placements())
    widths = [len(ranks) for ranks in placement]
    recipe = RegisteredSchedule.named(name)
    least = recipe.update_every(max(depth(widths, stage) for stage in range(len(widths))) + 1)
    microbatches = draw(st.integers(max(max(widths), least), 13))
    every = None if recipe.flush else draw(st.sampled_from(
        [k for k in range(least, microbatches + 1) if microbatches % k == 0]))
    return Case(name, widths, placement, microbatches, every, draw(ties(len(widths))),
                recipe.flush and draw(st.booleans()))


@given(cases())
def test_any_widths_are_proved_and_every_microbatch_goes_to_its_replica(case: Case) -> None:
    schedule = prove(case.name, case.placement, case.microbatches, case.every, case.ties, case.norm)
    for stage, ranks in enumerate(case.placement):
        for replica, rank in enumerate(ranks):
            for op in (Op.FORWARD, Op.BACKWARD, Op.WEIGHT):
                taken = [action.microbatch for action in schedule.programs[rank]
                         if action.stage == stage and action.op is op]
                mine = list(range(replica, case.microbatches, len(ranks)))
                halves = any(action.op is Op.WEIGHT for action in schedule.programs[rank])
                assert taken == ([] if op.completes and halves is (op is Op.BACKWARD) and mine else mine)


@given(cases(("1f1b", *STREAMS)))
def test_warm_up_and_peak(case: Case) -> None:
    """D forwards, then forwards and backwards in turn: at most D + 1 microbatches in flight."""
    schedule = case.built()
    for stage, ranks in enumerate(case.placement):
        for replica, rank in enumerate(ranks):
            ops = [action.op for action in schedule.programs[rank] if action.op.per_microbatch]
            own, warmup = len(range(replica, case.microbatches, len(ranks))), depth(case.widths, stage)
            turns = [Op.FORWARD, Op.BACKWARD] * max(0, own - warmup)
            assert ops == [Op.FORWARD] * min(warmup, own) + turns + [Op.BACKWARD] * min(warmup, own)
            assert schedule.rank_peaks[rank].peak_activations == min(warmup + 1, own)
            assert schedule.peak_activations[rank] == min(warmup + 1, own)


@given(st.data(), st.sampled_from([name for name in RegisteredSchedule.names() if name != "auto"]), st.integers(1, 3),
       st.integers(1, 3), st.integers(1, 12))
def test_with_equal_widths_every_pipeline_is_one_without_replicas(data: st.DataObject, name: str, ranks: int,
                                                                  width: int, own: int) -> None:
    """Microbatch j of replica r is microbatch j * width + r of all."""
    recipe = RegisteredSchedule.named(name)
    alone = recipe.layout(ranks, recipe.chunks)
    count = own * width if not recipe.flush else data.draw(st.integers((own - 1) * width + 1, own * width))
    assume(count >= width)
    try:
        one = {each: build(name, alone, each) for each in {own, len(range(width - 1, count, width))}}
        every = None if recipe.flush else one[own].update_every
        together = build(name, widened(alone, width), count, every)
    except UserError:  # not of this size
        assume(False)
    for rank in range(ranks):
        for replica in range(width):
            program = one[len(range(replica, count, width))].programs[rank]
            assert together.programs[rank * width + replica] == tuple(
                Action(action.op, action.stage, action.microbatch * width + replica)
                if action.op.per_microbatch else action for action in program)
    check(together)
    check(lower(together))


def test_a_searched_order_for_every_replica() -> None:
    schedule = prove("auto", widened(((0,), (1,)), 2), 5, norm=True)
    assert [sum(action.op is Op.FORWARD for action in program) for program in schedule.programs] == [3, 2, 3, 2]


@given(cases(), st.booleans())
def test_a_file_has_the_same_replicas(case: Case, lowered: bool) -> None:
    schedule = lower(build(case.name, case.placement, case.microbatches, case.every)) if lowered else case.built()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        path.write_text(schedule.to_csv())
        read = CsvFile.read(path).schedule
    assert (read.programs, read.placement, read.microbatches) == (schedule.programs, case.placement, case.microbatches)
    if max(map(schedule.updates, range(schedule.stages))) > 1:  # else the file of a stream is one with a flush
        assert (read.flush, read.update_every) == (schedule.flush, schedule.update_every)
    check(read)
    check(lower(read.compute_only()))


def test_rounds() -> None:
    """2-1 with 2 microbatches per update and replica, of 7: the last round of stage 0 is not whole."""
    assignment = Assignment(((0, 1), (2,)), 2, False, lambda microbatch: microbatch < 7)
    assert [assignment.per_update(0), assignment.per_update(1), assignment.per_step] == [4, 2, 4]
    assert [list(assignment.in_update(0, update)) for update in range(3)] == [[0, 1, 2, 3], [4, 5, 6], []]
    assert [list(assignment.share(0, 1, 0, rank)) for rank in (0, 1)] == [[4, 6], [5]]
    assert list(assignment.taken(range(4, 8), 0, 1)) == [5, 7]
    assert assignment.contributors(0, 1, 0) == [0, 1]
    assert assignment.contributors(1, 3, 0) == [0]
    assert [assignment.rank_of(0, microbatch) for microbatch in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("widths", [[2, 3, 1], [3, 4], [5, 6], [1, 4, 1], [4, 3, 1], [1, 3, 1], [1, 1, 3, 1],
                                    [2, 3, 1, 3]])
def test_streams_with_ties_as_long_as_a_run_proves_them(widths: list[int], every: int) -> None:
    """Here replicas get far ahead of one another, and tied gradients of their owner."""
    placement = tuple(tuple(range(sum(widths[:stage]), sum(widths[:stage + 1]))) for stage in range(len(widths)))
    proved(described(Asynchronous("pipedream", update_every=every), Cut(ranks=placement), every,
                     ties={0: (len(widths) - 1,)}))


@given(st.sampled_from(["chimera", "dualpipe"]), st.integers(1, 4), st.integers(1, 3), st.integers(2, 24), st.data())
def test_copies_on_ranks_in_any_order(name: str, half: int, replicas: int, microbatches: int,
                                      data: st.DataObject) -> None:
    """Both ways, with pipelines side by side, renumbered ranks, ties and norms: every microbatch goes to its copy."""
    own = widened(both_ways(2 * half), replicas)
    numbers = data.draw(st.permutations(range(2 * half * replicas)))
    placement = tuple(tuple(numbers[rank] for rank in ranks) for ranks in own)
    owners = data.draw(st.sets(st.integers(0, 2 * half - 2), max_size=2))
    ties = {owner: tuple(sorted(data.draw(st.sets(st.integers(owner + 1, 2 * half - 1), min_size=1))))
            for owner in owners}
    try:
        schedule = prove(name, placement, microbatches, None, ties, data.draw(st.booleans()))
    except CheckError:  # gradients of several borrowers may have no order in which one transfer at a time would do
        assert any(len(borrowers) > 1 for borrowers in ties.values())
        return
    except UserError:  # too few microbatches
        return
    for stage, ranks in enumerate(placement):
        for number, rank in enumerate(ranks):
            taken = [action.microbatch for action in schedule.programs[rank]
                     if action.stage == stage and action.op is Op.FORWARD]
            assert taken == list(range(number, microbatches, len(ranks)))


@pytest.mark.parametrize("placement", [
    ((0, 3), (1, 2), (1, 2), (3, 0)), ((0, 3), (1, 2), (2, 1)), ((0,), (1,), (2,), (3,)),
    ((0, 3, 1), (1, 2, 0), (2, 1, 3), (3, 0, 2)), ((0, 1, 2, 3), (2, 1, 0, 3)), ((0, 4), (1, 2), (2, 1), (4, 3))])
def test_a_placement_that_is_not_the_schedules_own(placement: Placement) -> None:
    with pytest.raises(UserError) as raised:
        build("chimera", placement, 8)
    problem = raised.value.problems[0]
    assert problem.what == f"'chimera' does not place stages as {list(map(list, placement))}"
    assert problem.hint.startswith(f"place them as {list(map(list, both_ways(len(placement))))}")


@pytest.mark.parametrize(("name", "widths", "every"), [("1f1b", (2, 1), None), ("1f1b", (3, 1), None),
                                                       ("pipedream", (2, 1), 1)])
@pytest.mark.parametrize("step", [0, 2])
def test_weights_that_owners_send_take_as_long_as_sums(name: str, widths: tuple[int, int], every: int | None,
                                                       step: int) -> None:
    """They travel behind the step instead of before it."""
    front = tuple(range(widths[0]))
    costs = Costs((StageCosts(2, 2, 2, step_s=step, reduce_bytes=12), StageCosts(1, 1, 1, step_s=step)), Link(1, 2))
    taken = {zero1: simulate(prove(name, (front, (widths[0],)), 6, every, zero1=zero1), costs).makespan_s
             for zero1 in (False, True)}
    assert taken[True] == taken[False]
