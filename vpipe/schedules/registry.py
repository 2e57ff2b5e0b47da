"""Schedules by name: a generator of actions and what it promises. One file in this folder adds a schedule."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import vpipe.schedules
from vpipe.errors import UserError, nearest
from vpipe.schedules.action import Action

Program = Callable[..., Iterator[Action]]
"""``program(rank, ranks, microbatches)`` yields the compute actions and steps of one rank, lazily.

A program without a flush also takes ``update_every`` and is *prefix-closed*: its actions on microbatches
below n are the program for n microbatches. So a run whose length nobody knows takes the program for
very many microbatches and leaves out those that never come.
"""

Bound = Callable[[int, int, int], int]
"""``bound(stage, stages, microbatches)``: a number the checker holds the schedule to."""


@dataclass(frozen=True)
class Recipe:
    """A registered schedule.

    Attributes:
        name: what a config calls it.
        program: the generator of one rank's actions.
        flush: whether the pipeline is empty at every optimizer step (bsp) or not (asp).
        peak_activations: microbatches whose activations a stage holds at most.
        versions: weight versions a stage holds at most.
    """

    name: str
    program: Program
    flush: bool
    peak_activations: Bound
    versions: Bound


_RECIPES: dict[str, Recipe] = {}


def _one_version(stage: int, stages: int, microbatches: int) -> int:
    return 1


def register_schedule(name: str, *, flush: bool, peak_activations: Bound,
                      versions: Bound = _one_version) -> Callable[[Program], Program]:
    """Make the decorated generator known as ``name``."""

    def register(program: Program) -> Program:
        _RECIPES[name] = Recipe(name, program, flush, peak_activations, versions)
        return program

    return register


def recipe_named(name: str) -> Recipe:
    """The schedule called ``name``.

    Raises:
        UserError: there is none; the hint names the nearest.
    """
    names = schedule_names()
    if name not in names:
        raise UserError(f"no schedule is called '{name}'", hint=nearest(name, names))
    return _RECIPES[name]


def schedule_names() -> list[str]:
    """Every name that :func:`recipe_named` knows."""
    _find_all()
    return sorted(_RECIPES)


@cache
def _find_all() -> None:
    """Import every module of this folder, so that a schedule is added by one file in it."""
    for module in pkgutil.iter_modules(vpipe.schedules.__path__, prefix="vpipe.schedules."):
        importlib.import_module(module.name)
