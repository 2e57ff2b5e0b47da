"""Find files with a record per line, gzipped or not, and read their lines."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from vpipe.app.data.corpus import PARTS, Part
from vpipe.errors import Problem, UserError

T = TypeVar("T")

MOST_PROBLEMS = 10
"""Wrong lines that one error shows."""

_LONGEST_LINE = 4 << 20


def line_files(path: Path, suffixes: Sequence[str], holds: str) -> list[Path]:
    """Return the file itself, or those in the folder and below, sorted.

    Raises:
        UserError: there is none, or a link leads nowhere: its data is missing.

    Args:
        suffixes: how their names end.
        holds: what they hold, for the hint.
    """
    kinds = " or ".join(f"*{suffix}" for suffix in suffixes)
    if not path.exists():
        raise UserError(f"{os.path.abspath(path)} does not exist",
                        hint=f"name a file or a folder of {kinds} files; for a run that has begun, as --data PATH")
    if not path.is_dir():
        if not path.is_file() or not path.name.endswith(tuple(suffixes)):
            raise UserError(f"{path} is no {kinds} file", hint="name one, or a folder that holds some")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.name.endswith(tuple(suffixes)))
    for file in files:
        if file.is_symlink() and not file.exists():
            raise UserError(f"{file} is a link to {file.readlink()}, which is not there",
                            hint="mount or copy what it leads to, or remove the link")
    if not (files := [file for file in files if file.is_file()]):
        others = sum(1 for _ in path.iterdir())
        raise UserError(f"no {kinds} file in {path} or below it ({others} other entries)",
                        hint=f"unpack the data there: {holds}")
    return files


def read_records(files: Sequence[Path], root: Path, parse: Callable[[bytes, Part | None], T], remedy: str
                 ) -> Iterator[T]:
    """Yield the record of every line, in order; blank lines are skipped.

    Args:
        root: names of files and folders below it give the part.
        parse: makes a record of a line and the part of its file; raises ValueError with the mistake in the line.
        remedy: of a wrong line.

    Raises:
        UserError: lines are wrong; raised at the end, or after ten mistakes, with all of them as ``file:line``.
    """
    problems: list[Problem] = []
    for file in files:
        part = part_of_path(file.relative_to(root))
        for number, line in read_lines(file, problems):
            try:
                yield parse(line, part)
            except ValueError as error:
                problems.append(Problem(str(error), remedy, f"{file}:{number}"))
                if len(problems) >= MOST_PROBLEMS:
                    raise UserError.all_of(problems) from None
    if problems:
        raise UserError.all_of(problems)


def read_lines(file: Path, problems: list[Problem]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1 on; a file that ends too early is a problem."""
    number = 0
    try:
        if file.name.endswith(".gz") and not file.stat().st_size:
            raise EOFError("it has 0 bytes")  # which gzip takes for the end of the last member
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as lines:
            for number, line in enumerate(iter(partial(lines.readline, _LONGEST_LINE + 1), b""), 1):
                if len(line) > _LONGEST_LINE:
                    problems.append(Problem(f"the line has more than {_LONGEST_LINE >> 20} MiB; the file is not read "
                                            "on", "correct or remove the line", f"{file}:{number}"))
                    return
                line = line.replace(BOM_UTF8, b"")  # also of files that were joined
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        problems.append(Problem(f"{file.name} cannot be read on: {error}", "copy or download it again",
                                f"{file}:{number + 1}"))


def part_of_path(path: Path) -> Part | None:
    """Return the part that the file's name contains, or else the nearest folder's.

    ``python_train_0.jsonl.gz`` and ``train/0.jsonl`` are ``train``. A name that holds two such words gives no part.
    """
    for name in reversed(path.parts):
        found = {PARTS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in PARTS}
        if len(found) == 1:
            return found.pop()
    return None
