"""What the stages of a schedule hold at the moment when their rank holds most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vpipe.schedules.action import RETURNS, Op
from vpipe.schedules.facts import stage_loads
from vpipe.schedules.order import Schedule, stages_of_rank
from vpipe.schedules.simulation.costs import Costs, Number, StageCosts


@dataclass(slots=True)
class Load:
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


def heaviest(schedule: Schedule, costs: Costs, rank: int) -> dict[int, Load]:
    """By stage of ``rank``, what it holds when the rank holds most; the first such moment."""
    most: Number = -1
    found: dict[int, Load] = {}
    for loads, held in _moments(schedule, costs, rank):
        if held > most:
            most, found = held, {stage: Load(load.in_flight, load.recomputed, load.weight_halves, load.versions)
                                 for stage, load in loads.items()}
    return found


def _moments(schedule: Schedule, costs: Costs, rank: int) -> Iterator[tuple[dict[int, Load], Number]]:
    """What the stages of a rank hold, and in bytes together, after each of its actions; and while one recomputes."""
    program, stages = schedule.programs[rank], stages_of_rank(schedule.placement, rank)
    versions = {stage: {load.position: load.versions for load in stage_loads(program, stage)} for stage in stages}
    early = {action.stage for action in program if action.op is Op.RECOMPUTE}
    loads = {stage: Load() for stage in stages}
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
