"""Prepare the schedule of a pipeline, and check that its executor and its compiler can run it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vpipe.description.cut import Cut, ties_between
from vpipe.description.execution import Execution
from vpipe.description.order import Order
from vpipe.errors import UserError
from vpipe.schedules.builder import reverse_backwards
from vpipe.schedules.checker import check
from vpipe.schedules.lowering import lower
from vpipe.schedules.prepare import described
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule

if TYPE_CHECKING:
    from vpipe.model.model import Model


def prepare_schedule(model: Model | None, cut: Cut, order: Order, microbatches: int, execution: Execution, *,
                     needs_norms: bool, zero1: bool = False, ranks: int | None = None,
                     proved: bool = False) -> Schedule:
    """Return the lowered and proved schedule that a pipeline of these parts runs.

    Args:
        model: None where only the ranks matter: then the schedule exchanges no weights that stages share.
        cut: with the layers of every stage.
        needs_norms: whether an update depends on the norms of gradients.
        zero1: whether each replica of a stage steps a part of its parameters.
        ranks: how many processes there are; None where the schedule says it.
        proved: whether another process proves the same schedule at the same time.

    Raises:
        UserError: the parts do not fit each other.
    """
    if execution.threaded and (refused := RegisteredSchedule.threads_refused(order.schedule)):
        raise UserError(f"the executor is {execution.executor}, {refused[0]}", hint=refused[1])
    found = {} if model is None else ties_between(model.split(cut.partition))
    ties = {owner: tuple(borrowers) for owner, borrowers in found.items()}
    schedule = described(order, cut, microbatches, ranks, ties, meshed=execution.mesh is not None)
    if execution.threaded:
        schedule = reverse_backwards(schedule)
    if execution.data is not None and not schedule.flush:
        raise UserError(f"'{schedule.name}' has no flush, but weights that fully_shard divides have one version",
                        hint="choose a schedule with a flush, such as 1f1b, or replicas in place of fully_shard")
    # Without a flush a stage knows its norms by itself, unless each replica has a part of them.
    schedule = lower(schedule, needs_norms and (schedule.flush or zero1), execution.data is not None, zero1)
    if not proved:
        check(schedule)
    if execution.backend is not None:
        from vpipe.runtime.compiled import check_compiled

        check_compiled(execution.backend, schedule)
    return replace(schedule)  # without its graph, which takes more memory than the actions
