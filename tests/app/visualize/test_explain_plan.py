"""A plan explained: its tables, and the words for what holds it up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from made_profile import MIB, made_profile

from vpipe import Asynchronous, Cut, Order
from vpipe.app.visualize.explain_plan import OtherPlan, PlanExplanation, alternatives_table, memory_table
from vpipe.app.visualize.table import Column, columns, filled
from vpipe.plan.plan import Plan, Prediction, StagePrediction
from vpipe.plan.profile import TensorBytes
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


def sentence(word: str, explanation: PlanExplanation) -> str:
    """The sentence that begins so, on one line."""
    text = explanation.text(500)
    [found] = [part for part in text.replace("\n  ", " ").splitlines() if part.startswith(f"{word}:")]
    return found


def test_the_delay_of_gradients_without_a_flush() -> None:
    plan = replace(planned(), order=Asynchronous("pipedream", update_every=4))
    assert sentence("delay of gradients in updates, by stage", explained(plan)).endswith(
        ": mean 0.75 0.5 0.25 0, greatest 1 1 1 0")
    deep = replace(plan, order=replace(plan.order.late, warmup_depth=(6, 3, 1, 0)))
    deeper = sentence("delay of gradients in updates, by stage", explained(deep))
    assert ": mean 1.5 0.75 0.25 0, greatest 2 1 1 0; less with training.num_microbatches 8 and " in deeper
    assert sentence("warning", explained(replace(plan, order=Asynchronous("pipedream", update_every=1)))).startswith(
        "warning: the gradients of stage 0 are 3 updates late on average, so each update lowers the loss less; better "
        "are: parallel.update_every 4 (0.75 updates late; an update is then ")
    assert "delay" not in explained(planned()).text(80)


def test_tensors_that_cross_the_cuts() -> None:
    """A tensor that skips layers, another that needs no gradient."""
    made = made_profile()
    layers = list(made.layers)
    mask = TensorBytes("mask", MIB // 2, wants_gradient=False)
    layers[2] = replace(layers[2], writes=(*layers[2].writes, mask))
    layers[5] = replace(layers[5], reads=("h", "mask"))
    assert sentence("sent by one microbatch", explained(planned(), profile=replace(made, layers=tuple(layers)))) == (
        "sent by one microbatch: 1 MiB forward and back after stage 0 (h); 1.5 MiB forward, 1 MiB back after stage 1 "
        "(h 1 MiB, mask 512 KiB); 1 MiB forward and back after stage 2 (h)")


def other(what: str, plan: Plan | None, seconds: float | None = None, simulated: bool = True,
          why: str = "") -> OtherPlan:
    if plan is not None and plan.predictions is not None:
        seconds = plan.predictions.seconds_per_sample
    return OtherPlan(what, plan, seconds, simulated, why)


def test_all_of_it_on_80_columns() -> None:
    text = explained(planned(), solver="exact for the measured costs; 31 choices in 0.3 s", others=[
        other("the config's own", planned(step_ms=156, dropped=0)),
        other("schedule gpipe", replace(planned(), order=Order("gpipe"), predictions=None), 0.011, simulated=False),
        other("no recompute", None, why="stage 0 needs 1.1 GiB"),
        other("no recompute, from 1.08 GiB", planned(step_ms=120, dropped=0))]).text(80)
    assert text == """\
bert made: 9 layers on 4 ranks of 1 GiB (--memory)
plan: 1f1b, 4 stages [2, 2, 2, 3], 4 microbatches of 4 samples per update
predicted: 152 ms per update, 105 samples/s, bubble 27 %

stage  layers  rank  forward  backward     recompute  step  comm  idle  busy
    0     0-1     0      8.0      17.0             -   6.0   7.9  60.0  61 %
    1     2-3     1      8.0      17.0             -   6.0   7.9  62.0  59 %
    2     4-5     2      8.0      17.0  4.0 (1 of 2)   6.0   7.9  40.0  74 %
    3     6-8     3     12.0      25.5  8.0 (2 of 3)   6.0   7.9   2.0  99 %
in ms: forward, backward and recompute of one microbatch; step of the optimizer;
  comm (transfers, mostly while it computes) and idle of a rank per update

memory of a rank when it holds most, in MiB
stage  weights  stashed  gradients  optimizer  activations  working   peak
    0     40.0        0       40.0       80.0         60.0     12.0  232.0
    1     40.0        0       40.0       80.0         50.0     12.0  222.0
    2     40.0        0       40.0       80.0         40.0     12.0  212.0
    3     60.0        0       60.0      120.0         30.0     12.0  282.0

bottleneck: stage 3 (layers 6-8, rank 3), busy 150 ms of 152 ms, 35 % more than
  the average rank
sent by one microbatch: 1 MiB forward and back after stages 0, 1, 2 (h)
solver: exact for the measured costs; 31 choices in 0.3 s

                             schedule  layers per stage  m  recompute  samples/s
this plan                    1f1b      [2, 2, 2, 3]      4     3 of 9        105
the config's own             1f1b      [2, 2, 2, 3]      4          -        103  -2.6 %
schedule gpipe               gpipe     [2, 2, 2, 3]      4     3 of 9      ~90.9   -14 %
no recompute, from 1.08 GiB  1f1b      [2, 2, 2, 3]      4          -        133   +27 %
~ by the solver's formula, not simulated
no recompute: stage 0 needs 1.1 GiB
"""


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_wider_terminal_shows_more_and_nothing_is_wider_than_it(width: int) -> None:
    text = explained(planned()).text(width)
    assert max(map(len, text.splitlines())) <= width
    assert ("of limit" in text) == (width >= 100)
    assert ("####" in text) == (width >= 100)


def test_columns_that_can_be_spared_go_from_the_right_until_the_rest_fits() -> None:
    made = [Column("a", ["1"]), Column("bb", ["x" * 9], spare=True), Column("c", ["22"], left=True),
            Column("d", ["y" * 9], spare=True)]
    assert [len(columns(made, width)[1].split()) for width in (100, 27, 26, 16, 15, 3)] == [4, 4, 3, 3, 2, 2]


@pytest.mark.parametrize(("idle_ms", "said"), [
    ((60, 62, 40, 2), "stage 3 (layers 6-8, rank 3), busy 150 ms of 152 ms, 35 % more than the average rank"),
    ((20, 21, 22, 20), "none, the ranks are even, busy 86 % of the time; most stage 3 (layers 6-8, rank 3)")])
def test_the_bottleneck(idle_ms: Sequence[float], said: str) -> None:
    assert sentence("bottleneck", explained(planned(idle_ms))) == f"bottleneck: {said}"


def test_a_rank_with_several_stages_is_named_with_them_and_holds_their_sum() -> None:
    plan = planned(ranks=((0,), (1,), (0,), (1,)), schedule="interleaved")
    assert "bottleneck: rank 1 (stages 1, 3), busy" in sentence("bottleneck", explained(plan))
    assert plan.predicted.fullest_rank[1] == (222 + 282 - 12) * MIB  # it works on one at a time
    rows = [line.split() for line in memory_table(plan, 2**30, 80)[2:]]
    assert [row[:2] for row in rows] == [["0", "2"], ["1", "3"]]
    assert rows[1][-1] == "492.0"


def test_cores_that_ranks_share_are_the_bottleneck_when_computing_fills_them() -> None:
    plan = planned(step_ms=262)
    # Per update 4 microbatches of 9 layers x 12.5 ms + 3 x 4 ms recomputed, and 4 steps of 6 ms: 522 of 2 x 262 ms.
    assert sentence("bottleneck", explained(plan, profile=made_profile(cores=2))) == (
        "bottleneck: the 2 cores that 4 ranks of a host share, which compute 100 % of the time: no cut and no "
        "schedule gains anything")
    said = sentence("bottleneck", explained(planned(step_ms=280), profile=made_profile(cores=2)))
    assert "compute 93 % of the time: no cut and no schedule gains more than the other 7 %" in said
    assert "stage" in sentence("bottleneck", explained(plan, profile=made_profile(cores=4)))
    assert "stage" in sentence("bottleneck", explained(planned(step_ms=400), profile=made_profile(cores=2)))


def test_many_stages_are_summed_up_in_the_comparison() -> None:
    many = planned()
    deep = replace(many, cut=Cut((3,) * 60, ranks=tuple((stage,) for stage in range(60))))
    assert "60 stages of 3" in alternatives_table(many, [other("deep", deep)], 120)[2]


def test_a_number_stays_with_its_unit() -> None:
    lines = filled("word " * 8 + "413 MiB of 8 GiB", 44)
    assert lines == ["word " * 7 + "word", "  413 MiB of 8 GiB"]
