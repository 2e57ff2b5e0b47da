"""The data set ``text``: .txt files, or the prose inside installed packages, for BERT or a language model.

BERT's samples are made of documents, split, tokenizer, pairs. The cache directory keeps them as mapped arrays:

    bert-<key>/  manifest.json  tokenizer.json  train_input_ids.npy  ...  test_next_sentence_labels.npy

Text of this machine in other languages than English is found by extras and packages
(:class:`~vpipe.app.data.corpus.Source`).
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vpipe.app.data import tokenizers
from vpipe.app.data.bert_samples import (
    STORAGE,
    Samples,
    bert_fields,
    check_lengths,
    default_max_predictions,
    make_samples,
)
from vpipe.app.data.cache import CachedFolder, cached_folder, file_state, file_states
from vpipe.app.data.corpus import SOURCES, Corpus, Document, token_dataset
from vpipe.app.data.dataset import SPLITS, Dataset, DatasetSettings, Split
from vpipe.app.data.epoch import LABELS, Array, ArrayDataset, first_samples
from vpipe.app.data.local_corpus import PROSE_PACKAGES, Sentences, machine_prose
from vpipe.app.data.plain_text import read_blocks, read_documents, text_files
from vpipe.app.data.registry import register_dataset
from vpipe.errors import UserError, counted
from vpipe.plugins import PluginGroup

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FORMAT = 2  # raised when the same parameters come to mean other samples
_TEST_SHARE = 20  # one document in so many is held out
_FEWEST_DOCUMENTS = 4  # two a split: a random next passage comes from another document of the same split


@dataclass(frozen=True)
class BertTextSettings:
    """The text and the parameters that samples are made from; equal values give equal samples on the same machine.

    ``text``: a folder of .txt files, or None for the prose inside the installed ``packages``. ``vocab_size``: of the
    tokenizer to train; -1 = 8192, or that of ``tokenizer`` (a ``tokenizer.json``). ``max_predictions``: None = 15 %.
    """

    text: Path | None = None
    sequence_length: int = 128
    vocab_size: int = -1
    max_predictions: int | None = None
    seed: int = 0
    tokenizer: Path | None = None
    packages: tuple[str, ...] = PROSE_PACKAGES

    @property
    def predictions(self) -> int:
        """Return P, with the default filled in."""
        return default_max_predictions(self.sequence_length) if self.max_predictions is None else self.max_predictions


@dataclass(frozen=True)
class BertCorpus:
    """Samples of both splits, the tokenizer that made them, its size as a model should have it, and counts."""

    samples: dict[Split, Samples]
    tokenizer: Tokenizer
    vocab_size: int
    counts: dict[str, int]

    def facts(self, wanted: BertTextSettings, *packages: str) -> dict[str, Any]:
        """Return the entries of the manifest."""
        return {"parameters": json.loads(json.dumps(asdict(wanted), default=str)),
                "packages": PluginGroup.versions_of([*wanted.packages, "tokenizers", *packages]),
                "vocab_size": self.vocab_size, "sequence_length": wanted.sequence_length,
                "max_predictions": wanted.predictions, "counts": self.counts}


def build_corpus(wanted: BertTextSettings) -> BertCorpus:
    """Gather, split, tokenize, pair and mask; about 20 s for the prose of a machine, with progress lines on stderr.

    The tokenizer is trained on the training documents only. Raises :class:`UserError` for text, lengths or sizes that
    cannot work.
    """
    check_lengths(wanted.sequence_length, wanted.predictions)
    documents = machine_prose(wanted.packages) if wanted.text is None else read_documents(wanted.text)
    train, test = split_documents(documents)
    if wanted.tokenizer is not None:
        tokenizer = tokenizers.load_wordpiece(wanted.tokenizer)
    else:
        size = tokenizers.DEFAULT_VOCAB_SIZE if wanted.vocab_size == -1 else wanted.vocab_size
        tokenizer = tokenizers.train_wordpiece(train, size)
    samples = {split: make_samples(part, tokenizer, sequence_length=wanted.sequence_length,
                                   max_predictions=wanted.predictions, seed=wanted.seed)
               for split, part in zip(SPLITS, (train, test), strict=True)}
    counts = {"documents": len(documents), "test_documents": len(test), "sentences": sum(map(len, documents)),
              "words": sum(len(sentence.split()) for document in documents for sentence in document),
              **{f"{split}_samples": len(fields["input_ids"]) for split, fields in samples.items()}}
    vocab_size = tokenizers.model_vocab_size(wanted.vocab_size, tokenizer.get_vocab_size(), wanted.tokenizer)
    return BertCorpus(samples, tokenizer, vocab_size, counts)


def split_documents(documents: Sequence[Sentences]) -> tuple[list[Sentences], list[Sentences]]:
    """Return train and test: the twentieth of the documents (two at least) whose text has the smallest SHA-256.

    So the choice depends on the texts alone, not on their order. Raises :class:`UserError` for fewer than four.
    """
    if len(documents) < _FEWEST_DOCUMENTS:
        raise UserError(f"the text has {len(documents)} documents of at least 2 sentences; to train and to test, "
                        f"{_FEWEST_DOCUMENTS} are needed", hint="give more text, documents separated by blank lines")
    digests = [hashlib.sha256("\n".join(document).encode()).digest() for document in documents]
    by_digest = sorted(range(len(documents)), key=digests.__getitem__)
    held_out = set(by_digest[:max(_FEWEST_DOCUMENTS // 2, len(documents) // _TEST_SHARE)])
    return ([document for number, document in enumerate(documents) if number not in held_out],
            [documents[number] for number in sorted(held_out)])


class BertCache(CachedFolder):
    """A complete, checked folder of samples."""

    def samples(self, split: Split) -> int:
        """Return the number of samples in the split."""
        return self.manifest_count("counts", f"{split}_samples")

    def array(self, split: Split, field: str) -> Array:
        """Map one field of one split ``[N, *shape]`` from disk: only the rows that are indexed are read."""
        try:
            array: Array = np.load(self.folder / f"{split}_{field}.npy", mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise self.damaged(f"{split}_{field}.npy: {error}") from None
        if len(array) != self.samples(split):
            raise self.damaged(f"{split}_{field}.npy holds {counted(len(array), 'sample')}, not {self.samples(split)}")
        return array


def prepare_text(wanted: BertTextSettings, cache_directory: Path | None = None) -> BertCache:
    """Find the samples in the cache or build them now, without torch. Raises UserError for text that cannot work."""
    # Files are known by name, size and time of change, not by content.
    facts: dict[str, Any] = {**asdict(wanted), "format": _FORMAT, "python": platform.python_version(),
                             "max_predictions": wanted.predictions,
                             "tokenizers": PluginGroup.versions_of(["tokenizers"])}
    if wanted.text is None:
        facts["versions"] = PluginGroup.versions_of(wanted.packages)
    else:
        facts["text"] = file_states(text_files(wanted.text), wanted.text)
    if wanted.tokenizer is not None and wanted.tokenizer.is_file():
        facts["tokenizer"] = file_state(wanted.tokenizer)
    return BertCache(*cached_folder("bert", facts, partial(_build, wanted), cache_directory))


def _build(wanted: BertTextSettings, folder: Path) -> dict[str, Any]:
    corpus = build_corpus(wanted)
    tokenizers.save_tokenizer(corpus.tokenizer, folder / "tokenizer.json")
    for split, samples in corpus.samples.items():
        for name, array in samples.items():
            np.save(folder / f"{split}_{name}.npy", array, allow_pickle=False)
    return corpus.facts(wanted)


def bert_text(settings: DatasetSettings) -> ArrayDataset:
    """Prepare (or find prepared) samples and open them all, so that the folder may go; length -1 means 128 tokens."""
    wanted = BertTextSettings(settings.path, 128 if settings.sequence_length == -1 else settings.sequence_length,
                              settings.vocab_size, settings.max_predictions, settings.seed, settings.tokenizer)
    cache = prepare_text(wanted, settings.cache_directory)
    opened = {(split, field): cache.array(split, field) for split in SPLITS for field in STORAGE}
    return ArrayDataset(cache.vocab_size, wanted.sequence_length,
                        partial(bert_fields, wanted.sequence_length, wanted.predictions),
                        first_samples({split: cache.samples(split) for split in SPLITS}, settings.samples),
                        lambda split, field: opened[split, field], cache.tokenizer_path)


def text_corpus(folder: Path | None, language: str | None = None) -> Corpus:
    """Return the documents for a language model, each with its line breaks; None: the text of this machine.

    That is English prose, or what a source of ``vpipe.sources`` finds in another language.

    Raises:
        UserError: there is none.
    """
    if folder is not None:
        return Corpus(str(folder), {"text": file_states(text_files(folder), folder)},
                      lambda: (Document("\n".join(block)) for block in read_blocks(folder)))

    if language is not None:
        return _text_in(language)

    @cache  # reading the sources takes seconds
    def prose() -> list[Document]:
        return [Document(" ".join(sentences)) for sentences in machine_prose()]

    versions = {"python": platform.python_version(), **PluginGroup.versions_of(PROSE_PACKAGES)}
    return Corpus("the prose of this machine", {"prose": versions}, prose)


def _text_in(language: str) -> Corpus:
    """Return the text of this machine in a language, from the first source that has some."""
    refused = UserError(f"nothing here finds text in the language '{language}'",
                        hint="name a folder of text as dataset.path; vpipe/extras/catalogues, which is missing here, "
                             "reads what programs say")
    for kind in SOURCES.added():
        try:
            found: Corpus | None = kind().text(language)
            if found is not None:
                return found
        except UserError as error:
            refused = error
    raise refused


@register_dataset("text", files=("*.txt",))
def text(settings: DatasetSettings) -> Dataset:
    """Return samples for the model that reads ``settings.fields``. Raises :class:`UserError` for impossible text."""
    if LABELS in settings.fields:  # which a model that predicts the next token reads, and BERT does not
        return token_dataset(text_corpus(settings.path, settings.language), settings)
    if settings.language is not None and settings.path is None:
        raise UserError(f"dataset.language is {settings.language}, but BERT's samples are made of prose, which is "
                        "found in English alone", hint="name a folder of text as dataset.path, or train a gpt")
    return bert_text(settings)
