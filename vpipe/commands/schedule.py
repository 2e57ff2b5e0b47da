"""``vpipe schedule``, ``check`` and ``simulate``: schedules drawn, compared and proved, without torch."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from vpipe.draw.summary import RankCosts, Summary
from vpipe.draw.svg import draw_svg
from vpipe.draw.table import compare
from vpipe.draw.text import draw_text
from vpipe.draw.words import listed, number, sizes
from vpipe.errors import UserError, counted
from vpipe.schedules.action import RECEIVES, SENDS
from vpipe.schedules.check import check
from vpipe.schedules.csv_file import read_csv, write_csv
from vpipe.schedules.facts import rank_facts, stage_facts
from vpipe.schedules.lower import lower
from vpipe.schedules.order import Schedule, build, check_chunks
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
    schedule = _file(options.file)
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
    sys.stdout.write(_text(Summary.of(_file(options.file), _costs(options.costs))))


def _file(path: Path) -> Schedule:
    if str(path) in schedule_names() and not path.exists():
        raise UserError(f"'{path}' is a schedule's name, not a file",
                        hint=f"vpipe schedule {path} proves and draws it; with --format csv it writes the file")
    return read_csv(path)


def _text(summary: Summary) -> str:
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    columns = shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns
    return draw_text(summary, columns, colour=colour)


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
    check_chunks(recipe, options.chunks, "--chunks")
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
        raise UserError(f"{counted(options.stages, 'rank')} and {counted(options.microbatches, 'microbatch')} are "
                        f"{actions:,} forwards and backwards",
                        hint=f"stay below {MOST_ACTIONS:,}: a schedule repeats, so fewer microbatches show the same")
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
                              None if recipe.flush else options.update_every, costs,
                              None if recipe.search is None else options.memory)
            found[name] = Summary.of(schedule, costs)
        except UserError as error:
            found[name] = error.problems[0].what.splitlines()[0]
    limit = "" if options.memory is None else f"; auto: {counted(options.memory, 'microbatch')} on a rank at most"
    print(f"{counted(ranks, 'rank')}, {counted(microbatches, 'microbatch')}, {costs}{limit}\n")
    sys.stdout.write(compare(found))


def _costs(text: str) -> RankCosts:
    """``--costs F,I,W,transfer``, exactly as written."""
    parts = text.split(",")
    hint = "write --costs F,I,W,transfer, such as 1,1,1,0 or 5.5,1/2,4: seconds or any other unit"
    if len(parts) not in (3, 4):
        raise UserError(f"--costs has {counted(len(parts), 'number')}, not 3 or 4: '{text}'", hint=hint)
    values = []
    for part in parts:
        if _NUMBER.fullmatch(part.strip()) is None:
            raise UserError(f"--costs has '{part}', which is no number", hint=hint)
        value = _fraction(part)
        if value is None or not (value == 0 or Fraction(1, 10**9) <= value <= 10**9):
            raise UserError(f"--costs has {part}", hint="give numbers from 0 to 1e9, and none but 0 below 1e-9")
        values.append(value)
    if not values[0] or not values[1] + values[2]:
        raise UserError(f"--costs has a forward of {number(values[0])} and a backward of "
                        f"{number(values[1] + values[2])}", hint="both take time: give numbers above 0")
    return RankCosts(*(int(value) if value.denominator == 1 else value for value in values))


def _fraction(text: str) -> Fraction | None:
    """The exact value of a number of :data:`_NUMBER`'s form; None for one that is out of all proportion."""
    _, _, exponent = text.lower().partition("e")
    if len(text) > 32 or abs(int(exponent or 0)) > 32:
        return None
    try:
        return Fraction(text.strip())
    except ZeroDivisionError:
        return None


_NUMBER = re.compile(r"[+-]?(\d+/\d+|(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)", re.IGNORECASE | re.ASCII)
"""A whole number, a decimal one or a fraction."""
