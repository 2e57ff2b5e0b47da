"""Check a schedule: hold it to the rules of :mod:`vpipe.schedules.rules` and :mod:`vpipe.schedules.deadlock`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from vpipe.schedules.build import build
from vpipe.schedules.costs import Costs
from vpipe.schedules.deadlock import no_deadlock_buffered, no_deadlock_in_one_order, no_deadlock_rendezvous
from vpipe.schedules.dependencies import Dependencies
from vpipe.schedules.lower import lower
from vpipe.schedules.passes import reverse_backwards
from vpipe.schedules.registry import Limits
from vpipe.schedules.rules import (
    borrowed_versions,
    channel_order,
    completeness,
    indices,
    last_versions,
    matching,
    norms,
    peak_activations,
    placement,
    precedence,
    reductions,
    updates,
    used_versions,
    weight_versions,
)
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.size import Placement


def prove(name: str, placement: Placement, microbatches: int, update_every: int | None = None,
          ties: Mapping[int, tuple[int, ...]] | None = None, norm: bool = False,
          recompute: Collection[int] = (), costs: Costs | None = None, limits: Limits = None,
          last_first: bool = False) -> Schedule:
    """Build, lower and check the schedule ``name``, before any process is started.

    A stream (a schedule without a flush) is proved by a finite part of it. After the warm-up its programs repeat: the
    actions of the next :attr:`~vpipe.schedules.replication.Rounds.per_step` microbatches are those of the ones before
    with microbatches, updates and versions shifted, and the rules see only differences between these. An action
    depends on no action further away than the microbatches in flight (at most as many per rank as the pipeline is deep)
    and the versions in use (made at most that many microbatches, or one update, before the latest). So what holds in
    one repetition holds in all. Four times as many microbatches contain the warm-up, several repetitions and the
    cooldown (``tests/schedules/test_lower.py`` shows the repetition).

    Args:
        last_first: reverse the backwards with :func:`~vpipe.schedules.passes.reverse_backwards`.

    Raises:
        UserError: the numbers do not fit the schedule.
        CheckError: the schedule breaks a rule.
    """
    schedule = lowered(name, placement, microbatches, update_every, ties, norm, recompute, costs, limits, last_first)
    check(schedule)
    return schedule


def lowered(name: str, placement: Placement, microbatches: int, update_every: int | None = None,
            ties: Mapping[int, tuple[int, ...]] | None = None, norm: bool = False,
            recompute: Collection[int] = (), costs: Costs | None = None, limits: Limits = None,
            last_first: bool = False) -> Schedule:
    """Build and lower the schedule ``name``; see :func:`prove`."""
    schedule = build(name, placement, microbatches, update_every, ties, recompute, costs, limits)
    return lower(reverse_backwards(schedule) if last_first else schedule, norm)


def check(schedule: Schedule) -> None:
    """Hold a schedule to every rule in :data:`RULES`.

    A schedule without any transfer counts as not lowered: the rules on transfers are empty then, and its actions wait
    for each other directly.

    Raises:
        CheckError: a rule is broken; the text shows the grid of actions with the one at fault marked.
    """
    dependencies = Dependencies.from_schedule(schedule)
    for rule in RULES:
        rule(dependencies)


RULES: tuple[Callable[[Dependencies], None], ...] = (
    placement, indices, completeness, updates, used_versions, reductions, norms, matching, precedence, last_versions,
    borrowed_versions, channel_order, no_deadlock_buffered, no_deadlock_rendezvous, no_deadlock_in_one_order,
    weight_versions, peak_activations)
"""Every rule, in the order in which :func:`check` holds a schedule to them."""
