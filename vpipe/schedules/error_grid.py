"""Draw the grid of actions that a failed check shows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vpipe.errors import CheckError
from vpipe.schedules.action import Action
from vpipe.schedules.schedule import Schedule

Spot = tuple[int, int]
"""The place of an action: (rank, position in its program). The position after the last action is the end."""

MARK = "<-- here"
SIDE = 8  # columns on either side of the mark: with transfers, a screen holds about this many
MOST_ROWS, NEAR = 32, 3  # of more ranks those near a mark are shown


def draw_grid(programs: Sequence[Sequence[Action]], marks: Collection[Spot],
              cursors: Sequence[int] | None = None) -> str:
    """Return one row per rank, columns aligned, the marked actions followed by ``<-- here``.

    Long programs are cut to a window of :data:`SIDE` columns on either side, many ranks to those near a mark.

    Args:
        programs: actions per rank.
        marks: where to put the mark.
        cursors: the position in the middle of each rank's window; without it every rank is shown as far
            into its program as the first mark is into its own, since ranks have different numbers of transfers.
    """
    ranks = max([len(programs), *(rank + 1 for rank, _ in marks)])
    rows = [[str(action) for action in programs[rank]] if rank < len(programs) else [] for rank in range(ranks)]
    for rank, position in marks:
        rows[rank] += ["end"] if position == len(rows[rank]) else []
        rows[rank][position] += f" {MARK}"
    longest = max(map(len, rows), default=0)
    if longest <= 2 * SIDE + 1:
        cells = [[*row, *[""] * (longest - len(row))] for row in rows]
    else:
        rank, position = min(marks, default=(0, 0))
        abreast = [position * len(row) // max(1, len(rows[rank])) for row in rows]
        middles = cursors or [dict(marks).get(rank, middle) for rank, middle in enumerate(abreast)]
        cells = [_window(row, middle) for row, middle in zip(rows, middles, strict=True)]
    shown = list(range(ranks))
    if ranks > MOST_ROWS:
        near = {rank for marked, _ in marks for rank in range(marked - NEAR, marked + NEAR + 1)} & set(shown)
        shown = sorted(near)[:MOST_ROWS]
    widths = [max(map(len, column)) for column in zip(*(cells[rank] for rank in shown), strict=True)]
    label, lines = len(f"rank {ranks - 1}"), []
    for before, rank in zip([-1, *shown], [*shown, ranks], strict=True):
        lines += ["..."] * (rank > before + 1)
        if rank < ranks:
            line = " ".join(cell.ljust(width) for cell, width in zip(cells[rank], widths, strict=True))
            lines.append(f"{f'rank {rank}':{label}} {line}".rstrip())
    return "\n".join(lines)


def _window(row: Sequence[str], middle: int) -> list[str]:
    first, last = middle - SIDE, middle + SIDE + 1
    cells = [row[column] if 0 <= column < len(row) else "" for column in range(first, last)]
    return ["..." if first > 0 else "", *cells, "..." if last < len(row) else ""]


def rule_error(schedule: Schedule, what: str, hint: str, *marks: Spot,
               cursors: Sequence[int] | None = None) -> CheckError:
    """Return the error that a rule raises: what is wrong, the grid with ``marks``, the remedy."""
    grid = draw_grid(schedule.programs, marks, cursors)
    error = CheckError(f"schedule '{schedule.name}': {what}\n{grid}", hint=hint)
    error.marks = marks
    return error
