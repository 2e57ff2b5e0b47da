"""Batches as a stream of microbatches, read when first asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor

from vpipe.distributed.watchdog import at_work
from vpipe.errors import UserError
from vpipe.schedules.replication import Rounds

Batch = Mapping[str, Tensor]
"""A dict of tensors whose dimension 0 counts samples."""

_END: Batch = {}
"""What stands for the end of the batches."""

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""The shapes of a microbatch's fields: what the shapes between stages follow from."""


class BatchChecker(Protocol):
    """The comparison of batches with those of other ranks."""

    def checksums(self, batch: Batch) -> list[int]:
        """Return what is compared of a batch."""

    def exhausted(self, feed: Feed) -> None:
        """Note that there are no more batches."""


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
        used: fields that layers here compute with.
        copy_to: the device to which these are copied as they are read, where further batches are read while they are
            in use: the user may fill the same memory with the next one. None: they are not copied.
        comparison: with the batches of other ranks; None where there are none.

    Attributes:
        end: a microbatch at which to pause.
        error: what was raised while a batch was read: the microbatches end before it.
        known: the checksums of batches, by number, until the comparison with other ranks drops them.
    """

    def __init__(self, batches: Iterator[Batch], microbatches: int, fields: tuple[str, ...],
                 takers: Callable[[int], int], limit: int | None = None, used: Collection[str] = (),
                 copy_to: torch.device | None = None, comparison: BatchChecker | None = None) -> None:
        self._batches, self._microbatches, self._fields, self._takers = batches, microbatches, fields, takers
        self._limit, self._used, self._copy_to, self._comparison = limit, used, copy_to, comparison
        self._open: dict[int, _Open] = {}
        self._read = 0
        self._exhausted = False
        self.end: int | None = None
        self.error: Exception | None = None
        self.known: dict[int, list[int]] = {}
        self._changes = [(0, 0, 0)]  # microbatches and samples before a change of size, and samples per microbatch

    def has(self, microbatch: int) -> bool:
        """Whether this microbatch exists and lies before the pause."""
        if any(end is not None and microbatch >= end for end in (self.end, self._limit)):
            return False
        while microbatch >= self._read * self._microbatches and not self._exhausted:
            self._read_batch()
        return microbatch < self._read * self._microbatches

    def _read_batch(self) -> None:
        try:
            with at_work("reading a batch"):
                batch = next(self._batches, _END)
            fields = None if batch is _END else self._checked(batch)
        except Exception as error:  # kept until what was read before is done
            self.error, fields = error, None
        if fields is None:
            self._exhausted = True
            if self._comparison is not None:
                self._comparison.exhausted(self)
            return
        first = self._read * self._microbatches
        left = sum(map(self._takers, range(first, first + self._microbatches)))
        if self._comparison is not None:
            self.known[self._read] = self._comparison.checksums(fields)
        if left:
            if self._copy_to is not None:
                # A copy from pinned memory is only queued: the user could change the batch before it is made.
                fields |= {name: fields[name].to(self._copy_to, non_blocking=not fields[name].is_pinned(), copy=True)
                           for name in self._used}
            parts = {name: torch.chunk(t, self._microbatches) for name, t in fields.items()}
            chunks = [{name: part[i] for name, part in parts.items()} for i in range(self._microbatches)]
            self._open[self._read] = _Open(chunks, left)
        self._read += 1

    @property
    def total(self) -> int:
        """How many microbatches there are up to the pause, once :meth:`has` has said no to one."""
        read = self._read * self._microbatches if self._exhausted else None
        return min(end for end in (self.end, self._limit, read) if end is not None)

    @property
    def batches(self) -> int:
        """How many batches were read."""
        return self._read

    @property
    def ended(self) -> bool:
        """Whether the batches have ended, or one could not be read, before the limit and the pause."""
        return self._exhausted and all(end is None or self._read * self._microbatches < end
                                       for end in (self.end, self._limit))

    def batch_of(self, microbatch: int) -> int:
        """The number of the batch that a microbatch is of."""
        return microbatch // self._microbatches

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
        first, samples, size = self._changes[bisect_right(self._changes, microbatch, key=itemgetter(0)) - 1]
        return samples + size * (microbatch - first)

    def close(self) -> None:
        """Let go of what the user iterates over."""
        self._batches = iter(())

    def _chunk(self, microbatch: int) -> dict[str, Tensor]:
        number, within = divmod(microbatch, self._microbatches)
        return self._open[number].chunks[within]

    def _checked(self, batch: Batch) -> dict[str, Tensor]:
        """The fields of a batch that can be cut."""
        if not isinstance(batch, Mapping):
            names = ", ".join(f"{name!r}: ..." for name in self._fields)
            hint = f"name what it holds: {{{names}}}"
            if isinstance(batch, (list, tuple)) and len(batch) == len(self._fields) > 1:
                names = ", ".join(f"{name!r}: batch[{i}]" for i, name in enumerate(self._fields))
                hint = f"name what it holds: ({{{names}}} for batch in batches)"
            raise UserError(f"a batch is {type(batch).__name__}, not a dict of tensors", hint=hint)
        missing = [name for name in self._fields if name not in batch]
        if missing:
            raise UserError(f"a batch holds {sorted(batch, key=str)}, but not {missing}",
                            hint=f"give every batch the fields {list(self._fields)}")
        tensors = {name: batch[name] for name in self._fields}
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise UserError(f"the field '{name}' of a batch is {type(value).__name__}, not a tensor",
                                hint="give tensors; torch.as_tensor makes one of an array or of numbers")
            if not value.dim():
                raise UserError(f"the field '{name}' of a batch is a tensor without dimensions",
                                hint="dimension 0 of every field counts the samples")
        sizes = {name: t.shape[0] for name, t in tensors.items()}
        samples = next(iter(sizes.values()), 0)
        if len(set(sizes.values())) > 1:
            raise UserError(f"the fields of a batch disagree on the number of samples: {sizes}",
                            hint="dimension 0 of every field counts the samples")
        if not samples or samples % self._microbatches:
            down = samples - samples % self._microbatches
            fitting = " or ".join(str(size) for size in (down, down + self._microbatches) if size)
            raise UserError(f"a batch of {samples} samples cannot be cut into {self._microbatches} equal microbatches",
                            hint=f"use batches of {fitting} samples, or drop the incomplete last batch")
        if unread := [name for name in self._used if tensors[name].is_meta]:
            raise UserError(f"the field '{unread[0]}' of a batch is on the meta device, but layers of this process "
                            "read it", hint="leave out the values of such fields alone as no layer of a rank reads")
        size, first = samples // self._microbatches, self._read * self._microbatches
        if size != self._changes[-1][2]:
            self._changes.append((first, self.samples_before(first), size))
        return tensors


@dataclass
class Segment:
    """Which microbatches, and how they count.

    Attributes:
        feed: where microbatches come from.
        first: the feed's number of the segment's microbatch 0.
        base: the run's number of the segment's microbatch 0, counted over all training.
        steps_before: of the run, before the segment.
        rounds: who takes which of the segment's microbatches, and which update does.
        training: False for forward only.
    """

    feed: Feed
    first: int
    base: int
    steps_before: int
    rounds: Rounds
    training: bool

    @property
    def every(self) -> int:
        """Microbatches per update; without a flush, and replica."""
        return self.rounds.update_every

    def number(self, microbatch: int) -> int:
        """The run's number of a microbatch."""
        return self.base + microbatch

    def update_number(self, stage: int, update: int) -> int:
        """The run's number of an update, or version, of a stage, whatever made the updates before this segment."""
        return self.steps_before * self.rounds.per_step // self.rounds.span(stage) + update

    def signature(self, microbatch: int) -> Signature:
        """The shapes of a microbatch's fields."""
        return self.feed.signature(self.first + microbatch)
