"""The place that a command is told to write to."""

from __future__ import annotations

from pathlib import Path

from vpipe.errors import UserError


def check_free(out: Path) -> None:
    """Refuse to write over something, before any work is done.

    Raises:
        UserError: ``out`` exists, or the folder it is to be in does not.
    """
    if out.exists():
        raise UserError(f"'{out}' exists already", hint="name another as -o, or remove it first")
    if not out.absolute().parent.is_dir():
        raise UserError(f"cannot write '{out}': there is no folder '{out.parent}'", hint="make the folder first")
