"""Hold what the actions of a rank make, from the action that makes a value to the one that ends it; count its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from vpipe.runtime.sharded_tensors import local
from vpipe.schedules.kinds import HALF, KEPT, OFFLOADED, SAVED, Needed, Value

LOSS = Value("loss")
WANTED = Value("outputs of an evaluation")
OUTLIVING = frozenset({LOSS, WANTED})
"""Values that outlive a segment: who collects the results of a step or an evaluation takes them."""

RECORDS = (SAVED, HALF, OFFLOADED)
"""Values that are the record of a microbatch (:class:`~vpipe.runtime.activations.Record`); each becomes another."""

HELD = (*RECORDS, KEPT)
"""Values whose memory is what a rank is said to hold: each of its storages counts once."""


class Values(dict[Needed, Any]):
    """What a rank holds of microbatches, from (value, stage, index), as the table of kinds names them
    (:mod:`vpipe.schedules.kinds`). An index counts from the beginning of the segment, as that of an action does. Of
    tied weights the stage is the number of the pair of owner and borrower, and the index counts over all training.

    An action takes what it is the last to need, and puts what it makes.
    """

    def left(self) -> list[str]:
        """Return the names of values that a segment has left behind, and should not have."""
        return list(dict.fromkeys(value.name for value, _, _ in self if value not in OUTLIVING))

    def records(self) -> dict[tuple[int, int], Any]:
        """Return the records of microbatches in flight, by stage and index."""
        return {(stage, index): record for (value, stage, index), record in self.items() if value in RECORDS}

    def take_all(self, value: Value, stage: int) -> list[Any]:
        """Take a value of all indices, in their order."""
        return [self.pop((value, stage, index)) for index in sorted(
            index for each, where, index in self if each is value and where == stage)]


def sizes_of(tensors: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
    """Return the bytes of the storages of tensors that have one: those by which DTensor finds shapes have none."""
    storages = (local(tensor).untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages  # type: ignore[no-untyped-call]
            if storage.device.type != "meta"}


def alive(sizes: Mapping[StorageWeakRef, int]) -> dict[StorageWeakRef, int]:
    """Return the storages that were not freed."""
    return {storage: size for storage, size in sizes.items() if not storage.expired()}  # type: ignore[no-untyped-call]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors; several may share one."""
    return sum(sizes_of(tensors).values())


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Return a reference to the storage of a tensor, equal for all that share it."""
    return StorageWeakRef(local(tensor).untyped_storage())  # type: ignore[no-untyped-call]

