"""The data set ``synthetic``: random samples for BERT or a language model, for timing and tests; nothing is read.

Extras and packages add samples for models that read other fields (:class:`~vpipe.app.data.corpus.Source`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from zlib import crc32

import numpy as np

from vpipe.app.data.bert_samples import (
    STORAGE,
    Samples,
    SentencePair,
    bert_fields,
    check_lengths,
    default_max_predictions,
    mask_tokens,
    pack,
)
from vpipe.app.data.corpus import SOURCES
from vpipe.app.data.dataset import Dataset, DatasetSettings, Split
from vpipe.app.data.epoch import INPUT_IDS, LABELS, POSITIONS, Array, ArrayDataset, TokenDataset, seeded_generator
from vpipe.app.data.registry import register_dataset
from vpipe.app.data.tokenizers import DEFAULT_VOCAB_SIZE
from vpipe.errors import UserError


def synthetic_tokens(vocab_size: int, sequence_length: int, train: int, test: int, *, seed: int = 0,
                     end: int | None = None) -> TokenDataset:
    """Return samples of S tokens, each drawn evenly from the vocabulary and independent of the others.

    So no model gets below a loss of ln(vocab_size) on the test split. The arguments decide every value. Values are made
    when an epoch first needs one, and kept in memory: 4 S bytes a sample. Raises :class:`UserError` for wrong sizes.
    ``end``: as of :class:`TokenDataset`.
    """
    if vocab_size < 2:
        raise UserError(f"vocab_size is {vocab_size}", hint="use at least 2, so that there is something to predict")
    counts: dict[Split, int] = {"train": train, "test": test}

    @cache
    def drawn(split: Split) -> Array:
        rng = seeded_generator(seed, crc32(split.encode()))
        return rng.integers(vocab_size, size=counts[split] * sequence_length + 1, dtype=np.uint32)

    return TokenDataset(vocab_size, sequence_length, counts, drawn, end=end)


_SPECIAL = 5  # ids 0 .. 4: padding, unknown, [CLS], [SEP], [MASK]
_CLS, _SEP, _MASK = 2, 3, 4
_DEFAULT_SAMPLES = 1024
_MOST_SAMPLES, _MOST_TOKENS = 1 << 24, 1 << 28  # all of them are in memory
_TEST_SHARE = 8  # one test sample for so many training samples


def synthetic_bert(vocab_size: int, sequence_length: int, samples: int = _DEFAULT_SAMPLES, *, seed: int = 0,
                   max_predictions: int | None = None, batch_size: int = 1) -> ArrayDataset:
    """Return ``samples`` training samples of random words, half a length to a full one, and some test samples.

    Those are an eighth as many, but no fewer than ``batch_size``. The arguments decide every value. Values are made
    when an epoch first needs one, and kept in memory: 6 S + 8 P + 1 bytes a sample. Raises :class:`UserError` for wrong
    sizes.
    """
    predictions = default_max_predictions(sequence_length) if max_predictions is None else max_predictions
    check_lengths(sequence_length, predictions)
    if vocab_size <= _SPECIAL:
        raise UserError(f"vocab_size is {vocab_size}, but {_SPECIAL} ids are special tokens",
                        hint=f"use at least {_SPECIAL + 1}")
    counts = sample_counts(samples, batch_size)

    @cache
    def made(split: Split) -> Samples:
        rng = seeded_generator(seed, crc32(split.encode()))
        drawn = random_pairs(counts[split], vocab_size, sequence_length, rng)
        fields = pack(drawn, sequence_length, cls=_CLS, sep=_SEP)
        mask_tokens(fields, predictions, special=np.arange(_SPECIAL, dtype=np.int32), mask_id=_MASK,
                    words=np.arange(_SPECIAL, vocab_size, dtype=np.int32), rng=rng)
        return fields

    return ArrayDataset(vocab_size, sequence_length, partial(bert_fields, sequence_length, predictions), counts,
                        lambda split, field: made(split)[field])


def random_pairs(count: int, vocab_size: int, sequence_length: int, rng: np.random.Generator) -> list[SentencePair]:
    """Return pairs of passages of random words; with their special tokens they have S/2 to S tokens."""
    room = sequence_length - 3
    lengths = rng.integers(max(2, room // 2), room + 1, size=count)
    words = rng.integers(_SPECIAL, vocab_size, size=(count, room), dtype=STORAGE["input_ids"])
    middles = rng.integers(1, lengths)
    labels = rng.random(count) < 0.5
    return [SentencePair(row[:middle].tolist(), row[middle:length].tolist(), bool(label))
            for row, middle, length, label in zip(words, middles, lengths, labels, strict=True)]


def sample_counts(samples: int, batch_size: int) -> dict[Split, int]:
    """Return the samples of each split; the test split holds one batch at least."""
    if samples < 1:
        raise UserError(f"samples is {samples}", hint="a data set holds at least 1 sample")
    return {"train": samples, "test": max(batch_size, samples // _TEST_SHARE)}


@register_dataset("synthetic")
def synthetic(settings: DatasetSettings) -> Dataset:
    """Return random samples of the sizes in ``settings``, for the model that reads ``settings.fields``.

    For -1 the vocabulary is 8192 and a sequence 128 tokens; for None there are 1024 samples, or 8 batches where those
    are more.
    """
    vocab_size = DEFAULT_VOCAB_SIZE if settings.vocab_size == -1 else settings.vocab_size
    length = 128 if settings.sequence_length == -1 else settings.sequence_length
    size = settings.batch_size
    samples = max(_DEFAULT_SAMPLES, _TEST_SHARE * size) if settings.samples is None else settings.samples
    if samples > _MOST_SAMPLES or samples * length > _MOST_TOKENS:
        raise UserError(f"{samples:,} synthetic samples of {length:,} tokens are too many to be kept in memory",
                        hint=f"use {min(_MOST_SAMPLES, _MOST_TOKENS // length):,} at most: set dataset.samples, or a "
                             "smaller dataset.batch_size or model.sequence_length")
    if settings.fields and INPUT_IDS not in settings.fields:
        settled = replace(settings, vocab_size=vocab_size, sequence_length=length, samples=samples)
        for kind in SOURCES.added():
            found: Dataset | None = kind().synthetic(settled)
            if found is not None:
                return found
    if LABELS in settings.fields:  # which a model that predicts the next token reads, and BERT does not
        counts = sample_counts(samples, size)
        return synthetic_tokens(vocab_size, length, counts["train"], counts["test"], seed=settings.seed,
                                end=0 if POSITIONS in settings.fields else None)
    return synthetic_bert(vocab_size, length, samples, seed=settings.seed, max_predictions=settings.max_predictions,
                          batch_size=size)
