"""What a plan will take: its schedule, simulated at measured costs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from vpipe.errors import UserError, counted
from vpipe.measures import bubble
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
    """What a plan will take, and how.

    Attributes:
        prediction: in numbers.
        timeline: with a flush, or of a schedule from a file, of one batch from an empty pipeline to an empty one;
            without, of so many microbatches from the first on that a steady state is among them.
    """

    prediction: Prediction
    timeline: Timeline


def predict(profile: Profile, plan: Plan, *, schedule: str | None = None, microbatches: int | None = None,
            update_every: int | None = None) -> SimulatedPlan:
    """What training with ``plan`` takes per step; evaluations, checkpoints and reading data are not in it.

    A step with a flush is the time from one to the next of several in a row, without one the mean over several in
    the steady state.

    Args:
        schedule: its name, or the path of a CSV file, where the plan does not say.
        microbatches: of a batch, where the plan does not say.
        update_every: without a flush, microbatches per update and replica, where the plan does not say.

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
    wanted = ScheduleSpec(name, len(plan.partition), microbatches, plan.update_every or update_every,
                          plan.stage_to_rank_map or None, ties=ties_of(profile, plan.partition),
                          recompute=[stage for stage, dropped in enumerate(recomputed) if dropped])
    if is_file(name):
        arranged = wanted.prepare()
    else:
        placement = wanted.placement or _default(name, wanted.stages)
        arranged = _built(replace(wanted, placement=placement),
                          pipeline_costs(profile, plan.partition, recomputed, placement))
    split = any(action.op is Op.INPUT for program in arranged.programs for action in program)
    rounds = arranged.rounds
    costs = pipeline_costs(profile, plan.partition, recomputed, arranged.placement, split, arranged.versions,
                           [-(-rounds.span(stage) // rounds.width(stage)) for stage in range(arranged.stages)])
    steps = _Steps.simulated(arranged, costs)
    return SimulatedPlan(_prediction(profile, plan.partition, recomputed, steps), steps.timeline)


def ties_of(profile: Profile, partition: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The stages that borrow a stage's tied weights, by owning stage."""
    stage_of = [stage for stage, size in enumerate(partition) for _ in range(size)]
    ties: dict[int, set[int]] = {}
    for number, layer in enumerate(profile.layers):
        for owner in layer.tied:
            if stage_of[owner] != stage_of[number]:
                ties.setdefault(stage_of[owner], set()).add(stage_of[number])
    return {owner: tuple(sorted(borrowers)) for owner, borrowers in sorted(ties.items())}


def _default(name: str, stages: int) -> Placement:
    recipe = recipe_named(name)
    if stages % recipe.chunks:
        raise UserError(f"'{name}' holds {recipe.chunks} stages on each rank, which do not divide "
                        f"{counted(stages, 'stage')}", hint="use a multiple, or say where the stages live")
    return recipe.layout.placement(stages // recipe.chunks, recipe.chunks)


def _built(wanted: ScheduleSpec, costs: Costs) -> Schedule:
    """The schedule; without a flush of so many microbatches that there is a steady state in its middle.

    Not proved: what is simulated is not run.

    Args:
        costs: of a searched one.
    """
    assert wanted.placement is not None
    recipe = recipe_named(wanted.schedule)
    one = build(wanted.schedule, wanted.placement, wanted.microbatches, wanted.update_every, wanted.ties,
                wanted.recompute, costs if recipe.search is not None else None)
    if one.flush:
        return one
    return build(wanted.schedule, wanted.placement, _Stream.of(one).steps * one.rounds.per_step, one.update_every,
                 wanted.ties, wanted.recompute)


_SETTLING = 12
"""Microbatches beyond those in flight after which a stream repeats itself, and over which a mean is good, nearly."""


@dataclass(frozen=True)
class _Stream:
    """How a stream is looked at: the steps while it fills, those that count, those while it empties."""

    filling: int
    counted: int
    emptying: int

    @classmethod
    def of(cls, schedule: Schedule) -> _Stream:
        in_flight, per_step = schedule.ranks, schedule.rounds.per_step  # over the whole pipeline, whatever the widths
        return cls(-(-(in_flight + _SETTLING) // per_step) + 1,
                   max(2, -(-max(_SETTLING, in_flight // 2) // per_step)), -(-in_flight // per_step))

    @property
    def steps(self) -> int:
        return self.filling + self.counted + self.emptying


@dataclass(frozen=True)
class _Steps:
    """Simulated steps.

    Attributes:
        timeline: see :class:`SimulatedPlan`.
        step_s: the time from step to step.
        working_s: per rank and step, how long it computes or steps, at the speed that it has.
    """

    timeline: Timeline
    step_s: float
    working_s: tuple[float, ...]

    @classmethod
    def simulated(cls, schedule: Schedule, costs: Costs) -> _Steps:
        return cls._of_batches(schedule, costs) if not schedule.stream else cls._of_stream(schedule, costs)

    @classmethod
    def _of_batches(cls, schedule: Schedule, costs: Costs) -> _Steps:
        """From the end of one batch to the end of the next: that may begin on a rank while others finish the first."""
        if schedule.ties and any(schedule.microbatches % len(crew) for crew in schedule.placement):
            return cls._of_one(schedule, costs)
        timeline = simulate(_again(schedule), costs)
        lengths = [len(events) // 2 for events in timeline.events]
        first = tuple(events[:length] for events, length in zip(timeline.events, lengths, strict=True))
        second = tuple(events[length:] for events, length in zip(timeline.events, lengths, strict=True))
        ends = [max(float(event.end_s) for events in part for event in events) for part in (first, second)]
        alone = [tuple(action for action in program if not _later(action, schedule))
                 for program in timeline.schedule.programs]
        ways = tuple(way for way in timeline.transfers if not _later(way.action, schedule))
        steps = schedule.microbatches // schedule.rounds.per_step
        working = tuple(float(sum(event.end_s - event.start_s for event in events)) / steps for events in second)
        return cls(Timeline(schedule.with_programs(alone), costs, first, ways), (ends[1] - ends[0]) / steps, working)

    @classmethod
    def _of_one(cls, schedule: Schedule, costs: Costs) -> _Steps:
        """From an empty pipeline to an empty one: numbered on, microbatches of a second batch would be those of other
        replicas than the first's, which tied weights do not go with."""
        timeline = simulate(schedule, costs)
        working = tuple(float(sum(event.end_s - event.start_s for event in events)) for events in timeline.events)
        return cls(timeline, max(float(event.end_s) for events in timeline.events for event in events), working)

    @classmethod
    def _of_stream(cls, schedule: Schedule, costs: Costs) -> _Steps:
        """The mean over steps in the middle, as the last stage makes them."""
        timeline, stream, rounds = simulate(schedule, costs), _Stream.of(schedule), schedule.rounds
        last = schedule.stages - 1
        made: dict[int, float] = {}  # by update of the last stage, when its last replica had made it
        for rank in schedule.placement[last]:
            for event in timeline.events[rank]:
                if event.action.op is Op.STEP and event.action.stage == last:
                    update = event.action.microbatch
                    made[update] = max(float(event.end_s), made.get(update, 0.0))
        per_step = rounds.per_step // rounds.span(last)
        begin, end = (made[steps * per_step - 1] for steps in (stream.filling, stream.filling + stream.counted))
        working = tuple(sum(max(0.0, min(end, float(event.end_s)) - max(begin, float(event.start_s)))
                            for event in events) / stream.counted for events in timeline.events)
        return cls(timeline, (end - begin) / stream.counted, working)


def _again(schedule: Schedule) -> Schedule:
    """A batch, and the same once more."""
    programs = [(*program, *(Action(action.op, action.stage, action.microbatch + _per_batch(action, schedule))
                             for action in program)) for program in schedule.programs]
    return replace(schedule.with_programs(programs), microbatches=2 * schedule.microbatches)


def _later(action: Action, schedule: Schedule) -> bool:
    """Whether an action belongs to the second batch."""
    return action.microbatch >= _per_batch(action, schedule)


def _per_batch(action: Action, schedule: Schedule) -> int:
    """By how much its number differs from that of the same action in the batch before."""
    return schedule.microbatches if action.op in PER_MICROBATCH else schedule.updates(action.stage)


def _prediction(profile: Profile, partition: Sequence[int], recomputed: Sequence[Collection[int]],
                steps: _Steps) -> Prediction:
    timeline, step_s = steps.timeline, steps.step_s
    schedule, costs, held = timeline.schedule, timeline.costs, ActivationMemory(profile)
    idle = [max(0.0, step_s - working) for working in steps.working_s]
    loads: dict[int, list[StageContents]] = {stage: [] for stage in range(schedule.stages)}
    for rank in range(schedule.ranks):
        for stage, load in peak_contents(schedule, costs, rank).items():
            loads[stage].append(load)
    sending, stages = _sending_s(steps), []
    for stage, layers in enumerate(ranges(partition)):
        cost, ranks = costs.stages[stage], schedule.placement[stage]
        memories = [_memory(profile, layers, recomputed[stage], load, held) for load in loads[stage]]
        stages.append(StagePrediction(
            layers.start, len(layers), ranks, float(cost.forward_s), float(cost.input_s + cost.weight_s),
            float(cost.recompute_s), float(cost.step_s), sending[stage],
            max(idle[rank] for rank in ranks), max(memories, key=lambda memory: memory.peak)))
    per_step = schedule.rounds.per_step
    return Prediction(step_s, per_step * profile.identity.microbatch_size,
                      bubble(zip(idle, steps.working_s, strict=True)), tuple(stages))


def _memory(profile: Profile, layers: range, recomputed: Collection[int], load: StageContents,
            held: ActivationMemory) -> StageMemory:
    """Of a stage with a load: as :func:`~vpipe.plan.stage_costs.stage_memory`, at one moment of its rank."""
    at_most = stage_memory(profile, layers, recomputed, 1, load.versions, held=held)
    full = load.recomputed if recomputed else load.in_flight
    activations = (full * held.full(layers, recomputed) + (load.in_flight - full) * held.kept(layers, recomputed)
                   + load.weight_halves * sum(profile.layers[number].weight_half_bytes for number in layers))
    return replace(at_most, activations=activations)


def _sending_s(steps: _Steps) -> list[float]:
    """Per stage, how long what one rank of it sends takes its links, per step."""
    timeline = steps.timeline
    sent = [0.0] * timeline.schedule.stages
    for way in timeline.transfers:
        sent[way.action.stage] += float(way.end_s - way.start_s)
    schedule = timeline.schedule
    simulated = schedule.microbatches // schedule.rounds.per_step
    return [seconds / simulated / len(ranks) for seconds, ranks in zip(sent, schedule.placement, strict=True)]
