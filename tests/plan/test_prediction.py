"""Predictions: closed forms, long simulations, and what real pipelines hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import KIB, any_profile, frozen, layer, profile, transformer

from vpipe import Asynchronous, Cut, Order
from vpipe.description.cut import Recompute
from vpipe.errors import UserError
from vpipe.plan.plan import Plan, Prediction
from vpipe.plan.prediction import predict
from vpipe.plan.profile import Profile, Seconds
from vpipe.plan.stage_costs import pipeline_costs, stage_memory
from vpipe.schedules.assignment import Layout
from vpipe.schedules.builder import build
from vpipe.schedules.kinds import Op
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.simulator.timeline import peak_contents, simulate


def equal(layers: int = 4, *, step_s: float = 0.0, cores: int | None = None) -> Profile:
    """Layers of 1 s forward and 2 s backward, 0.1 s more in halves, with transfers that take no time."""
    made = [layer(f"layer{n}", 1.0, reads=("h" if n else "ids",), step_s=step_s) for n in range(layers)]
    return profile(made, bytes_per_s=1e30, cores=cores)


def taken(made: Profile, name: str, recompute: Recompute = 0.0, update_every: int | None = None) -> Prediction:
    """One layer per stage, 8 microbatches."""
    order = Order.of(name, update_every=update_every)
    return predict(made, Plan(Cut((1,) * len(made.layers), recompute), order, microbatches=8)).prediction


@pytest.mark.parametrize(("name", "options", "step_s"), [
    ("1f1b", {}, (8 + 3) * 3 + 0.5), ("gpipe", {}, (8 + 3) * 3 + 0.5),
    ("1f1b", {"recompute": (1.0,) * 4}, 8 * 4 + 3 * 3 + 0.5),  # recomputed while the gradient is on its way
    ("zb_h1", {}, 8 * 3.1 + 3 * (1 + 1.1 - 1.0) + 0.5),  # its closed form, at the halves' times
    ("pipedream", {}, 3 + 0.5), ("pipedream", {"update_every": 4}, 4 * 3 + 0.5), ("2bw", {"update_every": 4}, 12.5)])
def test_closed_forms(name: str, options: dict[str, object], step_s: float) -> None:
    prediction = taken(equal(step_s=0.5), name, **options)
    assert prediction.step_s == pytest.approx(step_s)
    per_step = options.get("update_every", 1) if name in ("pipedream", "2bw") else 8
    assert prediction.samples_per_step == 4 * per_step  # type: ignore[operator]
    assert prediction.seconds_per_sample == prediction.step_s / prediction.samples_per_step


def test_slices_take_equal_parts_of_a_microbatch() -> None:
    """But for adding gradients, dispatch, and keys and values, which a slice keeps of those before it, too."""
    plan = Plan(Cut((1,) * 4), Order("seq1f1b", slices=4), microbatches=8)
    whole, found = taken(equal(step_s=0.5), "1f1b"), predict(equal(step_s=0.5), plan).prediction
    assert found.step_s == pytest.approx((8 + 3 / 4) * 3 + 0.5)
    assert found.samples_per_step == 32
    assert [stage.microbatch_s for stage in found.stages] == pytest.approx([3.0] * 4)
    held = [stage.memory.activations for stage in whole.stages]
    assert [16 * (4 - n) * stage.memory.activations for n, stage in enumerate(found.stages)] == [
        4 * (7 - n) * held[n] for n in range(4)]  # 7, 6, 5 and 4 quarters of a microbatch in place of 4, 3, 2 and 1
    slow = replace(equal(), dispatch_s=0.01, accumulate_bytes_per_s=4 * KIB / 0.1)
    again = predict(slow, plan).prediction.stages[1]
    # Of 2 s 0.1 s add gradients, in each of 32 slices but the first; an action, its receive and its send take 0.01 s.
    assert again.microbatch_s == pytest.approx(1.0 + 1.9 + 4 * (0.1 - 0.1 / 32) + 4 * (2 * 3 * 0.01))
    carrying = replace(equal(), layers=tuple(replace(each, carried_bytes=4 * KIB) for each in equal().layers))
    assert [more.memory.activations - less.memory.activations for more, less in zip(
        predict(carrying, plan).prediction.stages, found.stages, strict=True)] == [
        in_flight * 4 * KIB * 3 // 8 for in_flight in (7, 6, 5, 4)]
    dropped = replace(plan, cut=replace(plan.cut, recompute=1.0))  # the recomputed one has twice 3 // 8 more
    assert [more.memory.activations - less.memory.activations for more, less in zip(
        predict(carrying, dropped).prediction.stages, predict(equal(), dropped).prediction.stages, strict=True)] == [
        (in_flight + 2) * 4 * KIB * 3 // 8 for in_flight in (7, 6, 5, 4)]


@pytest.mark.parametrize(("name", "step_s"), [
    ("1f1b", (8 + 1) * 3), ("zb_h1", 8 * 3.1 + (1 + 1.1 - 1.0)), ("pipedream", 3)])
def test_a_frozen_front_only_goes_forward(name: str, step_s: float) -> None:
    """Two stages are trained; in a closed form of them alone, since those in front are done long before."""
    made = replace(frozen(equal(), 2), dispatch_s=1e-6)
    prediction = taken(made, name)
    assert prediction.step_s == pytest.approx(step_s, abs=1e-3)
    assert [stage.backward_s > 0 for stage in prediction.stages] == [False, False, True, True]
    assert [stage.memory.activations > 0 for stage in prediction.stages] == [False, False, True, True]


def test_a_batch_begins_while_others_finish_the_one_before() -> None:
    made = equal()
    late = replace(made, layers=(*made.layers[:3], replace(made.layers[3], step=Seconds(50.0))))
    predicted = predict(late, Plan(Cut((1,) * 4), Order("1f1b"), microbatches=8))
    assert predicted.timeline.makespan_s == pytest.approx(3 + 8 * 3 + 50)  # alone, it waits for the pipeline to fill
    assert predicted.prediction.step_s == pytest.approx(8 * 3 + 50)
    assert predicted.prediction.bottleneck == 3


def test_where_ranks_share_cores_work_is_what_counts() -> None:
    crowded = taken(equal(cores=2), "pipedream")
    assert crowded.step_s == pytest.approx(4 * 3 / 2)  # of a microbatch, on four ranks
    assert crowded.bubble == pytest.approx(0, abs=1e-9)
    assert taken(equal(cores=4), "1f1b") == taken(equal(), "1f1b")
    assert taken(equal(cores=1), "1f1b").step_s == pytest.approx(4 * 8 * 3)


def test_the_slowest_stage_is_the_bottleneck() -> None:
    made = equal()
    slow = replace(made, layers=tuple(layer(f"layer{n}", 1.5 if n == 2 else 1.0, reads=("h" if n else "ids",))
                                      for n in range(4)))
    for name in ("1f1b", "pipedream"):
        prediction = taken(slow, name)
        assert prediction.bottleneck == 2
        assert min(stage.idle_s for stage in prediction.stages) == prediction.stages[2].idle_s
        assert [stage.forward_s for stage in prediction.stages] == [1, 1, 1.5, 1]
    assert prediction.step_s == pytest.approx(4.5)
    assert [round(stage.idle_s, 6) for stage in prediction.stages] == [1.5, 1.5, 0, 1.5]
    assert prediction.bubble == pytest.approx(3 * 1.5 / (4 * 4.5))


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from(["pipedream", "2bw"]), st.integers(2, 4), st.sampled_from([None, 2]),
       st.booleans())
def test_a_step_of_a_stream_is_one_of_very_many(seed: int, name: str, stages: int, cores: int | None,
                                                slow: bool) -> None:
    made = any_profile(seed, 2 * stages, bytes_per_s=1e5 if slow else 1e9, latency_s=1e-3, cores=cores)
    order = Asynchronous(name, update_every=stages if name == "2bw" else 1)
    predicted = predict(made, Plan(Cut((2,) * stages, recompute=(0.5,) * stages), order, microbatches=2 * stages))
    schedule, many = predicted.timeline.schedule, 40
    long = build(name, schedule.placement, many * schedule.assignment.per_step, schedule.update_every, schedule.ties,
                 range(stages))
    ends = [float(event.end_s) for event in simulate(long, predicted.timeline.costs).events[-1]
            if event.action.op is Op.STEP]
    assert predicted.prediction.step_s == pytest.approx((ends[30] - ends[10]) / 20, rel=0.03)


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "gpipe", "zb_h1"]), st.integers(2, 4),
       st.sampled_from([None, 2]))
def test_a_step_with_a_flush_lies_between_the_work_and_a_batch_by_itself(seed: int, name: str, stages: int,
                                                                         cores: int | None) -> None:
    made = any_profile(seed, 2 * stages, latency_s=1e-3, cores=cores)
    made = replace(made, layers=tuple(replace(one, tied={}) for one in made.layers))  # a batch alone sends no version
    predicted = predict(made, Plan(Cut((2,) * stages), Order(name), microbatches=2 * stages))
    timeline = predicted.timeline
    work = max(sum(float(event.end_s - event.start_s) for event in events)
               for events in simulate(timeline.schedule, replace(timeline.costs, cores=None)).events)
    assert work * (1 - 1e-9) <= predicted.prediction.step_s <= float(timeline.makespan_s) * (1 + 1e-9)
    assert len(timeline.events[0]) == sum(action.op in "FBIWRSTEP" for action in timeline.schedule.programs[0])


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "pipedream", "zb_h1"])
def test_memory_is_that_of_the_schedule(name: str) -> None:
    made = transformer(6)
    plan = Plan(Cut((3, 3, 3, 4), recompute=((0, 1), (), (7,), ())), Order(name), microbatches=8)
    predicted = predict(made, plan)
    schedule = predicted.timeline.schedule
    for stage, (facts, versions) in enumerate(zip(schedule.rank_peaks, schedule.stage_peaks, strict=True)):
        halves = facts.peak_weight_halves if name == "zb_h1" and stage else 0
        bound = stage_memory(made, [range(0, 3), range(3, 6), range(6, 9), range(9, 13)][stage],
                             plan.recomputed[stage], facts.peak_activations, versions.versions, halves)
        found = predicted.prediction.stages[stage].memory
        assert replace(found, activations=bound.activations) == bound
        assert 0 < found.activations <= bound.activations  # not all at their most at the same moment
        assert halves or found == bound


def test_a_rank_with_two_stages_holds_both_at_one_moment() -> None:
    plan = Plan(Cut((3, 3, 3, 4), recompute=(1.0, 0.0, 0.0, 0.0)), Order("zb_v"), microbatches=4)
    predicted = predict(transformer(6), plan)
    stages, timeline = predicted.prediction.stages, predicted.timeline
    assert [stage.ranks for stage in stages] == [(0,), (1,), (1,), (0,)]
    for rank, own in enumerate(((0, 3), (1, 2))):
        held = sum(stages[stage].memory.activations + stages[stage].memory.weights for stage in own)
        assert held <= timeline.peak_bytes[rank]  # which counts a forward from its start, before another ends
        loads = peak_contents(timeline.schedule.programs[rank], own, timeline.costs, timeline.schedule.frozen)
        assert held == sum(n * value.bytes(timeline.costs.stages[stage]) for (value, stage), n in loads.items())


def test_replicas_halve_the_work_and_step_together() -> None:
    wide = Plan(Cut((2, 2), ranks=((0, 1), (2,))), Order("pipedream"), microbatches=8)
    prediction = predict(equal(), wide).prediction
    assert prediction.step_s == pytest.approx(2 * 6)  # both microbatches of the first stage's update, on the last
    assert prediction.samples_per_step == 8
    assert [stage.idle_s for stage in prediction.stages] == [pytest.approx(6), pytest.approx(0)]


@pytest.mark.parametrize(("plan", "text"), [
    (Plan(Cut((2, 3)), Order("1f1b"), microbatches=4), "the plan is for 5 layers, but the profile is of a model of 4"),
    (Plan(Cut((2, 2)), microbatches=4), "does not say the schedule"),
    (Plan(Cut((2, 2)), Order("1f1b")), "does not say how many microbatches"),
    (Plan(Cut((1, 1, 2)), Order("zb_v"), microbatches=4), "which do not divide 3 stages"),
    (Plan(Cut((2, 2), ranks=[[0], [2]]), Order("1f1b"), microbatches=4), "names ranks up to 2, but never rank 1"),
    (Plan(Cut((2, 2), ranks=[[1], [2]]), Order("auto"), microbatches=4), "names ranks up to 2, but never rank 0"),
    (Plan(Cut((2, 2), ranks=[[0], []]), Order("pipedream"), microbatches=4), "gives stage 1 no rank"),
    (Plan(Cut((2, 2)), Order("2f2b"), microbatches=4), "no schedule is called '2f2b'")])
def test_plans_that_cannot_be(plan: Plan, text: str) -> None:
    with pytest.raises(UserError, match=text):
        predict(equal(), plan)


def test_arguments_complete_an_open_plan() -> None:
    said = predict(equal(), Plan(Cut((2, 2))), schedule="pipedream", microbatches=4, update_every=2)
    assert said == predict(equal(), Plan(Cut((2, 2)), Asynchronous("pipedream", update_every=2), microbatches=4))


def test_a_prediction_survives_a_file() -> None:
    prediction = taken(equal(), "1f1b", recompute=(1.0, 0.0, 0.0, 0.0))
    assert Prediction.of_json(json.loads(json.dumps(prediction.as_json()))) == prediction


def test_costs_are_of_halves_where_a_schedule_halves() -> None:
    made, placement = equal(), RegisteredSchedule.named("zb_h1").layout(4, 1)
    predicted = predict(made, Plan(Cut((1,) * 4), Order("zb_h1"), microbatches=8))
    split = pipeline_costs(made, (1,) * 4, [()] * 4, placement, split=True)
    assert predicted.timeline.costs.stages[1].input_s == split.stages[1].input_s == pytest.approx(1.1)
    assert made.layers[0].saved_bytes == 8 * KIB


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "pipedream"])
def test_a_schedule_from_a_file_takes_what_it_takes_by_name(name: str, tmp_path: Path) -> None:
    made, plan = equal(), Plan(Cut((1,) * 4, recompute=(1.0, 0.0, 0.0, 0.0)), Order(name), microbatches=8)
    path = tmp_path / f"{name}.csv"
    path.write_text(build(name, Layout.LOOP(4), 8).to_csv())
    by_name, by_file = (predict(made, one).prediction for one in (plan, replace(plan, order=Order(str(path)))))
    assert by_file.samples_per_step == by_name.samples_per_step
    if name == "pipedream":  # a file ends with its batch: the pipeline is filled and emptied every time
        assert by_name.step_s < by_file.step_s <= by_name.step_s + 3 * 3 / 8
    else:
        assert by_file == by_name


@pytest.mark.parametrize("microbatches", [3, 5])
def test_replicas_with_tied_weights_and_a_microbatch_left_over(microbatches: int) -> None:
    plan = Plan(Cut((10, 3), ranks=((0, 1), (2, 3))), Order("1f1b"), microbatches=microbatches)
    found = predict(transformer(6), plan).prediction
    even = predict(transformer(6), replace(plan, microbatches=microbatches + 1)).prediction
    assert even.step_s <= found.step_s * 1.2
    assert found.seconds_per_sample > even.seconds_per_sample
