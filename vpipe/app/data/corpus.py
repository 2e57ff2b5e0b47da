"""Turn texts into a language model's samples: divide them, tokenize once, keep the tokens in the cache directory.

    tokens-<key>/  manifest.json  tokenizer.json  train.bin  test.bin

A ``.bin`` holds the tokens of the split's documents one after another; a token for the end of a text follows each
document. Numbers have 16 bits where the vocabulary allows it, else 32. The length of a sample is not in it.
"""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vpipe.app.data import tokenizers
from vpipe.app.data.cache import CachedFolder, cached_folder, file_state
from vpipe.app.data.dataset import SPLITS, Dataset, DatasetSettings, Split
from vpipe.app.data.epoch import POSITIONS, Array, TokenDataset, first_samples, samples_in
from vpipe.app.progress import progress
from vpipe.errors import UserError, counted
from vpipe.plugins import PluginGroup

Part = Literal["train", "valid", "test"]
PARTS: Mapping[str, Part] = {"train": "train", "training": "train", "test": "test", "testing": "test",
                             "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid"}
"""Part of a corpus by the names that publishers use."""
_HELD_OUT = 20  # one document in so many, where none is marked
_FORMAT = 4  # raised when the same facts come to mean other tokens, or another manifest
_TEXTS_AT_ONCE = 1024


@dataclass(frozen=True)
class Document:
    """A text; ``part``: where its publisher put it, None where it is not marked; ``language``: of a program."""

    text: str
    part: Part | None = None
    language: str = ""


@dataclass(frozen=True)
class Pair(Document):
    """A source, which is the ``text``, and its ``target``; ``language``: the languages, or the catalogue's name."""

    target: str = ""


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


SOURCES = PluginGroup("vpipe.sources", "source of data")
"""The group of entry points."""


class Source:
    """What a package gives to data sets of others; what it does not override gives nothing.

    It is added by an entry point of its name in the group ``vpipe.sources``.
    """

    def text(self, language: str) -> Corpus | None:
        """Return the text of this machine in a language, such as ``zh_CN``.

        Raises:
            UserError: there is none; the hint names languages that there are.
        """
        return None

    def pairs(self, path: Path | None, source: str | None, target: str | None) -> Corpus | None:
        """Return the pairs to translate in a file or folder, None: of this machine, between two languages."""
        return None

    def synthetic(self, settings: DatasetSettings) -> Dataset | None:
        """Return random samples for a model that reads fields which no data set of vpipe has."""
        return None


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


class TokenCache(CachedFolder):
    """A complete, checked folder of tokens."""

    def count(self, split: Split) -> int:
        """Return the number of tokens in the split."""
        return self.manifest_count("counts", f"{split}_tokens")

    def tokens(self, split: Split) -> Array:
        """Map the tokens of a split [T] from disk: only what is indexed is read."""
        path, name, count = self.folder / f"{split}.bin", self.manifest.get("dtype"), self.count(split)
        if name not in ("uint16", "uint32") or path.stat().st_size != count * np.dtype(name).itemsize:
            raise self.damaged(f"{path.name} does not hold {counted(count, 'token')} of {name}")
        return np.memmap(path, np.dtype(name), "r") if count else np.empty(0, np.dtype(name))


def token_dataset(corpus: Corpus, settings: DatasetSettings) -> TokenDataset:
    """Prepare (or find prepared) the tokens of a corpus and open them: the folder may go while they are in use.

    ``sequence_length`` -1 means 128. Does not import torch. Raises :class:`UserError` for a corpus or sizes that cannot
    work, and as :func:`~vpipe.app.data.cache.cached_folder` does.
    """
    length = 128 if settings.sequence_length == -1 else settings.sequence_length
    cache = prepare_tokens(corpus, settings.vocab_size, settings.tokenizer, settings.cache_directory)
    counts: dict[Split, int] = {split: samples_in(cache.count(split), length) for split in SPLITS}
    for split, samples in counts.items():
        batch_size = settings.batch_size if split == "train" else 1  # held-out samples may fill a part of a batch
        if samples < batch_size:
            tokens, batch = counted(cache.count(split), "token"), counted(batch_size, "sample")
            raise UserError(f"{corpus.name}: the {split} split has {tokens}, but a batch of {batch} of sequence_length "
                            f"{length} takes {batch_size * length + 1}", hint="use a shorter model.sequence_length"
                            + (" or a smaller dataset.batch_size, or add data" if split == "train" else
                               ", or add data; held out is what is marked test, else 1 document in 20"))
    opened: dict[Split, Array] = {split: cache.tokens(split) for split in SPLITS}
    return TokenDataset(cache.vocab_size, length, first_samples(counts, settings.samples), opened.__getitem__,
                        cache.tokenizer_path, cache.manifest_count("counts", "test_bytes"),
                        [f"text: {corpus.name}, "
                         f"{counted(cache.manifest_count('counts', 'documents'), 'document', commas=True)}, "
                         f"{counted(cache.manifest_count('counts', 'characters'), 'character', commas=True)}"],
                        cache.manifest_count("end_of_text") if POSITIONS in settings.fields else None)


def prepare_tokens(corpus: Corpus, vocab_size: int = -1, tokenizer: Path | None = None,
                   cache_directory: Path | None = None) -> TokenCache:
    """Find the tokens of a corpus in the cache or make them now.

    ``vocab_size``: of the tokenizer to train on the training documents; -1 = 8192, or that of ``tokenizer``, a file.
    """
    facts = {"corpus": dict(corpus.facts), "vocab_size": vocab_size, "format": _FORMAT,
             "python": platform.python_version(), "tokenizers": PluginGroup.versions_of(["tokenizers"]),
             "tokenizer": file_state(tokenizer) if tokenizer is not None and tokenizer.is_file() else tokenizer}
    return TokenCache(*cached_folder("tokens", facts, partial(_build, corpus, vocab_size, tokenizer), cache_directory))


def _build(corpus: Corpus, vocab_size: int, given: Path | None, folder: Path) -> dict[str, Any]:
    """Write the tokens of both splits and the tokenizer; return the entries of the manifest."""
    divided = SplitCorpus.build(corpus)
    tokenizer = tokenizers.load_with_end(given) if given is not None else tokenizers.train_byte_bpe(
        divided.texts("train"), tokenizers.DEFAULT_VOCAB_SIZE if vocab_size == -1 else vocab_size,
        total=divided.counts["documents"])
    words, ending = tokenizers.ids_in(tokenizer), tokenizers.end_token(tokenizer)
    assert ending is not None, "no token ends a text"
    end = ending[1]
    size = tokenizers.model_vocab_size(vocab_size, words, given)
    dtype = np.dtype("uint16" if words <= 1 << 16 else "uint32")
    counts = dict(divided.counts)
    tokenizers.save_tokenizer(tokenizer, folder / "tokenizer.json")
    tokenizer.encode_special_tokens = True  # a text that spells such a token means its letters
    for split in SPLITS:
        texts = iter(progress(divided.texts(split), f"tokenizing for {'training' if split == 'train' else split}",
                              unit="text"))
        documents = tokens = size_bytes = 0
        with (folder / f"{split}.bin").open("wb") as file:
            while batch := list(islice(texts, _TEXTS_AT_ONCE)):
                documents += len(batch)
                size_bytes += sum(len(text.encode()) for text in batch)
                for ids in tokenizers.token_ids(tokenizer, batch):
                    file.write(np.array([*ids, end], dtype).tobytes())
                    tokens += len(ids) + 1
        counts |= {f"{split}_documents": documents, f"{split}_tokens": tokens, f"{split}_bytes": size_bytes}
    return {"corpus": corpus.name, "tokenizer": None if given is None else str(given), "vocab_size": size,
            "dtype": dtype.name, "end_of_text": end, "counts": counts, "languages": divided.languages,
            "packages": PluginGroup.versions_of(["tokenizers"])}
