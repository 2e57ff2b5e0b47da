"""The specification of a schedule, executable: one function per rule.

Every rule takes a :class:`Reading` and raises :class:`CheckError` when it is broken; a rule may rely on
those before it in :data:`RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from vpipe.schedules.lower import lower
from vpipe.schedules.order import Schedule, build
from vpipe.schedules.reading import Reading
from vpipe.schedules.registry import Limits
from vpipe.schedules.reversal import backwards_last_first
from vpipe.schedules.rules.bounds import peak_activations, weight_versions
from vpipe.schedules.rules.structure import completeness, indices, placement
from vpipe.schedules.rules.transfers import (
    borrowed_versions,
    channel_order,
    last_versions,
    matching,
    no_deadlock_buffered,
    no_deadlock_in_one_order,
    no_deadlock_rendezvous,
    precedence,
)
from vpipe.schedules.rules.updates import norms, reductions, updates, used_versions
from vpipe.schedules.simulation.costs import Costs
from vpipe.schedules.size import Placement


def prove(name: str, placement: Placement, microbatches: int, update_every: int | None = None,
          ties: Mapping[int, tuple[int, ...]] | None = None, norm: bool = False,
          recompute: Collection[int] = (), costs: Costs | None = None, limits: Limits = None,
          last_first: bool = False) -> Schedule:
    """The schedule ``name``, built, lowered and checked; what to call before a process is started.

    ``last_first``: with :func:`~vpipe.schedules.reversal.backwards_last_first` in between.

    A stream (a schedule without a flush) is proved by a finite part of it. After the warm-up its programs
    repeat: the actions of the next :attr:`~vpipe.schedules.rounds.Rounds.per_step` microbatches are those of the ones
    before with microbatches, updates and versions shifted, and the rules see only differences between these. No action
    depends on one further away than the microbatches in flight, at most as many per rank as the pipeline is deep, and
    the versions in use, made at most that many microbatches or one update before the latest. So what holds in one
    repetition holds in all; four times as many microbatches hold the warm-up, several repetitions and the
    cooldown (``tests/schedules/test_lower.py`` shows the repetition).

    Raises:
        UserError: the numbers do not fit the schedule.
        CheckError: the schedule breaks a rule.
    """
    schedule = build(name, placement, microbatches, update_every, ties, recompute, costs, limits)
    schedule = lower(backwards_last_first(schedule) if last_first else schedule, norm)
    check(schedule)
    return schedule


def check(schedule: Schedule) -> None:
    """Hold a schedule to every rule in :data:`RULES`.

    A schedule without any transfer counts as not lowered: its rules on transfers are empty, and its
    actions wait for each other directly.

    Raises:
        CheckError: a rule is broken; the text shows the grid of actions with the one at fault marked.
    """
    reading = Reading.of(schedule)
    for rule in RULES:
        rule(reading)


RULES: tuple[Callable[[Reading], None], ...] = (
    placement, indices, completeness, updates, used_versions, reductions, norms, matching, precedence, last_versions,
    borrowed_versions, channel_order, no_deadlock_buffered, no_deadlock_rendezvous, no_deadlock_in_one_order,
    weight_versions, peak_activations)
"""Every rule, in the order in which :func:`check` holds a schedule to them."""
