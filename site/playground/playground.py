"""Answer the page's requests with vpipe's own schedules, checker, simulator and drawing: JSON in, JSON out."""

from __future__ import annotations

import io
import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from vpipe.app.commands.schedule import compared_schedule, named_schedule, parse_costs, run_check
from vpipe.app.visualize.summary import RankCosts, Summary, share_text
from vpipe.app.visualize.svg import draw_svg
from vpipe.app.visualize.table import number, percent, plain, row_name, sizes
from vpipe.errors import CheckError, UserError, counted
from vpipe.schedules import Action, CsvFile, RegisteredSchedule

EDITED = Path("edited.csv")
MOST = {"ranks": 16, "microbatches": 64, "slices": 16}
"""Larger schedules take a page more than a few seconds."""

MOST_SEARCHED, MOST_SEARCHED_BESIDE = 256, 64
"""Ranks times microbatches of a schedule that is searched: about 8 s; the same in the comparison: about 2 s."""

COSTS = ("forward", "input", "weight", "transfer", "step")
_OPTIONS = {"--ranks": "ranks", "--microbatches": "microbatches", "--chunks": "chunks", "--slices": "slices",
            "--update-every": "update_every", "--warmup-depth": "warmup", "--memory": "limit"}


def answer(request: str) -> str:
    """Answer ``{"call": NAME, ...}`` with ``{"result": ...}``, or with ``{"error": [{"what", "hint", "where"}]}``."""
    try:
        arguments = json.loads(request)
        return json.dumps({"result": _CALLS[arguments.pop("call")](**arguments)})
    except UserError as error:
        return json.dumps({"error": _problems(error)})
    except Exception as error:
        return json.dumps({"error": [{"what": f"the playground failed: {type(error).__name__}: {error}", "where": None,
                                      "hint": "undo the last change, or reload the page"}]})


def catalog() -> Mapping[str, Any]:
    """Return the registered schedules, which settings each takes, and the largest sizes."""
    return {"most": MOST, "schedules": [
        {"name": registered.name, "about": _about(registered), "flush": registered.flush, "chunks": registered.chunks,
         "any_chunks": registered.any_chunks, "any_warmup": registered.any_warmup, "sliced": registered.sliced,
         "searched": registered.search is not None}
        for registered in RegisteredSchedule.imported()]}


def draw(settings: Mapping[str, str]) -> Mapping[str, Any]:
    """Return everything that the page shows of the schedule that ``settings`` name."""
    costs, options = _costs(settings), _options(settings)
    _check_search(RegisteredSchedule.named(options.name), options, MOST_SEARCHED, "use the command line")
    return _drawn(Summary.of(named_schedule(options, costs), costs), _command(settings))


def compare(settings: Mapping[str, str], name: str) -> Mapping[str, Any]:
    """Return a row of the comparison: the schedule ``name`` with those of the settings that it can have."""
    costs, options, registered = _costs(settings), _options(settings), RegisteredSchedule.named(name)
    _check_search(registered, options, MOST_SEARCHED_BESIDE, "choose it alone")
    one = Summary.of(compared_schedule(registered, options, costs), costs)
    period = one.timeline.period_s / one.schedule.assignment.step_microbatches
    return {"name": name, "flush": one.schedule.flush,
            "order": [float(one.timeline.bubble_s), float(one.peak), name],
            "cells": [one.stages_per_rank, number(one.timeline.bubble_s), share_text(one),
                      number(one.timeline.makespan_s), number(period), number(one.peak),
                      str(max(stage.versions for stage in one.proved.stage_peaks)),
                      str(max(stage.staleness for stage in one.proved.stage_peaks))]}


def check(settings: Mapping[str, str], text: str) -> Mapping[str, Any]:
    """Return the verdict of ``vpipe check`` on edited actions; the picture of those that pass."""
    EDITED.write_text(text, encoding="utf-8")
    slices = _options(settings).slices
    try:
        with redirect_stdout(io.StringIO()) as said:
            run_check(Namespace(file=EDITED, slices=slices))
    except UserError as error:
        marks = _marked(text, error.marks) if isinstance(error, CheckError) else _lines(error)
        return {"problems": _problems(error), "marks": marks,
                "command": shlex.join(["vpipe", "check", str(EDITED), *_sliced(slices)])}
    drawn = _drawn(Summary.of(replace(CsvFile.read(EDITED).schedule, slices=slices or 1), _costs(settings)),
                   _with_costs(["vpipe", "simulate", str(EDITED), *_sliced(slices)], settings))
    return {"verdict": said.getvalue(), "drawn": drawn}


_CALLS: Mapping[str, Callable[..., Any]] = {"catalog": catalog, "draw": draw, "compare": compare, "check": check}


def _sliced(slices: int | None) -> list[str]:
    return [] if slices is None else ["--slices", str(slices)]


def _about(registered: RegisteredSchedule) -> str:
    """Return the first line that the schedule's file says of it."""
    return (sys.modules[registered.program.__module__].__doc__ or "").strip().partition("\n")[0]


def _costs(settings: Mapping[str, str]) -> RankCosts:
    parsed = parse_costs(",".join(settings[cost] for cost in COSTS))
    sizes = [parse_costs(f"1,1,0,{settings[key]}").transfer_s for key in ("activation", "version")]
    return RankCosts(parsed.forward_s, parsed.input_s, parsed.weight_s, parsed.transfer_s, parsed.step_s, *sizes)


def _options(settings: Mapping[str, str]) -> Namespace:
    """Return the settings as ``vpipe schedule`` gets them; an empty one is left out."""
    def whole(key: str) -> int | None:
        text = settings.get(key, "").strip()
        if not text:
            return None
        if not text.isascii() or not text.isdecimal() or len(text) > 9:
            raise UserError(f"{_flag(key)} is '{text[:40]}'", hint="give a whole number, 1 or more")
        if int(text) > MOST.get(key, 10**9):
            raise UserError(f"{_flag(key)} is {text}, but this page draws {MOST[key]} at most",
                            hint="use the command line for larger schedules")
        return int(text)

    return Namespace(name=settings["schedule"], ranks=whole("ranks"), stages=None, microbatches=whole("microbatches"),
                     chunks=whole("chunks"), update_every=whole("update_every"), memory=whole("limit"), widths=None,
                     slices=whole("slices"), warmup=settings.get("warmup", "").strip() or None)


def _check_search(registered: RegisteredSchedule, options: Namespace, most: int, hint: str) -> None:
    size = (options.ranks or 0) * (options.microbatches or 0)
    if registered.search is not None and size > most:
        raise UserError(f"the search takes long for {counted(options.ranks, 'rank')} and "
                        f"{counted(options.microbatches, 'microbatch')}: the product is {size}, and this page "
                        f"searches up to {most} here", hint=hint)


def _flag(key: str) -> str:
    return next(flag for flag, own in _OPTIONS.items() if own == key)


def _command(settings: Mapping[str, str]) -> str:
    """Return the command that prints the same figures."""
    words = ["vpipe", "schedule", settings["schedule"]]
    for flag, key in _OPTIONS.items():
        if text := settings.get(key, "").strip():
            words += [flag, text]
    return _with_costs(words, settings)


def _with_costs(words: Sequence[str], settings: Mapping[str, str]) -> str:
    costs = [settings[cost] for cost in COSTS]
    while costs[3:] and costs[-1] == "0":
        costs.pop()
    return shlex.join([*words, *(["--costs", ",".join(costs)] if costs != ["1"] * 3 else [])])


def _drawn(summary: Summary, command: str) -> Mapping[str, Any]:
    schedule, timeline = summary.schedule, summary.timeline
    versions, per_step, period = summary.versions_used, schedule.assignment.step_microbatches, summary.timeline.period_s
    ranks = [{"name": row_name(schedule.placement, rank), "activations": peaks.peak_activations,
              "halves": peaks.peak_weight_halves, "idle": number(timeline.idle_s[rank]),
              "events": [[str(event.action), str(event.action.op), plain(event.start_s), plain(event.end_s),
                          versions.get((event.action.stage, event.action.index))
                          if event.action.op != "STEP" else None] for event in timeline.events[rank]],
              "memory": [[plain(time), plain(held)] for time, held in dict(timeline.memory[rank]).items()],
              "peak": number(timeline.peak_bytes[rank])} for rank, peaks in enumerate(summary.proved.rank_peaks)]
    moments = sorted({plain(time) for events in timeline.events for event in events
                      for time in (event.start_s, event.end_s)})
    return {
        "name": schedule.name, "sizes": sizes(schedule), "command": command, "svg": draw_svg(summary),
        "csv": schedule.to_csv(), "microbatches": schedule.microbatches // schedule.slices, "flush": schedule.flush,
        "bubble": number(timeline.bubble_s),
        "share": percent(timeline.bubble_share), "makespan": number(timeline.makespan_s),
        "end": plain(timeline.makespan_s), "period": number(period), "per_step": per_step,
        "update_every": None if schedule.flush else schedule.update_every,
        "per_microbatch": number(period / per_step), "peak": number(summary.peak), "ranks": ranks,
        "most": plain(max(timeline.peak_bytes)), "moments": moments,
        "stages": [{"ranks": list(where), "versions": stage.versions, "staleness": stage.staleness}
                   for where, stage in zip(schedule.placement, summary.proved.stage_peaks, strict=True)]}


def _problems(error: UserError) -> list[Mapping[str, str | None]]:
    return [{"what": problem.what, "hint": problem.hint, "where": problem.where} for problem in error.problems]


def _lines(error: UserError) -> list[Mapping[str, Any]]:
    """Return the lines at which the file could not be read."""
    lines = [(problem.where or "").removeprefix(f"{EDITED}:") for problem in error.problems]
    return [{"line": int(line) - 1, "start": 0, "end": None, "action": None} for line in lines if line.isdecimal()]


def _marked(text: str, marks: Sequence[tuple[int, int]]) -> list[Mapping[str, Any]]:
    """Return for each (rank, position) its line, and the characters of its cell in it; None behind the last action."""
    found, rows = [], text.splitlines()
    for rank, position in marks:
        row = rows[rank] if rank < len(rows) else ""
        cells, at = [], 0
        for cell in row.split(","):
            word = cell.strip()
            if word and _is_action(word):
                start = at + cell.index(word)
                cells.append((start, start + len(word), word))
            at += len(cell) + 1
        start, end, action = cells[position] if position < len(cells) else (len(row), None, None)
        found.append({"line": rank, "start": start, "end": end, "action": action})
    return found


def _is_action(word: str) -> bool:
    try:
        return bool(Action.parse(word))
    except UserError:
        return False
