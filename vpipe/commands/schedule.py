"""``vpipe schedule``, ``check`` and ``simulate``: schedules drawn, compared and proved, without torch."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from vpipe.draw.summary import RankCosts, Summary
from vpipe.draw.svg import draw_svg
from vpipe.draw.table import compare
from vpipe.draw.text import draw_text
from vpipe.draw.words import counted, listed, number, sizes
from vpipe.errors import UserError
from vpipe.schedules.action import RECEIVES, SENDS
from vpipe.schedules.check import check
from vpipe.schedules.csv_file import read_csv, write_csv
from vpipe.schedules.facts import rank_facts, stage_facts
from vpipe.schedules.lower import lower
from vpipe.schedules.order import Schedule, build
from vpipe.schedules.registry import Recipe, recipe_named, schedule_names
from vpipe.schedules.searching.search import search_placements

MOST_ACTIONS = 1_000_000
"""Forwards and backwards beyond which nothing is drawn: minutes, and nobody could look at it."""

PIPE_COLUMNS = 200
"""Width of a picture that goes to a file or a pipe."""


def run_schedule(options: argparse.Namespace) -> None:
    """``vpipe schedule NAME|FILE.csv|--all``."""
    costs = _costs(options.costs)
    if options.all:
        _compare(options, costs)
        return
    if options.name is None:
        raise UserError("which schedule?", hint=f"name one of {', '.join(schedule_names())}, or a CSV file; --all "
                        "compares them")
    schedule = _named(options, costs)
    summary = Summary.of(schedule, costs)
    sys.stdout.write(_FORMATS[options.format](summary))


def run_check(options: argparse.Namespace) -> None:
    """``vpipe check FILE.csv``: as it stands, and with transfers of ours when it has none."""
    schedule = read_csv(options.file)
    check(schedule)
    transfers = sum(action.op in SENDS or action.op in RECEIVES for program in schedule.programs for action in program)
    if not transfers:
        check(lower(schedule))
    actions, of_them = sum(map(len, schedule.programs)), f", {transfers} of them transfers" if transfers else ""
    print(f"ok: {schedule.name}: {sizes(schedule)}, {actions} actions{of_them}")
    print("no deadlock, whether sends wait for their receives or not"
          + ("" if transfers else "; with the transfers that vpipe adds"))
    stages = stage_facts(schedule)
    print(f"peak activations per rank: {listed([rank.peak_activations for rank in rank_facts(schedule)])}; "
          f"versions per stage: {listed([stage.versions for stage in stages])}; "
          f"staleness: {listed([stage.staleness for stage in stages])}")


def run_simulate(options: argparse.Namespace) -> None:
    """``vpipe simulate FILE.csv``."""
    sys.stdout.write(_text(Summary.of(read_csv(options.file), _costs(options.costs))))


def _text(summary: Summary) -> str:
    terminal = sys.stdout.isatty()
    columns = shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns
    return draw_text(summary, columns, colour=terminal)


def _json(summary: Summary) -> str:
    return json.dumps(summary.as_json()) + "\n"


def _csv(summary: Summary) -> str:
    return write_csv(summary.schedule)


_FORMATS: dict[str, Callable[[Summary], str]] = {"text": _text, "csv": _csv, "svg": draw_svg, "json": _json}


def _named(options: argparse.Namespace, costs: RankCosts) -> Schedule:
    """The schedule of a name or a file, not proved yet."""
    name = options.name
    if name not in schedule_names() and (name.lower().endswith(".csv") or "/" in name):
        schedule = read_csv(Path(name))
        for option, said, is_ in (("--stages", options.stages, schedule.ranks),
                                  ("--microbatches", options.microbatches, schedule.microbatches),
                                  ("--update-every", options.update_every, schedule.update_every)):
            if said not in (None, is_):
                raise UserError(f"{option} is {said}, but '{name}' has {is_}",
                                hint=f"leave {option} out: the file says it")
        for option, given in (("--chunks", options.chunks), ("--memory", options.memory)):
            if given is not None:
                raise UserError(f"{option} does not go with a file", hint="leave it out: the file says it")
        return schedule
    recipe = recipe_named(name)
    ranks, microbatches = _sizes(options)
    if options.chunks is not None and not recipe.any_chunks and options.chunks != recipe.chunks:
        others = [other for other in schedule_names() if recipe_named(other).any_chunks]
        raise UserError(f"--chunks is {options.chunks}, but '{name}' holds {recipe.chunks} "
                        f"stage{'s' * (recipe.chunks > 1)} on each rank",
                        hint="leave --chunks out" + (f", or choose a schedule with any number: {', '.join(others)}"
                                                     if others else ""))
    if recipe.search is None and options.memory is not None:
        raise UserError(f"--memory does not go with '{name}', which holds what it holds",
                        hint="leave it out, or let auto find an order that keeps it")
    return _built(recipe, ranks, microbatches, options.chunks, options.update_every, costs, options.memory)


def _sizes(options: argparse.Namespace) -> tuple[int, int]:
    for option, value in (("--stages", options.stages), ("--microbatches", options.microbatches)):
        if value is None:
            raise UserError(f"{option} is missing", hint="say how large: --stages 4 --microbatches 8")
    for option, value in (("--stages", options.stages), ("--microbatches", options.microbatches),
                          ("--chunks", options.chunks), ("--update-every", options.update_every),
                          ("--memory", options.memory)):
        if value is not None and value < 1:
            raise UserError(f"{option} is {value}", hint="give a whole number, 1 or more")
    actions = 2 * options.stages * options.microbatches * (options.chunks or 1)
    if actions > MOST_ACTIONS:
        raise UserError(f"{options.stages} ranks and {options.microbatches} microbatches are {actions:,} forwards and "
                        f"backwards", hint=f"stay below {MOST_ACTIONS:,}: a schedule repeats, so fewer microbatches "
                                           "show the same")
    return options.stages, options.microbatches


def _built(recipe: Recipe, ranks: int, microbatches: int, chunks: int | None, update_every: int | None,
           costs: RankCosts, memory: int | None = None) -> Schedule:
    if recipe.search is not None:
        return search_placements(ranks, microbatches, chunks, costs.of, memory)
    placement = recipe.layout.placement(ranks, recipe.chunks if chunks is None else chunks)
    return build(recipe.name, placement, microbatches, update_every)


def _compare(options: argparse.Namespace, costs: RankCosts) -> None:
    if options.name is not None:
        raise UserError(f"--all and '{options.name}'", hint="name a schedule, or compare all of them")
    if options.format != "text":
        raise UserError(f"--all prints a table, not {options.format}", hint="leave --format out, or name a schedule")
    ranks, microbatches = _sizes(options)
    found: dict[str, Summary | str] = {}
    for name in schedule_names():
        recipe = recipe_named(name)
        try:
            schedule = _built(recipe, ranks, microbatches, options.chunks if recipe.any_chunks else None,
                              None if recipe.flush else options.update_every, costs)
            found[name] = Summary.of(schedule, costs)
        except UserError as error:
            found[name] = error.problems[0].what.splitlines()[0]
    print(f"{counted(ranks, 'rank')}, {counted(microbatches, 'microbatch')}, {costs}\n")
    sys.stdout.write(compare(found))


def _costs(text: str) -> RankCosts:
    """``--costs F,I,W,transfer``, exactly as written."""
    parts = text.split(",")
    hint = "write --costs F,I,W,transfer, such as 1,1,1,0: seconds or any other unit"
    if len(parts) not in (3, 4):
        raise UserError(f"--costs has {len(parts)} number{'s' * (len(parts) != 1)}, not 3 or 4: '{text}'", hint=hint)
    values = []
    for part in parts:
        try:
            value = float(part)
        except ValueError:
            raise UserError(f"--costs has '{part}', which is no number", hint=hint) from None
        if not (math.isfinite(value) and 0 <= value <= 1e9 and (value == 0 or value >= 1e-9)):
            raise UserError(f"--costs has {part}", hint="give numbers from 0 to 1e9, and none but 0 below 1e-9")
        values.append(Fraction(repr(value)))
    if not values[0] or not values[1] + values[2]:
        raise UserError(f"--costs has a forward of {number(values[0])} and a backward of "
                        f"{number(values[1] + values[2])}", hint="both take time: give numbers above 0")
    return RankCosts(*(int(value) if value.denominator == 1 else value for value in values))
