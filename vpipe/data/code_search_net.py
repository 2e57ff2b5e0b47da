"""The data set ``code_search_net``: functions, from files in the CodeSearchNet layout or from installed packages.

The layout is a JSON object per line, gzipped or not:

    {"code": "def f(): ...", "docstring": "...", "language": "python", "partition": "train", ...}

The code is ``func_code_string``, ``code`` or ``whole_func_string``, the documentation ``func_documentation_string``
or ``docstring``. ``partition``, ``split`` or ``split_name`` name the line's split, or else the name of its file
or of a folder above it. Other keys are not read, other files (the layout has pickles) not opened.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vpipe.data.cache import existing_files, file_states
from vpipe.data.corpus import PARTS, Corpus, Document, Part, token_dataset
from vpipe.data.dataset import DatasetSettings
from vpipe.data.epoch import TokenDataset
from vpipe.data.local_corpus import machine_functions
from vpipe.data.registry import register_dataset
from vpipe.errors import Problem, UserError

SUFFIXES = (".jsonl", ".jsonl.gz")
CODE = ("func_code_string", "code", "whole_func_string")
DOCUMENTATION = ("func_documentation_string", "docstring")
PARTITION = ("partition", "split", "split_name")
_MOST_PROBLEMS = 10
_LONGEST_LINE = 4 << 20


def jsonl_files(path: Path) -> list[Path]:
    """Return the file itself, or those in the folder and below, sorted. Raises :class:`UserError` without any."""
    if not path.exists():
        raise UserError(f"{path} does not exist", hint="name a file or a folder of *.jsonl or *.jsonl.gz files as "
                                                       "dataset.path")
    if not path.is_dir():
        if not path.is_file() or not path.name.endswith(SUFFIXES):
            raise UserError(f"{path} is no *.jsonl or *.jsonl.gz file", hint="name one, or a folder that holds some")
        return [path]
    files = existing_files(file for file in path.rglob("*") if file.name.endswith(SUFFIXES))
    if not files:
        others = sum(1 for _ in path.iterdir())
        raise UserError(f"no *.jsonl or *.jsonl.gz file in {path} or below it ({others} other entries)",
                        hint="unpack the data there: a JSON object with the key 'code' per line")
    return files


def read_functions(files: Sequence[Path], root: Path) -> Iterator[Document]:
    """Yield the function of every line, in order; blank lines are skipped.

    Names of files and folders below ``root`` give the part. Raises one :class:`UserError` at the end, or after ten
    mistakes, that names the wrong lines as ``file:line``.
    """
    problems: list[Problem] = []
    for file in files:
        part_of_file = _part_of_path(file.relative_to(root))
        for number, line in _lines(file, problems):
            try:
                yield _document(line, part_of_file)
            except ValueError as error:
                problems.append(Problem(str(error), "correct or remove the line", f"{file}:{number}"))
                if len(problems) == _MOST_PROBLEMS:
                    raise UserError.all_of(problems) from None
    if problems:
        raise UserError.all_of(problems)


def _lines(file: Path, problems: list[Problem]) -> Iterator[tuple[int, bytes]]:
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
                line = line.removeprefix(BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        problems.append(Problem(f"{file.name} cannot be read on: {error}", "copy or download it again",
                                f"{file}:{number + 1}"))


def _document(line: bytes, part_of_file: Part | None) -> Document:
    """Parse a line. Raises ValueError with the mistake in it."""
    try:
        record = json.loads(line.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON: {error.msg} (column {error.colno})") from error
    except ValueError as error:
        raise ValueError("the line has a number with too many digits") from error
    except RecursionError as error:
        raise ValueError("the line is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"the line is a JSON {_kind(record)}, not an object")
    code = _text(record, CODE)
    if code is None or not code.strip():
        keys = ", ".join(sorted(key for key, value in record.items() if value is not None)) or "none"
        raise ValueError(f"the line has no '{CODE[0]}' or '{CODE[1]}' (its keys: {keys})" if code is None else
                         "the code is empty")
    name = _text(record, PARTITION)
    if name is not None and name.lower() not in PARTS:
        raise ValueError(f"the part is '{name}', not train, valid or test")
    return Document(with_documentation(code, _text(record, DOCUMENTATION)),
                    part_of_file if name is None else PARTS[name.lower()], _text(record, ("language",)) or "")


def with_documentation(code: str, documentation: str | None) -> str:
    """Return the code, with its documentation before it unless that is part of the code already, as in Python."""
    opening = documentation.strip().split("\n", 1)[0].rstrip() if documentation else ""
    return code if opening in code else f"{documentation}\n{code}"


def _text(record: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """Return the value of the first key that is there, as text that can be written down."""
    for key in keys:
        value = record.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise ValueError(f"'{key}' is a JSON {_kind(value)}, not a string")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"'{key}' holds half of a surrogate pair (character {error.start})") from error
        return value
    return None


def _part_of_path(path: Path) -> Part | None:
    """Return the part that the file's name contains, or else the nearest folder's.

    ``python_train_0.jsonl.gz`` and ``train/0.jsonl`` are ``train``. A name that holds two such words gives no part.
    """
    for name in reversed(path.parts):
        found = {PARTS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in PARTS}
        if len(found) == 1:
            return found.pop()
    return None


def _kind(value: Any) -> str:
    kinds = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


@register_dataset("code_search_net")
def code_search_net(settings: DatasetSettings) -> TokenDataset:
    """Return the functions in the file or folder ``path``; without one, those of the standard library and torch."""
    if settings.path is None:
        found = machine_functions(settings.cache_directory)
        name, facts, root = "the sources of this machine", {"functions": found.manifest["files"]}, found.folder
        files = jsonl_files(root)
    else:
        files, root = jsonl_files(settings.path), settings.path.parent if settings.path.is_file() else settings.path
        name, facts = str(settings.path), {"jsonl": file_states(files, root)}
    return token_dataset(Corpus(name, facts, partial(read_functions, files, root)), settings)
