"""Hold what the actions of a rank make, from the action that makes a value to the one that ends it; count its bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from vpipe.runtime.sharded_tensors import local
from vpipe.schedules.kinds import HALF, OFFLOADED, SAVED, Needed, Value
from vpipe.torch_private import hooks_for_saved

LOSS = Value("loss")
WANTED = Value("outputs of an evaluation")
KEPT = Value("inputs kept for a later stage of the rank")
OUTLIVING = frozenset({LOSS, WANTED})
"""Values that outlive a segment: who collects the results of a step or an evaluation takes them."""

RECORDS = (SAVED, HALF, OFFLOADED)
"""Values that are the record of a microbatch (:class:`~vpipe.runtime.activations.Record`); each becomes another."""


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

    def record(self, stage: int, index: int) -> Any:
        """Return the record of a microbatch in flight; None without one."""
        return next((self[value, stage, index] for value in RECORDS if (value, stage, index) in self), None)

    def take_all(self, value: Value, stage: int) -> list[Any]:
        """Take a value of all indices, in their order."""
        return [self.pop((value, stage, index)) for index in sorted(
            index for each, where, index in self if each is value and where == stage)]


class SavingHooks:
    """Hooks of vpipe's for tensors that autograd saves, which change no number. They are called with each tensor."""

    def __call__(self, saved: Tensor) -> object:
        raise NotImplementedError


class ActivationCounter(SavingHooks):
    """Count the bytes that the graphs of one microbatch save, by storage.

    It hooks into the saving of tensors by autograd, and changes no number. It holds no storage: one that was freed no
    longer counts. Tensors without strides (sparse ones) are not counted. Autograd does not check whether tensors that
    hooks handle are changed in place before they are used; the counter does.

    Args:
        before: those that hold longer and count what both hold: of the slice before, such as keys, and of the same
            microbatch on an earlier stage of the rank, whose output is this one's input.
    """

    def __init__(self, before: Sequence[ActivationCounter] = ()) -> None:
        self._before, self._held = before, frozenset[StorageWeakRef]()
        self._saved: dict[StorageWeakRef, int] = {}
        self._fields: dict[StorageWeakRef, int] = {}  # of the batch, which the record drops before the weight half

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tensors that are saved meanwhile."""
        with saved_tensors_hooks(self, unpack_unchanged):
            yield

    def __call__(self, saved: Tensor) -> tuple[Tensor, int]:
        self._saved |= sizes_of([saved])
        return saved.detach(), saved._version  # an operation's output would hold the graph that holds it

    def saved(self) -> dict[StorageWeakRef, int]:
        """Return the bytes of saved storages that were not freed."""
        return alive(self._saved)

    def bytes(self, held: Iterable[Tensor], fields: Collection[Tensor], modules: Iterable[nn.Module]) -> int:
        """Return the bytes that a record holds now: every storage once, without the modules' weights and buffers.

        Args:
            held: the tensors that it holds besides what its graphs save.
            fields: of the batch, as long as it holds them. Each counts by its own size: its storage is that of the
                whole batch.
        """
        there = {**sizes_of(held), **self.saved()}
        elsewhere = frozenset().union(*(each._held for each in self._before))
        self._held = elsewhere | there.keys()
        there = {storage: size for storage, size in there.items() if storage not in elsewhere}
        self._fields |= {storage_of(field): min(field.nbytes, bytes_of([field])) for field in fields}
        there |= {storage: size for storage, size in self._fields.items() if fields or storage in there}
        own = sizes_of(t for module in modules for t in (*module.parameters(), *module.buffers()))
        return sum(size for storage, size in there.items() if storage not in own)


def only_ours() -> bool:
    """Return whether the hooks for saved tensors in force, if any, are vpipe's."""
    return hooks_for_saved(True) is None or saving_hooks() is not None


def saving_hooks() -> SavingHooks | None:
    """Return the hooks for saved tensors in force, if they are vpipe's."""
    hooks = hooks_for_saved(True)
    return hooks[0] if hooks is not None and isinstance(hooks[0], SavingHooks) else None


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


def unpack_unchanged(packed: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor; raise autograd's own error if it was changed in place meanwhile."""
    saved, version = packed
    if saved._version != version:  # which it shares with the tensor that it was detached from
        raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace "
                           f"operation: [{saved.type()} {list(saved.shape)}] is at version {saved._version}; expected "
                           f"version {version} instead")
    return saved
