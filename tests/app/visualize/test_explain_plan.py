"""A plan explained: its tables, and why each other candidate lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from made_profile import MIB, made_profile

from vpipe import Asynchronous, Cut, Order
from vpipe.app.visualize.explain_plan import OtherPlan, PlanExplanation, candidates_table, memory_table
from vpipe.app.visualize.table import Column, columns, filled
from vpipe.plan.plan import Plan, Prediction, StagePrediction
from vpipe.plan.stage_costs import StageMemory


def planned(idle_ms: Sequence[float] = (60, 62, 40, 2), step_ms: float = 152, schedule: str = "1f1b",
            ranks: Sequence[tuple[int, ...]] = ((0,), (1,), (2,), (3,)), dropped: int = 3) -> Plan:
    """Nine layers in four stages, of which 1 and ``dropped - 1`` are recomputed at the end."""
    cut, stages, first = (2, 2, 2, 3), [], 0
    again = ((), (), (4,), (6, 7)) if dropped else ()
    for stage, layers in enumerate(cut):
        stages.append(StagePrediction(
            first, layers, ranks[stage], 0.004 * layers, 0.0085 * layers, 0.004 * len(again[stage]) if again else 0.0,
            0.006, 0.0079, idle_ms[stage] / 1e3,
            StageMemory(20 * MIB * layers, 0, 20 * MIB * layers, 40 * MIB * layers, (60 - 10 * stage) * MIB, 12 * MIB)))
        first += layers
    bubble = sum(idle_ms) / len(idle_ms) / step_ms
    return Plan(Cut(cut, recompute=again, ranks=tuple(ranks)), Order(schedule), microbatches=4,
                predictions=Prediction(step_ms / 1e3, 16, bubble, tuple(stages)))


def explained(plan: Plan, **more: object) -> PlanExplanation:
    known: dict[str, object] = {"profile": made_profile(), "limit_bytes": 2**30, "limit_from": "--memory",
                                "solver": "exact", "others": []}
    return PlanExplanation(plan, **{**known, **more})  # type: ignore[arg-type]


def test_the_delay_of_gradients_without_a_flush_is_a_column_of_the_stages() -> None:
    plan = replace(planned(), order=Asynchronous("pipedream", update_every=4))
    rows = [line.split()[-1] for line in explained(plan).text(200).splitlines()[5:10]]
    assert rows == ["late", "0.75", "0.5", "0.25", "0"]
    assert "late" not in explained(planned()).text(200)


def holding(plan: Plan, activations: int) -> Plan:
    """The plan with so many bytes of activations on every stage."""
    stages = tuple(replace(stage, memory=replace(stage.memory, activations=activations))
                   for stage in plan.predicted.stages)
    return replace(plan, predictions=replace(plan.predicted, stages=stages))


def other(what: str, plan: Plan | None, seconds: float | None = None, simulated: bool = True,
          why: str = "") -> OtherPlan:
    if plan is not None and plan.predictions is not None:
        seconds = plan.predictions.seconds_per_sample
    return OtherPlan(what, plan, seconds, simulated, why)


def test_all_of_it_on_100_columns() -> None:
    text = explained(planned(), solver="exact for the measured costs; 31 choices in 0.3 s", others=[
        other("the config's own", planned(step_ms=156, dropped=0)),
        other("schedule gpipe", replace(planned(), order=Order("gpipe"), predictions=None), 0.011, simulated=False),
        other("no recompute", None, why="stage 0 needs 1.1 GiB"),
        other("with zero1", planned(step_ms=151)),
        other("no recompute, from 1.08 GiB", holding(planned(step_ms=120, dropped=0), 2**30))]).text(100)
    assert text == """\
bert made: 9 layers on 4 ranks of 1 GiB (--memory)
plan: 1f1b, 4 stages [2, 2, 2, 3], 4 microbatches of 4 samples per update
predicted: 152 ms per update, 105 samples/s, bubble 27 %

in ms: of a microbatch, of a step of the optimizer; comm and idle per update
stage  layers  rank  forward  backward     recompute  step  comm  idle  busy
    0     0-1     0      8.0      17.0             -   6.0   7.9  60.0  61 %
    1     2-3     1      8.0      17.0             -   6.0   7.9  62.0  59 %
    2     4-5     2      8.0      17.0  4.0 (1 of 2)   6.0   7.9  40.0  74 %
    3     6-8     3     12.0      25.5  8.0 (2 of 3)   6.0   7.9   2.0  99 %

memory of a rank when it holds most, in MiB
stage  weights  stashed  gradients  optimizer  activations  working   peak  of limit
    0     40.0        0       40.0       80.0         60.0     12.0  232.0      23 %
    1     40.0        0       40.0       80.0         50.0     12.0  222.0      22 %
    2     40.0        0       40.0       80.0         40.0     12.0  212.0      21 %
    3     60.0        0       60.0      120.0         30.0     12.0  282.0      28 %

solver: exact for the measured costs; 31 choices in 0.3 s

candidate                    schedule  layers per stage  m  recompute  samples/s  lost by
this plan                    1f1b      [2, 2, 2, 3]      4     3 of 9        105
the config's own             1f1b      [2, 2, 2, 3]      4          -        103  2.6 % slower
schedule gpipe               gpipe     [2, 2, 2, 3]      4     3 of 9       90.9  14 % slower by formula
with zero1                   1f1b      [2, 2, 2, 3]      4     3 of 9        106  0.7 % faster, too little
no recompute, from 1.08 GiB  1f1b      [2, 2, 2, 3]      4          -        133  27 % faster, does not fit
no recompute: stage 0 needs 1.1 GiB
"""


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_wider_terminal_shows_more_and_nothing_is_wider_than_it(width: int) -> None:
    text = explained(planned()).text(width)
    assert max(map(len, text.splitlines())) <= width
    assert ("of limit" in text) == (width >= 100)


def test_columns_that_can_be_spared_go_from_the_right_until_the_rest_fits() -> None:
    made = [Column("a", ["1"]), Column("bb", ["x" * 9], spare=True), Column("c", ["22"], left=True),
            Column("d", ["y" * 9], spare=True)]
    assert [len(columns(made, width)[1].split()) for width in (100, 27, 26, 16, 15, 3)] == [4, 4, 3, 3, 2, 2]


def test_a_rank_with_several_stages_holds_their_sum() -> None:
    plan = planned(ranks=((0,), (1,), (0,), (1,)), schedule="interleaved")
    assert plan.predicted.fullest_rank[1] == (222 + 282 - 12) * MIB  # it works on one at a time
    rows = [line.split() for line in memory_table(plan, 2**30, 80)[2:]]
    assert [row[:2] for row in rows] == [["0", "2"], ["1", "3"]]
    assert rows[1][-1] == "492.0"


def test_cores_that_ranks_share_are_named() -> None:
    texts = [explained(planned(), profile=made_profile(cores=cores)).text(100) for cores in (2, 4)]
    assert texts[0].startswith("bert made: 9 layers on 4 ranks of 1 GiB (--memory); 4 ranks of a host share 2 cores\n")
    assert texts[1].startswith("bert made: 9 layers on 4 ranks of 1 GiB (--memory)\n")


def test_many_stages_are_summed_up_in_the_comparison() -> None:
    many = planned()
    deep = replace(many, cut=Cut((3,) * 60, ranks=tuple((stage,) for stage in range(60))))
    assert "60 stages of 3" in candidates_table(many, [other("deep", deep)], None, 120)[2]


def test_a_number_stays_with_its_unit() -> None:
    lines = filled("word " * 8 + "413 MiB of 8 GiB", 44)
    assert lines == ["word " * 7 + "word", "  413 MiB of 8 GiB"]
