"""Plain text for a language model: the documents of a folder of .txt files, or the prose inside installed packages."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from vpipe.data.corpus import Corpus, Document
from vpipe.data.manifest import package_versions
from vpipe.data.plain_text import read_blocks, text_files
from vpipe.data.prepared import states
from vpipe.data.prose import PACKAGES, machine_prose


def text_corpus(folder: Path | None) -> Corpus:
    """The documents that BERT's samples are made of, each with its line breaks; a single sentence is one too.

    Blank lines separate documents. ``None``: the prose of this machine. Raises :class:`UserError` for a folder
    without text.
    """
    return _prose() if folder is None else _files(folder)


def _files(folder: Path) -> Corpus:
    def read() -> Iterator[Document]:
        return (Document("\n".join(block)) for block in read_blocks(folder))

    return Corpus(str(folder), {"text": states(text_files(folder), folder)}, read)


def _prose() -> Corpus:
    @cache  # reading the sources takes seconds
    def read() -> list[Document]:
        return [Document(" ".join(sentences)) for sentences in machine_prose()]

    versions = {"python": platform.python_version(), **package_versions(PACKAGES)}
    return Corpus("the prose of this machine", {"prose": versions}, read)
