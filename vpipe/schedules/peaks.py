"""Follow what the stages of a rank hold, action by action, and its size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vpipe.schedules.assignment import stages_of_rank
from vpipe.schedules.costs import Costs, Number, StageCosts
from vpipe.schedules.kinds import HALF, RECOMPUTED, SAVED
from vpipe.schedules.loads import recomputations, stage_loads
from vpipe.schedules.schedule import Schedule


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
    versions = {stage: {load.position: load.versions for load in stage_loads(program, stage, schedule.frozen)}
                if every_version or costs.stages[stage].version_bytes else {} for stage in stages}
    early, foreign = recomputations(program), {kind for kind in schedule.kinds if not kind.is_own}
    contents = {stage: StageContents() for stage in stages}
    held = {stage: each.size(in_units[stage]) for stage, each in contents.items()}
    yield -1, True, contents, sum(held.values())
    for position, action in enumerate(program):
        stage, memory = action.stage, action.op.memory
        if stage not in contents or stage < schedule.frozen:  # tied weights of another rank's; nothing is kept
            continue
        own, cost, is_early = contents[stage], in_units[stage], (stage, action.index) in early
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
