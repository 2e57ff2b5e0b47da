"""Random tokens for a language model, for timing and for tests. Nothing is read."""

from __future__ import annotations

from functools import cache
from zlib import crc32

import numpy as np

from vpipe.data.dataset import Split
from vpipe.data.epoch import generator
from vpipe.data.token_arrays import TokenArrays, Tokens
from vpipe.errors import UserError


def synthetic_tokens(vocab_size: int, sequence_length: int, train: int, test: int, *, seed: int = 0) -> TokenArrays:
    """``train`` and ``test`` samples of S tokens, each drawn evenly from the vocabulary and independent of the others.

    So no model gets below a loss of ln(vocab_size) on the test split. The arguments decide every value. They are made
    when an epoch first needs one, and kept in memory: 4 S bytes a sample. Raises :class:`UserError` for sizes that no
    sample can have.
    """
    if vocab_size < 2:
        raise UserError(f"vocab_size is {vocab_size}", hint="use at least 2, so that there is something to predict")
    counts: dict[Split, int] = {"train": train, "test": test}

    @cache
    def drawn(split: Split) -> Tokens:
        rng = generator(seed, crc32(split.encode()))
        return rng.integers(vocab_size, size=counts[split] * sequence_length + 1, dtype=np.uint32)

    return TokenArrays(vocab_size, sequence_length, counts, drawn)
