"""Make BERT samples from text: documents, split, tokenizer, samples. The cache directory keeps them as mapped arrays.

    bert-<key>/  manifest.json  tokenizer.json  train_input_ids.npy  ...  test_next_sentence_labels.npy
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vpipe.data.bert_samples import STORAGE, BertDataset, Samples, check_lengths, default_max_predictions, make_samples
from vpipe.data.cache import CachedFolder, cached_folder_for_vocabulary, file_state, file_states
from vpipe.data.dataset import DatasetSettings, Split
from vpipe.data.epoch import first_samples
from vpipe.data.local_corpus.prose import PACKAGES, Document, machine_prose
from vpipe.data.plain_text import read_documents, text_files
from vpipe.data.tokenizers import DEFAULT_VOCAB_SIZE, load_wordpiece, model_vocab_size, save_tokenizer, train_wordpiece
from vpipe.errors import UserError, counted
from vpipe.plugins import package_versions

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
    packages: tuple[str, ...] = PACKAGES

    @property
    def predictions(self) -> int:
        """Return P, with the default filled in."""
        return default_max_predictions(self.sequence_length) if self.max_predictions is None else self.max_predictions


@dataclass(frozen=True)
class BertCorpus:
    """Samples of both splits, the tokenizer that made them, its size as a model should have it, and counts."""

    train: Samples
    test: Samples
    tokenizer: Tokenizer
    vocab_size: int
    counts: dict[str, int]


def build_corpus(wanted: BertTextSettings) -> BertCorpus:
    """Gather, split, tokenize, pair and mask; about 20 s for the prose of a machine, with progress lines on stderr.

    The tokenizer is trained on the training documents only. Raises :class:`UserError` for text, lengths or sizes that
    cannot work.
    """
    check_lengths(wanted.sequence_length, wanted.predictions)
    documents = machine_prose(wanted.packages) if wanted.text is None else read_documents(wanted.text)
    train, test = split_documents(documents)
    if wanted.tokenizer is not None:
        tokenizer = load_wordpiece(wanted.tokenizer)
    else:
        tokenizer = train_wordpiece(train, DEFAULT_VOCAB_SIZE if wanted.vocab_size == -1 else wanted.vocab_size)
    train_samples, test_samples = (
        make_samples(part, tokenizer, sequence_length=wanted.sequence_length, max_predictions=wanted.predictions,
                     seed=wanted.seed) for part in (train, test))
    counts = {"documents": len(documents), "test_documents": len(test), "sentences": sum(map(len, documents)),
              "words": sum(len(sentence.split()) for document in documents for sentence in document),
              "train_samples": len(train_samples["input_ids"]), "test_samples": len(test_samples["input_ids"])}
    vocab_size = model_vocab_size(wanted.vocab_size, tokenizer.get_vocab_size(), wanted.tokenizer)
    return BertCorpus(train_samples, test_samples, tokenizer, vocab_size, counts)


def split_documents(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Return train and test: the twentieth of the documents (two at least) whose text has the smallest SHA-256 is held
    out.

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


_FORMAT = 1  # raised when the same parameters come to mean other samples


@dataclass(frozen=True)
class BertCache(CachedFolder):
    """A complete, checked folder of samples."""

    def samples(self, split: Split) -> int:
        """Return the number of samples in the split."""
        return self.manifest_count("counts", f"{split}_samples")

    def arrays(self) -> dict[tuple[Split, str], NDArray[np.generic]]:
        """Open every field of both splits, see :meth:`array`: all files are open then, and the folder may go."""
        splits: tuple[Split, ...] = ("train", "test")
        return {(split, field): self.array(split, field) for split in splits for field in STORAGE}

    def array(self, split: Split, field: str) -> NDArray[np.generic]:
        """Map one field of one split ``[N, *shape]`` from disk: only the rows that are indexed are read."""
        try:
            array: NDArray[np.generic] = np.load(self.folder / f"{split}_{field}.npy", mmap_mode="r",
                                                 allow_pickle=False)
        except ValueError as error:
            raise self.damaged(f"{split}_{field}.npy: {error}") from None
        if len(array) != self.samples(split):
            raise self.damaged(f"{split}_{field}.npy holds {counted(len(array), 'sample')}, not {self.samples(split)}")
        return array


def prepare_text(wanted: BertTextSettings, cache_directory: Path | None = None) -> BertCache:
    """Find the samples in the cache or build them now (about 20 s for a machine's prose).

    Does not import torch. Raises :class:`UserError` for text that cannot work and for a cache directory that cannot be
    written; see :func:`~vpipe.data.cache.cached_folder`.
    """
    found = cached_folder_for_vocabulary("bert", _facts(wanted), partial(_build, wanted), cache_directory)
    return BertCache(found.folder, found.manifest)


def _build(wanted: BertTextSettings, folder: Path) -> dict[str, Any]:
    corpus = build_corpus(wanted)
    save_tokenizer(corpus.tokenizer, folder / "tokenizer.json")
    for split, samples in (("train", corpus.train), ("test", corpus.test)):
        for name, array in samples.items():
            np.save(folder / f"{split}_{name}.npy", array, allow_pickle=False)
    return {"parameters": json.loads(json.dumps(asdict(wanted), default=str)),
            "packages": package_versions([*wanted.packages, "tokenizers"]), "vocab_size": corpus.vocab_size,
            "sequence_length": wanted.sequence_length, "max_predictions": wanted.predictions, "counts": corpus.counts}


def _facts(wanted: BertTextSettings) -> dict[str, Any]:
    """Return all that decides the samples. Files are known by name, size and time of change, not by content."""
    facts: dict[str, Any] = {**asdict(wanted), "format": _FORMAT, "python": platform.python_version(),
                             "max_predictions": wanted.predictions, "tokenizers": package_versions(["tokenizers"])}
    if wanted.text is None:
        facts["versions"] = package_versions(wanted.packages)
    else:
        facts["text"] = file_states(text_files(wanted.text), wanted.text)
    if wanted.tokenizer is not None and wanted.tokenizer.is_file():
        facts["tokenizer"] = file_state(wanted.tokenizer)
    return facts


def bert_text(settings: DatasetSettings) -> BertDataset:
    """Prepare (or find prepared) samples and open them: the folder may go while they are in use.

    ``sequence_length`` -1 means 128. Raises :class:`UserError` for text that cannot work; see :func:`prepare_text`.
    """
    wanted = BertTextSettings(settings.path, 128 if settings.sequence_length == -1 else settings.sequence_length,
                      settings.vocab_size, settings.max_predictions, settings.seed, settings.tokenizer)
    cache = prepare_text(wanted, settings.cache_directory)
    counts: dict[Split, int] = {"train": cache.samples("train"), "test": cache.samples("test")}
    opened = cache.arrays()
    return BertDataset(cache.vocab_size, wanted.sequence_length, wanted.predictions,
                      first_samples(counts, settings.samples), lambda split, field: opened[split, field],
                      cache.tokenizer_path)
