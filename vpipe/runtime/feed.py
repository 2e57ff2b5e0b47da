"""Batches as a stream of microbatches, read when first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vpipe.errors import UserError
from vpipe.watch.current import at_work

Batch = Mapping[str, Tensor]
"""A dict of tensors whose dimension 0 counts samples."""

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""The shapes of a microbatch's fields: what the shapes between stages follow from."""


@dataclass
class _Open:
    """A batch of which some microbatches are still to be taken."""

    chunks: list[dict[str, Tensor]]
    left: int


class Feed:
    """The microbatches of ``batches``, numbered from 0 on.

    Args:
        batches: what the user iterates over; a field this process does not need may be on the meta device.
        microbatches: into how many equal parts a batch is cut along dimension 0.
        fields: names a batch must hold.
        takers: how many stages of this process take a microbatch, each once; none of those before the first that is
            to be taken, where training goes on within a batch.
        limit: after how many microbatches the stream ends, if the batches do not end before.
    """

    def __init__(self, batches: Iterator[Batch], microbatches: int, fields: tuple[str, ...],
                 takers: Callable[[int], int], limit: int | None = None) -> None:
        self._batches, self._microbatches, self._fields, self._takers = batches, microbatches, fields, takers
        self._limit = limit
        self._open: dict[int, _Open] = {}
        self._read = 0
        self._exhausted = False
        self.end: int | None = None  # a microbatch at which to pause
        self._sizes: list[tuple[int, int]] = []  # microbatches in a row, and how many samples each of them has

    def has(self, microbatch: int) -> bool:
        """Whether this microbatch exists and lies before the pause."""
        if any(end is not None and microbatch >= end for end in (self.end, self._limit)):
            return False
        while microbatch >= self._read * self._microbatches and not self._exhausted:
            with at_work("reading a batch"):
                batch = next(self._batches, None)
            if batch is None:
                self._exhausted = True
            else:
                first = self._read * self._microbatches
                left = sum(map(self._takers, range(first, first + self._microbatches)))
                chunks = self._cut(batch)
                if left:
                    self._open[self._read] = _Open(chunks, left)
                self._read += 1
        return microbatch < self._read * self._microbatches

    @property
    def total(self) -> int:
        """How many microbatches there are up to the pause, once :meth:`has` has said no to one."""
        read = self._read * self._microbatches if self._exhausted else None
        return min(end for end in (self.end, self._limit, read) if end is not None)

    def signature(self, microbatch: int) -> Signature:
        """The shapes of a microbatch that was not taken by all yet."""
        return tuple((name, tuple(t.shape)) for name, t in self._chunk(microbatch).items())

    def take(self, microbatch: int) -> dict[str, Tensor]:
        """The fields of a microbatch; the batch is let go when every taker has had all of it."""
        chunk = self._chunk(microbatch)
        number = microbatch // self._microbatches
        self._open[number].left -= 1
        if not self._open[number].left:
            del self._open[number]
        return chunk

    def samples(self, first: int, end: int) -> int:
        """How many samples the microbatches from ``first`` on and before ``end`` have; all of them were read."""
        return self.samples_before(end) - self.samples_before(first)

    def samples_before(self, microbatch: int) -> int:
        """How many samples the microbatches before this one have; all of them were read."""
        total, first = 0, 0
        for count, samples in self._sizes:
            total += samples * min(count, microbatch - first)
            first += count
            if first >= microbatch:
                break
        return total

    def _count(self, samples: int) -> None:
        count, before = self._sizes[-1] if self._sizes else (0, samples)
        if before != samples:
            count = 0
        else:
            del self._sizes[-1:]
        self._sizes.append((count + self._microbatches, samples))

    def _chunk(self, microbatch: int) -> dict[str, Tensor]:
        number, within = divmod(microbatch, self._microbatches)
        return self._open[number].chunks[within]

    def _cut(self, batch: Batch) -> list[dict[str, Tensor]]:
        missing = [name for name in self._fields if name not in batch]
        if missing:
            raise UserError(f"a batch holds {sorted(batch)}, but not {missing}",
                            hint=f"give every batch the fields {list(self._fields)}")
        tensors = {name: batch[name] for name in self._fields}
        sizes = {name: t.shape[0] if t.dim() else 0 for name, t in tensors.items()}
        samples = next(iter(sizes.values()), 0)
        if len(set(sizes.values())) > 1:
            raise UserError(f"the fields of a batch disagree on the number of samples: {sizes}",
                            hint="dimension 0 of every field counts the samples")
        if not samples or samples % self._microbatches:
            down = samples - samples % self._microbatches
            fitting = " or ".join(str(size) for size in (down, down + self._microbatches) if size)
            raise UserError(f"a batch of {samples} samples cannot be cut into {self._microbatches} equal microbatches",
                            hint=f"use batches of {fitting} samples, or drop the incomplete last batch")
        self._count(samples // self._microbatches)
        parts = {name: torch.chunk(t, self._microbatches) for name, t in tensors.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(self._microbatches)]
