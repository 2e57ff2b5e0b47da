"""Turn a corpus into a language model's samples: tokenize once, keep the tokens in the cache directory, cut sequences.

    tokens-<key>/  manifest.json  tokenizer.json  train.bin  test.bin

A ``.bin`` holds the tokens of the split's documents one after another; a token for the end of a text follows each
document. Numbers have 16 bits where the vocabulary allows it, else 32. The length of a sample is not in it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vpipe.data.cache import CachedFolder, cached_folder_for_vocabulary, file_state
from vpipe.data.corpus import Corpus, SplitCorpus
from vpipe.data.dataset import DatasetSettings, Field, Split
from vpipe.data.epoch import ArrayDataset, first_samples
from vpipe.data.tokenizers import (
    DEFAULT_VOCAB_SIZE,
    end_of_text,
    ids_in,
    load_with_end,
    model_vocab_size,
    save_tokenizer,
    train_byte_bpe,
)
from vpipe.errors import UserError, counted
from vpipe.plugins import package_versions
from vpipe.progress import progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INPUT_IDS, LABELS = NAMES = ("input_ids", "labels")


def for_language_model(fields: Collection[str]) -> bool:
    """Return whether a model that reads these fields predicts the next token; BERT and a model without fields do
    not.
    """
    return LABELS in fields


def token_fields(sequence_length: int) -> dict[str, Field]:
    """Return the fields by name, both [S] and int64: ``labels[t]`` is the token after ``input_ids[t]``."""
    import torch

    return {name: Field((sequence_length,), torch.int64) for name in NAMES}


def check_length(sequence_length: int) -> None:
    """Raise :class:`UserError` for a length that no sample can have."""
    if sequence_length < 1:
        raise UserError(f"sequence_length is {sequence_length}", hint="a sample has at least 1 token")


Tokens = NDArray[np.generic]


class TokenDataset(ArrayDataset):
    """A data set of ``input_ids`` and ``labels`` [S], cut from one long row of tokens per split.

    Args:
        counts: samples of each split, at most as many as its tokens have (:func:`samples_in`).
        tokens: split -> its tokens [T], of any type of integers; a map of a file is read where samples are asked for.

    A batch with a token out of the vocabulary raises :class:`UserError`.
    """

    def __init__(self, vocab_size: int, sequence_length: int, counts: Mapping[Split, int],
                 tokens: Callable[[Split], Tokens], tokenizer_path: Path | None = None) -> None:
        check_length(sequence_length)

        def load(split: Split, field: str) -> Tokens:
            row = tokens(split)
            first, samples = int(field == LABELS), samples_in(len(row), sequence_length)
            return row[first:first + samples * sequence_length].reshape(samples, sequence_length)

        super().__init__(vocab_size, sequence_length, partial(token_fields, sequence_length), counts, load,
                         tokenizer_path)

    def _check(self, split: Split, taken: Mapping[str, Tokens]) -> None:
        largest = max((int(np.max(values)) for values in taken.values()), default=0)
        if largest >= self.vocab_size:
            kept = None if self.tokenizer_path is None else str(self.tokenizer_path.parent)
            raise UserError(f"the {split} split has the token {largest}, but the vocabulary ends at "
                            f"{self.vocab_size - 1}: the prepared data is damaged",
                            hint="remove its folder, and it is made anew", where=kept)


def samples_in(tokens: int, sequence_length: int) -> int:
    """Return the number of samples in so many tokens."""
    check_length(sequence_length)
    return max(0, tokens - 1) // sequence_length


_FORMAT = 1  # raised when the same facts come to mean other tokens
_TEXTS_AT_ONCE = 1024
_SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True)
class TokenCache(CachedFolder):
    """A complete, checked folder of tokens."""

    def count(self, split: Split) -> int:
        """Return the number of tokens in the split."""
        return self.manifest_count("counts", f"{split}_tokens")

    def tokens(self, split: Split) -> Tokens:
        """Map the tokens of a split [T] from disk: only what is indexed is read."""
        path, name, count = self.folder / f"{split}.bin", self.manifest.get("dtype"), self.count(split)
        if name not in ("uint16", "uint32") or path.stat().st_size != count * np.dtype(name).itemsize:
            raise self.damaged(f"{path.name} does not hold {counted(count, 'token')} of {name}")
        return np.memmap(path, np.dtype(name), "r") if count else np.empty(0, np.dtype(name))


def token_dataset(corpus: Corpus, settings: DatasetSettings) -> TokenDataset:
    """Prepare (or find prepared) the tokens of a corpus and open them: the folder may go while they are in use.

    ``sequence_length`` -1 means 128. Does not import torch. Raises :class:`UserError` for a corpus or sizes that cannot
    work, and as :func:`~vpipe.data.cache.cached_folder` does.
    """
    length = 128 if settings.sequence_length == -1 else settings.sequence_length
    cache = prepare_tokens(corpus, settings.vocab_size, settings.tokenizer, settings.cache_directory)
    counts: dict[Split, int] = {split: samples_in(cache.count(split), length) for split in _SPLITS}
    for split, samples in counts.items():
        if samples < settings.batch_size:
            held_out = "" if split == "train" else "; held out is what is marked test, else 1 document in 20"
            tokens, batch = counted(cache.count(split), "token"), counted(settings.batch_size, "sample")
            raise UserError(f"{corpus.name}: the {split} split has {tokens}, but a batch of {batch} of sequence_length "
                            f"{length} takes {settings.batch_size * length + 1}",
                            hint="use a shorter model.sequence_length or a smaller dataset.batch_size, or add data"
                                 f"{held_out}")
    opened: dict[Split, Tokens] = {split: cache.tokens(split) for split in _SPLITS}
    return TokenDataset(cache.vocab_size, length, first_samples(counts, settings.samples), opened.__getitem__,
                       cache.tokenizer_path)


def prepare_tokens(corpus: Corpus, vocab_size: int = -1, tokenizer: Path | None = None,
                   cache_directory: Path | None = None) -> TokenCache:
    """Find the tokens of a corpus in the cache or make them now.

    Args:
        vocab_size: of the tokenizer that is trained; -1 = 8192, or that of ``tokenizer``.
        tokenizer: a ``tokenizer.json`` to use; None trains one on the training documents.
    """
    facts = {"corpus": dict(corpus.facts), "vocab_size": vocab_size, "format": _FORMAT,
             "python": platform.python_version(), "tokenizers": package_versions(["tokenizers"]),
             "tokenizer": file_state(tokenizer) if tokenizer is not None and tokenizer.is_file() else tokenizer}
    found = cached_folder_for_vocabulary("tokens", facts, partial(_build, corpus, vocab_size, tokenizer),
                                         cache_directory)
    return TokenCache(found.folder, found.manifest)


def _build(corpus: Corpus, vocab_size: int, given: Path | None, folder: Path) -> dict[str, Any]:
    divided = SplitCorpus.build(corpus)
    tokenizer = _tokenizer(divided, vocab_size, given)
    words = ids_in(tokenizer)
    size = model_vocab_size(vocab_size, words, given)
    dtype = np.dtype("uint16" if words <= 1 << 16 else "uint32")
    counts = dict(divided.counts)
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    for split in _SPLITS:
        counts |= _write(divided, split, tokenizer, folder / f"{split}.bin", dtype)
    return {"corpus": corpus.name, "tokenizer": None if given is None else str(given), "vocab_size": size,
            "dtype": dtype.name, "end_of_text": end_of_text(tokenizer), "counts": counts,
            "languages": divided.languages, "packages": package_versions(["tokenizers"])}


def _tokenizer(divided: SplitCorpus, vocab_size: int, given: Path | None) -> Tokenizer:
    if given is not None:
        return load_with_end(given)
    return train_byte_bpe(divided.texts("train"), DEFAULT_VOCAB_SIZE if vocab_size == -1 else vocab_size,
                          total=divided.counts["documents"])


def _write(divided: SplitCorpus, split: Split, tokenizer: Tokenizer, path: Path,
           dtype: np.dtype[Any]) -> dict[str, int]:
    """Tokenize a split into a file; return the number of documents and of tokens."""
    end, texts = end_of_text(tokenizer), iter(progress(
        divided.texts(split), f"tokenizing for {'training' if split == 'train' else split}", unit="text"))
    documents = tokens = 0
    with path.open("wb") as file:
        while batch := list(islice(texts, _TEXTS_AT_ONCE)):
            documents += len(batch)
            for ids in _encoded(tokenizer, batch):
                file.write(np.array([*ids, end], dtype).tobytes())
                tokens += len(ids) + 1
    return {f"{split}_documents": documents, f"{split}_tokens": tokens}


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[int]]:
    tokenizer.encode_special_tokens = True  # a text that spells such a token means its letters
    return (encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
