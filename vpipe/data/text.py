"""The data set ``text``: .txt files, or the prose inside installed packages, for BERT or a language model."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from vpipe.data.bert_text import bert_text
from vpipe.data.cache import file_states
from vpipe.data.corpus import Corpus, Document
from vpipe.data.dataset import Dataset, DatasetSettings
from vpipe.data.local_corpus.prose import PACKAGES, machine_prose
from vpipe.data.plain_text import read_blocks, text_files
from vpipe.data.registry import register_dataset
from vpipe.data.token_dataset import for_language_model, token_dataset
from vpipe.plugins import package_versions


def text_corpus(folder: Path | None) -> Corpus:
    """Return the documents that BERT's samples are made of, each with its line breaks; a single sentence is one too.

    Blank lines separate documents. ``None``: the prose of this machine. Raises :class:`UserError` for a folder
    without text.
    """
    return _prose() if folder is None else _files(folder)


def _files(folder: Path) -> Corpus:
    def read() -> Iterator[Document]:
        return (Document("\n".join(block)) for block in read_blocks(folder))

    return Corpus(str(folder), {"text": file_states(text_files(folder), folder)}, read)


def _prose() -> Corpus:
    @cache  # reading the sources takes seconds
    def read() -> list[Document]:
        return [Document(" ".join(sentences)) for sentences in machine_prose()]

    versions = {"python": platform.python_version(), **package_versions(PACKAGES)}
    return Corpus("the prose of this machine", {"prose": versions}, read)


@register_dataset("text")
def text(settings: DatasetSettings) -> Dataset:
    """Return samples for the model that reads ``settings.fields``. Raises :class:`UserError` for text that cannot
    work.
    """
    if for_language_model(settings.fields):
        return token_dataset(text_corpus(settings.path), settings)
    return bert_text(settings)
