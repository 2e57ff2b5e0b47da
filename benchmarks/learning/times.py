"""How long an update of an arm takes on p devices: measured costs of a block, then vpipe's simulator.

python benchmarks/learning/times.py      measures the costs and writes them to costs.json

A device holds 8/p blocks. Embeddings and head are left out, since in a large model they are a small share, and messages
take no time. A synchronous pipeline may begin an update on some devices while others still end the one before.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "throughput"))

import torch
from arms import CENTRE, Arm
from machine import description
from task import BLOCKS, batches, gpt
from training import PIPEDREAM, optimizer

from vpipe.plan.profile import Identity
from vpipe.profiling import measure
from vpipe.schedules.assignment import Size
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs
from vpipe.schedules.kinds import Action
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.search.search import search
from vpipe.schedules.simulator.timeline import simulate

FILE = Path(__file__).parent / "costs.json"
UPDATES = 12
"""Of a simulation; the steady state is its second half."""


@dataclass(frozen=True)
class BlockCosts:
    """Seconds of a block of the model on one core, for one sequence.

    Attributes:
        forward_s, backward_s: F and B.
        input_s, weight_s: I and W, the halves of a split backward.
        step_s: one step of the block's optimizer, by its name.
    """

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    step_s: dict[str, float]
    machine: str = ""


def measured(budget_s: float = 12.0) -> BlockCosts:
    """Measure a block as ``vpipe profile`` does."""
    torch.set_num_threads(1)
    steps = {}
    for name in CENTRE:
        identity = Identity("learning", "learning", BLOCKS + 1, 1, name, "cpu", 1, 1, "gloo", torch.__version__)
        [profile] = measure(gpt(), list(batches(1, 1, 0)), optimizer(name, 1e-3).from_named, identities=[identity],
                            budget_s=budget_s)
        block = profile.layers[1]
        steps[name] = block.step.median
    return BlockCosts(block.forward.median, block.backward.median, block.input_half.median, block.weight_half.median,
                      steps, description())


@cache
def block_costs() -> BlockCosts:
    """Return what was measured."""
    return BlockCosts(**json.loads(FILE.read_text()))


def update_s(arm: Arm, step: float = 1.0) -> float:
    """Seconds from one update to the next in the steady state, where an optimizer's step takes ``step`` times S."""
    costs = block_costs()
    return _period(arm.schedule if arm.synchronous else PIPEDREAM, arm.depth, arm.batch,
                   step * costs.step_s[arm.optimizer])


@cache
def _period(schedule: str, ranks: int, batch: int, step_s: float) -> float:
    costs, blocks = block_costs(), BLOCKS // ranks
    halves = schedule != "1f1b" and RegisteredSchedule.named(schedule).flush
    backward = (costs.input_s, costs.weight_s) if halves else (costs.backward_s / 2, costs.backward_s / 2)
    recipe = RegisteredSchedule.named(schedule)

    def costs_of(chunks: int) -> Costs:
        return Costs.uniform(Size(ranks, batch, chunks, batch), blocks * costs.forward_s, blocks * backward[0],
                             blocks * backward[1], step=blocks * step_s)

    if recipe.search is not None:
        one = search(ranks, batch, lambda placement: costs_of(len(placement) // ranks))
    elif recipe.flush:
        one = build(schedule, recipe.layout(ranks, recipe.chunks), batch)
    else:
        one = build(schedule, recipe.layout(ranks, 1), UPDATES * batch, batch)
    timeline = simulate(one if not recipe.flush else _repeated(one), costs_of(one.stages // ranks))
    ends: dict[int, float] = {}
    for events in timeline.events:
        for event in events:
            if event.action.op == "STEP":
                update = event.action.index
                ends[update] = max(ends.get(update, 0.0), float(event.end_s))
    return (ends[UPDATES - 1] - ends[UPDATES // 2 - 1]) / (UPDATES // 2)


def _repeated(schedule: Schedule) -> Schedule:
    """Return so many updates of a schedule with a flush, one after the other on every rank."""
    def moved(action: Action, update: int) -> Action:
        by = 1 if action.op == "STEP" else schedule.microbatches
        return action._replace(index=action.index + by * update)

    return replace(schedule, microbatches=UPDATES * schedule.microbatches, programs=tuple(
        tuple(moved(action, update) for update in range(UPDATES) for action in program)
        for program in schedule.compute_only().programs))


if __name__ == "__main__":
    FILE.write_text(json.dumps(asdict(measured()), indent=1) + "\n")
    print(FILE.read_text())
