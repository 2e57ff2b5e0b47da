"""GPipe with its backwards in reverse order: the program of the executor ``async_threaded``."""

from __future__ import annotations

from collections.abc import Sequence

from vpipe.errors import UserError
from vpipe.schedules.action import Action, Op
from vpipe.schedules.order import Schedule

REVERSIBLE = "gpipe"
"""The one schedule whose backwards may come in any order: every forward is before every backward."""

_RETURN = frozenset({Op.RECOMPUTE, Op.BACKWARD})


def backwards_last_first(schedule: Schedule) -> Schedule:
    """The same schedule, not lowered yet, with the backwards of every rank from the last microbatch to the first.

    ::

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B3 -- B2 -- B1 -- B0 -S
        rank 1  .  F0 F1 F2 F3 .  .  .  B3 -- B2 -- B1 -- B0 -S
        rank 2  .  .  F0 F1 F2 F3 B3 -- B2 -- B1 -- B0 -S

    It has GPipe's bubble and peak. What was computed last is still in the caches, and what autograd keeps goes in the
    reverse of the order in which it came.

    Raises:
        UserError: it is another schedule.
    """
    if schedule.name != REVERSIBLE:
        raise UserError(f"'{schedule.name}' cannot run its backwards from the last microbatch to the first",
                        hint=f"only {REVERSIBLE} can")
    return schedule.with_programs([_turned(program) for program in schedule.programs])


def _turned(program: Sequence[Action]) -> list[Action]:
    backwards = [action for action in program if action.op in _RETURN]
    first = program.index(backwards[0]) if backwards else len(program)
    # The sort is stable: a recomputation stays right before its backward.
    backwards.sort(key=lambda action: -action.microbatch)
    return [*program[:first], *backwards, *program[first + len(backwards):]]
