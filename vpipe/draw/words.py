"""Numbers and sizes as people and as files have them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from vpipe.errors import counted
from vpipe.schedules.order import Schedule
from vpipe.schedules.simulation.costs import Number

_LISTED = 16


def sizes(schedule: Schedule) -> str:
    """``4 ranks, 8 stages, 8 microbatches, flush``."""
    parts = [counted(schedule.ranks, "rank"), counted(schedule.microbatches, "microbatch")]
    if schedule.stages != schedule.ranks:
        parts.insert(1, f"{schedule.stages} stages")
    every = schedule.update_every
    parts.append("flush" if schedule.flush else
                 "no flush, an update every " + ("microbatch" if every == 1 else f"{every} microbatches"))
    return ", ".join(parts)


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


def percent(share: Number) -> str:
    """``27 %``; one decimal below ten."""
    value = Fraction(share) * 100
    return f"{float(value):.1f} %" if 0 < value < 10 else f"{float(value):.0f} %"
