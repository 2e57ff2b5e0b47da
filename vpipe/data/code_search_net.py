"""The data set ``code_search_net``: functions for a language model, from files in the public layout or from here."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from vpipe.data.corpus import Corpus
from vpipe.data.dataset import DatasetSettings
from vpipe.data.functions import machine_functions
from vpipe.data.jsonl import jsonl_files, read_functions
from vpipe.data.prepared import states
from vpipe.data.registry import register_dataset
from vpipe.data.token_arrays import TokenArrays
from vpipe.data.token_cache import token_dataset


@register_dataset("code_search_net")
def code_search_net(settings: DatasetSettings) -> TokenArrays:
    """The functions in the file or folder ``path``; without one, those of the standard library and torch.

    Raises :class:`UserError` for files that cannot work; see :func:`~vpipe.data.jsonl.read_functions`.
    """
    corpus = _machine(settings.cache_directory) if settings.path is None else _files(settings.path)
    return token_dataset(corpus, settings)


def _files(path: Path) -> Corpus:
    files, root = jsonl_files(path), path.parent if path.is_file() else path
    return Corpus(str(path), {"jsonl": states(files, root)}, partial(read_functions, files, root))


def _machine(cache_directory: Path | None) -> Corpus:
    found = machine_functions(cache_directory)
    files = jsonl_files(found.folder)
    return Corpus("the sources of this machine", {"functions": found.manifest["files"]},
                  partial(read_functions, files, found.folder))
