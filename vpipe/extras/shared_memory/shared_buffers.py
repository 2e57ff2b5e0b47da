"""Buffers of shared memory, into which a sender copies the tensors of a transfer.

The memory has no name in any file system (``memfd_create``): nothing is left when a process is killed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from vpipe.runtime import transport

TensorSpec = transport.TensorSpec

ALIGNMENT = 64
"""Of a tensor in a buffer, as torch's own: kernels may sum in another order at other addresses."""

SLAB_BUFFERS, SLAB_BYTES = 16, 1 << 28
"""Buffers of one memory, and its bytes, above which it has fewer: each memory takes a file descriptor or two."""

IDLE_SENDS = 1000
"""After which a memory that was not used is given back, when more memory of another size is needed."""

TESTED_BYTES = 1 << 20
"""Of shared memory that must be there at the start."""


class BufferLayout(NamedTuple):
    """The places of a transfer's tensors in a buffer.

    Attributes:
        code: their specs as bytes.
        places: offset and number of elements of each.
    """

    code: bytes
    specs: list[TensorSpec]
    places: list[tuple[int, int]]
    nbytes: int

    @staticmethod
    @lru_cache(1000)
    def parse(code: bytes) -> BufferLayout:
        """Return the layout for encoded specs. Raises ValueError if the bytes are none."""
        specs, places, end = transport.decode_specs(code), [], 0
        for spec in specs:
            count = prod(spec.shape)
            places.append((end, count))
            end += -(-count * spec.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return BufferLayout(code, specs, places, end)

    def views(self, memory: mmap.mmap | bytearray, offset: int) -> list[Tensor]:
        """Return tensors over a buffer, to write into."""
        return [torch.frombuffer(memory, dtype=spec.dtype, count=count, offset=offset + at).view(spec.shape) if count
                else torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
                for spec, (at, count) in zip(self.specs, self.places, strict=True)]


class Slab:
    """A shared memory of the sender, for buffers of one size."""

    def __init__(self, number: int, capacity: int) -> None:
        self.number, self.capacity = number, capacity
        self.size = capacity * max(1, min(SLAB_BUFFERS, SLAB_BYTES // capacity))
        self.descriptor = _new_memory(self.size)
        try:
            self.memory = mmap.mmap(self.descriptor, self.size)
        except OSError:
            os.close(self.descriptor)
            raise
        self.buffers: list[Buffer] = []
        self.in_use, self.used_at, self.announced = 0, 0, False

    def new_buffer(self, number: int) -> Buffer:
        """Return a buffer of memory that is really there: without that, a write into it could kill the process."""
        offset = len(self.buffers) * self.capacity
        os.posix_fallocate(self.descriptor, offset, self.capacity)
        self.buffers.append(Buffer(self, number, offset))
        return self.buffers[-1]

    def close(self) -> None:
        os.close(self.descriptor)
        for buffer in self.buffers:
            buffer.layout, buffer.tensors = None, []


class Buffer:
    """A place for the tensors of one transfer, and tensors over it for the latest layout."""

    __slots__ = ("layout", "number", "offset", "slab", "tensors")

    def __init__(self, slab: Slab, number: int, offset: int) -> None:
        self.slab, self.number, self.offset = slab, number, offset
        self.layout: BufferLayout | None = None
        self.tensors: list[Tensor] = []

    def write(self, layout: BufferLayout, tensors: Sequence[Tensor]) -> None:
        if self.layout is not layout:
            self.layout, self.tensors = layout, layout.views(self.slab.memory, self.offset)
        for own, tensor in zip(self.tensors, tensors, strict=True):
            own.copy_(tensor.detach())


def _new_memory(size: int) -> int:
    """Return the descriptor of a new memory, whose size is final: neither end can take it from under the other."""
    descriptor = os.memfd_create("vpipe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _capacity(nbytes: int) -> int:
    """Return the size of a buffer for so many bytes: at most an eighth more, in whole pages."""
    step = max(mmap.PAGESIZE, 1 << (nbytes.bit_length() - 4) if nbytes >= 16 else 1)
    return -(-nbytes // step) * step


class BufferPool:
    """The buffers of one direction of a link, at its sender. It grows when all are in use."""

    def __init__(self) -> None:
        self._free: dict[int, list[Buffer]] = {}  # by capacity
        self._buffers: dict[int, Buffer] = {}
        self._slabs: list[Slab] = []
        self._taken = self._numbered = self._slabs_made = 0

    def take(self, nbytes: int) -> Buffer | None:
        """Return a free buffer for so many bytes; None if there is none, and :meth:`grow` must make one."""
        self._taken += 1
        capacity = _capacity(nbytes)
        free = self._free.get(capacity)
        if not free:
            larger = [size for size, buffers in self._free.items() if buffers and capacity <= size <= 2 * capacity]
            if not larger:
                return None
            free = self._free[min(larger)]
        return self._used(free.pop())

    def grow(self, nbytes: int) -> Buffer:
        """Return a new buffer for so many bytes. Raises OSError if there is no memory for it."""
        capacity = _capacity(nbytes)
        slab = next((slab for slab in self._slabs if slab.capacity == capacity
                     and len(slab.buffers) * capacity < slab.size), None)
        if slab is None:
            slab = Slab(self._slabs_made, capacity)
            self._slabs.append(slab)
            self._slabs_made += 1
        buffer = slab.new_buffer(self._numbered)
        self._buffers[self._numbered] = buffer
        self._numbered += 1
        return self._used(buffer)

    def _used(self, buffer: Buffer) -> Buffer:
        buffer.slab.in_use += 1
        buffer.slab.used_at = self._taken
        return buffer

    def put_back(self, number: int) -> None:
        """Take back a buffer that its receiver has returned. Raises KeyError if it is none."""
        buffer = self._buffers[number]
        buffer.slab.in_use -= 1
        self._free.setdefault(buffer.slab.capacity, []).append(buffer)

    def retire(self) -> list[int]:
        """Give back memories that were not used for long; return their numbers, for the receiver."""
        idle = [slab for slab in self._slabs if not slab.in_use and self._taken - slab.used_at > IDLE_SENDS]
        for slab in idle:
            self._slabs.remove(slab)
            for buffer in slab.buffers:
                self._free[slab.capacity].remove(buffer)
                del self._buffers[buffer.number]
            slab.close()
        return [slab.number for slab in idle if slab.announced]

    def close(self) -> None:
        for slab in self._slabs:
            slab.close()
        for store in (self._slabs, self._free, self._buffers):
            store.clear()


def map_memory(descriptor: int, size: int) -> mmap.mmap:
    """Map a memory of the other end. Raises ValueError if it could get smaller."""
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    if os.fstat(descriptor).st_size != size or not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("a memory of another size")
    return mmap.mmap(descriptor, size)


def memory_error() -> int:
    """Return the error number of a test of shared memory, 0 if it is there."""
    try:
        with closing(Slab(0, TESTED_BYTES)) as slab:
            slab.new_buffer(0)
    except OSError as error:
        return error.errno or errno.ENOMEM
    return 0
