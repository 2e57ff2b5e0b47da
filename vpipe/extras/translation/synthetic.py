"""Make up random pairs, for timing and tests."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from vpipe.app.data.corpus import Source
from vpipe.app.data.dataset import DatasetSettings, Split
from vpipe.app.data.epoch import seeded_generator
from vpipe.app.data.synthetic import sample_counts
from vpipe.app.data.tokenizers import PAIR_TOKENS
from vpipe.errors import UserError
from vpipe.extras.translation.length_buckets import SOURCE_IDS, LengthBuckets, PairDataset, TokenPairs


class RandomPairs(Source):
    """Random pairs for a model that translates."""

    def synthetic(self, settings: DatasetSettings) -> PairDataset | None:
        """Return the pairs; None for another model."""
        if SOURCE_IDS not in settings.fields:
            return None
        assert settings.samples is not None, "the data set 'synthetic' has a default"
        return synthetic_pairs(settings.vocab_size, settings.sequence_length, settings.samples, seed=settings.seed,
                               batch_size=settings.batch_size, max_tokens=settings.max_tokens)


def synthetic_pairs(vocab_size: int, sequence_length: int, samples: int = 1024, *, seed: int = 0,
                    batch_size: int = 1, max_tokens: int | None = None) -> PairDataset:
    """Return ``samples`` training pairs of random tokens, either side half a length to a full one, and some test pairs.

    Those are an eighth as many, but no fewer than ``batch_size``. The arguments decide every value. All are kept in
    memory: 8 S bytes a pair at most. Raises :class:`UserError` for wrong sizes.
    """
    if sequence_length < 2:
        raise UserError(f"sequence_length is {sequence_length}", hint="a side has at least a token and its end")
    if vocab_size <= len(PAIR_TOKENS):
        raise UserError(f"vocab_size is {vocab_size}, but {len(PAIR_TOKENS)} ids are special tokens",
                        hint=f"use at least {len(PAIR_TOKENS) + 1}")
    pairs: dict[Split, TokenPairs] = {}
    for split, count in sample_counts(samples, batch_size).items():
        rng = seeded_generator(seed, crc32(split.encode()))
        lengths = rng.integers(max(1, sequence_length // 2 - 1), sequence_length, size=(count, 2))
        source, target = (rng.integers(len(PAIR_TOKENS), vocab_size, size=int(total), dtype=np.uint32)
                          for total in lengths.sum(0))
        pairs[split] = TokenPairs.from_lengths(source, target, lengths)
    LengthBuckets(pairs["train"].widths, batch_size, max_tokens)  # which checks the sizes
    return PairDataset(vocab_size, sequence_length, pairs, (0, 1), max_tokens)
