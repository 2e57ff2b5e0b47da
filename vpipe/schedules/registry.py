"""Schedules by name: a generator of actions and what it promises.

One file in ``library/`` adds a schedule. So does an installed package, by an entry point of the schedule's name in the
group ``vpipe.schedules`` that points to the module with the decorated generator.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import vpipe.schedules.generators
from vpipe.errors import Problem, UserError, nearest
from vpipe.packages import announced, load, unregistered
from vpipe.schedules.action import Action
from vpipe.schedules.costs import Costs, Number
from vpipe.schedules.size import Layout, Placement, Size

if TYPE_CHECKING:
    from vpipe.schedules.schedule import Schedule

Program = Callable[..., Iterator[Action]]
"""``program(rank, ranks, microbatches)`` yields the compute actions and steps of one rank, lazily.

A schedule with any number of stages per rank also takes ``chunks``, that number. A schedule without a flush also
takes ``update_every`` and is *prefix-closed*: its actions on microbatches below n are the program for n
microbatches. So a run whose length nobody knows takes the program for very many microbatches and leaves out
those that never come.
"""

Bound = Callable[[int, Size], int]
"""``bound(rank, size)``: a number the checker holds the schedule to."""

Constraint = Callable[[Size], Problem | None]
"""What is wrong with a size, with the numbers to change; None when it fits."""

Limits = Number | Sequence[Number | None] | None
"""What a rank may hold, in the unit of ``StageCosts.activation_bytes`` (:mod:`vpipe.schedules.costs`): one
number for all, or one per rank; None is no limit."""


class Search(Protocol):
    """Finds an order over ``placement`` for ``microbatches``; see :func:`~vpipe.schedules.search.search.search`."""

    def __call__(self, placement: Placement, microbatches: int, costs: Costs | None = None,
                 limits: Limits = None) -> Schedule: ...


@dataclass(frozen=True)
class Recipe:
    """A registered schedule.

    Attributes:
        name: what a config calls it.
        program: the generator of one rank's actions.
        flush: whether the pipeline is empty at every optimizer step (bsp) or not (asp).
        layout: which stages a rank holds.
        chunks: stages per rank, unless told otherwise.
        any_chunks: whether there may be another number of them.
        peak_activations: microbatch-stages whose activations a rank holds at most, each from its forward until its
            gradient has gone through (B or I).
        versions: weight versions that a stage on a rank holds at most.
        update_every: microbatches per update that a schedule without a flush needs at least, of the number of ranks.
        requires: which sizes it cannot have.
        search: makes the schedule for any placement, costs and limits on memory; None when the order is fixed.
    """

    name: str
    program: Program
    flush: bool
    layout: Layout
    chunks: int
    any_chunks: bool
    peak_activations: Bound
    versions: Bound
    update_every: Callable[[int], int]
    requires: Constraint
    search: Search | None = None


ENTRY_POINTS = "vpipe.schedules"
_LIBRARY = "vpipe.schedules.generators."
_RECIPES: dict[str, Recipe] = {}


def _everything(rank: int, size: Size) -> int:
    return size.microbatches * size.chunks


def _one_version(rank: int, size: Size) -> int:
    return 1


def _every_microbatch(ranks: int) -> int:
    return 1


def _nothing(size: Size) -> Problem | None:
    return None


def register_schedule(name: str, *, flush: bool, layout: Layout = Layout.LOOP, chunks: int = 1,
                      any_chunks: bool = False, peak_activations: Bound = _everything, versions: Bound = _one_version,
                      update_every: Callable[[int], int] = _every_microbatch,
                      requires: Constraint = _nothing, search: Search | None = None) -> Callable[[Program], Program]:
    """Make the decorated generator known as ``name``; see :class:`Recipe` for the rest.

    Raises:
        UserError: another schedule has that name. The same definition, executed again, replaces itself.
    """

    def register(program: Program) -> Program:
        if not _definition(program).startswith(_LIBRARY):
            _find_all()  # so that a name of the library is known to be taken
        if name in _RECIPES and _definition(_RECIPES[name].program) != _definition(program):
            raise UserError(f"there is already a schedule called '{name}': {_definition(_RECIPES[name].program)}",
                            hint="choose another name")
        _RECIPES[name] = Recipe(name, program, flush, layout, chunks, any_chunks, peak_activations, versions,
                                update_every, requires, search)
        return program

    return register


def _definition(program: Program) -> str:
    """Where a generator is defined: ``module.function``."""
    return f"{getattr(program, '__module__', None)}.{getattr(program, '__qualname__', repr(program))}"


def recipe_named(name: str) -> Recipe:
    """The schedule called ``name``.

    Raises:
        UserError: there is none, and the hint names the nearest; or the package that has it cannot be imported, or is
            not the only one.
    """
    if not isinstance(name, str):
        raise UserError(f"the schedule is {name!r}, which is no name",
                        hint="give the name of a schedule, such as 1f1b, or the path of a CSV file, as text")
    _find_all()
    own = name in _RECIPES and _definition(_RECIPES[name].program).startswith(_LIBRARY)
    entry = load(ENTRY_POINTS, "schedule", name, own=own)
    if name not in _RECIPES:
        raise UserError(f"no schedule is called '{name}'", hint=nearest(name, schedule_names())) if entry is None \
            else unregistered(entry, "schedule")
    return _RECIPES[name]


def recipe_if_any(name: str) -> Recipe | None:
    """The schedule called ``name``; None where :func:`recipe_named` would refuse it."""
    try:
        return recipe_named(name)
    except UserError:
        return None


def recipes() -> list[Recipe]:
    """Those that can be had at once, by name: of packages the ones that were imported."""
    _find_all()
    return [_RECIPES[name] for name in sorted(_RECIPES)]


def schedule_names() -> list[str]:
    """Every name that :func:`recipe_named` knows; a package that announces one is not imported for that."""
    _find_all()
    return sorted({*_RECIPES, *announced(ENTRY_POINTS)})


@cache
def _find_all() -> None:
    """Import every module of the library, so that a schedule is added by one file in it."""
    for module in pkgutil.iter_modules(vpipe.schedules.generators.__path__, prefix=_LIBRARY):
        importlib.import_module(module.name)
