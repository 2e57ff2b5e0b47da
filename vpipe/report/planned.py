"""The run as it was to be: a simulated timeline in the form of a recorded one, so that all figures are made alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from vpipe.report.causes import Cause, Producers, medians, pieces
from vpipe.report.recorded import Done, Recording, Track
from vpipe.report.steady import step_ends
from vpipe.schedules.action import COMPUTE, PER_MICROBATCH, Action, Op
from vpipe.schedules.costs import Costs, Link, StageCosts
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.simulate import simulate
from vpipe.schedules.simulator.timeline import Timeline

_LONGEST = 24  # steps that are simulated
_REPLAYED = COMPUTE | {Op.STEP}


def as_recording(timeline: Timeline, like: Recording) -> Recording:
    """A simulated timeline in the form of a recording: a rank that has nothing to do waits for its next action.

    Args:
        like: the recording that it stands beside: sizes and names come from it.
    """
    schedule, tracks = timeline.schedule, []
    for rank, events in enumerate(timeline.events):
        actions: list[Done] = []
        now = 0.0
        for event in events:
            start, end = float(event.start_s), float(event.end_s)
            actions.append(Done(event.action.op, event.action.stage, event.action.microbatch, now, end,
                                max(0.0, start - now), 0, 0))
            now = end
        tracks.append(Track(rank, "", actions))
    return replace(like, schedule=schedule.name, placement=schedule.placement, flush=schedule.flush,
                   microbatches=schedule.update_every if schedule.flush else like.microbatches,
                   update_every=schedule.update_every, tracks=tuple(tracks), notes=())


def in_a_row(timeline: Timeline, batches: int) -> Timeline:
    """So many batches of a schedule with a flush, where ``timeline`` is of one."""
    schedule = timeline.schedule
    count = schedule.microbatches

    def turn(number: int, action: Action) -> Action:
        return Action(action.op, action.stage,
                      action.microbatch + number * (count if action.op in PER_MICROBATCH else 1))

    programs = [[turn(number, action) for number in range(batches) for action in program]
                for program in schedule.programs]
    return simulate(replace(schedule.with_programs(programs), microbatches=batches * count), timeline.costs)


def replayed(recording: Recording, producers: Producers) -> Timeline | None:
    """The recorded order of actions at the run's own medians: what it would have been without a stray one.

    None where not even one step was recorded whole.
    """
    first, steps = _whole_from_start(recording)
    if not steps:
        return None
    rounds = recording.rounds
    before = first * rounds.per_step  # microbatches of earlier attempts of the run
    last = steps * rounds.per_step

    def taken(done: Done) -> int:
        return rounds.span(done.stage) if done.op is Op.STEP else 1

    programs = [[Action(done.op, done.stage, done.number - before // taken(done)) for done in track.actions
                 if done.op in _REPLAYED and (done.number + 1) * taken(done) <= before + last]
                for track in recording.tracks]
    ranks, stages = len(programs), len(recording.placement)
    schedule = Schedule(recording.schedule, recording.placement, tuple(map(tuple, programs)), last,
                        rounds.update_every, recording.flush, (last * stages,) * ranks, (last + 1,) * stages, {})
    return simulate(schedule, _median_costs(recording, producers, programs))


def _whole_from_start(recording: Recording) -> tuple[int, int]:
    """The first step, and how many from it on were recorded whole, up to a limit."""
    ends = step_ends(recording)
    first = min(ends, default=0)
    count = next((number for number in range(len(ends)) if first + number not in ends), len(ends))
    return first, min(count, max(_LONGEST, 3 * len(recording.placement)))


def _median_costs(recording: Recording, producers: Producers, programs: Sequence[Sequence[Action]]) -> Costs:
    usual = medians(recording)
    early = {action.stage for program in programs for action in program if action.op is Op.RECOMPUTE}

    def stage(number: int) -> StageCosts:
        def of(op: Op) -> float:
            return usual.get((number, op), 0.0)

        whole = of(Op.BACKWARD)
        halves = (of(Op.INPUT), of(Op.WEIGHT)) if (number, Op.INPUT) in usual else (whole, 0.0)
        return StageCosts(of(Op.FORWARD), *halves, recompute_s=of(Op.RECOMPUTE) if number in early else 0.0,
                          step_s=of(Op.STEP))

    waits = list(_transfer_waits(recording, producers))
    latency = median(waits) if waits else 0.0
    return Costs(tuple(map(stage, range(len(recording.placement)))), Link(latency))


def _transfer_waits(recording: Recording, producers: Producers) -> Iterator[float]:
    """How long what ranks waited for was under way."""
    for track in recording.tracks:
        for piece in pieces(recording, track, producers):
            if piece.cause is Cause.TRANSFER:
                yield piece.end_s - piece.start_s


def planned_memory(timeline: Timeline, static_bytes: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Per rank (second, bytes held from then on), with what it holds all the time."""
    curves: list[list[tuple[float, float]]] = []
    for curve, static in zip(timeline.memory, static_bytes, strict=True):
        points: dict[float, float] = defaultdict(float)
        for second, held in curve:
            points[float(second)] = float(held) + static
        curves.append(sorted(points.items()))
    return curves
