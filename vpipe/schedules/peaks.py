"""Count what the programs of a schedule hold at most: activations, weight halves, weight versions, staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vpipe.schedules.action import Action
from vpipe.schedules.costs import Costs, Number, StageCosts
from vpipe.schedules.kinds import HALF, RECOMPUTED, SAVED, is_own
from vpipe.schedules.schedule import Schedule, stages_of_rank
from vpipe.schedules.versions import VersionRegister


class RankLoad(NamedTuple):
    """The contents of a rank behind the action at ``position`` of its program.

    Attributes:
        activations: microbatch-stages between their forward and the passing of their gradient (B or I).
        weight_halves: microbatch-stages between their I and their W.
    """

    position: int
    activations: int
    weight_halves: int


class StageLoad(NamedTuple):
    """The contents of a stage behind the action at ``position`` of its rank's program.

    Attributes:
        versions: weight versions: those from the one in use to the latest, since a later forward may use any of
            them, and those that microbatches in flight use.
        staleness: when a gradient passes, latest version - version used; otherwise 0.
    """

    position: int
    versions: int
    staleness: int


def rank_loads(program: Sequence[Action]) -> Iterator[RankLoad]:
    """Yield what a rank holds behind each action that takes or frees memory."""
    activations = halves = 0
    for position, action in enumerate(program):
        more = action.op.more_held
        if more != (0, 0):
            activations, halves = activations + more[0], halves + more[1]
            yield RankLoad(position, activations, halves)


def stage_loads(program: Sequence[Action], stage: int) -> Iterator[StageLoad]:
    """Yield what ``stage`` holds behind each forward, backward, half, step and USE of its rank's program."""
    register = VersionRegister()
    pinned: dict[int, int] = {}  # version by microbatch in flight
    users: Counter[int] = Counter()  # microbatches in flight by version
    for position, action in enumerate(program):
        op, own, microbatch = action
        if own != stage or not op.touches_versions:
            continue
        staleness = 0
        if op.uses_version:
            pinned[microbatch] = register.in_use
            users[register.in_use] += 1
        else:
            register.follow(action)
        if op.returns:
            staleness = register.latest - pinned[microbatch]
        if op.completes:
            used = pinned.pop(microbatch)
            users[used] -= 1
            if not users[used]:
                del users[used]
        oldest = register.in_use
        older = len(users) - (oldest in users)  # versions are used in order
        yield StageLoad(position, register.latest - oldest + 1 + older, staleness)


@dataclass(frozen=True)
class RankPeaks:
    """The most that a rank ever holds; see :class:`RankLoad`."""

    peak_activations: int
    peak_weight_halves: int


@dataclass(frozen=True)
class StagePeaks:
    """The most that a stage ever holds: see :class:`StageLoad`."""

    versions: int
    staleness: int


def rank_peaks(schedule: Schedule) -> tuple[RankPeaks, ...]:
    """Return the peaks of every rank; ``schedule`` must have passed :func:`~vpipe.schedules.check.check`."""
    loads = [list(rank_loads(program)) for program in schedule.programs]
    return tuple(RankPeaks(max(load.activations for load in rank), max(load.weight_halves for load in rank))
                 for rank in loads)


def stage_peaks(schedule: Schedule) -> tuple[StagePeaks, ...]:
    """Return the peaks of every stage of such a schedule."""
    loads = [[load for rank in ranks for load in stage_loads(schedule.programs[rank], stage)]
            for stage, ranks in enumerate(schedule.placement)]
    return tuple(StagePeaks(max(load.versions for load in stage), max(load.staleness for load in stage))
                 for stage in loads)


@dataclass(slots=True)
class StageContents:
    """The contents of a stage at one moment.

    Attributes:
        in_flight: microbatches between forward and backward.
        dropped: those of them of which only ``kept_bytes`` are there.
        recomputed: those of them whose dropped activations are recomputed.
        weight_halves: microbatches between the halves of their backward.
        versions: of the weights.
        others: size of values that packages' kinds hold.
    """

    in_flight: int = 0
    dropped: int = 0
    recomputed: int = 0
    weight_halves: int = 0
    versions: int = 1
    others: Number = 0

    def size(self, cost: StageCosts) -> Number:
        """Return the size of all that is held, in the units of the costs."""
        return (cost.kept_bytes * self.dropped + cost.activation_bytes * (self.in_flight - self.dropped)
                + cost.weight_half_bytes * self.weight_halves + cost.version_bytes * self.versions
                + self.others)


def peak_contents(schedule: Schedule, costs: Costs, rank: int) -> dict[int, StageContents]:
    """Return, by stage of ``rank``, what it holds at the first moment when the rank holds most."""
    most: Number = -1
    found: dict[int, StageContents] = {}
    for _, _, contents, held in moments(schedule, costs, rank, every_version=True):
        if held > most:
            most, found = held, {stage: replace(each) for stage, each in contents.items()}
    return found


def moments(schedule: Schedule, costs: Costs, rank: int,
            every_version: bool = False) -> Iterator[tuple[int, bool, dict[int, StageContents], Number]]:
    """Yield what the stages of a rank hold, and its size in the units of the costs, whenever an action may change it.

    Before each stands the action's position in the program, -1 at the beginning, and whether its start changes them:
    a forward and a recomputation, also one within a backward, take memory as they start. Versions that take no bytes
    are counted only with ``every_version``.
    """
    program, stages = schedule.programs[rank], stages_of_rank(schedule.placement, rank)
    in_units, unit = costs.in_units
    versions = {stage: {load.position: load.versions for load in stage_loads(program, stage)}
                if every_version or costs.stages[stage].version_bytes else {} for stage in stages}
    early, foreign = recomputations(program), {kind for kind in schedule.kinds if not is_own(kind)}
    contents = {stage: StageContents() for stage in stages}
    held = {stage: each.size(in_units[stage]) for stage, each in contents.items()}
    yield -1, True, contents, sum(held.values())
    for position, action in enumerate(program):
        stage, memory = action.stage, action.op.memory
        if stage not in contents:  # tied weights of another rank's
            continue
        own, cost, is_early = contents[stage], in_units[stage], (stage, action.microbatch) in early
        if memory is None and position not in versions[stage]:
            continue
        for value in memory.takes if memory is not None else ():
            if value is SAVED:
                own.in_flight += 1
                own.dropped += is_early or cost.recompute_s > 0
            elif value is RECOMPUTED:
                own.dropped, own.recomputed = own.dropped - 1, own.recomputed + 1
        if action.op.recomputes and cost.recompute_s and not is_early:
            own.dropped, own.recomputed = own.dropped - 1, own.recomputed + 1
            held[stage] = own.size(cost)
            yield position, True, contents, sum(held.values())
        if memory is not None:
            if SAVED in memory.frees:
                own.in_flight -= 1
                own.dropped -= not action.op.recomputes and (is_early or cost.recompute_s > 0)
            if RECOMPUTED in memory.frees:
                own.recomputed = max(0, own.recomputed - 1)
            own.weight_halves += (HALF in memory.leaves) - (HALF in memory.frees)
            if action.op in foreign:
                own.others += unit * (sum(value.bytes(costs.stages[stage]) for value in memory.takes + memory.leaves)
                                      - sum(value.bytes(costs.stages[stage]) for value in memory.frees))
        own.versions = versions[stage].get(position, own.versions)
        held[stage] = own.size(cost)
        yield position, memory is not None and bool(memory.takes), contents, sum(held.values())


def recomputations(program: Sequence[Action]) -> set[tuple[int, int]]:
    """Return (stage, microbatch) of everything that ``program`` recomputes before the backward."""
    return {(action.stage, action.microbatch) for action in program
            if action.op.memory is not None and RECOMPUTED in action.op.memory.takes}
