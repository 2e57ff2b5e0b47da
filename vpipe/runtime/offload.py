"""Offload saved activations to the memory of the host, by actions of the schedule.

What autograd saves in a forward is packed into holders, whose tensors can be copied to the host, which frees their
memory on the device. The stage's inputs, which a backward leaves gradients at, stay on the device, as do weights.

Source: Rhu et al., vDNN (MICRO 2016), section 3; as actions of a pipeline's schedule: Yuan et al., PipeOffload
(arXiv:2503.01328), section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from vpipe import accelerator
from vpipe.errors import UserError
from vpipe.runtime.values import SavingHooks, only_ours, saving_hooks, storage_of, unpack_unchanged


class Holder:
    """A tensor that autograd has saved, or nothing while its values are elsewhere."""

    def __init__(self, saved: Tensor) -> None:
        self.tensor: Tensor | None = saved
        self._version = saved._version

    def take(self) -> Tensor:
        """Return the tensor, and hold it no longer."""
        tensor, self.tensor = self.unchanged(), None
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Hold a tensor with the values and the layout of the one that was taken."""
        self.tensor, self._version = tensor, tensor._version
        if (outer := saving_hooks()) is not None:
            outer(tensor)  # which counts

    def unchanged(self) -> Tensor:
        """Return the tensor. Raise autograd's own error if it was changed in place."""
        assert self.tensor is not None, "it is put back before its backward"
        return unpack_unchanged((self.tensor, self._version))


_Copy = tuple[Tensor, torch.device, list[tuple[Holder, torch.dtype, tuple[Any, ...]]]]
"""The bytes of a storage on the host, their device, and the tensors that were in it: holder, dtype and layout."""


class SavedTensors(SavingHooks):
    """What autograd saves in the forward of a microbatch; iterate over the holders. A backward frees what it has used.

    Args:
        stage: its number.
        modules: of the stage, whose weights and buffers stay on the device.
        given: its inputs and fields of the batch, which stay there, too: the record holds them anyway.

    Raises:
        UserError: the user's own hooks handle what is saved.
    """

    def __init__(self, stage: int, modules: Iterable[nn.Module], given: Iterable[Tensor]) -> None:
        if not only_ours():
            raise UserError(f"stage {stage} offloads activations within hooks for saved tensors of your own",
                            hint="leave torch.autograd.graph.saved_tensors_hooks, or OFFLOAD, out")
        kept = (*given, *(tensor for module in modules for tensor in (*module.parameters(), *module.buffers())))
        self._not_offloaded = {storage_of(tensor) for tensor in kept if tensor.layout is torch.strided}
        self._holders: WeakSet[Holder] = WeakSet()
        self._outer: SavingHooks | None = None
        self._on_host: list[_Copy] = []

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._holders)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Hold the tensors that are saved meanwhile."""
        self._outer = saving_hooks()
        with saved_tensors_hooks(self, _unpack):
            yield

    def __call__(self, saved: Tensor) -> Holder | tuple[Tensor, int]:
        if self._outer is not None:
            self._outer(saved)  # which counts
        plain = type(saved) in (Tensor, nn.Parameter) and saved.layout is torch.strided
        if not plain or saved.is_conj() or saved.is_neg() or storage_of(saved) in self._not_offloaded:
            return saved.detach(), saved._version
        holder = Holder(saved.detach())
        self._holders.add(holder)
        return holder

    def offload(self) -> None:
        """Copy the tensors to the host, each storage once, and free them on the device.

        The copies are queued, as those of :meth:`fetch`: both in the stream that computes, where each follows what it
        needs and precedes what takes its memory.
        """
        copies: dict[object, _Copy] = {}
        for holder in self._holders:
            tensor = holder.take()
            if (storage := storage_of(tensor)) not in copies:
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                host = torch.empty_like(flat) if flat.device.type == "cpu" else accelerator.pinned_bytes(len(flat))
                copies[storage] = host.copy_(flat, non_blocking=True), tensor.device, []
            copies[storage][2].append((holder, tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())))
        self._on_host = list(copies.values())

    def fetch(self) -> None:
        """Copy the tensors back to the device, each storage once, with the layout that they had."""
        for host, device, tensors in self._on_host:
            storage = torch.empty_like(host, device=device).copy_(host, non_blocking=True).untyped_storage()
            for holder, dtype, layout in tensors:
                holder.put(torch.empty(0, dtype=dtype, device=device).set_(storage, *layout))
        self._on_host.clear()


def _unpack(packed: Holder | tuple[Tensor, int]) -> Tensor:
    return packed.unchanged() if isinstance(packed, Holder) else unpack_unchanged(packed)
