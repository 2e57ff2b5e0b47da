"""Schedules of vpipe, most of which torch has too, as orders of compute actions."""

from __future__ import annotations

from dataclasses import dataclass

from case import Case
from torch.distributed.pipelining import schedules as torchs

from vpipe.schedules.assignment import Placement, Size
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.timeline import simulate


@dataclass(frozen=True)
class Order:
    """A schedule under the names of both.

    Attributes:
        name: vpipe's.
        peer: torch's class; None where it has none.
        chunks: stages per rank that a microbatch passes.
    """

    name: str
    peer: type[torchs._PipelineSchedule] | None
    chunks: int

    def placement(self, ranks: int) -> Placement:
        """The ranks of its stages."""
        return RegisteredSchedule.named(self.name).layout(ranks, self.chunks)

    def schedule(self, case: Case) -> Schedule:
        """Its compute actions."""
        return build(self.name, self.placement(case.ranks), case.microbatches)

    def formula_s(self, case: Case) -> float:
        """How long an update would take if messages and programs took no time."""
        half = case.times.backward_s / 2
        size = Size(case.ranks, case.microbatches, self.chunks, case.microbatches)
        return float(simulate(self.schedule(case), Costs.uniform(size, case.times.forward_s, half, half)).makespan_s)


ORDERS = (
    Order("gpipe", torchs.ScheduleGPipe, 1),
    Order("1f1b", torchs.Schedule1F1B, 1),
    Order("interleaved", torchs.ScheduleInterleaved1F1B, 2),
    Order("looped_bfs", torchs.ScheduleLoopedBFS, 2),
    Order("zb_h1", torchs.ScheduleInterleavedZeroBubble, 1),
    Order("zb_v", torchs.ScheduleZBVZeroBubble, 2),
    Order("dualpipe_v", torchs.ScheduleDualPipeV, 2),
    Order("chimera", None, 1),
    Order("dualpipe", None, 1),
)
