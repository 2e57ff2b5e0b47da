"""Tokens made once from a corpus and kept: a folder of memory-mapped rows in the cache directory.

    tokens-<key>/  manifest.json  tokenizer.json  train.bin  test.bin

A ``.bin`` holds the tokens of the split's documents, one behind the other, each document ended by the token for that,
as 16-bit numbers where the vocabulary allows it and as 32-bit ones elsewhere. The length of a sample is not in it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vpipe.data.arrays import first_samples
from vpipe.data.byte_bpe import end_of_text, load_with_end, train_byte_bpe
from vpipe.data.corpus import Corpus, Divided
from vpipe.data.dataset import DatasetSettings, Split
from vpipe.data.manifest import package_versions
from vpipe.data.prepared import Prepared, prepared_for_vocabulary, state
from vpipe.data.progress import progress
from vpipe.data.token_arrays import TokenArrays, Tokens, samples_in
from vpipe.data.tokenizer_file import DEFAULT_VOCAB_SIZE, ids_in, model_vocab_size, save_tokenizer
from vpipe.errors import UserError, counted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FORMAT = 1  # raised when the same facts come to mean other tokens
_TEXTS_AT_ONCE = 1024
_SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True)
class TokenCache(Prepared):
    """A whole, checked folder of tokens."""

    def count(self, split: Split) -> int:
        """How many tokens the split has."""
        return self.number("counts", f"{split}_tokens")

    def tokens(self, split: Split) -> Tokens:
        """The tokens of a split [T], mapped from disk: only what is indexed is read."""
        path, name, count = self.folder / f"{split}.bin", self.manifest.get("dtype"), self.count(split)
        if name not in ("uint16", "uint32") or path.stat().st_size != count * np.dtype(name).itemsize:
            raise self.damaged(f"{path.name} does not hold {counted(count, 'token')} of {name}")
        return np.memmap(path, np.dtype(name), "r") if count else np.empty(0, np.dtype(name))


def token_dataset(corpus: Corpus, settings: DatasetSettings) -> TokenArrays:
    """Prepare (or find prepared) the tokens of a corpus and open them: the folder may go while they are in use.

    ``sequence_length`` -1 means 128.
    Raises :class:`UserError` for a corpus or sizes that cannot work, and as
    :func:`~vpipe.data.prepared.prepared` does. Does not import torch.
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
    return TokenArrays(cache.vocab_size, length, first_samples(counts, settings.samples), opened.__getitem__,
                       cache.tokenizer_path)


def prepare_tokens(corpus: Corpus, vocab_size: int = -1, tokenizer: Path | None = None,
                   cache_directory: Path | None = None) -> TokenCache:
    """The tokens of a corpus, from the cache or made now.

    Args:
        vocab_size: of the tokenizer that is trained; -1 = 8192, or what ``tokenizer`` has.
        tokenizer: a ``tokenizer.json`` to use; None trains one on the training documents.
    """
    facts = {"corpus": dict(corpus.facts), "vocab_size": vocab_size, "format": _FORMAT,
             "python": platform.python_version(), "tokenizers": package_versions(["tokenizers"]),
             "tokenizer": state(tokenizer) if tokenizer is not None and tokenizer.is_file() else tokenizer}
    found = prepared_for_vocabulary("tokens", facts, partial(_build, corpus, vocab_size, tokenizer), cache_directory)
    return TokenCache(found.folder, found.manifest)


def _build(corpus: Corpus, vocab_size: int, given: Path | None, folder: Path) -> dict[str, Any]:
    divided = Divided.of(corpus)
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


def _tokenizer(divided: Divided, vocab_size: int, given: Path | None) -> Tokenizer:
    if given is not None:
        return load_with_end(given)
    return train_byte_bpe(divided.texts("train"), DEFAULT_VOCAB_SIZE if vocab_size == -1 else vocab_size,
                          total=divided.counts["documents"])


def _write(divided: Divided, split: Split, tokenizer: Tokenizer, path: Path, dtype: np.dtype[Any]) -> dict[str, int]:
    """Tokenize a split into a file; how many documents and tokens it has."""
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
