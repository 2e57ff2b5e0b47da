"""Hold the texts for a language model, and divide them into a train and a test split."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vpipe.data.dataset import Split
from vpipe.errors import UserError, counted
from vpipe.progress import progress

Part = Literal["train", "valid", "test"]
PARTS: Mapping[str, Part] = {"train": "train", "training": "train", "test": "test", "testing": "test",
                             "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid"}
"""Part of a corpus by the names that publishers use."""
_HELD_OUT = 20  # one document in so many, where none is marked


@dataclass(frozen=True)
class Document:
    """A text; ``part``: where its publisher put it, None where it is not marked; ``language``: of a program."""

    text: str
    part: Part | None = None
    language: str = ""


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again, in the same order.

    Attributes:
        name: for messages.
        facts: all that decides the documents; another corpus has other ones.
        read: returns the documents. Raises UserError for what cannot be read.
    """

    name: str
    facts: Mapping[str, Any]
    read: Callable[[], Iterable[Document]]


@dataclass(frozen=True)
class SplitCorpus:
    """A corpus divided into training and held-out documents.

    Training takes what is marked ``train`` or not marked. Held out is what is marked ``test``; without that, ``valid``;
    without either, the twentieth of the training documents (one at least) whose text has the smallest SHA-256.
    So the choice depends on the texts alone, and equal texts are on one side.
    """

    corpus: Corpus
    held_out: Part | None
    border: int  # digests up to here are held out
    counts: dict[str, int]
    languages: dict[str, int]

    @classmethod
    def build(cls, corpus: Corpus) -> SplitCorpus:
        """Read the corpus once and divide it. Raises UserError when nothing is left to train on, or to hold out."""
        marked: Counter[Part | None] = Counter()
        languages: Counter[str] = Counter()
        digests, characters = set(), 0
        for document in progress(corpus.read(), "reading documents", unit="document"):
            marked[document.part] += 1
            characters += len(document.text)
            if document.language:
                languages[document.language] += 1
            if document.part in (None, "train"):
                digests.add(_digest(document.text))
        named: list[Part] = [part for part in ("test", "valid") if marked[part]]
        fewest = 1 if named else 2
        if len(digests) < fewest:
            parts = ", ".join(f"{marked[part]} marked {part}" for part in ("train", "valid", "test"))
            raise UserError(f"{corpus.name}: {counted(len(digests), 'different document')} to train on ({parts}, "
                            f"{marked[None]} not marked), of the {fewest} that are needed", hint="add documents")
        border = -1 if named else sorted(digests)[max(1, len(digests) // _HELD_OUT) - 1]
        counts = {"documents": marked.total(), "characters": characters,
                  "left_out_documents": sum(marked[part] for part in named[1:])}
        return cls(corpus, named[0] if named else None, border, counts, dict(sorted(languages.items())))

    def split_of(self, document: Document) -> Split | None:
        """Return the split of a document; None: it is left out."""
        if document.part in (None, "train"):
            return "test" if self.held_out is None and _digest(document.text) <= self.border else "train"
        return "test" if document.part == self.held_out else None

    def texts(self, split: Split) -> Iterator[str]:
        """Return the texts of a split, in their order."""
        return (document.text for document in self.corpus.read() if self.split_of(document) == split)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
