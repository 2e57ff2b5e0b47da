"""The data set ``huggingface``: a folder that ``save_to_disk`` of the package ``datasets`` wrote, for a language model.

That package is large, so vpipe does not bring it along; where it is missing, a folder that was tokenized before can
still be opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from vpipe.app.data.cache import file_states
from vpipe.app.data.code_search_net import CODE
from vpipe.app.data.corpus import PARTS, Corpus, Document, token_dataset
from vpipe.app.data.dataset import DatasetSettings
from vpipe.app.data.epoch import TokenDataset
from vpipe.app.data.registry import register_dataset
from vpipe.errors import UserError

_COLUMNS = ("text", "content", *CODE)
_MARKS = ("dataset_dict.json", "dataset_info.json")


@register_dataset("huggingface", files=("dataset_info.json",))
def huggingface(settings: DatasetSettings) -> TokenDataset:
    """Return the texts of a folder: the column ``text``, ``content``, ``func_code_string`` or ``code`` of every row.

    Splits called train, validation and test are divided as :class:`~vpipe.app.data.corpus.SplitCorpus` describes.
    Raises :class:`UserError` for another folder, other splits or columns, and where ``datasets`` is needed but missing.
    """
    path = settings.path
    if path is None:
        raise UserError("the data set 'huggingface' has no path",
                        hint="name the folder that save_to_disk wrote as dataset.path")
    if not is_saved(path):
        raise UserError(f"{path} is no folder that save_to_disk wrote (no {' or '.join(_MARKS)} in it)",
                        hint="load the data set with the package datasets, and save it with save_to_disk(FOLDER)")
    return token_dataset(Corpus(str(path), saved_facts(path), partial(_read, path)), settings)


def is_saved(path: Path) -> bool:
    """Return whether a folder is one that ``save_to_disk`` wrote."""
    return any((path / mark).is_file() for mark in _MARKS)


def saved_facts(path: Path) -> dict[str, Any]:
    """Return what decides the content of such a folder."""
    return {"huggingface": file_states(sorted(file for file in path.rglob("*") if file.is_file()), path)}


def saved_splits(path: Path) -> dict[str, Any]:
    """Return the rows of such a folder by the name of their split, empty for a folder of a single one.

    Raises:
        UserError: a split has another name than publishers use; the folder cannot be read, or ``datasets`` is missing.
    """
    try:
        load_from_disk: Callable[[str], Any] = import_module("datasets").load_from_disk
    except ImportError as error:
        raise UserError(f"reading {path} needs the package datasets, which cannot be imported: {error}",
                        hint="install it: pip install datasets") from error
    try:
        loaded = load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"the package datasets cannot read {path}: {error}",
                        hint="save the data set again, with this version of the package") from error
    found = dict(loaded) if isinstance(loaded, dict) else {"": loaded}
    for name in found:
        if name and name not in PARTS:
            raise UserError(f"the data set in {path} has a split '{name}'; known are {', '.join(PARTS)}",
                            hint="save what is to be trained on and held out under those names", where=str(path))
    return found


def _read(path: Path) -> Iterator[Document]:
    for name, rows in saved_splits(path).items():
        column = next((column for column in _COLUMNS if column in rows.column_names), None)
        if column is None:
            raise UserError(f"the data set in {path} has no column of texts (its columns: "
                            f"{', '.join(rows.column_names)})", hint=f"call it one of {', '.join(_COLUMNS)}",
                            where=str(path))
        for number, row in enumerate(rows.select_columns([column])):
            text = "" if row[column] is None else row[column]
            if not isinstance(text, str):
                raise UserError(f"row {number} of the column '{column}' is a {type(text).__name__}, not a text",
                                hint="keep the texts in that column, as strings", where=str(path))
            if text.strip():
                yield Document(text, PARTS.get(name))
