"""Run ``vpipe schedule``, ``check`` and ``simulate``: draw, compare and prove schedules, without torch."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from pathlib import Path

from vpipe import Plan
from vpipe.app.visualize.repeating import Repeating
from vpipe.app.visualize.summary import RankCosts, Summary, compare
from vpipe.app.visualize.svg import draw_svg
from vpipe.app.visualize.table import PIPE_COLUMNS, listed, number, replicas, sizes, terminal_columns
from vpipe.app.visualize.terminal import draw_text
from vpipe.errors import UserError, counted
from vpipe.schedules import CsvFile, RegisteredSchedule, Schedule, build, check, lower

MOST_SEARCHED = 25_000
"""Forwards and backwards of an order that is searched over several placements: a minute."""


def run_schedule(options: argparse.Namespace) -> None:
    """Draw the schedule that the options name, or compare all."""
    costs = parse_costs(options.costs)
    if options.all:
        _compare(options, costs)
        return
    if options.name is None:
        raise UserError("which schedule?", hint=f"name one of {', '.join(RegisteredSchedule.names())}, or a file; "
                        "--all compares them")
    summary = _too_long_to_list(options, costs)
    if summary is None:
        listing = "" if options.format in _PICTURES else f", which --format {options.format} lists one by one,"
        schedule = named_schedule(options, costs, listing)
        summary = Summary.of(schedule, costs)
    sys.stdout.write(_for_torch(schedule) if options.format == "torch" else _FORMATS[options.format](summary))


def run_check(options: argparse.Namespace) -> None:
    """Prove a schedule in a CSV file: as written and, if it has no transfers, with those that vpipe adds."""
    schedule = _file(options)
    check(schedule)
    transfers = sum(action.op.transfer is not None for program in schedule.programs for action in program)
    if not transfers:
        check(lower(schedule.compute_only()))
    actions, of_them = sum(map(len, schedule.programs)), f", {transfers} of them transfers" if transfers else ""
    print(f"ok: {schedule.name}: {sizes(schedule)}, {actions} actions{of_them}")
    print("no deadlock, whether sends wait for their receives or not"
          + ("" if transfers else "; with the transfers that vpipe adds"))
    stages = schedule.stage_peaks
    print(f"peak activations per rank: {listed([rank.peak_activations for rank in schedule.rank_peaks])}; "
          f"versions per stage: {listed([stage.versions for stage in stages])}; "
          f"staleness: {listed([stage.staleness for stage in stages])}")


def run_simulate(options: argparse.Namespace) -> None:
    """Draw a schedule in a CSV file."""
    sys.stdout.write(_text(Summary.of(_file(options), parse_costs(options.costs))))


def _file(options: argparse.Namespace) -> Schedule:
    path = options.file
    if str(path) in RegisteredSchedule.names() and not path.exists():
        raise UserError(f"'{path}' is a schedule's name, not a file",
                        hint=f"vpipe schedule {path} proves and draws it; with --format csv it writes the file")
    return _read(path, _slices(options))


def _read(path: Path, slices: int) -> Schedule:
    """Read a CSV file; say what of it a schedule here has not."""
    file = CsvFile.read(path)
    if file.schedule.microbatches % slices:
        raise UserError(f"--slices is {slices}, but '{path}' has {counted(file.schedule.microbatches, 'forward')} of "
                        "every stage", hint="give a divisor of that number: every microbatch has as many slices")
    if (said := file.note) is not None:
        print(f"note: {said}", file=sys.stderr)
    return replace(file.schedule, slices=slices)


def _for_torch(schedule: Schedule) -> str:
    """Return the file for PyTorch; say what it needs beside it, and who does what it leaves out."""
    text = schedule.to_torch_csv()
    left = Counter(action.op.torch for program in schedule.programs for action in program if action.op.torch)
    print(f"note: num_stages={schedule.stages}, n_microbatches={schedule.microbatches}; left out: "
          + "; ".join(f"{times} {what}" for what, times in left.items()), file=sys.stderr)
    return text


def _text(summary: Summary) -> str:
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return draw_text(summary, terminal_columns(PIPE_COLUMNS), colour=colour)


_PICTURES = ("text", "svg")
"""Formats that may show a part; the others list all actions."""

_FORMATS: dict[str, Callable[[Summary], str]] = {
    "text": _text, "csv": lambda summary: summary.schedule.to_csv(), "svg": draw_svg,
    "json": lambda summary: json.dumps(summary.as_json()) + "\n"}


def named_schedule(options: argparse.Namespace, costs: RankCosts, listing: str = "") -> Schedule:
    """Return the schedule of a name, a file or a plan, not proved yet; ``listing`` says why all actions are listed."""
    name = options.name
    if name not in RegisteredSchedule.names() and (name.lower().endswith((".csv", ".json")) or "/" in name):
        planned = name.lower().endswith(".json")
        schedule = _planned(name, options) if planned else _read(Path(name), _slices(options))
        for option, given, has in (("--stages", options.stages, schedule.stages),
                                   ("--ranks", options.ranks, schedule.ranks),
                                   ("--microbatches", options.microbatches, schedule.microbatches // schedule.slices),
                                   ("--slices", options.slices, schedule.slices),
                                   ("--update-every", options.update_every, schedule.update_every),
                                   ("--chunks", options.chunks, None), ("--memory", options.memory, None),
                                   ("--widths", options.widths, None), ("--warmup-depth", options.warmup, None)):
            if given not in (None, has):
                raise UserError(f"{option} does not go with a file" if has is None else
                                f"{option} is {given}, but '{name}' has {has}",
                                hint=f"leave {option} out: the file says it")
        return schedule
    registered, widths, microbatches = _asked(options, why=listing)
    return _built(registered, options, widths, microbatches, costs)


def _asked(options: argparse.Namespace, *, listed: bool = True,
           why: str = "") -> tuple[RegisteredSchedule, tuple[int, ...], int]:
    """Return the schedule that the options name, the replicas at each position, and the number of microbatches.

    See :func:`_sizes` for the arguments.
    """
    registered = RegisteredSchedule.named(options.name)
    if registered.search is not None:
        why = f", which '{registered.name}' searches one by one,"
    widths, microbatches = _sizes(options, registered, listed=listed, why=why)
    registered.check_chunks(options.chunks, "--chunks")
    registered.check_slices(_slices(options), "--slices")
    if registered.search is None and options.memory is not None:
        raise UserError(f"--memory does not go with '{registered.name}', which holds what it holds",
                        hint="leave it out, or let auto find an order that keeps it")
    return registered, widths, microbatches


def _too_long_to_list(options: argparse.Namespace, costs: RankCosts) -> Summary | None:
    """Return the summary of a schedule with too many actions to list, which must repeat; None of any other.

    A searched schedule does not repeat, and every format but a picture lists all actions: they keep the limit.
    """
    if options.format not in _PICTURES or options.name not in RegisteredSchedule.names():
        return None
    registered, widths, microbatches = _asked(options, listed=False)
    ranks, chunks, several = sum(widths), options.chunks or 1, max(widths) > 1
    if registered.search is not None or _slices(options) > 1 \
            or 2 * ranks * microbatches * chunks <= Schedule.MOST_ACTIONS:
        return None
    warmup = _depths(options.warmup)
    if warmup is not None:
        registered.check_warmup(widths, warmup)
    placement = _replicated(registered.placement(len(widths), options.chunks), widths)
    gc.disable()  # a million tuples, none of them in a circle: to look for these takes a tenth of the time
    try:
        found = Repeating.find(registered.name, placement, microbatches, costs.of(placement), options.update_every,
                               warmup)
    finally:
        gc.freeze()
        gc.enable()
    if found is None:
        Schedule.check_work(ranks, microbatches, chunks, replicated=several,
                   why=f", in no short part of which '{registered.name}' is seen to repeat itself at these costs,")
    return None if found is None else Summary(found.schedule, costs, found.timeline, found)


def _planned(path: str, options: argparse.Namespace) -> Schedule:
    """Return the schedule of a plan, which may leave the number of microbatches to the options."""
    plan = Plan.load(path)
    slices, microbatches = plan.order.slices or 1, plan.microbatches or options.microbatches
    if plan.schedule is None:
        raise UserError("the plan has no schedule", where=path,
                        hint='add one, such as "schedule": "1f1b"; vpipe plan CONFIG -o plan.json writes whole plans')
    if microbatches is None:
        raise UserError("the plan has no number of microbatches", where=path, hint="give --microbatches")
    Schedule.check_work(sum(map(len, plan.groups)), microbatches * slices, replicated=max(map(len, plan.groups)) > 1)
    return build(plan.schedule, plan.groups, microbatches, plan.update_every,
                 recompute=[stage for stage, layers in enumerate(plan.recomputed) if layers],
                 warmup=plan.warmup, slices=slices)


def _sizes(options: argparse.Namespace, registered: RegisteredSchedule, *, listed: bool = True,
           why: str = "") -> tuple[tuple[int, ...], int]:
    """Return the replicas at each position of the pipeline, and the number of microbatches.

    Args:
        registered: says how many stages each rank holds.
        listed: all actions are, so that there may not be too many of them.
        why: they are.
    """
    widths = _widths(options.widths)
    size = options.ranks if options.stages is None and len(widths) < 2 else widths
    for option, value in (("--ranks", size), ("--microbatches", options.microbatches)):
        if value is None:
            raise UserError(f"{option} is missing", hint="give the size: --ranks 4 --microbatches 8")
    for option, value in (("--ranks", options.ranks), ("--stages", options.stages),
                          ("--microbatches", options.microbatches),
                          ("--chunks", options.chunks), ("--update-every", options.update_every),
                          ("--memory", options.memory)):
        if value is not None and value < 1:
            raise UserError(f"{option} is {value}", hint="give a whole number, 1 or more")
    each = options.chunks if options.chunks and registered.any_chunks else registered.chunks
    width, positions = widths[0] if len(widths) == 1 else 1, len(widths)
    for option, count, unit, held in (
            ("--ranks", None if len(widths) > 1 else options.ranks, width, f"each stage has {width} replicas"),
            ("--stages", options.stages, each, f"'{registered.name}' holds {each} stages on each rank")):
        if count is not None:
            positions, rest = divmod(count, unit)
            if rest:
                raise UserError(f"{option} is {count}, but {held}", hint=f"give a multiple of {unit}")
    chunks = (options.chunks or 1) * _slices(options)

    def check_numbers(ranks: int, *, replicated: bool) -> None:
        if listed or options.microbatches > Schedule.MOST_MICROBATCHES or 2 * ranks * chunks > Schedule.MOST_ACTIONS:
            Schedule.check_work(ranks, options.microbatches, chunks, replicated=replicated, why=why)

    if len(widths) <= 1:  # refuses numbers that are too large before so long a tuple is made
        [width] = widths or (1,)
        check_numbers(positions * width, replicated=width > 1)
        widths = (width,) * positions
    if len(widths) != positions:
        raise UserError(f"--widths has {counted(len(widths), 'number')}, but --stages is {options.stages}",
                        hint=f"give {counted(positions, 'number')}, or one for all, or leave --stages out")
    if options.ranks not in (None, sum(widths)):
        raise UserError(f"--ranks is {options.ranks}, but with these --stages and --widths '{registered.name}' has "
                        f"{counted(sum(widths), 'rank')}", hint="leave --ranks out, or change --stages or --chunks")
    check_numbers(sum(widths), replicated=max(widths) > 1)
    if options.microbatches < max(widths):
        raise UserError(f"{counted(max(widths), 'replica')} for {counted(options.microbatches, 'microbatch')}: some "
                        "would have nothing to do", hint=f"use {max(widths)} microbatches or more, or fewer replicas")
    return widths, options.microbatches


def _slices(options: argparse.Namespace) -> int:
    if options.slices is not None and options.slices < 1:
        raise UserError(f"--slices is {options.slices}", hint="give a whole number, 1 or more")
    return options.slices or 1


def _widths(text: str | None) -> tuple[int, ...]:
    """Parse ``--widths 2,1``, or 2-1 as the docs write it; empty when left out."""
    return () if text is None else _numbers(
        re.split(r",|(?<=\d)-", text), r"0*[1-9]\d{0,5}", "--widths", "replicas",
        "write --widths 2,1 or --widths 2: a whole number for each of the --stages, or one for all")


def _depths(text: str | None) -> tuple[int, ...] | None:
    """Parse ``--warmup-depth 5,3,1,0``."""
    return None if text is None else _numbers(
        text.split(","), r"\d{1,5}", "--warmup-depth", "forwards",
        "write --warmup-depth 5,3,1,0: a whole number for each of the --stages")


def _numbers(parts: Sequence[str], form: str, option: str, what: str, hint: str) -> tuple[int, ...]:
    for part in parts:
        if re.fullmatch(rf"\s*{form}\s*", part, re.ASCII) is None:
            raise UserError(f"{option} has '{part}', which is no number of {what}", hint=hint)
    return tuple(map(int, parts))


def _built(registered: RegisteredSchedule, options: argparse.Namespace, widths: tuple[int, ...], microbatches: int,
           costs: RankCosts) -> Schedule:
    # Of a search among all numbers of stages per rank that with which --stages were counted.
    ranks, chunks = len(widths), options.chunks or (registered.chunks if options.stages and registered.search else None)
    if (warmup := _depths(options.warmup)) is not None:
        registered.check_warmup(widths, warmup)
    if registered.search is None:
        return build(registered.name, _replicated(registered.placement(ranks, chunks), widths), microbatches,
                     options.update_every, warmup=warmup, slices=_slices(options))
    Schedule.check_work(sum(widths), microbatches, chunks or 1, replicated=max(widths) > 1, most=MOST_SEARCHED)
    limit = None if options.memory is None else options.memory * costs.activation_bytes
    if max(widths) == 1:
        return build(registered.name, ranks, microbatches, costs=costs.of, limits=limit, chunks=chunks)
    if len(set(widths)) > 1:
        return build(registered.name, _replicated(registered.placement(ranks, 1), widths), microbatches)  # says why not
    placement = build(registered.name, ranks, -(-microbatches // widths[0]), costs=costs.of, limits=limit,
                      chunks=chunks).placement
    return build(registered.name, _replicated(placement, widths), microbatches, costs=costs.of(placement), limits=limit)


def _replicated(placement: tuple[tuple[int, ...], ...], widths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return a placement with every rank replaced by its replicas, numbered one after the other."""
    own = [range(first := sum(widths[:rank]), first + width) for rank, width in enumerate(widths)]
    return tuple(tuple(chain.from_iterable(own[rank] for rank in ranks)) for ranks in placement)


def compared_schedule(registered: RegisteredSchedule, options: argparse.Namespace, costs: RankCosts) -> Schedule:
    """Return a schedule with those of the options that it can have, not proved yet."""
    has = {"chunks": registered.any_chunks, "update_every": not registered.flush, "warmup": registered.any_warmup,
           "memory": registered.search is not None, "slices": registered.sliced}
    own = {key: given if has.get(key, True) else None for key, given in vars(options).items()}
    return _built(registered, argparse.Namespace(**own), *_sizes(options, registered), costs)


def _compare(options: argparse.Namespace, costs: RankCosts) -> None:
    if options.name is not None:
        raise UserError(f"--all and '{options.name}'", hint="name a schedule, or compare all of them")
    if options.format != "text":
        raise UserError(f"--all prints a table, not {options.format}", hint="leave --format out, or name a schedule")
    widths, microbatches = _sizes(options, RegisteredSchedule.named(RegisteredSchedule.DEFAULT))
    found: dict[str, Summary | str] = {}
    for name in RegisteredSchedule.names():
        try:
            found[name] = Summary.of(compared_schedule(RegisteredSchedule.named(name), options, costs), costs)
        except UserError as error:
            found[name] = error.problems[0].what.splitlines()[0]
    limit = "" if options.memory is None else f"; auto: {counted(options.memory, 'microbatch')} on a rank at most"
    ranks = (counted(options.stages, "stage") if options.stages else counted(sum(widths), "rank"))
    ranks += f" ({replicas(widths)})" * (max(widths) > 1)
    slices = f" in {options.slices} slices each where a schedule takes them" * (_slices(options) > 1)
    print(f"{ranks}, {counted(microbatches, 'microbatch')}{slices}, {costs}{limit}\n")
    sys.stdout.write(compare(found))


def parse_costs(text: str) -> RankCosts:
    """Parse ``--costs F,I,W,transfer,step``, exactly as written."""
    parts = text.split(",")
    hint = "write --costs F,I,W,transfer,step, such as 1,1,1,0 or 5.5,1/2,4: seconds or any other unit"
    if len(parts) not in (3, 4, 5):
        raise UserError(f"--costs has {counted(len(parts), 'number')}, not 3 to 5: '{text}'", hint=hint)
    values = []
    for part in parts:
        value = Fraction(part.strip()) if _NUMBER.fullmatch(part.strip()) else -1
        if not (value == 0 or Fraction(1, 10**9) <= value <= 10**9):
            raise UserError(f"--costs has '{part}', which is neither 0 nor a number from 1e-9 to 1e9", hint=hint)
        values.append(value)
    if not values[0] or not values[1] + values[2]:
        raise UserError(f"--costs has a forward of {number(values[0])} and a backward of "
                        f"{number(values[1] + values[2])}", hint="both take time: give numbers above 0")
    return RankCosts(*(int(value) if value.denominator == 1 else value for value in values))


_NUMBER = re.compile(r"\+?(?=.{1,32}$)(\d+/0*[1-9]\d*|(\d+\.?\d*|\.\d+)(e[+-]?\d{1,2})?)", re.IGNORECASE | re.ASCII)
"""A whole number, a decimal one or a fraction, whose exact value has few digits."""
