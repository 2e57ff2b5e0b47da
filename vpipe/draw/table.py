"""Tables of text that fit the terminal, and the one that compares schedules."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence

from vpipe.draw.summary import Summary
from vpipe.draw.words import number, percent
from vpipe.schedules.costs import ratio
from vpipe.schedules.schedule import stages_of_rank

FILE_COLUMNS = 100
"""Width of tables where there is no terminal: in logs, pipes and files."""


def terminal_columns() -> int:
    """Return the width that tables of a run may have."""
    return shutil.get_terminal_size((FILE_COLUMNS, 24)).columns


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Columns as wide as their widest cell, aligned to the right but for the first ``left``."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(cell.ljust(width) if column < left else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in (head, *rows)]


def fitted(head: Sequence[str], rows: Sequence[Sequence[str]], width: int, left: int = 0,
           names: int = 1) -> list[str]:
    """Lay out a table in lines of at most ``width``, where one of its columns allows it.

    What does not fit stands in further tables below the first, as few as can be, of about the same width. Each begins
    with the first ``names`` columns, which say what a row is about.
    """
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) + 2 for column in columns]
    room = width + 2 - sum(widths[:names])

    def cut(room: int) -> list[list[int]]:
        parts: list[list[int]] = [[]]
        for column in range(names, len(columns)):
            if parts[-1] and sum(widths[own] for own in (*parts[-1], column)) > room:
                parts.append([])
            parts[-1].append(column)
        return parts

    parts = cut(room)
    while room > max(widths) and len(even := cut(room - 1)) == len(parts):
        parts, room = even, room - 1
    lines: list[str] = []
    for part in parts:
        own = [columns[column] for column in (*range(names), *part)]
        part_head, *part_rows = zip(*own, strict=True)
        lines += [*([""] if lines else []), *table(part_head, part_rows, left)]
    return lines


def filled(text: str, width: int) -> list[str]:
    """Return lines of ``width`` at most, and of 120; a number stays with its unit."""
    bound = re.sub(r"(?<=\d) (?=(?:%|ms|s|[KMGT]iB|B)(?!\w))", "\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(bound, max(40, min(width, 120)), subsequent_indent="  ", break_long_words=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def compare(found: Mapping[str, Summary | str]) -> str:
    """One line per schedule, the least bubble first; below them those that cannot be, and why.

    Args:
        found: by name, the summary or the reason.
    """
    summaries = sorted((one for one in found.values() if isinstance(one, Summary)),
                       key=lambda one: (one.timeline.bubble_s, _peak(one), one.schedule.name))
    head = ["schedule", "stages/rank", "bubble", "share", "makespan", "peak activations", "versions", "staleness"]
    rows = [[one.schedule.name, one.chunks, number(one.timeline.bubble_s), percent(one.bubble_share),
             number(one.timeline.makespan_s), _peak_text(one), str(max(stage.versions for stage in one.stages)),
             str(max(stage.staleness for stage in one.stages))] for one in summaries]
    lines = table(head, rows, left=1)
    reasons = [(name, why) for name, why in sorted(found.items()) if isinstance(why, str)]
    longest = max([len(name) for name in found], default=0)
    lines += [f"{name:{longest}}  not possible: {why}" for name, why in reasons]
    lines += ["", "peak activations: of the rank that holds most, in microbatches of a whole rank (of one stage);",
              "versions, staleness: of the stage with most"]
    streams = [one.schedule.name for one in summaries if not one.schedule.flush]
    if streams:
        lines.append(f"without a flush ({', '.join(streams)}) the bubble comes once in a run, not at every update")
    return "\n".join(lines) + "\n"


def _peak(summary: Summary) -> int | float:
    """The most that a rank holds, in microbatches of the whole rank."""
    return max(float(ratio(facts.peak_activations, len(stages_of_rank(summary.schedule.placement, rank))))
               for rank, facts in enumerate(summary.ranks))


def _peak_text(summary: Summary) -> str:
    most = max(facts.peak_activations for facts in summary.ranks)
    return number(_peak(summary)) + (f" ({most})" if summary.chunks != "1" else "")
