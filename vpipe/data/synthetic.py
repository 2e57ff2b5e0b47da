"""The data set ``synthetic``: random samples for any of the models, for timing and tests. Nothing is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from vpipe.data.bert_samples import (
    STORAGE,
    BertDataset,
    Pair,
    Samples,
    check_lengths,
    default_max_predictions,
    mask_tokens,
    pack,
)
from vpipe.data.dataset import DatasetSettings, Field, Split
from vpipe.data.epoch import (
    Array,
    ArrayDataset,
    TokenDataset,
    epoch_rows,
    for_language_model,
    seeded_generator,
    tensors,
)
from vpipe.data.registry import register_dataset
from vpipe.data.tokenizers import DEFAULT_VOCAB_SIZE
from vpipe.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def synthetic_tokens(vocab_size: int, sequence_length: int, train: int, test: int, *, seed: int = 0) -> TokenDataset:
    """Return samples of S tokens, each drawn evenly from the vocabulary and independent of the others.

    So no model gets below a loss of ln(vocab_size) on the test split. The arguments decide every value. Values are made
    when an epoch first needs one, and kept in memory: 4 S bytes a sample. Raises :class:`UserError` for wrong sizes.
    """
    if vocab_size < 2:
        raise UserError(f"vocab_size is {vocab_size}", hint="use at least 2, so that there is something to predict")
    counts: dict[Split, int] = {"train": train, "test": test}

    @cache
    def drawn(split: Split) -> Array:
        rng = seeded_generator(seed, crc32(split.encode()))
        return rng.integers(vocab_size, size=counts[split] * sequence_length + 1, dtype=np.uint32)

    return TokenDataset(vocab_size, sequence_length, counts, drawn)


class SyntheticPairs(ArrayDataset):
    """Pairs of random sentences for a translation model, each of half a length to a full one.

    A batch is as wide as its longest source and target. Id 0 is padding and what the decoder begins with, 1 the end.
    Values are made when an epoch first needs one, and kept in memory: 16 S bytes a sample.
    """

    def __init__(self, vocab_size: int, sequence_length: int, counts: Mapping[Split, int], *, seed: int = 0) -> None:
        if vocab_size <= _END + 1 or sequence_length < 2:
            raise UserError(f"vocab_size is {vocab_size} and sequence_length {sequence_length}",
                            hint=f"use at least {_END + 2} and 2: a sentence is a word and its end")

        def describe() -> dict[str, Field]:
            import torch

            return {name: Field((sequence_length,), torch.int64) for name in PAIR_FIELDS}

        @cache
        def made(split: Split) -> dict[str, Array]:
            rng, fields = seeded_generator(seed, crc32(split.encode())), {}
            for side in ("source", "target"):
                lengths = rng.integers(-(-sequence_length // 2), sequence_length + 1, size=(counts[split], 1))
                words = rng.integers(_END + 1, vocab_size, size=(counts[split], sequence_length), dtype=np.int32)
                places = np.arange(sequence_length)
                words[places == lengths - 1] = _END
                fields[side], fields[f"{side}_mask"] = np.where(places < lengths, words, 0), places < lengths
            target, there = fields["target"], fields["target_mask"]
            shifted = np.concatenate((np.zeros_like(target[:, :1]), target[:, :-1]), axis=1)
            return dict(zip(PAIR_FIELDS, (fields["source"], fields["source_mask"], np.where(there, shifted, 0),
                                          np.where(there, target, -100)), strict=True))

        super().__init__(vocab_size, sequence_length, describe, counts, lambda split, field: made(split)[field])

    def _epoch(self, split: Split, batch_size: int, seed: int | None, needed: frozenset[str],
               first: int) -> Iterator[dict[str, Tensor]]:
        arrays = {name: self._load(split, name) for name in PAIR_FIELDS}
        rows_of = epoch_rows(self.samples(split), batch_size, seed=seed, whole=split == "train")
        for rows in islice(rows_of, first, None):
            source, target = (int(there[rows].sum(1).max()) for there in (
                arrays["source_mask"], arrays["labels"] != -100))
            width = dict(zip(PAIR_FIELDS, (source, source, target, target), strict=True))
            fields = {name: Field((width[name],), field.dtype) for name, field in self.fields.items()}
            yield tensors(fields, len(rows), {name: arrays[name][rows, :width[name]] for name in needed})


PAIR_FIELDS = ("source_ids", "source_mask", "target_ids", "labels")
"""Fields of a batch of a translation model, int64 [B, S], [B, S], [B, T] and [B, T]."""

_END = 1
_SPECIAL = 5  # ids 0 .. 4: padding, unknown, [CLS], [SEP], [MASK]
_CLS, _SEP, _MASK = 2, 3, 4
_DEFAULT_SAMPLES = 1024
_MOST_SAMPLES, _MOST_TOKENS = 1 << 24, 1 << 28  # all of them are in memory
_TEST_SHARE = 8  # one test sample for so many training samples


def synthetic_bert(vocab_size: int, sequence_length: int, samples: int = _DEFAULT_SAMPLES, *, seed: int = 0,
                   max_predictions: int | None = None, batch_size: int = 1) -> BertDataset:
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
    counts = _counts(samples, batch_size)

    @cache
    def made(split: Split) -> Samples:
        rng = seeded_generator(seed, crc32(split.encode()))
        drawn = random_pairs(counts[split], vocab_size, sequence_length, rng)
        fields = pack(drawn, sequence_length, cls=_CLS, sep=_SEP)
        mask_tokens(fields, predictions, special=np.arange(_SPECIAL, dtype=np.int32), mask_id=_MASK,
                    words=np.arange(_SPECIAL, vocab_size, dtype=np.int32), rng=rng)
        return fields

    return BertDataset(vocab_size, sequence_length, predictions, counts, lambda split, field: made(split)[field])


def random_pairs(count: int, vocab_size: int, sequence_length: int, rng: np.random.Generator) -> list[Pair]:
    """Return pairs of passages of random words; with their special tokens they have S/2 to S tokens."""
    room = sequence_length - 3
    lengths = rng.integers(max(2, room // 2), room + 1, size=count)
    words = rng.integers(_SPECIAL, vocab_size, size=(count, room), dtype=STORAGE["input_ids"])
    middles = rng.integers(1, lengths)
    labels = rng.random(count) < 0.5
    return [Pair(row[:middle].tolist(), row[middle:length].tolist(), bool(label))
            for row, middle, length, label in zip(words, middles, lengths, labels, strict=True)]


def _counts(samples: int, batch_size: int) -> dict[Split, int]:
    """Return the samples of each split; the test split holds one batch at least."""
    if samples < 1:
        raise UserError(f"samples is {samples}", hint="a data set holds at least 1 sample")
    return {"train": samples, "test": max(batch_size, samples // _TEST_SHARE)}


@register_dataset("synthetic")
def synthetic(settings: DatasetSettings) -> BertDataset | TokenDataset | SyntheticPairs:
    """Return random samples of the sizes in ``settings``, for the model that reads ``settings.fields``.

    For -1 the vocabulary is 8192 and a sequence 128 tokens; for None there are 1024 samples, or 8 batches where those
    are more.
    """
    if settings.path is not None:
        raise UserError(f"dataset.path is '{settings.path}', but the data set 'synthetic' reads nothing",
                        hint="leave it out, or name the data set that reads it as dataset.name")
    vocab_size = DEFAULT_VOCAB_SIZE if settings.vocab_size == -1 else settings.vocab_size
    length = 128 if settings.sequence_length == -1 else settings.sequence_length
    size = settings.batch_size
    samples = max(_DEFAULT_SAMPLES, _TEST_SHARE * size) if settings.samples is None else settings.samples
    if samples > _MOST_SAMPLES or samples * length > _MOST_TOKENS:
        raise UserError(f"{samples:,} synthetic samples of {length:,} tokens are too many to be kept in memory",
                        hint=f"use {min(_MOST_SAMPLES, _MOST_TOKENS // length):,} at most: set dataset.samples, or a "
                             "smaller dataset.batch_size or model.sequence_length")
    counts = _counts(samples, size)
    if "source_ids" in settings.fields:
        return SyntheticPairs(vocab_size, length, counts, seed=settings.seed)
    if for_language_model(settings.fields):
        return synthetic_tokens(vocab_size, length, counts["train"], counts["test"], seed=settings.seed)
    return synthetic_bert(vocab_size, length, samples, seed=settings.seed, max_predictions=settings.max_predictions,
                          batch_size=size)
