"""Name the executors, which are ways to execute a rank's actions."""

from __future__ import annotations

from vpipe.description.execution import THREADED, Execution
from vpipe.errors import UserError
from vpipe.schedules.registry import recipe_if_any, reversible_schedules

NO_GAIN = ("executor async_threaded: on a CPU it brings no gain over overlapped, which takes less memory; it is for "
           "GPUs, where each microbatch gets a stream")
"""The note that a run on a CPU prints."""

NO_TIMELINE = (
    "the forwards of the executor async_threaded go on in threads, several at one time: there is no timeline of "
    "actions one after the other", "use the executor overlapped, which computes the same numbers")
"""Why such a run has no timeline, and what to do instead."""


def threads_refused(schedule: str) -> tuple[str, str] | None:
    """Return why ``async_threaded`` cannot run a schedule, and what to do instead; None when it can: if the backwards
    may be reversed (:func:`vpipe.schedules.build.reverse_backwards`)."""
    recipe = recipe_if_any(schedule)
    if recipe is not None and recipe.reversible:
        return None
    possible = " or ".join(reversible_schedules())
    return (f"{THREADED}, which runs the schedule {possible} alone, but the schedule is {schedule}",
            f"use the schedule {possible}, or the executor overlapped, which runs any")


def check_executor(execution: Execution, schedule: str) -> None:
    """Refuse an executor that cannot run the schedule. Raises UserError."""
    if execution.executor == THREADED and (refused := threads_refused(schedule)):
        raise UserError(f"the executor is {refused[0]}", hint=refused[1])
