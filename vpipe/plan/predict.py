"""Predict what a plan takes: simulate its schedule at measured costs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from vpipe.errors import UserError, counted
from vpipe.metric_formulas import bubble
from vpipe.plan.activation_memory import ActivationMemory
from vpipe.plan.plan import Plan, Prediction, StagePrediction
from vpipe.plan.profile import Profile
from vpipe.plan.recompute import ranges
from vpipe.plan.stage_costs import StageMemory, pipeline_costs, stage_memory
from vpipe.schedules.action import PER_MICROBATCH, Action, Op
from vpipe.schedules.build import build
from vpipe.schedules.costs import Costs
from vpipe.schedules.peaks import StageContents, peak_contents
from vpipe.schedules.prepare import ScheduleSpec, is_file
from vpipe.schedules.registry import recipe_named
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.simulate import simulate
from vpipe.schedules.simulator.timeline import Timeline
from vpipe.schedules.size import Placement


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan's prediction, with the timeline that it comes from.

    Attributes:
        prediction: in numbers.
        timeline: with a flush, or of a schedule from a file, of one batch from an empty pipeline to an empty one;
            without, of the first microbatches, enough to contain a steady state.
    """

    prediction: Prediction
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
    layers = len(profile.layers)
    if sum(plan.partition) != layers:
        raise UserError(f"the plan is for {sum(plan.partition)} layers, but the profile is of a model of {layers}",
                        hint="make another plan, or profile the model that the plan is for")
    recomputed = plan.recomputed
    spec = ScheduleSpec(name, len(plan.partition), microbatches, plan.update_every or update_every,
                        plan.stage_to_rank_map or None, ties=ties_of(profile, plan.partition),
                        recompute=[stage for stage, dropped in enumerate(recomputed) if dropped])
    if is_file(name):
        built = spec.prepare()
    else:
        placement = spec.placement or _default_placement(name, spec.stages)
        built = _build(replace(spec, placement=placement),
                       pipeline_costs(profile, plan.partition, recomputed, placement))
    split = any(action.op is Op.INPUT for program in built.programs for action in program)
    rounds = built.rounds
    costs = pipeline_costs(profile, plan.partition, recomputed, built.placement, split, built.versions,
                           [-(-rounds.per_update(stage) // rounds.width(stage)) for stage in range(built.stages)])
    steps = _simulate_stream(built, costs) if built.stream else _simulate_batches(built, costs)
    return SimulatedPlan(_prediction(profile, plan.partition, recomputed, steps), steps.timeline)


def ties_of(profile: Profile, partition: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the stages that borrow a stage's tied weights, by owning stage."""
    stage_of = [stage for stage, size in enumerate(partition) for _ in range(size)]
    ties: dict[int, set[int]] = {}
    for number, layer in enumerate(profile.layers):
        for owner in layer.tied:
            if stage_of[owner] != stage_of[number]:
                ties.setdefault(stage_of[owner], set()).add(stage_of[number])
    return {owner: tuple(sorted(borrowers)) for owner, borrowers in sorted(ties.items())}


def _default_placement(name: str, stages: int) -> Placement:
    recipe = recipe_named(name)
    if stages % recipe.chunks:
        raise UserError(f"'{name}' holds {recipe.chunks} stages on each rank, which do not divide "
                        f"{counted(stages, 'stage')}", hint="use a multiple, or say where the stages live")
    return recipe.layout.placement(stages // recipe.chunks, recipe.chunks)


def _build(spec: ScheduleSpec, costs: Costs) -> Schedule:
    """Build the schedule; a stream with enough microbatches for a steady state in its middle.

    It is not proved, since it is simulated only.

    Args:
        costs: of a searched schedule.
    """
    assert spec.placement is not None
    recipe = recipe_named(spec.schedule)
    one = build(spec.schedule, spec.placement, spec.microbatches, spec.update_every, spec.ties, spec.recompute,
                costs if recipe.search is not None else None)
    if one.flush:
        return one
    return build(spec.schedule, spec.placement, sum(_stream_steps(one)) * one.rounds.per_step, one.update_every,
                 spec.ties, spec.recompute)


_SETTLING = 12
"""Microbatches beyond those in flight after which a stream repeats itself, and over which a mean is good, nearly."""


def _stream_steps(schedule: Schedule) -> tuple[int, int, int]:
    """Return the steps of a simulated stream: while it fills, those that count, while it drains."""
    in_flight, per_step = schedule.ranks, schedule.rounds.per_step  # over the whole pipeline, whatever the widths
    return (-(-(in_flight + _SETTLING) // per_step) + 1,
            max(2, -(-max(_SETTLING, in_flight // 2) // per_step)), -(-in_flight // per_step))


@dataclass(frozen=True)
class _SimulatedSteps:
    """Simulated steps.

    Attributes:
        timeline: see :class:`SimulatedPlan`.
        step_s: the time from step to step.
        working_s: per rank and step, how long it computes or steps, at the speed that it has.
    """

    timeline: Timeline
    step_s: float
    working_s: tuple[float, ...]


def _simulate_batches(schedule: Schedule, costs: Costs) -> _SimulatedSteps:
    """Simulate two batches: the second may begin on a rank while other ranks finish the first."""
    if schedule.ties and any(schedule.microbatches % len(group) for group in schedule.placement):
        return _simulate_batch(schedule, costs)
    timeline = simulate(_twice(schedule), costs)
    lengths = [len(events) // 2 for events in timeline.events]
    first = tuple(events[:length] for events, length in zip(timeline.events, lengths, strict=True))
    second = tuple(events[length:] for events, length in zip(timeline.events, lengths, strict=True))
    ends = [max(float(event.end_s) for events in part for event in events) for part in (first, second)]
    alone = [tuple(action for action in program if not _is_second(action, schedule))
             for program in timeline.schedule.programs]
    transfers = tuple(transfer for transfer in timeline.transfers if not _is_second(transfer.action, schedule))
    steps = schedule.microbatches // schedule.rounds.per_step
    working = tuple(float(sum(event.end_s - event.start_s for event in events)) / steps for events in second)
    return _SimulatedSteps(Timeline(schedule.with_programs(alone), costs, first, transfers),
                           (ends[1] - ends[0]) / steps, working)


def _simulate_batch(schedule: Schedule, costs: Costs) -> _SimulatedSteps:
    """Simulate one batch, from an empty pipeline to an empty one.

    Numbered on, the microbatches of a second batch would go to other replicas than the first's, which tied weights
    do not allow.
    """
    timeline = simulate(schedule, costs)
    working = tuple(float(sum(event.end_s - event.start_s for event in events)) for events in timeline.events)
    return _SimulatedSteps(timeline, max(float(event.end_s) for events in timeline.events for event in events), working)


def _simulate_stream(schedule: Schedule, costs: Costs) -> _SimulatedSteps:
    """Simulate a stream, and average over steps in its middle, as the last stage makes them."""
    timeline, rounds = simulate(schedule, costs), schedule.rounds
    filling, counting, _ = _stream_steps(schedule)
    last = schedule.stages - 1
    made: dict[int, float] = {}  # by update of the last stage, when its last replica had made it
    for rank in schedule.placement[last]:
        for event in timeline.events[rank]:
            if event.action.op is Op.STEP and event.action.stage == last:
                update = event.action.microbatch
                made[update] = max(float(event.end_s), made.get(update, 0.0))
    per_step = rounds.per_step // rounds.per_update(last)
    begin, end = (made[steps * per_step - 1] for steps in (filling, filling + counting))
    working = tuple(sum(max(0.0, min(end, float(event.end_s)) - max(begin, float(event.start_s)))
                        for event in events) / counting for events in timeline.events)
    return _SimulatedSteps(timeline, (end - begin) / counting, working)


def _twice(schedule: Schedule) -> Schedule:
    """Return the schedule of a batch and the same batch once more."""
    programs = [(*program, *(Action(action.op, action.stage, action.microbatch + _per_batch(action, schedule))
                             for action in program)) for program in schedule.programs]
    return replace(schedule.with_programs(programs), microbatches=2 * schedule.microbatches)


def _is_second(action: Action, schedule: Schedule) -> bool:
    return action.microbatch >= _per_batch(action, schedule)


def _per_batch(action: Action, schedule: Schedule) -> int:
    """Return how much the index of an action differs from that of the same action in the batch before."""
    return schedule.microbatches if action.op in PER_MICROBATCH else schedule.updates(action.stage)


def _prediction(profile: Profile, partition: Sequence[int], recomputed: Sequence[Collection[int]],
                steps: _SimulatedSteps) -> Prediction:
    timeline, step_s = steps.timeline, steps.step_s
    schedule, costs, activations = timeline.schedule, timeline.costs, ActivationMemory(profile)
    idle = [max(0.0, step_s - working) for working in steps.working_s]
    contents: dict[int, list[StageContents]] = {stage: [] for stage in range(schedule.stages)}
    for rank in range(schedule.ranks):
        for stage, of_stage in peak_contents(schedule, costs, rank).items():
            contents[stage].append(of_stage)
    sending, stages = _sending_s(timeline), []
    for stage, layers in enumerate(ranges(partition)):
        cost, ranks = costs.stages[stage], schedule.placement[stage]
        memories = [_memory(profile, layers, recomputed[stage], each, activations) for each in contents[stage]]
        stages.append(StagePrediction(
            layers.start, len(layers), ranks, float(cost.forward_s), float(cost.input_s + cost.weight_s),
            float(cost.recompute_s), float(cost.step_s), sending[stage],
            max(idle[rank] for rank in ranks), max(memories, key=lambda memory: memory.peak)))
    return Prediction(step_s, schedule.rounds.per_step * profile.identity.microbatch_size,
                      bubble(zip(idle, steps.working_s, strict=True)), tuple(stages))


def _memory(profile: Profile, layers: range, recomputed: Collection[int], contents: StageContents,
            activations: ActivationMemory) -> StageMemory:
    """Return the memory of a stage at the moment when its rank holds most."""
    at_most = stage_memory(profile, layers, recomputed, 1, contents.versions, activations=activations)
    full = contents.recomputed if recomputed else contents.in_flight
    in_flight_bytes = (full * activations.full_bytes(layers, recomputed)
                       + (contents.in_flight - full) * activations.kept_bytes(layers, recomputed))
    half_bytes = contents.weight_halves * sum(profile.layers[number].weight_half_bytes for number in layers)
    return replace(at_most, activations=in_flight_bytes + half_bytes)


def _sending_s(timeline: Timeline) -> list[float]:
    """Return per stage the seconds per step that the transfers of one of its ranks take their links."""
    schedule = timeline.schedule
    sent = [0.0] * schedule.stages
    for transfer in timeline.transfers:
        sent[transfer.action.stage] += float(transfer.end_s - transfer.start_s)
    steps = schedule.microbatches // schedule.rounds.per_step
    return [seconds / steps / len(ranks) for seconds, ranks in zip(sent, schedule.placement, strict=True)]
