"""Count the batches, samples and tokens of an epoch, and find the batch at which a run resumes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, islice

import numpy as np
from numpy.typing import NDArray

from vpipe.app.data.dataset import Dataset, VaryingBatches


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of the order of an epoch: the same everywhere, unrelated for neighbouring values."""
    return int.from_bytes(hashlib.blake2b(struct.pack("<2q", seed, epoch), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Location:
    """The batch that holds the next sample: ``done`` of its ``samples`` are done already."""

    epoch: int
    batch: int
    done: int
    samples: int


@dataclass(frozen=True)
class Epochs:
    """The epochs of training on a data set.

    Every epoch has equally many batches and samples. A batch has ``batch_size`` samples, unless the data set has
    :class:`~vpipe.app.data.dataset.VaryingBatches`.

    Attributes:
        microbatches: of a batch.
        sequence_length: tokens of a sample, where all have equally many.
        seed: of the order of an epoch.
    """

    dataset: Dataset
    batch_size: int
    microbatches: int
    sequence_length: int
    seed: Callable[[int], int]

    @cached_property
    def batches(self) -> int:
        """Return the batches of an epoch."""
        return len(self._first) if self._varying else self.dataset.samples("train") // self.batch_size

    @cached_property
    def samples(self) -> int:
        """Return the samples of an epoch: those that fill no batch are left out."""
        return sum(map(len, self._first)) if self._varying else self.batches * self.batch_size

    @cached_property
    def tokens(self) -> int:
        """Return the tokens of these samples, padding excluded."""
        return sum(int(batch.sum()) for batch in self._first) if self._varying else self.samples * self.sequence_length

    def per_step(self, microbatches: int) -> tuple[int, int]:
        """Return the samples and tokens of a step of so many microbatches; their mean where they differ."""
        steps = self.batches * self.microbatches / microbatches
        return round(self.samples / steps), round(self.tokens / steps)

    def locate(self, samples: int) -> Location:
        """Return the batch that holds the first sample after so many of them."""
        epoch, rest = divmod(samples, self.samples)
        if not self._varying:
            return Location(epoch, *divmod(rest, self.batch_size), self.batch_size)
        sizes = [len(batch) for batch in self._batch_tokens(epoch)]
        ends = list(accumulate(sizes))
        batch = int(np.searchsorted(ends, rest, side="right"))
        return Location(epoch, batch, rest - ends[batch] + sizes[batch], sizes[batch])

    def microbatches_done(self, samples: int) -> int:
        """Return the microbatches of so many samples."""
        at = self.locate(samples)
        return (at.epoch * self.batches + at.batch) * self.microbatches + at.done * self.microbatches // at.samples

    def steps(self, samples: int, microbatches: int) -> Iterator[tuple[int, int]] | None:
        """Yield the samples and tokens of each step of so many microbatches, after ``samples``; None: all are equal."""
        if not self._varying:
            return None
        parts = islice(self._microbatches(self.locate(samples).epoch),
                       self.microbatches_done(samples) % (self.batches * self.microbatches), None)
        steps = iter(lambda: list(islice(parts, microbatches)), [])
        return ((sum(map(len, step)), sum(int(part.sum()) for part in step)) for step in steps)

    def _microbatches(self, first: int) -> Iterator[NDArray[np.int64]]:
        for epoch in count(first):
            for batch in self._batch_tokens(epoch):
                yield from np.split(batch, self.microbatches)

    @property
    def _varying(self) -> bool:
        return isinstance(self.dataset, VaryingBatches)

    @cached_property
    def _first(self) -> Sequence[NDArray[np.int64]]:
        return self._batch_tokens(0)

    def _batch_tokens(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        assert isinstance(self.dataset, VaryingBatches), "batches of equally many samples"
        return self.dataset.batch_tokens(self.batch_size, seed=self.seed(epoch))
