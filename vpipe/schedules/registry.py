"""Schedules by name: a generator of actions and what it promises."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
_BUILT_IN = {"gpipe": "gpipe", "1f1b": "one_f_one_b", "pipedream": "pipedream"}  # name -> module in this folder


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
    if name not in _RECIPES and name in _BUILT_IN:
        importlib.import_module(f"vpipe.schedules.{_BUILT_IN[name]}")
    if name not in _RECIPES:
        raise UserError(f"no schedule is called '{name}'", hint=nearest(name, schedule_names()))
    return _RECIPES[name]


def schedule_names() -> list[str]:
    """Every name that :func:`recipe_named` knows."""
    return sorted({*_RECIPES, *_BUILT_IN})
