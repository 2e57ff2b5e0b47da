"""Lay out tables of text and of CSV, and write numbers and sizes as people read them."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import tempfile
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from vpipe.errors import UserError, counted
from vpipe.schedules import Schedule

Number = int | float | Fraction
Item = TypeVar("Item")
Key = TypeVar("Key")


def sizes(schedule: Schedule) -> str:
    """Return ``4 ranks, 8 stages, 8 microbatches, flush``; of replicated stages also the number of replicas."""
    widths = [len(ranks) for ranks in schedule.placement]
    several = max(widths) > 1
    parts = [counted(schedule.ranks, "rank"), counted(schedule.microbatches // schedule.slices, "microbatch")
             + f" in {schedule.slices} slices each" * (schedule.slices > 1)]
    if several or schedule.stages != schedule.ranks:
        parts.insert(1, counted(schedule.stages, "stage") + f" with {replicas(widths)}" * several)
    every = schedule.update_every
    parts.append("flush" if schedule.flush else
                 "no flush, an update every " + ("microbatch" if every == 1 else f"{every} microbatches")
                 + " of each replica" * several)
    return ", ".join(parts)


def replicas(widths: Sequence[int]) -> str:
    """Return ``2 replicas each`` or ``2, 1 replicas``."""
    return f"{widths[0]} replicas each" if len(set(widths)) == 1 else f"{', '.join(map(str, widths))} replicas"


def row_name(placement: Sequence[Sequence[int]], rank: int) -> str:
    """Return ``rank 1``; of a replica with its stage, ``rank 1 (stage 0, 2 of 2)``.

    Where it is another replica of another stage, only with its stages: ``rank 1 (stages 1 2)``.
    """
    stages = [stage for stage, ranks in enumerate(placement) if rank in ranks]
    if (which := replica(placement, rank)) is None:
        return f"rank {rank}"
    each = which if " " not in which.split(" of ")[0] else ""
    return f"rank {rank} (stage{'s' * (len(stages) > 1)} {' '.join(map(str, stages))}{', ' * bool(each)}{each})"


def replica(placement: Sequence[Sequence[int]], rank: int) -> str | None:
    """Return ``2 of 2``, or ``1 2 of 2`` where it differs by stage; None for a rank whose stages are not replicated."""
    groups = [ranks for ranks in placement if rank in ranks]
    numbers = [1 + ranks.index(rank) for ranks in groups]
    if len(set(numbers)) == 1:
        numbers = numbers[:1]
    width = max(map(len, groups))
    return f"{' '.join(map(str, numbers))} of {width}" if width > 1 else None


def listed(values: Sequence[int]) -> str:
    """Return all values; of many only their range."""
    if len(values) <= 16:
        return " ".join(map(str, values))
    return f"{min(values)} to {max(values)}" if min(values) < max(values) else str(values[0])


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by what ``key`` makes of them, in order of the first."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def plain(value: Number) -> int | float:
    """Return a number as JSON has it: whole ones without a point."""
    return int(value) if value == int(value) else float(value)


def number(value: Number) -> str:
    """Return a number for people: ``9``, ``4.5``, ``321.3``."""
    return str(int(value)) if value == int(value) and value < 10**9 else f"{float(value):.6g}"


def ms_text(seconds: float) -> str:
    """Return milliseconds without their unit: ``1,234``, ``12.3``, ``0.42``; ``-`` for NaN, an unknown time."""
    value = 1e3 * seconds
    if math.isnan(value):
        return "-"
    if value < 0.005:
        return "0"
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def percent(share: Number) -> str:
    """Return ``27 %``; one decimal below ten."""
    value = float(Fraction(share) * 100)
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


FILE_COLUMNS, PIPE_COLUMNS = 100, 200
"""Widths where there is no terminal: of tables in logs and files, and of what a command prints to a file or a pipe."""


def terminal_columns(otherwise: int = FILE_COLUMNS) -> int:
    """Return the width of the terminal; ``otherwise`` where there is none."""
    return shutil.get_terminal_size((otherwise, 24)).columns


def shown_width(text: str) -> int:
    """Return the columns of a terminal that a text takes: two for a character of Chinese, Japanese or Korean."""
    return len(text) if text.isascii() else sum(
        1 + (unicodedata.east_asian_width(character) in "WF") for character in text)


def printable(text: str) -> str:
    """Return the first lines of a text with a space for what is no character, so that it cannot move the cursor."""
    lines = "".join(each if each.isprintable() or each == "\n" else " " for each in text.expandtabs(4)).split("\n")
    return "\n".join(clipped(line, _PRINTED_COLUMNS).rstrip() for line in lines[:_PRINTED_LINES])


_PRINTED_LINES, _PRINTED_COLUMNS = 10, 100


def clipped(text: str, width: int) -> str:
    """Return as much of the beginning of a text as so many columns of a terminal show."""
    for number, character in enumerate(text):
        width -= shown_width(character)
        if width < 0:
            return text[:number]
    return text


@dataclass(frozen=True)
class Column:
    """Cells under a head, left out where the table would be too wide if ``spare``, aligned to the left if ``left``."""

    head: str
    cells: Sequence[str]
    spare: bool = False
    left: bool = False

    @property
    def width(self) -> int:
        """Return the columns of a terminal that the widest cell takes."""
        return max(map(shown_width, (self.head, *self.cells)))


def columns(all_of_them: Sequence[Column], width: float = math.inf) -> list[str]:
    """Lay out a table no wider than ``width`` as long as there are spare columns to leave out, the last first."""
    kept = list(all_of_them)
    while sum(column.width + 2 for column in kept) - 2 > width and any(column.spare for column in kept):
        del kept[max(number for number, column in enumerate(kept) if column.spare)]
    padded = [[cell + blanks if column.left else blanks + cell for cell in (column.head, *column.cells)
               for blanks in (" " * (column.width - shown_width(cell)),)] for column in kept]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def _columns_of(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[Column]:
    return [Column(name, cells, left=number < left)
            for number, (name, *cells) in enumerate(zip(head, *rows, strict=True))]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Lay out columns as wide as their widest cell, aligned to the right but for the first ``left``."""
    return columns(_columns_of(head, rows, left))


def fitted(head: Sequence[str], rows: Sequence[Sequence[str]], width: int, left: int = 0,
           names: int = 1) -> list[str]:
    """Lay out a table in lines of at most ``width``, where one of its columns allows it.

    Columns beyond the width go into further tables below the first, as few as can be, of about the same width. Each
    begins with the first ``names`` columns, which name the row.
    """
    named, others = (every := _columns_of(head, rows, left))[:names], every[names:]
    room = width + 2 - sum(column.width + 2 for column in named)

    def cut(room: int) -> list[list[Column]]:
        parts: list[list[Column]] = [[]]
        for column in others:
            if parts[-1] and sum(own.width + 2 for own in (*parts[-1], column)) > room:
                parts.append([])
            parts[-1].append(column)
        return parts

    parts = cut(room)
    while room > max(column.width + 2 for column in every) and len(even := cut(room - 1)) == len(parts):
        parts, room = even, room - 1
    return "\n\n".join("\n".join(columns([*named, *part])) for part in parts).split("\n")


def filled(text: str, width: int) -> list[str]:
    """Return lines of ``width`` at most, and of 120; a number stays with its unit."""
    bound = re.sub(r"(?<=\d) (?=(?:%|ms|s|[KMGT]iB|B)(?!\w))", "\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(bound, max(40, min(width, 120)), subsequent_indent="  ", break_long_words=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def milliseconds(seconds: float) -> str:
    """Return ``0.42 ms``, ``12.3 ms``, ``421 ms``, ``12.3 s``."""
    value = seconds * 1e3
    if value >= 9999.5:
        return f"{seconds:,.1f} s"
    return f"{value:.2f} ms" if value < 9.995 else f"{value:.1f} ms" if value < 99.95 else f"{value:.0f} ms"


def compact(value: float) -> str:
    """Return a number in about three digits: ``1,234``, ``12.3``, ``0.0042``."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def check_output(path: Path | None) -> None:
    """Refuse a path, if there is one, that cannot be written as a new file, before any work is done."""
    if path is None:
        return
    folder, why = path.absolute().parent, None
    if path.exists() and not path.is_dir():
        raise UserError(f"'{path}' exists already", hint="name another as -o, or remove it first")
    if path.is_dir() or not folder.is_dir():
        why = "it is a folder" if path.is_dir() else "it is in no folder"
    else:
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            why = f"{folder}: {error.strerror}"
    if why is not None:
        raise UserError(f"cannot write '{path}': {why}", hint="name a file in a folder that exists, and can be "
                        "written, as -o")


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a header and a line per row, with a column for each key of any row, in order of first appearance.

    None and a missing key are empty cells; lists are JSON; true and false are as in YAML.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([json.dumps(cell) if isinstance(cell, bool | list | tuple | dict) else cell
                      for cell in map(row.get, columns)] for row in rows)
    return out.getvalue()
