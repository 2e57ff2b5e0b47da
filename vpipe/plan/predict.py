"""Predict what a plan takes: simulate its schedule at measured costs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from vpipe.description.order import Order
from vpipe.description.recompute import ranges
from vpipe.errors import UserError, counted
from vpipe.plan.plan import Plan, Prediction, StagePrediction
from vpipe.plan.profile import Profile
from vpipe.plan.stage_costs import pipeline_costs, stage_memory
from vpipe.schedules.action import Action
from vpipe.schedules.build import build, placement_of
from vpipe.schedules.costs import Costs
from vpipe.schedules.peaks import peak_contents
from vpipe.schedules.prepare import ScheduleSpec, is_file
from vpipe.schedules.registry import recipe_named
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.simulate import simulate
from vpipe.schedules.simulator.timeline import Event, Timeline


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan's prediction, with the timeline that it comes from."""

    prediction: Prediction  # in numbers
    # with a flush, or of a schedule from a file, of one batch from an empty pipeline to an empty one; without, of the
    # first microbatches, enough to contain a steady state
    timeline: Timeline


def predict(profile: Profile, plan: Plan, *, schedule: str | None = None, microbatches: int | None = None,
            update_every: int | None = None) -> SimulatedPlan:
    """Predict what training with ``plan`` takes per step, without evaluations, checkpoints and reading data.

    With a flush the time of a step is that from one to the next of several in a row. Without one it is the mean over
    several in the steady state.

    Args:
        schedule: its name, or the path of a CSV file, where the plan has none.
        microbatches: of a batch, where the plan has none.
        update_every: without a flush, microbatches per update and replica, where the plan has none.

    Raises:
        UserError: the plan is for another number of layers, or its numbers do not fit each other.
    """
    name, microbatches = plan.schedule or schedule, plan.microbatches or microbatches
    if name is None or microbatches is None:
        raise UserError(f"the plan does not say {'the schedule' if name is None else 'how many microbatches'}",
                        hint="write it into the plan")
    partition, recomputed, layers = plan.partition, plan.recomputed, len(profile.layers)
    if sum(partition) != layers:
        raise UserError(f"the plan is for {sum(partition)} layers, but the profile is of a model of {layers}",
                        hint="make another plan, or profile the model that the plan is for")
    order = plan.order.over(Order.of(name, update_every=update_every))
    spec = ScheduleSpec(order, plan.cut, microbatches, ties=ties_of(profile, partition))
    built = spec.prepare() if is_file(name) else _build(profile, spec)
    split = bool(built.split_backwards)
    assignment = built.assignment
    shares = [-(-assignment.per_update(stage) // len(ranks)) for stage, ranks in enumerate(built.placement)]
    costs = pipeline_costs(profile, partition, recomputed, built.placement, split, built.versions, shares)
    steps = _simulate_stream(built, costs) if built.stream else _simulate_batches(built, costs)
    return SimulatedPlan(_prediction(profile, partition, recomputed, steps), steps.timeline)


def step_period(schedule: Schedule, costs: Costs) -> float:
    """Return the time from one step of training to the next at ``costs``, as :func:`predict` does.

    Args:
        schedule: compute actions and steps only; of a stream any part, without recomputation.
    """
    return (_simulate_stream(_long(schedule), costs) if schedule.stream else _simulate_batches(schedule, costs)).step_s


def ties_of(profile: Profile, partition: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the stages that borrow a stage's tied weights, by owning stage."""
    stage_of = [stage for stage, size in enumerate(partition) for _ in range(size)]
    ties: dict[int, set[int]] = {}
    for number, layer in enumerate(profile.layers):
        for owner in layer.tied:
            if stage_of[owner] != stage_of[number]:
                ties.setdefault(stage_of[owner], set()).add(stage_of[number])
    return {owner: tuple(sorted(borrowers)) for owner, borrowers in sorted(ties.items())}


def _build(profile: Profile, spec: ScheduleSpec) -> Schedule:
    """Build a schedule that is simulated only, so without proof; a stream with a steady state in its middle."""
    recipe, cut, placement = recipe_named(spec.schedule), spec.cut, spec.cut.placement
    if placement is None:
        if cut.count % recipe.chunks:
            raise UserError(f"'{spec.schedule}' holds {recipe.chunks} stages on each rank, which do not divide "
                            f"{counted(cut.count, 'stage')}", hint="use a multiple, or say where the stages live")
        placement = placement_of(recipe, cut.count // recipe.chunks, recipe.chunks)
    costs = None if recipe.search is None else pipeline_costs(profile, cut.partition, cut.recomputed, placement)
    one = build(spec.schedule, placement, spec.microbatches, spec.update_every, spec.ties, spec.recompute, costs,
                warmup=spec.order.warmup)
    return one if one.flush else _long(one, spec.recompute)


def _long(stream: Schedule, recompute: Collection[int] = ()) -> Schedule:
    """Return a stream that is long enough to have a steady state in its middle."""
    return build(stream.name, stream.placement, sum(_stream_steps(stream)) * stream.assignment.per_step,
                 stream.update_every, stream.ties, recompute, warmup=stream.warmup)


_SETTLING = 12
"""Microbatches beyond those in flight after which a stream repeats itself, and over which a mean is good, nearly."""


def _stream_steps(schedule: Schedule) -> tuple[int, int, int]:
    """Return the steps of a simulated stream: while it fills, those that count, while it drains."""
    per_step = schedule.assignment.per_step
    in_flight = max(schedule.ranks, *(len(ranks) * (depth + 1)  # over the whole pipeline, whatever the widths
                                      for ranks, depth in zip(schedule.placement, schedule.warmup, strict=True)))
    return (-(-(in_flight + _SETTLING) // per_step) + 1,
            max(2, -(-max(_SETTLING, in_flight // 2) // per_step)), -(-in_flight // per_step))


@dataclass(frozen=True)
class _SimulatedSteps:
    """Simulated steps."""

    timeline: Timeline  # see SimulatedPlan
    step_s: float  # the time from step to step
    working_s: tuple[float, ...]  # per rank and step, how long it computes or steps, at the speed that it has


def _simulate_batches(schedule: Schedule, costs: Costs) -> _SimulatedSteps:
    """Simulate two batches: the second may begin on a rank while other ranks finish the first.

    Only one, where weights are tied and replicas take unequally many microbatches: numbered on, the microbatches of a
    second batch would go to other replicas than the first's, which tied weights do not allow.
    """
    if schedule.ties and any(schedule.microbatches % len(group) for group in schedule.placement):
        timeline = simulate(schedule, costs)
        return _SimulatedSteps(timeline, _end_s(timeline.events), _working_s(timeline.events))

    def per_batch(action: Action) -> int:  # by how much the index differs from that in the batch before
        return schedule.microbatches if action.op.per_microbatch else schedule.updates(action.stage)

    twice = schedule.with_programs([(*program, *(
        Action(action.op, action.stage, action.microbatch + per_batch(action)) for action in program))
        for program in schedule.programs])
    timeline = simulate(replace(twice, microbatches=2 * schedule.microbatches), costs)
    halves = [len(events) // 2 for events in timeline.events]
    events = tuple(events[:half] for events, half in zip(timeline.events, halves, strict=True))
    later = tuple(events[half:] for events, half in zip(timeline.events, halves, strict=True))
    alone = [tuple(action for action in program if action.microbatch < per_batch(action))
             for program in timeline.schedule.programs]
    transfers = tuple(transfer for transfer in timeline.transfers
                      if transfer.action.microbatch < per_batch(transfer.action))
    steps = schedule.microbatches // schedule.assignment.per_step
    return _SimulatedSteps(Timeline.of(schedule.with_programs(alone), costs, events, transfers),
                           (_end_s(later) - _end_s(events)) / steps,
                           tuple(seconds / steps for seconds in _working_s(later)))


def _end_s(events: Sequence[Sequence[Event]]) -> float:
    return max(float(event.end_s) for of_rank in events for event in of_rank)


def _working_s(events: Sequence[Sequence[Event]]) -> tuple[float, ...]:
    return tuple(float(sum(event.end_s - event.start_s for event in of_rank)) for of_rank in events)


def _simulate_stream(schedule: Schedule, costs: Costs) -> _SimulatedSteps:
    """Simulate a stream, and average over steps in its middle, as the last stage makes them."""
    timeline, assignment = simulate(schedule, costs), schedule.assignment
    filling, counting, _ = _stream_steps(schedule)
    last = schedule.stages - 1
    made: dict[int, float] = {}  # by update of the last stage, when its last replica had made it
    for rank in schedule.placement[last]:
        for event in timeline.events[rank]:
            if event.action.op.makes_version and event.action.stage == last:
                update = event.action.microbatch
                made[update] = max(float(event.end_s), made.get(update, 0.0))
    per_step = assignment.per_step // assignment.per_update(last)
    begin, end = (made[steps * per_step - 1] for steps in (filling, filling + counting))
    working = tuple(sum(max(0.0, min(end, float(event.end_s)) - max(begin, float(event.start_s)))
                        for event in events) / counting for events in timeline.events)
    return _SimulatedSteps(timeline, (end - begin) / counting, working)


def _prediction(profile: Profile, partition: Sequence[int], recomputed: Sequence[Collection[int]],
                steps: _SimulatedSteps) -> Prediction:
    timeline, step_s = steps.timeline, steps.step_s
    schedule, costs = timeline.schedule, timeline.costs
    idle = [max(0.0, step_s - working) for working in steps.working_s]
    contents = [peak_contents(schedule, costs, rank) for rank in range(schedule.ranks)]
    sending, stages = _sending_s(timeline), []
    for stage, layers in enumerate(ranges(partition)):
        cost, ranks = costs.stages[stage], schedule.placement[stage]
        memories = [stage_memory(profile, layers, recomputed[stage], held.in_flight, held.versions, held.weight_halves,
                                 held.recomputed) for held in (contents[rank][stage] for rank in sorted(ranks))]
        stages.append(StagePrediction(
            layers.start, len(layers), ranks, float(cost.forward_s), float(cost.input_s + cost.weight_s),
            float(cost.recompute_s), float(cost.step_s), sending[stage],
            max(idle[rank] for rank in ranks), max(memories, key=lambda memory: memory.peak)))
    return Prediction(step_s, schedule.assignment.per_step * profile.identity.microbatch_size,
                      bubble(zip(idle, steps.working_s, strict=True)), tuple(stages))


def _sending_s(timeline: Timeline) -> list[float]:
    """Return per stage the seconds per step that the transfers of one of its ranks take their links."""
    schedule = timeline.schedule
    sent = [0.0] * schedule.stages
    for transfer in timeline.transfers:
        sent[transfer.action.stage] += float(transfer.end_s - transfer.start_s)
    steps = schedule.microbatches // schedule.assignment.per_step
    return [seconds / steps / len(ranks) for seconds, ranks in zip(sent, schedule.placement, strict=True)]


def bubble(ranks: Iterable[tuple[float, float]]) -> float:
    """Return the share of the ranks' time in which they wait for other ranks, the mean over ranks; NaN where a time is.

    Args:
        ranks: of each rank the seconds in which it waited for others (the order of the schedule, unequal stages and
            transfers alike) and those in which it worked: computed, updated, handed over.
    """
    shares = [waited / (waited + worked) if waited else 0.0 for waited, worked in ranks]
    return sum(shares) / len(shares)
