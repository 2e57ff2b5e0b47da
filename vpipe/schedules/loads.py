"""Follow what a program holds, action by action: activations, weight halves, weight versions, and their size.

What an action takes, leaves and frees stands in the row of its kind (:mod:`vpipe.schedules.kinds`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from vpipe.schedules.action import Action
from vpipe.schedules.costs import Costs, Number, StageCosts
from vpipe.schedules.kinds import RECOMPUTED
from vpipe.schedules.versions import VersionRegister


@dataclass(frozen=True)
class RankPeaks:
    """The most that a rank ever holds."""

    peak_activations: int  # microbatch-stages between their forward and the passing of their gradient (B or I)
    peak_weight_halves: int  # microbatch-stages between their I and their W

    @classmethod
    def of(cls, program: Iterable[Action], frozen: int = 0) -> RankPeaks:
        """Return the peaks of a program; see :func:`rank_loads`."""
        loads = [(0, 0), *((activations, halves) for _, activations, halves in rank_loads(program, frozen))]
        return cls(*map(max, zip(*loads, strict=True)))


@dataclass(frozen=True)
class StagePeaks:
    """The most that a stage ever holds; see :func:`stage_loads`."""

    versions: int
    staleness: int

    @classmethod
    def of(cls, programs: Iterable[Sequence[Action]], stage: int, frozen: int = 0) -> StagePeaks:
        """Return the peaks of a stage in the programs of its ranks."""
        loads = [load for program in programs for _, *load in stage_loads(program, stage, frozen)]
        return cls(*map(max, zip(*loads, strict=True)))


def rank_loads(program: Iterable[Action], frozen: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yield the position of each action that takes or frees memory, and the activations and weight halves after it.

    Both are counted in microbatch-stages, as in :class:`RankPeaks`; the ``frozen`` stages in front keep nothing.
    """
    activations = halves = 0
    for position, action in enumerate(program):
        more = action.op.more_held
        if more != (0, 0) and action.stage >= frozen:
            activations, halves = activations + more[0], halves + more[1]
            yield position, activations, halves


def stage_loads(program: Iterable[Action], stage: int, frozen: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yield the position of each forward, backward, half, step and USE of ``stage``, its versions, and its staleness.

    The weight versions are those from the one in use to the latest, since a later forward may use any of them, and
    those that microbatches in flight use; each of the ``frozen`` stages in front needs no version beyond the forward.
    The staleness is latest version - version used when a gradient passes; otherwise 0.
    """
    register = VersionRegister()
    pinned: dict[int, int] = {}  # version by microbatch in flight
    users: Counter[int] = Counter()  # microbatches in flight by version
    for position, action in enumerate(program):
        op, own, microbatch = action
        if own != stage or not op.touches_versions:
            continue
        staleness = 0
        if op.uses_version:
            if stage >= frozen:
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
        yield position, register.latest - oldest + 1 + older, staleness


def recomputations(program: Sequence[Action]) -> set[tuple[int, int]]:
    """Return (stage, microbatch) of everything that ``program`` recomputes before the backward."""
    return {(action.stage, action.index) for action in program
            if action.op.memory is not None and RECOMPUTED in action.op.memory.takes}


@dataclass(slots=True)
class StageContents:
    """The contents of a stage at one moment."""

    in_flight: int = 0  # microbatches between forward and backward
    dropped: int = 0  # those of them of which only ``kept_bytes`` are there
    recomputed: int = 0  # those of them whose dropped activations are recomputed
    weight_halves: int = 0  # microbatches between the halves of their backward
    versions: int = 1  # of the weights
    others: Number = 0  # size of values that packages' kinds hold

    def size(self, cost: StageCosts) -> Number:
        """Return the size of all that is held, in the units of the costs."""
        return (cost.kept_bytes * self.dropped + cost.activation_bytes * (self.in_flight - self.dropped)
                + cost.weight_half_bytes * self.weight_halves + cost.version_bytes * self.versions
                + self.others)


def peak_contents(program: Sequence[Action], stages: Sequence[int], costs: Costs,
                  frozen: int = 0) -> dict[int, StageContents]:
    """Return, by stage of a rank, what it holds at the first moment when the rank holds most; see :func:`moments`."""
    most: Number = -1
    found: dict[int, StageContents] = {}
    for _, _, contents, held in moments(program, stages, costs, frozen, every_version=True):
        if held > most:
            most, found = held, {stage: replace(each) for stage, each in contents.items()}
    return found


def moments(program: Sequence[Action], stages: Sequence[int], costs: Costs, frozen: int = 0,
            every_version: bool = False) -> Iterator[tuple[int, bool, dict[int, StageContents], Number]]:
    """Yield what the stages of a rank hold, and its size in the units of the costs, whenever an action may change it.

    Before each stands the action's position in the program, -1 at the beginning, and whether its start changes them:
    a forward and a recomputation, also one within a backward, take memory as they start. Versions that take no bytes
    are counted only with ``every_version``. The ``frozen`` stages in front of the pipeline keep nothing.
    """
    in_units, unit = costs.in_units
    versions = {stage: {position: count for position, count, _ in stage_loads(program, stage, frozen)}
                if every_version or costs.stages[stage].version_bytes else {} for stage in stages}
    early = recomputations(program)
    contents = {stage: StageContents() for stage in stages}
    held = {stage: each.size(in_units[stage]) for stage, each in contents.items()}
    yield -1, True, contents, sum(held.values())
    for position, (op, stage, index) in enumerate(program):
        memory = op.memory
        if stage not in contents or stage < frozen:  # tied weights of another rank's; nothing is kept
            continue
        if memory is None and position not in versions[stage]:
            continue
        own, cost, is_early = contents[stage], in_units[stage], (stage, index) in early
        within = op.recomputes and cost.recompute_s > 0 and not is_early
        if within or (memory is not None and RECOMPUTED in memory.takes):
            own.dropped, own.recomputed = own.dropped - 1, own.recomputed + 1
        if within:
            held[stage] = own.size(cost)
            yield position, True, contents, sum(held.values())
        if memory is not None:
            activations, halves = op.more_held
            own.in_flight, own.weight_halves = own.in_flight + activations, own.weight_halves + halves
            if not op.recomputes and (is_early or cost.recompute_s > 0):
                own.dropped += activations
            if RECOMPUTED in memory.frees:
                own.recomputed = max(0, own.recomputed - 1)
            if not op.is_own:
                sizes = (value.bytes(costs.stages[stage]) for value in memory.takes + memory.leaves)
                own.others += unit * (sum(sizes) - sum(value.bytes(costs.stages[stage]) for value in memory.frees))
        own.versions = versions[stage].get(position, own.versions)
        held[stage] = own.size(cost)
        yield position, memory is not None and bool(memory.takes), contents, sum(held.values())
