"""Copies of tensors in the host's memory, which is taken once and used again by every save."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

_ALIGN = 64
"""Bytes: more than any kind of number needs, and a line of a processor's cache."""


class HostCopies:
    """One piece of memory with a place for each tensor; pinned where a tensor comes from a GPU.

    So a save neither waits for pages of memory, which the system hands out slower than they are filled, nor copies
    through a GPU driver's own buffers.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._places: dict[str, Tensor] = {}

    def reserve(self, sizes: Iterable[int], pinned: bool) -> None:
        """Take memory for tensors of so many bytes each, and have the system hand it out now."""
        self._places = {}
        self._make_room(sum(map(_aligned, sizes)), pinned)
        self._memory.zero_()

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous copies of ``tensors``, complete on return; those taken before are gone."""
        gpus = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if not self._fit(tensors):
            self._arrange(tensors, pinned=bool(gpus))
        for name, tensor in tensors.items():
            self._places[name].copy_(tensor.detach(), non_blocking=True)
        for device in gpus:
            torch.cuda.synchronize(device)
        return self._places

    def _fit(self, tensors: Mapping[str, Tensor]) -> bool:
        return self._places.keys() == tensors.keys() and all(
            place.shape == tensor.shape and place.dtype == tensor.dtype
            for place, tensor in ((self._places[name], tensor) for name, tensor in tensors.items()))

    def _arrange(self, tensors: Mapping[str, Tensor], pinned: bool) -> None:
        starts, end = {}, 0
        for name, tensor in tensors.items():
            starts[name] = end
            end += _aligned(tensor.nbytes)
        self._places = {}
        self._make_room(end, pinned)
        self._places = {name: self._memory[starts[name]:starts[name] + tensor.nbytes].view(tensor.dtype)
                        .view(tensor.shape) for name, tensor in tensors.items()}

    def _make_room(self, count: int, pinned: bool) -> None:
        if count > len(self._memory) or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # given back before more is taken
            self._memory = torch.empty(count, dtype=torch.uint8, pin_memory=True) if pinned else _pages(count)


def _aligned(count: int) -> int:
    """Bytes with what is left free behind them."""
    return -(-count // _ALIGN) * _ALIGN


def _pages(count: int) -> Tensor:
    """Bytes on large pages where the system has them: it then hands out 512 times fewer during the first copy."""
    if not count:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
