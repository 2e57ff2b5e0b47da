"""One schedule that the checker has proved; and the rows of any, as texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from vpipe.schedules.assignment import Placement
from vpipe.schedules.builder import build
from vpipe.schedules.checker import check
from vpipe.schedules.lowering import lower
from vpipe.schedules.rewrites import reverse_backwards
from vpipe.schedules.schedule import Schedule


def prove(name: str, placement: Placement, microbatches: int, update_every: int | None = None,
          ties: Mapping[int, tuple[int, ...]] | None = None, norm: bool = False,
          recompute: Collection[int] = (), last_first: bool = False, warmup: Sequence[int] | None = None,
          zero1: bool = False, slices: int = 1) -> Schedule:
    """Build, lower and check the schedule ``name``, before any process is started.

    Args:
        norm: exchange the norms of gradients before every step.
        last_first: reverse the backwards with :func:`~vpipe.schedules.rewrites.reverse_backwards`.
        warmup: forwards of every stage before its first backward, without a flush; those of 1F1B when None.
        zero1: each replica of a stage steps a part of its parameters.
        slices: of every microbatch.

    Raises:
        UserError: the numbers do not fit the schedule.
        CheckError: the schedule breaks a rule.
    """
    schedule = build(name, placement, microbatches, update_every, ties, recompute, warmup=warmup, slices=slices)
    schedule = lower(reverse_backwards(schedule) if last_first else schedule, norm, zero1=zero1)
    check(schedule)
    return schedule


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, program)) for program in schedule.programs]
