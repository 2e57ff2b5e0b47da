"""Make batches of pairs of similar length, padded to the longest of the batch: of a fixed size, or of so many tokens.

Training sorts the pairs by their longer side, with equal ones in an order that the seed of the epoch draws, and cuts
the row from its long end; then it draws an order of the batches:

    longest token counts    9 9 8 7 | 7 6 6 6 | 5 4 4 4 4 4 3 3 | 2      batch_size 4, max_tokens 40
    B * max(S, T)             36        28          8 * 5 = 40           left out: the shortest, fewer than batch_size

So the sizes of the batches are those of every epoch, whatever the seed, and one pass decides them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vpipe.app.data.dataset import Field, HeldOutText, Split
from vpipe.app.data.epoch import LABELS, Array, Rows, check_batch_size, check_split, needed_fields, seeded_generator
from vpipe.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

SOURCE_IDS, SOURCE_MASK, TARGET_IDS = "source_ids", "source_mask", "target_ids"
NO_LABEL = -100  # the label of padding, which no loss counts


@dataclass(frozen=True)
class TokenPairs:
    """The tokens of pairs, one side after another in one row each.

    Attributes:
        source, target: tokens of all pairs, of any integer type; the end of a text is not among them.
        lengths: ``[N, 2]``: of each pair the tokens of its source and of its target.
        starts: ``[N, 2]``: where they begin.
    """

    source: Array
    target: Array
    lengths: Rows
    starts: Rows

    @classmethod
    def from_lengths(cls, source: Array, target: Array, lengths: Rows) -> TokenPairs:
        """Return the pairs of two rows that hold nothing else."""
        return cls(source, target, lengths, np.cumsum(lengths, 0) - lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, rows: Rows) -> TokenPairs:
        """Return these pairs of them."""
        return replace(self, lengths=self.lengths[rows], starts=self.starts[rows])

    @cached_property
    def widths(self) -> Rows:
        """Return ``[N]``: of each pair the tokens of the longer side, with the token that ends it."""
        widths: Rows = self.lengths.max(1, initial=0) + 1
        return widths


class LengthBuckets:
    """How pairs become batches.

    Every batch has a multiple of ``group`` pairs. Without ``max_tokens`` it has ``group`` of them; with it as many as
    keep the pairs times the longest side, padding included, within it.

    Args:
        widths: ``[N]``: of each pair the tokens of the longer side.

    Raises:
        UserError: one group of the longest pairs has more than ``max_tokens``, or there are fewer pairs than ``group``.
    """

    def __init__(self, widths: Rows, group: int, max_tokens: int | None) -> None:
        check_batch_size("train", len(widths), group)
        longest = int(widths.max())
        if max_tokens is not None and group * longest > max_tokens:
            raise UserError(f"dataset.max_tokens is {max_tokens:,}, but the batch_size of {group} times the longest "
                            f"sample's {longest} tokens is {group * longest:,}",
                            hint=f"raise it to {group * longest:,} or more, or lower dataset.batch_size, which with "
                                 "max_tokens is what every batch has a multiple of, or model.sequence_length")
        self._widths, self._group, self._max_tokens = widths, group, max_tokens

    @cached_property
    def borders(self) -> list[int]:
        """Return where the batches begin in the sorted row, and where the last one ends."""
        sorted_widths, found = -np.sort(-self._widths), [0]
        last = len(sorted_widths) // self._group * self._group
        while found[-1] < last:
            groups = 1 if self._max_tokens is None else \
                self._max_tokens // (self._group * int(sorted_widths[found[-1]]))
            found.append(min(last, found[-1] + groups * self._group))
        return found

    def epoch(self, seed: int) -> list[Rows]:
        """Return the pairs of every batch of an epoch."""
        rng = seeded_generator(seed)
        order = rng.permutation(len(self._widths))
        order = order[np.argsort(-self._widths[order], kind="stable")]
        batches = [order[first:end] for first, end in pairwise(self.borders)]
        return [batches[number] for number in rng.permutation(len(batches))]


class PairDataset:
    """Batches of tokenized pairs: the source and its mask for an encoder, the target for a decoder.

    A batch of B pairs has, all int64, with S and T the longest of the batch, the tokens that end a text included:

        source_ids   [B, S]  the source and its end
        source_mask  [B, S]  1 for a token, 0 for padding
        target_ids   [B, T]  what a decoder reads: padding as the start, then the target without its end
        labels       [B, T]  the target and its end; -100 for padding

    Args:
        pairs: of each split.
        specials: the tokens of padding and of the end.
        max_tokens: see :class:`LengthBuckets`; None for batches of a fixed size.
        sequence_length: the most tokens of a side.
        held_out: source and target of each held-out pair, as texts.
        lines: what the data are, for the beginning of a run.
    """

    def __init__(self, vocab_size: int, sequence_length: int, pairs: Mapping[Split, TokenPairs],
                 specials: tuple[int, int], max_tokens: int | None = None, tokenizer_path: Path | None = None,
                 held_out: tuple[tuple[str, str], ...] = (), lines: tuple[str, ...] = ()) -> None:
        self.vocab_size, self.sequence_length, self.tokenizer_path = vocab_size, sequence_length, tokenizer_path
        self.held_out, self.lines = held_out, lines
        self._pairs, (self._padding, self._end), self._max_tokens = pairs, specials, max_tokens
        self._buckets: dict[int, LengthBuckets] = {}

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """Return the fields of a batch, by name."""
        import torch

        return {name: Field((-1,), torch.int64) for name in (SOURCE_IDS, SOURCE_MASK, TARGET_IDS, LABELS)}

    def samples(self, split: Split) -> int:
        """Return the number of pairs in the split."""
        check_split(split)
        return len(self._pairs[split])

    def batches(self, split: Split, batch_size: int, *, seed: int,
                fields: Collection[str] | None = None, first: int = 0) -> Iterator[dict[str, Tensor]]:
        """Yield one epoch; see :class:`~vpipe.app.data.dataset.Dataset` and :class:`LengthBuckets`.

        With ``max_tokens`` a batch for training has a multiple of ``batch_size`` pairs.
        """
        needed = needed_fields(self.fields, fields)
        check_batch_size(split, self.samples(split), batch_size, whole=split == "train")
        if split == "train":
            batches = self._bucketed(batch_size).epoch(seed)
        else:  # in their order, so that the first batches are a fair sample
            size = batch_size if self._max_tokens is None else \
                max(1, self._max_tokens // int(self._pairs[split].widths.max()))
            batches = np.split(np.arange(self.samples(split)), range(size, self.samples(split), size))
        return (self.batch(split, rows, needed) for rows in batches[first:])

    def batch_tokens(self, batch_size: int, *, seed: int) -> list[Rows]:
        """Return, for every batch of an epoch of training, the label tokens of each sample; see
        :class:`~vpipe.app.data.dataset.VaryingBatches`."""
        labels = self._pairs["train"].lengths[:, 1] + 1
        return [labels[rows] for rows in self._bucketed(batch_size).epoch(seed)]

    def largest_batch(self, batch_size: int) -> dict[str, Tensor]:
        """Return the batch with the longest samples."""
        widths = self._pairs["train"].widths
        rows = np.argsort(-widths, kind="stable")[:self._bucketed(batch_size).borders[1]]
        return self.batch("train", rows, frozenset(self.fields))

    def padding_share(self, batch_size: int) -> float:
        """Return the share of padding in the source and target tokens of an epoch of training."""
        lengths = self._pairs["train"].lengths + 1
        batches = [lengths[rows] for rows in self._bucketed(batch_size).epoch(0)]
        return 1 - sum(int(own.sum()) for own in batches) / sum(int(own.max(0).sum()) * len(own) for own in batches)

    def _bucketed(self, batch_size: int) -> LengthBuckets:
        if batch_size not in self._buckets:
            self._buckets[batch_size] = LengthBuckets(self._pairs["train"].widths, batch_size, self._max_tokens)
        return self._buckets[batch_size]

    def batch(self, split: Split, rows: Rows, needed: Collection[str]) -> dict[str, Tensor]:
        """Return the batch of some pairs of a split; fields that are not ``needed`` are on ``meta`` and not read."""
        import torch

        pairs, size = self._pairs[split], len(rows)
        lengths = pairs.lengths[rows]
        longest = [int(most) + 1 for most in lengths.max(0)]
        made: dict[str, Array] = {}
        if SOURCE_IDS in needed:
            made[SOURCE_IDS] = self._rows(pairs.source, pairs.starts[rows, 0], lengths[:, 0])
        if SOURCE_MASK in needed:
            made[SOURCE_MASK] = (np.arange(longest[0]) <= lengths[:, :1]).astype(np.int64)
        if TARGET_IDS in needed or LABELS in needed:
            targets = self._rows(pairs.target, pairs.starts[rows, 1], lengths[:, 1])
            if TARGET_IDS in needed:
                inside = np.arange(longest[1] - 1) < lengths[:, 1:]
                made[TARGET_IDS] = np.full((size, longest[1]), self._padding)
                made[TARGET_IDS][:, 1:][inside] = targets[:, :-1][inside]
            if LABELS in needed:
                made[LABELS] = np.where(np.arange(longest[1]) <= lengths[:, 1:], targets, NO_LABEL)
        return {name: torch.from_numpy(made[name]) if name in made else torch.empty(
            (size, longest[name in (TARGET_IDS, LABELS)]), dtype=field.dtype, device="meta")
            for name, field in self.fields.items()}

    def _rows(self, tokens: Array, starts: Rows, lengths: Rows) -> Array:
        """Return ``[B, longest + 1]`` tokens, each row with its end, then padding."""
        padded = np.full((len(lengths), int(lengths.max()) + 1), self._padding, np.int64)
        columns = np.arange(padded.shape[1])
        padded[columns < lengths[:, None]] = np.concatenate(
            [tokens[start:start + length] for start, length in zip(starts, lengths, strict=True)])
        padded[columns == lengths[:, None]] = self._end
        largest = int(padded.max())
        if largest >= self.vocab_size:
            raise UserError(f"a pair has the token {largest}, but the vocabulary ends at {self.vocab_size - 1}: the "
                            "prepared data is damaged", hint="remove its folder: the next run prepares it again",
                            where=str(self.tokenizer_path.parent) if self.tokenizer_path else None)
        return padded

    @cached_property
    def held_out_text(self) -> HeldOutText | None:
        """Return the label tokens of the held-out pairs, and the bytes of their targets; None without the texts."""
        if not self.held_out:
            return None
        pairs = self._pairs["test"]
        tokens = np.concatenate([pairs.target[start:start + length] for start, length in
                                 zip(pairs.starts[:, 1], pairs.lengths[:, 1], strict=True)])
        counts = np.bincount(np.append(tokens.astype(np.int64), np.full(len(pairs), self._end)))
        shares = counts[counts > 0] / counts.sum()
        return HeldOutText(int(counts.sum()), sum(len(target.encode()) for _, target in self.held_out),
                           float(-(shares * np.log(shares)).sum()))
