"""The data set ``code_search_net``: functions, from files in the CodeSearchNet layout or from installed packages.

The layout is a JSON object per line, gzipped or not:

    {"code": "def f(): ...", "docstring": "...", "language": "python", "partition": "train", ...}

The code is ``func_code_string``, ``code`` or ``whole_func_string``, the documentation ``func_documentation_string``
or ``docstring``. ``partition``, ``split`` or ``split_name`` name the line's split, or else the name of its file
or of a folder above it. Other keys are not read, other files (the layout has pickles) not opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vpipe.app.data.cache import file_states
from vpipe.app.data.corpus import PARTS, Corpus, Document, Part, token_dataset
from vpipe.app.data.dataset import DatasetSettings
from vpipe.app.data.epoch import TokenDataset
from vpipe.app.data.line_files import line_files, read_records
from vpipe.app.data.local_corpus import machine_functions
from vpipe.app.data.registry import register_dataset

SUFFIXES = (".jsonl", ".jsonl.gz")
CODE = ("func_code_string", "code", "whole_func_string")
DOCUMENTATION = ("func_documentation_string", "docstring")
PARTITION = ("partition", "split", "split_name")


def jsonl_files(path: Path) -> list[Path]:
    """Return the file itself, or those in the folder and below, sorted. Raises :class:`UserError` without any."""
    return line_files(path, SUFFIXES, "a JSON object with the key 'code' per line")


def read_functions(files: Sequence[Path], root: Path) -> Iterator[Document]:
    """Yield the function of every line, as :func:`~vpipe.app.data.line_files.read_records` does."""
    return read_records(files, root, _document, "correct or remove the line")


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


def _kind(value: Any) -> str:
    kinds = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


@register_dataset("code_search_net", files=("*.jsonl", "*.jsonl.gz"))
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
