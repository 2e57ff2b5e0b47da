"""Predict what a plan takes: simulate its schedule at measured costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from vpipe.description.cut import Cut, ranges, stage_specs, ties_between
from vpipe.description.order import Order
from vpipe.errors import UserError
from vpipe.plan.plan import Plan, Prediction, StagePrediction
from vpipe.plan.profile import Profile
from vpipe.plan.stage_costs import kept_bytes, pipeline_costs, stage_memory
from vpipe.schedules.builder import build, described, placed, proved, with_frozen
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.kinds import HALF, KEPT, RECOMPUTED, SAVED, UPDATED
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.rewrites import freeze
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.timeline import SimulatedSteps, Timeline, lengthened, peak_contents, simulate_steps


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan's prediction, with the timeline that it comes from."""

    prediction: Prediction  # in numbers
    # with a flush, or of a schedule from a file, of one batch from an empty pipeline to an empty one; without, of the
    # first microbatches, enough to contain a steady state
    timeline: Timeline


def predict(profile: Profile, plan: Plan, *, schedule: str | None = None, microbatches: int | None = None,
            update_every: int | None = None, lanes: int = 1) -> SimulatedPlan:
    """Predict what training with ``plan`` takes per step, without evaluations, checkpoints and reading data.

    With a flush the time of a step is that from one to the next of several in a row. Without one it is the mean over
    several in the steady state.

    Args:
        schedule: its name, or the path of a CSV file, where the plan has none.
        microbatches: of a batch, where the plan has none.
        update_every: without a flush, microbatches per update and replica, where the plan has none.
        lanes: among which ``fully_shard`` divides the weights of every stage; what they send takes no time here.

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
    ties = {owner: tuple(borrowers) for owner, borrowers in ties_between(
        stage_specs(profile.names, profile.fields, partition)).items()}
    frozen = sum(layers.stop <= profile.frozen_layers for layers in ranges(partition))
    built = freeze(_built(profile, order, plan.cut, microbatches, ties), frozen) if not CsvFile.is_path(name) else \
        with_frozen(proved(described(order, plan.cut, microbatches, ties=ties)), frozen)
    split = bool(built.split_backwards)
    assignment = built.assignment
    shares = [-(-assignment.per_update(stage) // len(ranks)) for stage, ranks in enumerate(built.placement)]
    part = profile.sliced(assignment.indices(1))
    costs = pipeline_costs(part, partition, recomputed, built.placement, split, built.versions, shares)
    steps = simulate_steps(built, costs)
    return SimulatedPlan(_prediction(part, partition, recomputed, steps, lanes), steps.timeline)


def _built(profile: Profile, order: Order, cut: Cut, microbatches: int,
           ties: Mapping[int, tuple[int, ...]]) -> Schedule:
    """Build a schedule that is simulated only, so without proof; a stream with a steady state in its middle."""
    registered = RegisteredSchedule.named(order.schedule)
    placement = placed(registered, order, cut)
    costs = None if registered.search is None else pipeline_costs(profile, cut.partition, cut.recomputed, placement)
    one = build(order.schedule, placement, microbatches, order.update_every, ties, cut.recomputing, costs,
                warmup=order.warmup, slices=order.slices or 1)
    return one if one.flush else lengthened(one, cut.recomputing)


def _prediction(profile: Profile, partition: Sequence[int], recomputed: Sequence[Collection[int]],
                steps: SimulatedSteps, lanes: int) -> Prediction:
    timeline, step_s = steps.timeline, steps.step_s
    schedule, costs = timeline.schedule, timeline.costs
    each = schedule.assignment.indices(1)  # of a microbatch
    idle = [max(0.0, step_s - working) for working in steps.working_s]
    contents = [peak_contents(program, schedule.stages_of(rank), costs, schedule.frozen)
                for rank, program in enumerate(schedule.programs)]
    kept = kept_bytes(profile, partition, recomputed, schedule.placement)
    sending, stages = _sending_s(timeline), []
    for stage, layers in enumerate(ranges(partition)):
        cost, ranks = costs.stages[stage], schedule.placement[stage]
        memories = [stage_memory(profile, layers, recomputed[stage], held[SAVED, stage], held[UPDATED, stage],
                                 held[HALF, stage], held[RECOMPUTED, stage], len(ranks), lanes,
                                 held[KEPT, stage] * kept.waiting[stage] - held[SAVED, stage] * kept.shared[stage])
                    for rank, held in enumerate(contents) if rank in ranks]
        stages.append(StagePrediction(
            layers.start, len(layers), ranks, each * float(cost.forward_s), each * float(cost.input_s + cost.weight_s),
            each * float(cost.recompute_s), float(cost.step_s), sending[stage], max(idle[rank] for rank in ranks),
            max(memories, key=lambda memory: memory.peak)))
    return Prediction(step_s, schedule.assignment.step_microbatches * profile.identity.microbatch_size,
                      Plan.bubble_of(zip(idle, steps.working_s, strict=True)), tuple(stages), profile.process_bytes,
                      profile.kept_share)


def _sending_s(timeline: Timeline) -> list[float]:
    """Return per stage the seconds per step that the transfers of one of its ranks take their links."""
    schedule = timeline.schedule
    sent = [0.0] * schedule.stages
    for transfer in timeline.transfers:
        sent[transfer.action.stage] += float(transfer.end_s - transfer.start_s)
    steps = schedule.microbatches // schedule.assignment.per_step
    return [seconds / steps / len(ranks) for seconds, ranks in zip(sent, schedule.placement, strict=True)]
