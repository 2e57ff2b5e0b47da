"""Executors by name: ways to execute a rank's actions, whatever these are."""

from __future__ import annotations

from typing import Literal, get_args

from vpipe.errors import UserError, nearest
from vpipe.schedules.registry import recipe_if_any, reversible_schedules

Executor = Literal["overlapped", "naive", "async_threaded"]
"""``overlapped``: transfers go on behind the compute. ``naive``: an action has ended, with all that it began, when the
next begins. ``async_threaded``: the forwards of a batch in a thread each, on a GPU in a stream each, then the backwards
from the last to the first. The numbers are the same to the bit."""

EXECUTORS: tuple[Executor, ...] = get_args(Executor)
THREADED: Executor = "async_threaded"

NO_GAIN = ("executor async_threaded: on a CPU it brings no gain over overlapped, which takes less memory; it is for "
           "GPUs, where each microbatch gets a stream")
"""The note that a run on a CPU prints."""

NO_TIMELINE = (
    "the forwards of the executor async_threaded go on in threads, several at one time: there is no timeline of "
    "actions one after the other", "use the executor overlapped, which computes the same numbers")
"""What goes wrong with a record of such a run, and what to do instead."""


def reverses_backwards(executor: Executor, schedule: str) -> bool:
    """Return whether an executor runs the backwards of a batch from the last microbatch to the first."""
    return executor == THREADED and _reversible(schedule)


def executor_conflict(executor: Executor, schedule: str) -> tuple[str, str] | None:
    """Return why an executor cannot run a schedule, and what to do instead; None when it can."""
    if executor == THREADED and not _reversible(schedule):
        possible = " or ".join(reversible_schedules())
        return (f"{THREADED}, which runs the schedule {possible} alone, but the schedule is {schedule}",
                f"use the schedule {possible}, or the executor overlapped, which runs any")
    return None


def _reversible(schedule: str) -> bool:
    recipe = recipe_if_any(schedule)
    return recipe is not None and recipe.reversible


def check_executor(executor: str, schedule: str) -> Executor:
    """Return the executor of a name, for a schedule that it can run; see :func:`executor_conflict`.

    Raises:
        UserError: there is none, or it cannot.
    """
    known = next((each for each in EXECUTORS if each == executor), None)
    if known is None:
        raise UserError(f"no executor is called {executor!r}", hint=nearest(str(executor), EXECUTORS))
    if refused := executor_conflict(known, schedule):
        raise UserError(f"the executor is {refused[0]}", hint=refused[1])
    return known
