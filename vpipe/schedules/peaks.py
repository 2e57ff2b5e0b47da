"""What a schedule holds: activations, weight versions, staleness, counted from its programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vpipe.schedules.action import COMPLETES, RETURNS, Action, Op
from vpipe.schedules.costs import Costs, Number, StageCosts
from vpipe.schedules.schedule import Schedule, stages_of_rank


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What a rank holds when it has executed the action at ``position``.

    Attributes:
        position: in its program.
        activations: microbatch-stages between their forward and the passing of their gradient (B or I).
        weight_halves: microbatch-stages between their I and their W.
    """

    position: int
    activations: int
    weight_halves: int


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What a stage holds when its rank has executed the action at ``position``.

    Attributes:
        position: in the program of its rank.
        versions: weight versions: those from the one in use to the latest, since a later forward may use any of
            them, and those that microbatches in flight use.
        staleness: when a gradient passes, latest version - version used; otherwise 0.
    """

    position: int
    versions: int
    staleness: int


def rank_loads(program: Sequence[Action]) -> Iterator[RankLoad]:
    """What a rank holds after each of its forwards, backwards and halves."""
    activations = halves = 0
    for position, action in enumerate(program):
        if action.op is Op.FORWARD:
            activations += 1
        elif action.op is Op.WEIGHT:
            halves -= 1
        elif action.op in RETURNS:
            activations -= 1
            halves += action.op is Op.INPUT
        else:
            continue
        yield RankLoad(position, activations, halves)


def stage_loads(program: Sequence[Action], stage: int) -> Iterator[StageLoad]:
    """What ``stage`` holds after each forward, backward, half, step and USE of its rank's program."""
    latest = 0
    chosen: int | None = None  # what a USE said
    pinned: dict[int, int] = {}  # version by microbatch in flight
    users: Counter[int] = Counter()  # microbatches in flight by version
    for position, action in enumerate(program):
        if action.stage != stage:
            continue
        staleness = 0
        if action.op is Op.FORWARD:
            version = latest if chosen is None else chosen
            pinned[action.microbatch] = version
            users[version] += 1
        elif action.op is Op.STEP:
            latest += 1
        elif action.op is Op.USE:
            chosen = action.microbatch
        elif action.op not in RETURNS and action.op not in COMPLETES:
            continue
        if action.op in RETURNS:
            staleness = latest - pinned[action.microbatch]
        if action.op in COMPLETES:
            used = pinned.pop(action.microbatch)
            users[used] -= 1
            if not users[used]:
                del users[used]
        oldest = latest if chosen is None else chosen
        yield StageLoad(position, latest - oldest + 1 + sum(version < oldest for version in users), staleness)


@dataclass(frozen=True)
class RankPeaks:
    """The most that a rank ever holds: see :class:`RankLoad`."""

    peak_activations: int
    peak_weight_halves: int


@dataclass(frozen=True)
class StagePeaks:
    """The most that a stage ever holds: see :class:`StageLoad`."""

    versions: int
    staleness: int


def rank_peaks(schedule: Schedule) -> tuple[RankPeaks, ...]:
    """Per rank, what its program holds at most; ``schedule`` must have passed :func:`~vpipe.schedules.check.check`."""
    held = [list(rank_loads(program)) for program in schedule.programs]
    return tuple(RankPeaks(max(load.activations for load in rank), max(load.weight_halves for load in rank))
                 for rank in held)


def stage_peaks(schedule: Schedule) -> tuple[StagePeaks, ...]:
    """Per stage, what it holds at most; ``schedule`` must have passed :func:`~vpipe.schedules.check.check`."""
    held = [[load for rank in ranks for load in stage_loads(schedule.programs[rank], stage)]
            for stage, ranks in enumerate(schedule.placement)]
    return tuple(StagePeaks(max(load.versions for load in stage), max(load.staleness for load in stage))
                 for stage in held)


@dataclass(slots=True)
class StageContents:
    """What a stage holds.

    Attributes:
        in_flight: microbatches between forward and backward.
        recomputed: of these, those whose dropped activations are there again.
        weight_halves: microbatches between the halves of their backward.
        versions: of the weights.
    """

    in_flight: int = 0
    recomputed: int = 0
    weight_halves: int = 0
    versions: int = 1

    def bytes(self, cost: StageCosts) -> Number:
        """Of all the microbatches and versions."""
        kept = cost.kept_bytes if cost.recompute_s else cost.activation_bytes
        return (kept * (self.in_flight - self.recomputed) + cost.activation_bytes * self.recomputed
                + cost.weight_half_bytes * self.weight_halves + cost.version_bytes * self.versions)


def peak_contents(schedule: Schedule, costs: Costs, rank: int) -> dict[int, StageContents]:
    """By stage of ``rank``, what it holds when the rank holds most; the first such moment."""
    most: Number = -1
    found: dict[int, StageContents] = {}
    for loads, held in _moments(schedule, costs, rank):
        if held > most:
            most, found = held, {stage: replace(load) for stage, load in loads.items()}
    return found


def _moments(schedule: Schedule, costs: Costs, rank: int) -> Iterator[tuple[dict[int, StageContents], Number]]:
    """What the stages of a rank hold, and in bytes together, after each of its actions; and while one recomputes."""
    program, stages = schedule.programs[rank], stages_of_rank(schedule.placement, rank)
    versions = {stage: {load.position: load.versions for load in stage_loads(program, stage)} for stage in stages}
    early = {action.stage for action in program if action.op is Op.RECOMPUTE}
    loads = {stage: StageContents() for stage in stages}
    held = {stage: load.bytes(costs.stages[stage]) for stage, load in loads.items()}
    yield loads, sum(held.values())
    for position, action in enumerate(program):
        stage, op = action.stage, action.op
        if stage not in loads:  # tied weights of another rank's
            continue
        load, cost = loads[stage], costs.stages[stage]
        if op in RETURNS:
            if cost.recompute_s and stage not in early:  # all by itself: there is more while it lasts
                load.recomputed = 1
                held[stage] = load.bytes(cost)
                yield loads, sum(held.values())
            load.in_flight -= 1
            load.recomputed = max(0, load.recomputed - 1)
            load.weight_halves += op is Op.INPUT
        elif op is Op.FORWARD:
            load.in_flight += 1
        elif op is Op.RECOMPUTE:
            load.recomputed += 1
        elif op is Op.WEIGHT:
            load.weight_halves -= 1
        elif position not in versions[stage]:
            continue
        load.versions = versions[stage].get(position, load.versions)
        held[stage] = load.bytes(cost)
        yield loads, sum(held.values())
