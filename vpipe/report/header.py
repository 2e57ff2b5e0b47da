"""The first line of a rank's record: of which run it is, and of which rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vpipe.errors import UserError, counted

FORMAT = 1
AGAIN = "record the run again with 'trace: true' in its config, or copy the file whole"

SHARED = ("schedule", "placement", "flush", "microbatches", "update_every", "partition", "recomputed",
          "samples_per_step")
"""What all ranks' headers say alike."""


def is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15  # what is not a number is not less either


def _lists_of(value: Any, least: int) -> bool:
    return isinstance(value, list) and all(isinstance(own, list) and len(own) >= least and all(map(is_whole, own))
                                           for own in value)


def _sizes(value: Any) -> bool:
    return isinstance(value, dict) and all(key.isdecimal() and is_whole(size) for key, size in value.items())


_KEYS: Mapping[str, Callable[[Any], bool]] = {
    "rank": is_whole, "host": lambda value: isinstance(value, str), "clock_offset_s": is_number,
    "placement": lambda value: _lists_of(value, 1) and bool(value), "schedule": lambda value: isinstance(value, str),
    "flush": lambda value: isinstance(value, bool), "microbatches": lambda value: is_whole(value, 1),
    "update_every": lambda value: is_whole(value, 1),
    "partition": lambda value: isinstance(value, list) and all(is_whole(count, 1) for count in value),
    "recomputed": lambda value: _lists_of(value, 0), "samples_per_step": lambda value: is_whole(value, 1),
    "weight_bytes": _sizes, "static_bytes": _sizes}


def read_header(file: Path) -> dict[str, Any]:
    """The header of a rank's file.

    Raises:
        UserError: it is damaged, or of another format.
    """
    with opened(file) as lines:
        text = next(lines, "")
    if not text:
        raise UserError(f"the record {file.name} is empty: rank {file.stem.removeprefix('rank')} did not come to the "
                        "end of its first step", where=str(file), hint="let the run go on, or " + AGAIN)
    where = f"{file}:1"
    try:
        header = json.loads(text)
    except ValueError:
        raise UserError("the header of the record is not JSON", where=where, hint=AGAIN) from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else None
        raise UserError(f"the record has format {found!r}, this version reads {FORMAT}", where=where,
                        hint="use the version of vpipe that made the run")
    for key, is_right in _KEYS.items():
        if key not in header or not is_right(header[key]):
            raise UserError(f"'{key}' in the header of the record is {header.get(key)!r}", where=where, hint=AGAIN)
    stages = len(header["placement"])
    for key in ("partition", "recomputed"):
        if len(header[key]) != stages:
            raise UserError(f"'{key}' in the header has {counted(len(header[key]), 'entry')} for "
                            f"{counted(stages, 'stage')}", where=where, hint=AGAIN)
    if file.name != f"rank{header['rank']}.jsonl":
        raise UserError(f"{file.name} is the record of rank {header['rank']}", where=where, hint=AGAIN)
    return header


@contextmanager
def opened(file: Path) -> Iterator[Iterator[str]]:
    """The lines of a file; what cannot be read is the user's to mend."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            yield lines
    except OSError as error:
        raise UserError(f"cannot read the record: {error.strerror}", where=str(file), hint=AGAIN) from None
