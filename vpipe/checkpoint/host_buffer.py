"""Copy tensors into host memory that is allocated once and used again by every save."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

_ALIGN = 64
"""Bytes: more than any kind of number needs, and a line of a processor's cache."""


class HostBuffer:
    """One block of memory with a place for each tensor; pinned where a tensor comes from a GPU.

    So a save neither waits for pages of memory, which the system hands out slower than they are filled, nor copies
    through a GPU driver's own buffers.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._places: dict[str, Tensor] = {}

    def reserve(self, sizes: Iterable[int], pinned: bool) -> None:
        """Allocate memory for tensors of so many bytes each, and have the system hand out its pages now."""
        self._places = {}
        self._allocate(sum(map(_aligned, sizes)), pinned)
        self._memory.zero_()

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return contiguous copies of ``tensors``, complete on return; they overwrite the copies made before."""
        gpus = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if self._places.keys() != tensors.keys() or any(
                place.shape != tensors[name].shape or place.dtype != tensors[name].dtype
                for name, place in self._places.items()):
            self._lay_out(tensors, pinned=bool(gpus))
        for name, tensor in tensors.items():
            self._places[name].copy_(tensor.detach(), non_blocking=True)
        for device in gpus:
            torch.cuda.synchronize(device)
        return self._places

    def _lay_out(self, tensors: Mapping[str, Tensor], pinned: bool) -> None:
        self._places, end = {}, 0
        self._allocate(sum(_aligned(tensor.nbytes) for tensor in tensors.values()), pinned)
        for name, tensor in tensors.items():
            self._places[name] = self._memory[end:end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            end += _aligned(tensor.nbytes)

    def _allocate(self, count: int, pinned: bool) -> None:
        if count > len(self._memory) or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # freed before more is allocated
            self._memory = torch.empty(count, dtype=torch.uint8, pin_memory=True) if pinned else _pages(count)


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def _pages(count: int) -> Tensor:
    """Return bytes on large pages where the system has them: it then hands out 512 times fewer."""
    if not count:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
