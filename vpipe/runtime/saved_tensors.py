"""Hold what autograd saves in the forward of a microbatch: to count its bytes, or to offload it to the host.

What is saved is packed into holders, which live as long as the graph. Actions of the schedule copy their tensors to the
host, which frees their memory on the device. The stage's inputs, which a backward leaves gradients at, stay on the
device, as do weights.

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
from vpipe.runtime.values import sizes_of, storage_of
from vpipe.torch_private import hooks_for_saved


class Holder:
    """A tensor that autograd has saved, or nothing while its values are elsewhere."""

    def __init__(self, saved: Tensor) -> None:
        self.tensor: Tensor | None = saved.detach()  # an operation's output would hold the graph that holds it
        self._version = saved._version

    def take(self) -> Tensor:
        """Return the tensor, and hold it no longer."""
        tensor, self.tensor = self.unchanged(), None
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Hold a tensor with the values and the layout of the one that was taken."""
        self.tensor, self._version = tensor, tensor._version

    def unchanged(self) -> Tensor:
        """Return the tensor; raise autograd's own error if it was changed in place, which hooks keep it from seeing."""
        assert self.tensor is not None, "it is put back before its backward"
        saved, version = self.tensor, self._version
        if saved._version != version:  # which it shares with the tensor that it was detached from
            raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace "
                               f"operation: [{saved.type()} {list(saved.shape)}] is at version {saved._version}; "
                               f"expected version {version} instead")
        return saved


_Copy = tuple[Tensor, torch.device, list[tuple[Holder, torch.dtype, tuple[Any, ...]]]]
"""The bytes of a storage on the host, their device, and the tensors that were in it: holder, dtype and layout."""


class SavedTensors:
    """What the graphs of a microbatch save. A backward frees what it has used.

    Iterate over the holders whose tensors may leave the device.

    It hooks into the saving of tensors by autograd, and changes no number.

    Args:
        weights: of the stage, and its buffers, which are not held.
        given: its inputs and fields of the batch, which stay on the device: the record holds them anyway.
    """

    def __init__(self, weights: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        self.weights, self._given = sizes_of(weights).keys(), sizes_of(given).keys()
        self._holders: WeakSet[Holder] = WeakSet()
        self._on_host: list[_Copy] = []

    def __iter__(self) -> Iterator[Holder]:
        for holder in self._holders:
            if (tensor := holder.tensor) is None or type(tensor) not in (Tensor, nn.Parameter):
                continue
            plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
            if plain and storage_of(tensor) not in self._given:
                yield holder

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that are held now."""
        yield from (holder.tensor for holder in self._holders if holder.tensor is not None)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Hold the tensors that are saved meanwhile."""
        with saved_tensors_hooks(self, Holder.unchanged):
            yield

    def __call__(self, saved: Tensor) -> Holder:
        holder = Holder(saved)
        if not sizes_of([saved]).keys() <= self.weights:
            self._holders.add(holder)
        return holder

    def offload(self) -> None:
        """Copy the tensors to the host, each storage once, and free them on the device.

        The copies are queued, as those of :meth:`fetch`: both in the stream that computes, where each follows what it
        needs and precedes what takes its memory.
        """
        copies: dict[object, _Copy] = {}
        for holder in self:
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


def only_ours() -> bool:
    """Return whether the hooks for saved tensors in force, if any, are vpipe's, which change no number."""
    hooks = hooks_for_saved(True)
    return hooks is None or isinstance(hooks[0], SavedTensors)
