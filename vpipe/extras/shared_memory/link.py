"""A connection between two ranks of a host, which carries tensors through shared memory.

It is a UNIX socket. The sender copies the tensors of a transfer into a buffer of shared memory and sends a header over
the socket; the receiver makes tensors over that same memory, and returns the buffer when they are freed. Few bytes are
sent within the message. The other end of the socket sees at once when a process is killed.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from ctypes import addressof, c_char, memmove
from functools import lru_cache
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from vpipe.errors import RunError
from vpipe.extras.shared_memory.shared_buffers import Buffer, BufferLayout, BufferPool, map_memory
from vpipe.runtime import transport

TensorSpec = transport.TensorSpec
TransferKey = transport.TransferKey
TransferKind = transport.TransferKind

INLINE_BYTES = 4096
"""Of all tensors of a transfer, up to which they are a part of the message: a buffer would cost more."""

_KINDS = tuple(TransferKind)

HEAD = struct.Struct("<BBHHxxiqIQIIQQ")
"""Of a message: its type, the kind of its key, bytes of its specs, buffers returned; stage, number and generation of
its key; activations accepted; memory and buffer of its tensors, their offset, and the size of a new memory, else 0."""

_TENSORS, _ACKNOWLEDGE, _RETIRE, FULL = range(4)
_INLINE = 0xFFFFFFFF
"""In place of the number of a memory."""

_MESSAGE_BYTES = 1 << 17
_FD_BYTES = socket.CMSG_SPACE(array("i").itemsize)


class LinkClosedError(RuntimeError):
    """The other end of a link is gone."""


class Arrival(NamedTuple):
    """A message with tensors. A memoryview is over a buffer, which is returned when nothing refers to it any more."""

    layout: BufferLayout
    payload: memoryview | bytes

    def tensors(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Return the tensors as leaves that require gradients as ``specs`` say."""
        tensors, payload = [], self.payload
        for spec, (offset, count) in zip(specs, self.layout.places, strict=True):
            if isinstance(payload, bytes):
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
                # Not by torch's copy, a longer way: caches are often cold when a message comes.
                memmove(tensor.data_ptr(), payload[offset:], tensor.nbytes)
            elif not count:
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
            else:  # resize_, not view: a view of a leaf is another thing to autograd
                tensor = torch.frombuffer(payload, dtype=spec.dtype, count=count, offset=offset).resize_(spec.shape)
            tensors.append(tensor.requires_grad_() if spec.wants_gradient else tensor)
        return tensors


class ReceivedMessage(NamedTuple):
    """A message of the other end; ``accepted``: how many of the activations of this generation it has accepted."""

    what: int
    key: TransferKey
    generation: int
    accepted: int
    arrival: Arrival | None


NO_KEY = TransferKey(TransferKind.ACTIVATIONS, 0, 0)
NO_GENERATION = 0xFFFFFFFF


class SharedMemoryLink:
    """This rank's end of the connection with another rank of its host.

    Attributes:
        closed: whether the other end is gone, and all that it sent was read.
        full_here: whether this end has found the memory full; what it sends from then on goes another way.
        full_there: the same of the other end.
        unsent: messages that the socket did not take yet, with the descriptors that go with them.
        returned: buffers of the other end that are free again, which it is still to be told; any thread may add one.
    """

    def __init__(self, peer: int, connected: socket.socket) -> None:
        connected.setblocking(False)
        transport.close_in_child(connected)
        self.peer, self.socket = peer, connected
        self.closed = self.full_here = self.full_there = False
        self.unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self.returned: deque[int] = deque()
        self._pool = BufferPool()
        self._scratch = bytearray(INLINE_BYTES + 1)
        self._scratch_at = addressof(c_char.from_buffer(self._scratch))
        self._memories: dict[int, mmap.mmap] = {}
        self._leases: dict[int, ref[memoryview]] = {}  # to know when the memory of an arrival is freed, by buffer
        self._input = bytearray(_MESSAGE_BYTES)
        self._view = memoryview(self._input)

    def fileno(self) -> int:
        return self.socket.fileno()

    # -- sending

    def send(self, key: TransferKey, generation: int, accepted: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors.

        Raises:
            LinkClosedError: the other end is gone.
            OSError: there is no memory for them.
        """
        layout = _layout(tuple([(t.shape, t.dtype, t.requires_grad) for t in tensors]))
        kind = _KINDS.index(key.kind)
        if layout.nbytes <= INLINE_BYTES:
            for (offset, _), tensor in zip(layout.places, tensors, strict=True):
                plain = transport.contiguous(tensor)
                memmove(self._scratch_at + offset, plain.data_ptr(), plain.nbytes)
            self._send(_TENSORS, kind, key, generation, accepted, layout.code, payload=self._scratch[:layout.nbytes])
            return
        buffer = self._pool.take(layout.nbytes) or self._new_buffer(layout.nbytes)
        buffer.write(layout, tensors)
        slab = buffer.slab
        new, slab.announced = not slab.announced, True
        self._send(_TENSORS, kind, key, generation, accepted, layout.code, (slab.number, buffer.number, buffer.offset),
                   slab.size if new else 0, descriptors=(slab.descriptor,) if new else ())

    def acknowledge(self, generation: int, accepted: int) -> None:
        """Send what the other end waits for: returned buffers, and the number of accepted activations."""
        self._send(_ACKNOWLEDGE, 0, NO_KEY, generation, accepted)

    def tell_full(self, error: int) -> None:
        """Send that what follows from this end goes another way, with the number of the error."""
        self.full_here = True
        with suppress(LinkClosedError):
            self._send(FULL, 0, NO_KEY, NO_GENERATION, error)

    def flush(self) -> None:
        """Send what the socket takes now of the messages that wait."""
        try:
            while self.unsent:
                message, descriptors = self.unsent[0]
                if descriptors:
                    self.socket.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))])
                else:
                    self.socket.send(message)
                self.unsent.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            if error.errno not in (errno.ENOBUFS, errno.ETOOMANYREFS):
                self.unsent.clear()
                raise LinkClosedError(f"Connection closed by peer: {error.strerror}") from error

    def _new_buffer(self, nbytes: int) -> Buffer:
        for number in self._pool.retire():
            self._send(_RETIRE, 0, NO_KEY, NO_GENERATION, 0, place=(number, 0, 0))
        return self._pool.grow(nbytes)

    def _send(self, what: int, kind: int, key: TransferKey, generation: int, accepted: int, code: bytes = b"",
              place: tuple[int, int, int] = (_INLINE, 0, 0), size: int = 0, payload: bytes | bytearray = b"",
              descriptors: tuple[int, ...] = ()) -> None:
        returned = b""
        if count := min(len(self.returned), 1000):
            returned = struct.pack(f"<{count}I", *[self.returned.popleft() for _ in range(count)])
        head = HEAD.pack(what, kind, len(code), count, key.stage, key.number, generation, accepted, *place, size)
        self.unsent.append((b"".join((head, code, returned, payload)), descriptors))
        self.flush()

    # -- receiving

    def receive(self) -> ReceivedMessage | None:
        """Return the next message; None if there is none now, or the other end is gone.

        Raises:
            RunError: this process has no descriptor left for a memory that came with the message.
        """
        try:
            size, ancillary, flags, _ = self.socket.recvmsg_into([self._input], _FD_BYTES, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionResetError:  # the other end is gone and left something unread; what it has sent is still there
            return self.receive()
        except OSError:
            size, ancillary, flags = 0, [], 0
        descriptors = array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data[:len(data) - len(data) % descriptors.itemsize])
        try:
            if flags & socket.MSG_CTRUNC:
                most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                raise RunError(f"no file descriptor is left for memory that rank {self.peer} shares: the limit of this "
                               f"process is {most}", hint="raise the limit (ulimit -n), or set shared_memory to false")
            if not size or flags & socket.MSG_TRUNC:
                raise ValueError("the end, or a part of a message")
            return self._read(size, descriptors)
        except (ValueError, LookupError, OSError, struct.error):
            self.closed = True
            return None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _read(self, size: int, descriptors: Sequence[int]) -> ReceivedMessage:
        (what, kind, specs, returned, stage, number, generation, accepted, memory, buffer, offset,
         memory_size) = HEAD.unpack_from(self._input)
        end = HEAD.size + specs
        for free in struct.unpack_from(f"<{returned}I", self._view[:size], end) if returned else ():
            self._pool.put_back(free)
        payload = end + 4 * returned
        if what == _TENSORS:
            layout = BufferLayout.parse(bytes(self._view[HEAD.size:end]))
            if memory == _INLINE:
                if size != payload + layout.nbytes:
                    raise ValueError("the bytes of tensors")
                arrival = Arrival(layout, bytes(self._view[payload:size]))
            else:
                if memory_size:
                    self._memories[memory] = map_memory(descriptors[0], memory_size)
                arrival = Arrival(layout, self._lease(memory, buffer, offset, layout.nbytes))
            return ReceivedMessage(what, TransferKey(_KINDS[kind], stage, number), generation, accepted, arrival)
        if what == _RETIRE:
            del self._memories[memory]
        elif what == FULL:
            self.full_there = True
        elif what != _ACKNOWLEDGE:
            raise ValueError("the type of a message")
        return ReceivedMessage(what, NO_KEY, generation, accepted, None)

    def _lease(self, memory: int, buffer: int, offset: int, nbytes: int) -> memoryview:
        mapped = self._memories[memory]
        if offset + nbytes > len(mapped):
            raise ValueError("tensors beyond their memory")
        leased = memoryview(mapped)[offset:offset + nbytes]
        returned = self.returned  # not self, which would keep it
        self._leases[buffer] = ref(leased, lambda _: returned.append(buffer))
        return leased

    def close(self) -> None:
        self.closed = True
        self.socket.close()
        self._pool.close()
        self._memories.clear()


@lru_cache(1000)
def _layout(specs: tuple[tuple[Sequence[int], torch.dtype, bool], ...]) -> BufferLayout:
    return BufferLayout.parse(transport.encode_specs(specs))
