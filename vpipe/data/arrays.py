"""A data set whose samples lie in arrays, in memory or mapped from disk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vpipe.data.dataset import Field, Split
from vpipe.data.epoch import check_batch_size, check_split, epoch_rows, needed_fields, tensors

if TYPE_CHECKING:
    from torch import Tensor


class Arrays:
    """Batches by indexing one array per needed field.

    ``load(split, field)`` gives an array ``[N, *shape]`` of any integer type; it is called at the start of an epoch,
    for needed fields only. ``counts`` holds the samples of each split, at most as many as the arrays have rows.
    ``describe`` gives the fields; it is called when they are first asked for, since their types are torch's.
    ``tokenizer_path``: of the ``tokenizer.json`` that made the samples; None where none did.
    """

    def __init__(self, vocab_size: int, sequence_length: int, describe: Callable[[], Mapping[str, Field]],
                 counts: Mapping[Split, int], load: Callable[[Split, str], NDArray[np.generic]],
                 tokenizer_path: Path | None = None) -> None:
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.tokenizer_path = tokenizer_path
        self._describe = describe
        self._counts = dict(counts)
        self._load = load

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """What a batch holds."""
        return self._describe()

    def samples(self, split: Split) -> int:
        """How many samples the split holds."""
        check_split(split)
        return self._counts[split]

    def batches(self, split: Split, batch_size: int, *, seed: int,
                fields: Collection[str] | None = None, first: int = 0) -> Iterator[dict[str, Tensor]]:
        """One epoch; see :class:`~vpipe.data.dataset.Dataset`."""
        check_batch_size(split, self.samples(split), batch_size)
        needed = needed_fields(self.fields, fields)
        return self._epoch(split, batch_size, seed if split == "train" else None, needed, first)

    def _epoch(self, split: Split, batch_size: int, seed: int | None, needed: frozenset[str],
               first: int) -> Iterator[dict[str, Tensor]]:
        arrays = {name: self._load(split, name) for name in self.fields if name in needed}
        for rows in islice(epoch_rows(self._counts[split], batch_size, seed=seed), first, None):
            taken = {name: array[rows] for name, array in arrays.items()}
            self._check(split, taken)
            yield tensors(self.fields, batch_size, taken)

    def _check(self, split: Split, taken: Mapping[str, NDArray[np.generic]]) -> None:
        """Raises :class:`UserError` for values that cannot be; to be overridden."""


def first_samples(counts: Mapping[Split, int], samples: int | None) -> dict[Split, int]:
    """Those counts, with at most ``samples`` for training; None = all."""
    return dict(counts) if samples is None else {**counts, "train": min(counts["train"], samples)}
