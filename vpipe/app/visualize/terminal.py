"""Draw a schedule in the terminal: a row per rank, time from left to right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

from vpipe.app.visualize.summary import Summary
from vpipe.app.visualize.table import Number, number, replica, row_name, sizes, table
from vpipe.schedules import Action, kinds

_IDLE, _DIM = ".", "2"
_LEFT_OUT = " ~ "  # in the place of the middle of a schedule that is too long to list
_UNSEEN = 100  # of an action that is so many times shorter than the longest there may be nothing to see

Cell = tuple[str, str]
"""A character and its style; an empty style is plain."""


def draw_text(summary: Summary, width: int, *, colour: bool) -> str:
    """Return the picture with its legend, the numbers and a table of what every rank holds.

    The scale is the widest, up to one that separates all actions, at which the whole schedule fits. Where labels do not
    fit, narrow ones lose their numbers. Where that is not enough, the picture ends at ``width``, and a line says so.
    """
    schedule = summary.schedule
    label = max(len(row_name(schedule.placement, rank)) for rank in range(schedule.ranks)) + 2
    room = max(20, width - label)
    per_unit, cut = _scale(summary, room - 1)  # a column for the last step
    pictures, rows = _pictured(summary, per_unit, room)
    lines = [f"{schedule.name}: {sizes(schedule)}", f"{summary.times()}  ({summary.costs})", "",
             *(f"{name:{label}}{_styled(cells, colour)}".rstrip() for name, cells in rows)]
    used = {event.action.op for events in summary.timeline.events for event in events}
    legend = [_styled([(f"{op[0]} {op.name}", op.shades[0])], colour) for op in kinds.known() if op in used]
    lines += ["", "  ".join([*legend, f"{_IDLE} idle"])]
    if any(summary.chunk_of):
        lines.append(f"lower case{' and lighter' * colour}: not the first of the rank's stages")
    if not schedule.flush:
        lines.append("v: the weight version that a forward or a backward uses")
    if any(picture.bare for picture in pictures):
        lines.append("a letter alone: too narrow for its microbatch; a wider terminal shows it, --format svg all")
    scale = f"a unit of time is {number(per_unit)} column{'s' * (per_unit != 1)}" if 1 <= per_unit < 1000 else \
        f"a column is {number(1 / per_unit)} units of time"
    if summary.left_out is not None:
        begin, end = math.floor(pictures[0].columns / per_unit), math.ceil(pictures[1].begin_s)
        scale += f"; {_LEFT_OUT.strip()}: {summary.said_left_out(begin, end)}"
    elif cut:
        shown = Fraction(room) / per_unit
        scale += (f"; cut at time {number(math.floor(shown) if shown >= 10 else shown)} of "
                  f"{number(summary.timeline.makespan_s)}: a wider terminal shows more, --format svg all")
    return "\n".join([*lines, scale, "", *holdings(summary)]) + "\n"


def holdings(summary: Summary) -> list[str]:
    """Return a table of what every rank holds, and how long it waits."""
    placement, ranks = summary.schedule.placement, range(summary.schedule.ranks)
    halves = any(rank.peak_weight_halves for rank in summary.proved.rank_peaks)
    which = [replica(placement, rank) or "" for rank in ranks]
    columns = {"rank": ranks, "stages": [" ".join(map(str, summary.schedule.stages_of(rank))) for rank in ranks],
               "replica": which if any(which) else None,
               "peak activations": [rank.peak_activations for rank in summary.proved.rank_peaks],
               "weight halves": [rank.peak_weight_halves for rank in summary.proved.rank_peaks] if halves else None,
               "versions": summary.per_rank("versions"), "staleness": summary.per_rank("staleness"),
               "idle": map(number, summary.timeline.idle_s)}
    shown = {head: map(str, cells) for head, cells in columns.items() if cells is not None}
    unit = ("microbatches" if summary.schedule.slices == 1 else "slices") + (
        "" if summary.stages_per_rank == "1" else " of one stage")
    return [*table(list(shown), list(zip(*shown.values(), strict=True))),
            f"(activations{' and weight halves' * halves} in {unit})"]


def _label(action: Action, chunk: int) -> str:
    """Return ``F3``; ``f3`` on a later stage of the rank."""
    label = f"{action.op}{action.index}"
    return label.lower() if chunk else label


def _scale(summary: Summary, room: int) -> tuple[Fraction, bool]:
    """Return columns per unit of time, and whether the picture must be cut.

    Best is a column between labels, then none, at a scale that puts every start and end on a column; then labels
    without their numbers. Actions too short to be seen beside the longest do not count.
    """
    labels: dict[Number, int] = {}  # the longest, by the time that actions take
    times: set[Number] = set()
    for rank in summary.timeline.events:
        for event in rank:
            if taken := event.end_s - event.start_s:
                labels[taken] = max(labels.get(taken, 0), len(_label(event.action, 0)))
                times.add(event.end_s)
    longest = Fraction(max(labels))
    seen = [(columns, Fraction(taken)) for taken, columns in labels.items() if Fraction(taken) * _UNSEEN > longest]
    end = Fraction(summary.timeline.makespan_s)
    roomy, tight, bare = (max(columns / taken for columns, taken in wanted) for wanted in (
        [(columns + 1, taken) for columns, taken in seen], seen, [(1, taken) for _, taken in seen]))
    ends = [Fraction(time) for time in times]
    whole = math.lcm(*{time.denominator for time in ends})
    grain = Fraction(math.gcd(*{int(time * whole) for time in ends}), whole)  # all ends are multiples of it
    fitting = Fraction(min(math.ceil(roomy * grain), math.floor(room * grain / end))) / grain  # starts on columns
    stretched = min(roomy, room / end)
    for least in (tight, bare):
        for scale in (fitting, stretched):
            if scale >= least:
                return scale, False
    return tight, True


def _pictured(summary: Summary, per_unit: Fraction, room: int) -> tuple[list[_Picture], list[tuple[str, list[Cell]]]]:
    """Return the picture and its rows; of a schedule that is too long to list, the beginning and the end."""
    if summary.left_out is None:
        picture = _Picture(summary, per_unit, room)
        return [picture], picture.rows()
    end = Fraction(summary.timeline.makespan_s)
    room -= len(_LEFT_OUT)
    right = min(room // 2, math.floor((end - Fraction(summary.left_out[1])) * per_unit) + 1)
    left = min(room - right, math.floor(Fraction(summary.left_out[0]) * per_unit))
    first, last = _Picture(summary, per_unit, left), _Picture(summary, per_unit, right, end - (right - 1) / per_unit)
    cells: list[Cell] = [(character, _DIM) for character in _LEFT_OUT]
    return [first, last], [(name, [*one, *cells, *other])
                   for (name, one), (_, other) in zip(first.rows(), last.rows(), strict=True)]


class _Picture:
    """The rows of a picture, column by column, from the time ``begin_s`` on."""

    def __init__(self, summary: Summary, per_unit: Fraction, columns: int, begin_s: Fraction = Fraction()) -> None:
        self._summary, self.begin_s = summary, begin_s
        self._column = cache(lambda seconds: round((Fraction(seconds) - begin_s) * per_unit))
        self.columns = min(columns, self._column(summary.timeline.makespan_s) + 1)
        self._versions = summary.versions_used
        self.bare = False  # whether an action was too narrow for its microbatch

    def rows(self) -> list[tuple[str, list[Cell]]]:
        """Return the name of each row and its cells."""
        rows = []
        for rank in range(self._summary.schedule.ranks):
            rows.append((row_name(self._summary.schedule.placement, rank), self._actions(rank)))
            if self._versions:
                rows.append(("", self._used(rank)))
        return rows

    def _actions(self, rank: int) -> list[Cell]:
        row: list[Cell] = [(_IDLE, _DIM)] * self.columns
        busy = 0
        for event in self._summary.timeline.events[rank]:
            if event.end_s < self.begin_s:
                continue
            first, last = self._column(event.start_s), min(self._column(event.end_s), self.columns)
            op = event.action.op
            if not op.per_microbatch:
                at = first - 1 if first and row[min(first, self.columns) - 1][0] in f" -S{_IDLE}" else first
                if at < self.columns:
                    row[at] = (op[0], op.shades[0])
                    busy = max(busy, at + 1)
                continue
            chunk, shades = self._summary.chunk_of[event.action.stage], op.shades
            style = shades[min(chunk, len(shades) - 1)]
            text = _label(event.action, chunk)
            if 0 < last - first < len(text):
                self.bare = self.bare or last < self.columns
                text = text[0]
            text = text.ljust(last - first, "-" if op.whole_backward else " ")[:max(0, last - first)]
            if first < 0:  # it began in what is left out
                text, first = "-" * last, 0
            row[first:first + len(text)] = [(character, style) for character in text]
            busy = max(busy, last)
        return row[:busy] if busy < self.columns else row

    def _used(self, rank: int) -> list[Cell]:
        row: list[Cell] = [(" ", "")] * self.columns
        for event in self._summary.timeline.events[rank]:
            used = self._versions.get((event.action.stage, event.action.index))
            if event.end_s < self.begin_s or not event.action.op.per_microbatch or used is None:
                continue
            width = self._column(event.end_s) - self._column(event.start_s)
            first, label = self._column(event.start_s), f"v{used}"
            if len(label) <= width and first >= 0:
                row[first:first + len(label)] = [(character, _DIM) for character in label]
        return row[:self.columns]


def _styled(cells: Sequence[Cell], colour: bool) -> str:
    """Return the characters, with an escape sequence wherever the style changes."""
    if not colour:
        return "".join(character for character, _ in cells)
    text, before = [], ""
    for character, style in cells:
        if style != before:
            text.append("\x1b[0m" + (f"\x1b[{style}m" if style else ""))
        text.append(character)
        before = style
    return "".join(text) + ("\x1b[0m" if before else "")
