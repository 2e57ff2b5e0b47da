"""Rewrite schedules that are not lowered yet: recompute early, freeze stages, reverse the backwards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from vpipe.errors import UserError
from vpipe.schedules.kinds import UPDATE, Action, Op
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule


def with_recompute(program: Iterable[Action], stages: Collection[int]) -> Iterator[Action]:
    """Yield the program with early recomputation: an R right before every backward (B or I) of ``stages``.

    A backward waits for its gradient where a rank has to wait. An R before it needs no gradient and fills that time.
    Any earlier place would hold the activations of one more microbatch. Backwards that have an R keep it.
    """
    recomputed: set[tuple[int, int]] = set()
    for action in program:
        key = action.stage, action.index
        if action.op is Op.RECOMPUTE:
            recomputed.add(key)
        elif action.op.returns and action.stage in stages and key not in recomputed:
            yield Action(Op.RECOMPUTE, *key)
        yield action


def recompute_early(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Return a schedule that is not lowered yet :func:`with_recompute`."""
    return schedule.with_programs([list(with_recompute(program, stages)) for program in schedule.programs])


def without_backwards(program: Iterable[Action], frozen: int) -> Iterator[Action]:
    """Yield a program in which the first ``frozen`` stages, which train nothing, take microbatches forward only."""
    return (action for action in program
            if action.stage >= frozen or not action.op.per_microbatch or action.op.uses_version)


def freeze(schedule: Schedule, frozen: int) -> Schedule:
    """Return a schedule that is not lowered yet for a pipeline whose first ``frozen`` stages train nothing."""
    return replace(schedule, frozen=frozen, programs=tuple(tuple(without_backwards(program, frozen))
                                                           for program in schedule.programs))


def reverse_backwards(schedule: Schedule) -> Schedule:
    """Return a schedule that is not lowered yet with the backwards of every rank from the last microbatch to the first.

    ::

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B3 -- B2 -- B1 -- B0 -S
        rank 1  .  F0 F1 F2 F3 .  .  .  B3 -- B2 -- B1 -- B0 -S
        rank 2  .  .  F0 F1 F2 F3 B3 -- B2 -- B1 -- B0 -S

    Executors whose forwards run in threads have this order. It has GPipe's bubble and peak. The tensors of the last
    forward are still in the caches, and autograd frees its memory in the reverse of the order in which it took it.

    Raises:
        UserError: a rank has a forward after a backward, or backwards in halves.
    """
    programs = []
    for program in schedule.programs:
        backwards = [action for action in program if action.op is Op.BACKWARD or action.op is Op.RECOMPUTE]
        first = program.index(backwards[0]) if backwards else len(program)
        steps = program[first + len(backwards):]
        if any(action.op.counts != UPDATE for action in steps):
            raise UserError(f"'{schedule.name}' cannot run its backwards from the last microbatch to the first",
                            hint="they must follow all forwards of a rank, as in "
                                 f"{' or '.join(RegisteredSchedule.with_reversible_backwards())}")
        # The sort is stable: a recomputation stays right before its backward.
        backwards.sort(key=lambda action: -action.index)
        programs.append([*program[:first], *backwards, *steps])
    return schedule.with_programs(programs)
