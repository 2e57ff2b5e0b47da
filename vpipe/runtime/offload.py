"""Offload saved activations to the memory of the host, by actions of the schedule.

What autograd saves in a forward is packed into holders, whose tensors can be copied to the host, which frees their
memory on the device. The stage's inputs, which a backward leaves gradients at, stay on the device, as do weights.

Source: Rhu et al., vDNN (MICRO 2016), section 3; as actions of a pipeline's schedule: Yuan et al., PipeOffload
(arXiv:2503.01328), section 3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from vpipe import accelerator
from vpipe.errors import UserError
from vpipe.runtime.values import SavingHooks, only_ours, saving_hooks, storage_of, unpack_unchanged


class Holder:
    """A tensor that autograd has saved, on the device; on the host, the bytes of the storage that it is a view of."""

    def __init__(self, saved: Tensor) -> None:
        self.tensor: Tensor | None = saved
        self.version = saved._version
        self.view = saved.storage_offset(), saved.shape, saved.stride()
        self.dtype, self.device = saved.dtype, saved.device
        self.on_host: Tensor | None = None


class SavedTensors(SavingHooks):
    """What autograd saves in one forward. It holds nothing itself: a backward frees what it has used.

    Args:
        kept: storages that stay on the device: of weights, and of what the record holds anyway.
    """

    def __init__(self, kept: Collection[object]) -> None:
        self._kept = kept
        self._holders: WeakSet[Holder] = WeakSet()
        self._outer: SavingHooks | None = None

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
        if not plain or saved.is_conj() or saved.is_neg() or storage_of(saved) in self._kept:
            return saved.detach(), saved._version
        holder = Holder(saved.detach())
        self._holders.add(holder)
        return holder

    def offload(self) -> None:
        """Copy the tensors to the host, each storage once, and free them on the device.

        The copies are queued, as those of :meth:`fetch`: both in the stream that computes, where each follows what it
        needs and precedes what takes its memory.
        """
        copies: dict[object, Tensor] = {}
        for holder in self._holders:
            assert holder.tensor is not None, "it is offloaded once"
            tensor = unpack_unchanged((holder.tensor, holder.version))
            storage = storage_of(tensor)
            if storage not in copies:
                flat = torch.empty(0, dtype=torch.uint8, device=holder.device).set_(tensor.untyped_storage())
                host = torch.empty_like(flat) if flat.device.type == "cpu" else accelerator.pinned_bytes(len(flat))
                copies[storage] = host.copy_(flat, non_blocking=True)
            holder.on_host, holder.tensor = copies[storage], None

    def fetch(self) -> None:
        """Copy the tensors back to the device, each storage once, with the layout that they had."""
        storages: dict[int, UntypedStorage] = {}
        outer = saving_hooks()
        for holder in self._holders:
            host = holder.on_host
            assert host is not None, "it is on the host"
            if host.data_ptr() not in storages:
                storages[host.data_ptr()] = torch.empty_like(host, device=holder.device).copy_(
                    host, non_blocking=True).untyped_storage()
            tensor = torch.empty(0, dtype=holder.dtype, device=holder.device).set_(storages[host.data_ptr()],
                                                                                   *holder.view)
            holder.tensor, holder.version = tensor, tensor._version
            if outer is not None:
                outer(tensor)  # which counts
        for holder in self._holders:
            holder.on_host = None


def _unpack(packed: Holder | tuple[Tensor, int]) -> Tensor:
    if not isinstance(packed, Holder):
        return unpack_unchanged(packed)
    assert packed.tensor is not None, "it was fetched before the backward"
    return unpack_unchanged((packed.tensor, packed.version))


def saving(stage: int, modules: Iterable[nn.Module], given: Iterable[Tensor]) -> SavedTensors:
    """Return what will hold the tensors that the forward of a microbatch saves, which may be offloaded.

    Args:
        modules: of the stage.
        given: its inputs and fields of the batch.

    Raises:
        UserError: the user's own hooks handle what is saved.
    """
    if not only_ours():
        raise UserError(f"stage {stage} offloads activations within hooks for saved tensors of your own",
                        hint="leave torch.autograd.graph.saved_tensors_hooks, or OFFLOAD, out")
    kept = (*given, *(tensor for module in modules for tensor in (*module.parameters(), *module.buffers())))
    return SavedTensors({storage_of(tensor) for tensor in kept if tensor.layout is torch.strided})
