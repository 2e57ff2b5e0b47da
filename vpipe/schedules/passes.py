"""Passes: rewrite the programs of a schedule without changing what it computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from vpipe.errors import UserError
from vpipe.schedules.action import COMPUTE, RETURNS, Action, Op
from vpipe.schedules.registry import reversible_schedules
from vpipe.schedules.schedule import Schedule

COMPUTE_ONLY = COMPUTE | {Op.STEP, Op.USE}
"""The operations that a generator yields; :func:`~vpipe.schedules.lower.lower` adds the others."""


def compute_only(schedule: Schedule) -> Schedule:
    """Return the schedule without its transfers and exchanges, as :func:`~vpipe.schedules.lower.lower` takes it."""
    return schedule.with_programs([[action for action in program if action.op in COMPUTE_ONLY]
                                   for program in schedule.programs])


def with_recompute(program: Iterator[Action], stages: Collection[int]) -> Iterator[Action]:
    """Yield the program with early recomputation: an R right before every backward (B or I) of ``stages``.

    A backward waits for its gradient where a rank has to wait. An R before it needs no gradient and fills that time.
    Any earlier place would hold the activations of one more microbatch. Backwards that have an R keep it.
    """
    recomputed: set[tuple[int, int]] = set()
    for action in program:
        key = action.stage, action.microbatch
        if action.op is Op.RECOMPUTE:
            recomputed.add(key)
        elif action.op in RETURNS and action.stage in stages and key not in recomputed:
            yield Action(Op.RECOMPUTE, *key)
        yield action


def reverse_backwards(schedule: Schedule) -> Schedule:
    """Return a schedule that is not lowered yet with the backwards of every rank from the last microbatch to the first.

    ::

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B3 -- B2 -- B1 -- B0 -S
        rank 1  .  F0 F1 F2 F3 .  .  .  B3 -- B2 -- B1 -- B0 -S
        rank 2  .  .  F0 F1 F2 F3 B3 -- B2 -- B1 -- B0 -S

    This is the order of the executor ``async_threaded``. It has GPipe's bubble and peak. The tensors of the last
    forward are still in the caches, and autograd frees its memory in the reverse of the order in which it took it.

    Raises:
        UserError: a rank has a forward behind a backward, or backwards in halves.
    """
    return schedule.with_programs([_reversed(schedule.name, program) for program in schedule.programs])


def _reversed(name: str, program: Sequence[Action]) -> list[Action]:
    backwards = [action for action in program if action.op in (Op.RECOMPUTE, Op.BACKWARD)]
    first = program.index(backwards[0]) if backwards else len(program)
    steps = program[first + len(backwards):]
    if any(action.op is not Op.STEP for action in steps):
        raise UserError(f"'{name}' cannot run its backwards from the last microbatch to the first",
                        hint=f"they must follow all forwards of a rank, as in {' or '.join(reversible_schedules())}")
    # The sort is stable: a recomputation stays right before its backward.
    backwards.sort(key=lambda action: -action.microbatch)
    return [*program[:first], *backwards, *steps]
