"""Find the first difference between the batches that the ranks of a job read: with different ones, inputs would be
trained with the labels of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vpipe.distributed.fault import Fault

SAME_BATCHES = ("every rank must read the same batches in the same order: give a DataLoader that shuffles a generator "
                "with the same seed on all ranks, generator=torch.Generator().manual_seed(0), and no "
                "DistributedSampler, since the pipeline divides each batch itself")
SEE_THERE = "the log of that rank has the traceback"


class ReadBatch(NamedTuple):
    """A batch as the rank that has read it describes it to the others, in JSON.

    Attributes:
        number: of the batch, from 0.
        first: its first microbatch, of all that were read.
        samples: 0 where the batches have ended, or this one could not be read.
        error: why it could not be read; empty where it could.
        group: equal on the ranks that must read the same values. All others read as many samples.
        fields: by name, checksums of the shape and of the values; None for values that this rank does not have.
    """

    number: int
    first: int
    samples: int
    error: str
    group: int
    fields: Mapping[str, Sequence[int | None]]


class ReadBatches:
    """Compare what ranks say of the batches that they read with what others have said before."""

    def __init__(self) -> None:
        self._said: dict[object, tuple[int, Any]] = {}  # by what is said: by which rank first, and what

    def add(self, rank: int, batches: Iterable[Sequence[Any]]) -> Fault | None:
        """Add the batches of a rank, each a :class:`ReadBatch`; return the first difference."""
        for each in batches:
            batch = ReadBatch(*each)
            found = self._compare_samples(rank, batch) or self._compare_fields(rank, batch)
            if found is not None:
                return found
        return None

    def _compare_samples(self, rank: int, batch: ReadBatch) -> Fault | None:
        number = batch.number
        other, theirs = self._said.setdefault(number, (rank, batch))
        if bool(batch.error) != bool(theirs.error):
            failed, of, there = (rank, batch, theirs) if batch.error else (other, theirs, batch)
            how = f"could not read batch {number}: {of.error}"
            return Fault((failed,), how if there.samples else f"{how}; on other ranks the batches ended before",
                         SEE_THERE, reported=True)
        if batch.samples == theirs.samples:
            return None
        (low, samples), (high, others) = sorted([(rank, batch.samples), (other, theirs.samples)])
        if samples and others:
            return _differ(f"batch {number} has {samples} samples on rank {low} and {others} on rank {high}")
        ended, more = (high, low) if samples else (low, high)
        return ended_before(number, ended, more)

    def _compare_fields(self, rank: int, batch: ReadBatch) -> Fault | None:
        for name, checksums in batch.fields.items():
            for what, checksum in zip(("the shape of ", ""), checksums, strict=True):
                if checksum is None:
                    continue
                other, theirs = self._said.setdefault((batch.number, batch.group, what, name), (rank, checksum))
                if checksum != theirs:
                    low, high = sorted([rank, other])
                    return _differ(f"{what}field '{name}' of batch {batch.number} on rank {low} and rank {high}")
        return None


def ended_before(number: int, ended: int, more: int) -> Fault:
    """Return the fault of ranks of which one has read ``number`` batches to their end, and another has more."""
    return _differ(f"there are {number} on rank {ended} and more on rank {more}")


def _differ(how: str) -> Fault:
    return Fault((), f"batches differ between ranks: {how}", SAME_BATCHES)
