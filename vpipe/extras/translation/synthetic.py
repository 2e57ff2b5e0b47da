"""Make up random pairs, for timing and tests."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from vpipe.app.data.dataset import DatasetSettings, Split
from vpipe.app.data.epoch import seeded_generator
from vpipe.app.data.synthetic import sample_counts
from vpipe.app.data.tokenizers import PAIR_TOKENS
from vpipe.errors import UserError
from vpipe.extras.translation.length_buckets import (
    SOURCE_IDS,
    SOURCE_POSITIONS,
    PairDataset,
    TokenPairs,
    packed_borders,
)


def synthetic(settings: DatasetSettings) -> PairDataset | None:
    """Return random pairs for a model that translates; None for another one."""
    if SOURCE_IDS not in settings.fields:
        return None
    assert settings.samples is not None, "the data set 'synthetic' has a default"
    return synthetic_pairs(settings.vocab_size, settings.sequence_length, settings.samples, seed=settings.seed,
                           batch_size=settings.batch_size, max_tokens=settings.max_tokens,
                           packed=SOURCE_POSITIONS in settings.fields)


def synthetic_pairs(vocab_size: int, sequence_length: int, samples: int = 1024, *, seed: int = 0,
                    batch_size: int = 1, max_tokens: int | None = None, packed: bool = False) -> PairDataset:
    """Return ``samples`` training pairs of random tokens, either side half a length to a full one, and some test pairs.

    Those are an eighth as many, but no fewer than ``batch_size``. The arguments decide every value. All are kept in
    memory: 8 S bytes a pair at most. ``packed``: sides have a quarter to half a length, and samples several pairs.
    Raises :class:`UserError` for wrong sizes.
    """
    if sequence_length < 2:
        raise UserError(f"sequence_length is {sequence_length}", hint="a side has at least a token and its end")
    if vocab_size <= len(PAIR_TOKENS):
        raise UserError(f"vocab_size is {vocab_size}, but {len(PAIR_TOKENS)} ids are special tokens",
                        hint=f"use at least {len(PAIR_TOKENS) + 1}")
    counts, pairs = sample_counts(samples, batch_size), dict[Split, TokenPairs]()
    longest = max(2, sequence_length // 2) if packed else sequence_length
    shortest = max(2, longest // 2)
    most = sequence_length // shortest if packed else 1  # in a sample, so that there are enough
    for split, count in counts.items():
        rng = seeded_generator(seed, crc32(split.encode()))
        lengths = rng.integers(shortest - 1, longest, size=(most * count, 2))
        source, target = (rng.integers(len(PAIR_TOKENS), vocab_size, size=int(total), dtype=np.uint32)
                          for total in lengths.sum(0))
        pairs[split] = TokenPairs.from_lengths(source, target, lengths)
    borders = None if not packed else {
        split: own[:counts[split] + 1] for split, own in packed_borders(pairs, sequence_length).items()}
    dataset = PairDataset(vocab_size, sequence_length, pairs, 0, 1, max_tokens, borders=borders)
    dataset.buckets(batch_size)  # which checks the sizes
    return dataset
