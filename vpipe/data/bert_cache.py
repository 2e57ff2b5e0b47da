"""BERT samples made once from text and kept: a folder of memory-mapped arrays in the cache directory.

    bert-<key>/  manifest.json  tokenizer.json  train_input_ids.npy  ...  test_next_sentence_labels.npy
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vpipe.data.bert_corpus import BertText, build_corpus
from vpipe.data.bert_fields import STORAGE
from vpipe.data.dataset import Split
from vpipe.data.manifest import package_versions
from vpipe.data.plain_text import text_files
from vpipe.data.prepared import Prepared, prepared_for_vocabulary, state, states
from vpipe.data.tokenizer_file import save_tokenizer
from vpipe.errors import counted

_FORMAT = 1  # raised when the same parameters come to mean other samples


@dataclass(frozen=True)
class BertCache(Prepared):
    """A whole, checked folder of samples."""

    def samples(self, split: Split) -> int:
        """How many samples the split holds."""
        return self.number("counts", f"{split}_samples")

    def arrays(self) -> dict[tuple[Split, str], NDArray[np.generic]]:
        """Every field of both splits, as :meth:`array` gives it: all files are open, and the folder may go."""
        splits: tuple[Split, ...] = ("train", "test")
        return {(split, field): self.array(split, field) for split in splits for field in STORAGE}

    def array(self, split: Split, field: str) -> NDArray[np.generic]:
        """One field of one split ``[N, *shape]``, mapped from disk: only the rows that are indexed are read."""
        try:
            array: NDArray[np.generic] = np.load(self.folder / f"{split}_{field}.npy", mmap_mode="r",
                                                 allow_pickle=False)
        except ValueError as error:
            raise self.damaged(f"{split}_{field}.npy: {error}") from None
        if len(array) != self.samples(split):
            raise self.damaged(f"{split}_{field}.npy holds {counted(len(array), 'sample')}, not {self.samples(split)}")
        return array


def prepare_text(wanted: BertText, cache_directory: Path | None = None) -> BertCache:
    """The samples that ``wanted`` describes, from the cache or built now (about 20 s for a machine's prose).

    Does not import torch. Raises :class:`UserError` for text that cannot work and for a cache directory that cannot be
    written; see :func:`~vpipe.data.prepared.prepared`.
    """
    found = prepared_for_vocabulary("bert", _facts(wanted), partial(_build, wanted), cache_directory)
    return BertCache(found.folder, found.manifest)


def _build(wanted: BertText, folder: Path) -> dict[str, Any]:
    corpus = build_corpus(wanted)
    save_tokenizer(corpus.tokenizer, folder / "tokenizer.json")
    for split, samples in (("train", corpus.train), ("test", corpus.test)):
        for name, array in samples.items():
            np.save(folder / f"{split}_{name}.npy", array, allow_pickle=False)
    return {"parameters": json.loads(json.dumps(asdict(wanted), default=str)),
            "packages": package_versions([*wanted.packages, "tokenizers"]), "vocab_size": corpus.vocab_size,
            "sequence_length": wanted.sequence_length, "max_predictions": wanted.predictions, "counts": corpus.counts}


def _facts(wanted: BertText) -> dict[str, Any]:
    """All that decides the samples. Files are known by name, size and time of change, not by content."""
    facts: dict[str, Any] = {**asdict(wanted), "format": _FORMAT, "python": platform.python_version(),
                             "max_predictions": wanted.predictions, "tokenizers": package_versions(["tokenizers"])}
    if wanted.text is None:
        facts["versions"] = package_versions(wanted.packages)
    else:
        facts["text"] = states(text_files(wanted.text), wanted.text)
    if wanted.tokenizer is not None and wanted.tokenizer.is_file():
        facts["tokenizer"] = state(wanted.tokenizer)
    return facts
