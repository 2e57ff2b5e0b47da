"""Weights in other programs' files: made into a checkpoint, and exported from one."""

from pathlib import Path

from vpipe.errors import UserError


def check_free(out: Path) -> None:
    """Raise UserError, before any work is done, when ``out`` exists or its folder does not."""
    if out.exists():
        raise UserError(f"'{out}' exists already", hint="name another as -o, or remove it first")
    if not out.absolute().parent.is_dir():
        raise UserError(f"cannot write '{out}': there is no folder '{out.parent}'", hint="make the folder first")
