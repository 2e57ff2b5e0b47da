"""Numbers and sizes as people and as files have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from vpipe.errors import counted
from vpipe.schedules.costs import Number
from vpipe.schedules.schedule import Schedule, stages_of_rank
from vpipe.schedules.size import Placement

_LISTED = 16


def sizes(schedule: Schedule) -> str:
    """``4 ranks, 8 stages, 8 microbatches, flush``; of replicated stages also how many replicas each has."""
    widths = [len(ranks) for ranks in schedule.placement]
    several = max(widths) > 1
    parts = [counted(schedule.ranks, "rank"), counted(schedule.microbatches, "microbatch")]
    if several or schedule.stages != schedule.ranks:
        parts.insert(1, counted(schedule.stages, "stage") + f" with {replicas(widths)}" * several)
    every = schedule.update_every
    parts.append("flush" if schedule.flush else
                 "no flush, an update every " + ("microbatch" if every == 1 else f"{every} microbatches")
                 + " of each replica" * several)
    return ", ".join(parts)


def replicas(widths: Sequence[int]) -> str:
    """``2 replicas each`` or ``2, 1 replicas``."""
    return f"{widths[0]} replicas each" if len(set(widths)) == 1 else f"{', '.join(map(str, widths))} replicas"


def row_name(placement: Placement, rank: int) -> str:
    """``rank 1``; of a replica with its stage, ``rank 1 (stage 0, 2 of 2)``."""
    stages = stages_of_rank(placement, rank)
    if (which := replica(placement, rank)) is None:
        return f"rank {rank}"
    return f"rank {rank} (stage{'s' * (len(stages) > 1)} {' '.join(map(str, stages))}, {which})"


def replica(placement: Placement, rank: int) -> str | None:
    """``2 of 2``; None of a rank whose stages have no other."""
    ranks = next(ranks for ranks in placement if rank in ranks)
    return f"{1 + ranks.index(rank)} of {len(ranks)}" if len(ranks) > 1 else None


def listed(values: Sequence[int]) -> str:
    """All values; of many only their range."""
    if len(values) <= _LISTED:
        return " ".join(map(str, values))
    return f"{min(values)} to {max(values)}" if min(values) < max(values) else str(values[0])


def plain(value: Number) -> int | float:
    """A number as JSON has it: whole ones without a point."""
    return int(value) if value == int(value) else float(value)


def number(value: Number) -> str:
    """A number for people: ``9``, ``4.5``, ``321.3``."""
    return str(int(value)) if value == int(value) and value < 10**9 else f"{float(value):.6g}"


def ms_text(seconds: float) -> str:
    """Milliseconds without their unit: ``1,234``, ``12.3``, ``0.42``; ``-`` of NaN, what nobody knows."""
    value = 1e3 * seconds
    if math.isnan(value):
        return "-"
    if value < 0.005:
        return "0"
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def percent(share: Number) -> str:
    """``27 %``; one decimal below ten."""
    value = Fraction(share) * 100
    return f"{float(value):.1f} %" if 0 < value < 10 else f"{float(value):.0f} %"
