"""Pass tensors between processes of one host through shared memory.

Each two ranks of a host have a UNIX socket. The sender copies the tensors of a transfer into a buffer of shared memory
and sends a header over the socket; the receiver makes tensors over that same memory, and returns the buffer when they
are freed. Few bytes are sent within the message. Memory and sockets have no names in any file system (``memfd_create``,
descriptors passed by SCM_RIGHTS, the abstract address of a listener that is closed once all are connected), so nothing
is left when a process is killed, and the other end of its sockets sees that at once.

A send does not wait: it is buffered. But of activations only so many are sent as the receiver has posted receives for,
and a few more, so that in an evaluation the first stage does not fill the memory. A receive is posted as of the call,
but its sender learns of it with the next message, or before this rank waits.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import secrets
import select
import socket
import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import addressof, c_char, memmove
from math import prod
from time import monotonic
from typing import NamedTuple
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor

from vpipe.errors import RunError
from vpipe.runtime.transport.transport import DESCRIPTIONS, TensorSpec, TransferKey

INLINE_BYTES = 4096
"""Of all tensors of a transfer, up to which they are a part of the message: a buffer would cost more."""

ALIGNMENT = 64
"""Of a tensor in a buffer, as torch's own: kernels may sum in another order at other addresses."""

SLAB_BUFFERS, SLAB_BYTES = 16, 1 << 28
"""Buffers of one memory, and its bytes, above which it has fewer: each memory takes a file descriptor or two."""

IDLE_SENDS = 1000
"""After which a memory that was not used is given back, when more memory of another size is needed."""

TESTED_BYTES = 1 << 20
"""Of shared memory that must be there at the start."""

_KINDS = "".join(DESCRIPTIONS)
_DTYPES = [getattr(torch, name) for name in (
    "float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64", "complex64",
    "complex128", "complex32", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz")]
_CODE_OF_DTYPE = {dtype: code for code, dtype in enumerate(_DTYPES)}

_HEAD = struct.Struct("<BBHHxxiqIQIIQQ")
"""Of a message: its type, the kind of its key, bytes of its specs, buffers returned; stage, number and generation of
its key; activations accepted; memory and buffer of its tensors, their offset, and the size of a new memory, else 0."""

_SPEC = struct.Struct("<BBB")
"""The code of a tensor's dtype, whether it wants a gradient, its number of dimensions; they follow, 8 bytes each."""

_TENSORS, _ACKNOWLEDGE, _RETIRE, _FULL = range(4)
_INLINE = 0xFFFFFFFF
"""In place of the number of a memory."""

_MESSAGE_BYTES = 1 << 17
_FD_BYTES = socket.CMSG_SPACE(array("i").itemsize)


class LinkClosedError(RuntimeError):
    """The other end of a link is gone."""


class Layout(NamedTuple):
    """The places of a transfer's tensors in a buffer.

    Attributes:
        code: their specs as bytes.
        places: offset and number of elements of each.
    """

    code: bytes
    specs: list[TensorSpec]
    places: list[tuple[int, int]]
    nbytes: int

    @classmethod
    def from_specs(cls, specs: list[TensorSpec], code: bytes) -> Layout:
        places, end = [], 0
        for spec in specs:
            count = prod(spec.shape)
            places.append((end, count))
            end += -(-count * spec.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return cls(code, specs, places, end)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> Layout:
        specs = [TensorSpec.from_tensor(tensor) for tensor in tensors]
        return cls.from_specs(specs, b"".join(
            _SPEC.pack(_CODE_OF_DTYPE[spec.dtype], spec.wants_gradient, len(spec.shape))
            + struct.pack(f"<{len(spec.shape)}q", *spec.shape) for spec in specs))

    @classmethod
    def parse(cls, code: bytes) -> Layout:
        """Decode specs. Raises ValueError, IndexError or struct.error if the bytes are none."""
        specs, at = [], 0
        while at < len(code):
            dtype, wants, dimensions = _SPEC.unpack_from(code, at)
            shape = struct.unpack_from(f"<{dimensions}q", code, at + _SPEC.size)
            if min(shape, default=0) < 0:
                raise ValueError("a dimension is negative")
            specs.append(TensorSpec(shape, _DTYPES[dtype], bool(wants)))
            at += _SPEC.size + 8 * dimensions
        return cls.from_specs(specs, code)

    def views(self, memory: mmap.mmap | bytearray, offset: int) -> list[Tensor]:
        """Return tensors over a buffer, to write into."""
        return [torch.frombuffer(memory, dtype=spec.dtype, count=count, offset=offset + at).view(spec.shape) if count
                else torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
                for spec, (at, count) in zip(self.specs, self.places, strict=True)]


class Arrival(NamedTuple):
    """A message with tensors. A memoryview is over a buffer, which is returned when nothing refers to it any more."""

    layout: Layout
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


class _Slab:
    """A shared memory of the sender, for buffers of one size."""

    def __init__(self, number: int, capacity: int) -> None:
        self.number, self.capacity = number, capacity
        self.size = capacity * max(1, min(SLAB_BUFFERS, SLAB_BYTES // capacity))
        self.descriptor = _memory(self.size)
        try:
            self.memory = mmap.mmap(self.descriptor, self.size)
        except OSError:
            os.close(self.descriptor)
            raise
        self.buffers: list[_Buffer] = []
        self.in_use, self.used_at, self.announced = 0, 0, False

    @property
    def has_room(self) -> bool:
        return len(self.buffers) * self.capacity < self.size

    def new_buffer(self, number: int) -> _Buffer:
        """Return a buffer of memory that is really there: without that, a write into it could kill the process."""
        offset = len(self.buffers) * self.capacity
        os.posix_fallocate(self.descriptor, offset, self.capacity)
        self.buffers.append(_Buffer(self, number, offset))
        return self.buffers[-1]

    def close(self) -> None:
        os.close(self.descriptor)
        for buffer in self.buffers:
            buffer.layout, buffer.tensors = None, []


class _Buffer:
    """A place for the tensors of one transfer, and tensors over it for the latest layout."""

    __slots__ = ("layout", "number", "offset", "slab", "tensors")

    def __init__(self, slab: _Slab, number: int, offset: int) -> None:
        self.slab, self.number, self.offset = slab, number, offset
        self.layout: Layout | None = None
        self.tensors: list[Tensor] = []

    def write(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        if self.layout is not layout:
            self.layout, self.tensors = layout, layout.views(self.slab.memory, self.offset)
        for own, tensor in zip(self.tensors, tensors, strict=True):
            own.copy_(tensor.detach())


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor whose numbers lie in memory as they are, one behind the other."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _memory(size: int) -> int:
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
        self._free: dict[int, list[_Buffer]] = {}  # by capacity
        self._buffers: dict[int, _Buffer] = {}
        self._slabs: list[_Slab] = []
        self._taken = self._numbered = self._slabs_made = 0

    def take(self, nbytes: int) -> _Buffer | None:
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

    def grow(self, nbytes: int) -> _Buffer:
        """Return a new buffer for so many bytes. Raises OSError if there is no memory for it."""
        capacity = _capacity(nbytes)
        slab = next((slab for slab in self._slabs if slab.capacity == capacity and slab.has_room), None)
        if slab is None:
            slab = _Slab(self._slabs_made, capacity)
            self._slabs.append(slab)
            self._slabs_made += 1
        buffer = slab.new_buffer(self._numbered)
        self._buffers[self._numbered] = buffer
        self._numbered += 1
        return self._used(buffer)

    def _used(self, buffer: _Buffer) -> _Buffer:
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

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(len(slab.buffers) * slab.capacity for slab in self._slabs)


class Message(NamedTuple):
    """A message of the other end; ``accepted``: how many of the activations of this generation it has accepted."""

    what: int
    key: TransferKey
    generation: int
    accepted: int
    arrival: Arrival | None


_NO_KEY = TransferKey("F", 0, 0)
_NO_GENERATION = 0xFFFFFFFF


class _Lease(ref[memoryview]):
    """A reference to the memory of an arrival, to know when it is freed."""

    __slots__ = ("buffer",)

    buffer: int


class Link:
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
        self.peer, self.socket = peer, connected
        self.closed = self.full_here = self.full_there = False
        self.unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self.returned: deque[int] = deque()
        self._pool = BufferPool()
        self._scratch = bytearray(INLINE_BYTES + 1)
        self._scratch_at = addressof(c_char.from_buffer(self._scratch))
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._parsed: dict[bytes, Layout] = {}
        self._memories: dict[int, mmap.mmap] = {}
        self._leases: dict[int, _Lease] = {}
        self._input = bytearray(_MESSAGE_BYTES)
        self._view = memoryview(self._input)
        returned = self.returned

        def give_back(lease: ref[memoryview]) -> None:
            assert isinstance(lease, _Lease)
            returned.append(lease.buffer)

        self._give_back = give_back

    def fileno(self) -> int:
        return self.socket.fileno()

    # -- sending

    def send(self, key: TransferKey, generation: int, accepted: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors.

        Raises:
            LinkClosedError: the other end is gone.
            OSError: there is no memory for them.
        """
        layout = self._layout(tensors)
        kind = _KINDS.index(key.kind)
        if layout.nbytes <= INLINE_BYTES:
            for (offset, _), tensor in zip(layout.places, tensors, strict=True):
                plain = _plain(tensor)
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
        self._send(_ACKNOWLEDGE, 0, _NO_KEY, generation, accepted)

    def tell_full(self, error: int) -> None:
        """Send that what follows from this end goes another way, with the number of the error."""
        self.full_here = True
        with suppress(LinkClosedError):
            self._send(_FULL, 0, _NO_KEY, _NO_GENERATION, error)

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

    def _layout(self, tensors: Sequence[Tensor]) -> Layout:
        key = tuple([(t.dtype, t.shape, t.requires_grad) for t in tensors])
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) > 1000:
                self._layouts.clear()
            layout = self._layouts[key] = Layout.from_tensors(tensors)
        return layout

    def _new_buffer(self, nbytes: int) -> _Buffer:
        for number in self._pool.retire():
            self._send(_RETIRE, 0, _NO_KEY, _NO_GENERATION, 0, place=(number, 0, 0))
        return self._pool.grow(nbytes)

    def _send(self, what: int, kind: int, key: TransferKey, generation: int, accepted: int, code: bytes = b"",
              place: tuple[int, int, int] = (_INLINE, 0, 0), size: int = 0, payload: bytes | bytearray = b"",
              descriptors: tuple[int, ...] = ()) -> None:
        returned = b""
        if count := min(len(self.returned), 1000):
            returned = struct.pack(f"<{count}I", *[self.returned.popleft() for _ in range(count)])
        head = _HEAD.pack(what, kind, len(code), count, key.stage, key.number, generation, accepted, *place, size)
        self.unsent.append((b"".join((head, code, returned, payload)), descriptors))
        self.flush()

    # -- receiving

    def receive(self) -> Message | None:
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

    def _read(self, size: int, descriptors: Sequence[int]) -> Message:
        (what, kind, specs, returned, stage, number, generation, accepted, memory, buffer, offset,
         memory_size) = _HEAD.unpack_from(self._input)
        end = _HEAD.size + specs
        for free in struct.unpack_from(f"<{returned}I", self._view[:size], end) if returned else ():
            self._pool.put_back(free)
        payload = end + 4 * returned
        if what == _TENSORS:
            code = bytes(self._view[_HEAD.size:end])
            layout = self._parsed.get(code)
            if layout is None:
                if len(self._parsed) > 1000:
                    self._parsed.clear()
                layout = self._parsed[code] = Layout.parse(code)
            if memory == _INLINE:
                if size != payload + layout.nbytes:
                    raise ValueError("the bytes of tensors")
                arrival = Arrival(layout, bytes(self._view[payload:size]))
            else:
                if memory_size:
                    self._memories[memory] = _mapped(descriptors[0], memory_size)
                arrival = Arrival(layout, self._lease(memory, buffer, offset, layout.nbytes))
            return Message(what, TransferKey(_KINDS[kind], stage, number), generation, accepted, arrival)
        if what == _RETIRE:
            del self._memories[memory]
        elif what == _FULL:
            self.full_there = True
        elif what != _ACKNOWLEDGE:
            raise ValueError("the type of a message")
        return Message(what, _NO_KEY, generation, accepted, None)

    def _lease(self, memory: int, buffer: int, offset: int, nbytes: int) -> memoryview:
        mapped = self._memories[memory]
        if offset + nbytes > len(mapped):
            raise ValueError("tensors beyond their memory")
        leased = memoryview(mapped)[offset:offset + nbytes]
        self._leases[buffer] = lease = _Lease(leased, self._give_back)
        lease.buffer = buffer
        return leased

    def close(self) -> None:
        self.closed = True
        self.socket.close()
        self._pool.close()
        self._memories.clear()


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    """Map a memory of the other end. Raises ValueError if it could get smaller."""
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    if os.fstat(descriptor).st_size != size or not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("a memory of another size")
    return mmap.mmap(descriptor, size)


class HostLinks:
    """The links of this rank with the other ranks of its host, which the pipelines of a process share.

    Args:
        reports: whether this rank says when the memory is full.

    Attributes:
        links: by rank.
        complete: whether all other ranks are linked.
        full: whether a rank has found the memory full: then no rank of the host sends through it any more.
    """

    def __init__(self, links: Mapping[int, Link], complete: bool, reports: bool) -> None:
        self.links, self.complete, self._reports, self.full = links, complete, reports, False
        self._poll = select.epoll()
        self._of = {link.fileno(): link for link in links.values()}
        for descriptor in self._of:
            self._poll.register(descriptor, select.EPOLLIN)
        self._writing: set[int] = set()
        self._generations: WeakValueDictionary[int, SharedMemoryTransfers] = WeakValueDictionary()
        self._newest = -1
        self._early: dict[int, list[tuple[int, Message]]] = {}
        _host_links.add(self)

    def register(self, generation: int, transfers: SharedMemoryTransfers) -> None:
        """Give all messages of a generation to its transfers."""
        self._generations[generation], self._newest = transfers, generation
        for peer, message in self._early.pop(generation, ()):
            transfers.deliver(peer, message)

    def receive(self, timeout_s: float) -> None:
        """Receive a message of each link that has one, or wait until one has one; send what could not be sent."""
        for link in self.links.values():
            if bool(link.unsent) != (link.fileno() in self._writing) and not link.closed:
                self._writing ^= {link.fileno()}
                self._poll.modify(link, select.EPOLLIN | (select.EPOLLOUT if link.unsent else 0))
        for descriptor, event in self._poll.poll(timeout_s):
            link = self._of[descriptor]
            if event & select.EPOLLOUT:
                with suppress(LinkClosedError):
                    link.flush()
            if event & ~select.EPOLLOUT:
                message = link.receive()
                if link.closed:
                    self._poll.unregister(descriptor)
                elif message is not None:
                    self._deliver(link.peer, message)

    def _deliver(self, peer: int, message: Message) -> None:
        if message.what == _FULL:
            self.give_up(message.accepted)
        elif message.generation != _NO_GENERATION:
            transfers = self._generations.get(message.generation)
            if transfers is not None:
                transfers.deliver(peer, message)
            elif message.generation > self._newest:  # else of a pipeline that was abandoned here
                self._early.setdefault(message.generation, []).append((peer, message))

    def give_up(self, error: int) -> None:
        """Send nothing through shared memory from now on, and tell all; the first rank of the host says so."""
        if not self.full and self._reports:
            print("gloo carries tensors between ranks of a host from now on: there is no more shared memory "
                  f"({os.strerror(error)})", file=sys.stderr, flush=True)
        self.full = True
        for link in self.links.values():
            if not link.full_here:
                link.tell_full(error)

    def break_off(self) -> None:
        """Shut all links down, from any thread: one that waits for them sees their end."""
        for link in self.links.values():
            with suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close all descriptors."""
        self._poll.close()
        for link in self.links.values():
            link.close()


_host_links: WeakSet[HostLinks] = WeakSet()


def _close_in_child() -> None:
    """Close the links in a forked child, which would keep them up when this process is gone."""
    for links in list(_host_links):
        links.close()


os.register_at_fork(after_in_child=_close_in_child)


class SharedMemoryTransfers:
    """The transfers of one pipeline over the links of this rank.

    Args:
        most_unaccepted: activations that may be under way to a rank that has not posted their receives.
        timeout_s: of a wait.
    """

    def __init__(self, links: HostLinks, generation: int, most_unaccepted: int, timeout_s: float) -> None:
        self.links = links
        self._generation, self._most, self._timeout_s = generation, most_unaccepted, timeout_s
        self._posted: dict[tuple[int, TransferKey], Sequence[TensorSpec] | None] = {}
        self._arrived: dict[tuple[int, TransferKey], deque[Arrival]] = {}
        # Activations, by peer: sent, and accepted there; accepted here, and as many as the peer was told.
        self._latest: dict[int, TransferKey] = {}
        self._sent, self._taken = dict.fromkeys(links.links, 0), dict.fromkeys(links.links, 0)
        self._accepted, self._told = dict.fromkeys(links.links, 0), dict.fromkeys(links.links, 0)
        links.register(generation, self)

    def carries(self, peer: int) -> bool:
        """Return whether what is sent to a rank now goes through shared memory."""
        link = self.links.links.get(peer)
        return link is not None and not link.full_here

    def is_crowded(self, peer: int) -> bool:
        """Return whether activations for a rank must wait for it to post receives."""
        return (self._sent[peer] - self._taken[peer] >= self._most and self.links.complete
                and not self.links.full)

    def send(self, peer: int, key: TransferKey, tensors: Sequence[Tensor]) -> None:
        """Send tensors. Raises as :meth:`Link.send`."""
        self.links.links[peer].send(key, self._generation, self._accepted[peer], tensors)
        self._told[peer] = self._accepted[peer]
        if key.kind == "F":
            self._sent[peer] += 1
        self._latest[peer] = key

    def post(self, peer: int, key: TransferKey, specs: Sequence[TensorSpec] | None) -> None:
        """Post a receive."""
        self._posted[peer, key] = specs
        if key.kind == "F" and (peer, key) in self._arrived:
            self._accept(peer)

    def is_posted(self, peer: int, key: TransferKey) -> bool:
        return (peer, key) in self._posted

    def has_arrived(self, peer: int, key: TransferKey) -> bool:
        """Return whether a transfer is here, after a look at what has come."""
        if (peer, key) in self._arrived:
            return True
        self.links.receive(0.0)
        return (peer, key) in self._arrived

    def wait_for(self, peer: int, key: TransferKey) -> bool:
        """Wait for a transfer; return False if it comes another way. Raises as :meth:`wait`."""
        link = self.links.links[peer]
        self.wait(peer, lambda: (peer, key) in self._arrived or link.full_there)
        return (peer, key) in self._arrived

    def specs(self, peer: int, key: TransferKey) -> list[TensorSpec]:
        """Return the specs of a transfer that has arrived."""
        return self._arrived[peer, key][0].layout.specs

    def withdraw(self, peer: int, key: TransferKey) -> Sequence[TensorSpec] | None:
        """Take back a posted receive of what comes another way; return its specs."""
        return self._posted.pop((peer, key))

    def take(self, peer: int, key: TransferKey) -> list[Tensor]:
        """Return the tensors of a posted transfer that has arrived."""
        specs, arrivals = self._posted.pop((peer, key)), self._arrived[peer, key]
        arrival = arrivals.popleft()
        if not arrivals:
            del self._arrived[peer, key]
        sent = arrival.layout.specs
        if specs is None:
            specs = sent
        elif len(specs) != len(sent) or any(mine.shape != its.shape or mine.dtype is not its.dtype
                                            for mine, its in zip(specs, sent, strict=True)):
            raise RunError(f"{key} from rank {peer} are {', '.join(map(str, sent))}, not {', '.join(map(str, specs))}",
                           hint="this is a defect of the schedule or of vpipe: please report it")
        return arrival.tensors(specs)

    def deliver(self, peer: int, message: Message) -> None:
        """Keep what has arrived until it is taken."""
        self._taken[peer] = max(self._taken[peer], message.accepted)
        if message.arrival is not None:
            slot = peer, message.key
            if slot in self._arrived:
                self._arrived[slot].append(message.arrival)
                return
            self._arrived[slot] = deque([message.arrival])
            if message.key.kind == "F" and slot in self._posted:
                self._accept(peer)

    def _accept(self, peer: int) -> None:
        self._accepted[peer] += 1
        if self._accepted[peer] - self._told[peer] > self._most // 2:
            self._acknowledge(peer)

    def _acknowledge(self, peer: int) -> None:
        with suppress(LinkClosedError):
            self.links.links[peer].acknowledge(self._generation, self._accepted[peer])
        self._told[peer] = self._accepted[peer]

    def wait(self, peer: int, until: Callable[[], bool]) -> None:
        """Wait for something that comes from a rank.

        Raises:
            LinkClosedError: that rank is gone.
            RuntimeError: the time is over.
        """
        self.links.receive(0.0)
        link, deadline = self.links.links[peer], monotonic() + self._timeout_s
        while not until():
            if link.closed:
                raise LinkClosedError("Connection closed by peer")
            for other, each in self.links.links.items():
                if each.returned or self._accepted[other] != self._told[other]:
                    self._acknowledge(other)
            left = deadline - monotonic()
            if left <= 0:
                raise RuntimeError(f"Timed out waiting {1000 * self._timeout_s:.0f}ms for rank {peer}")
            self.links.receive(left)

    def unfinished(self) -> Iterator[tuple[int, TransferKey, Callable[[], bool]]]:
        """Yield the ranks that have not accepted all activations, or were not sent all messages, with the latest
        transfer and what tells when it is done; and tell every rank what was accepted here."""
        for peer, link in self.links.links.items():
            if not link.closed and self._accepted[peer] != self._told[peer]:
                self._acknowledge(peer)
        for peer, link in self.links.links.items():
            def is_done(peer: int = peer, link: Link = link) -> bool:
                return not link.unsent and self._sent[peer] <= self._taken[peer]

            if not is_done():
                yield peer, self._latest.get(peer, _NO_KEY), is_done

    def untaken(self) -> list[TransferKey]:
        """Return the posted receives."""
        return [key for _, key in self._posted]


# -- setting up ----------------------------------------------------------------------------------------------------

_OFFER = struct.Struct("<BB16s16s16s")
"""Of a rank: a state, an errno, its boot of the system, the address of its listener, and a token."""

_HELLO = struct.Struct("<I16s")
_UNWANTED, _OFFERED, _UNAVAILABLE, _NO_MEMORY = range(4)

_CREDENTIALS = struct.Struct("3i")


def is_available() -> bool:
    """Return whether this system has what is needed."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(select, "epoll")


def _test_memory() -> int:
    """Return the error number of a test of shared memory, 0 if it is there."""
    try:
        slab = _Slab(0, TESTED_BYTES)
        try:
            slab.new_buffer(0)
        finally:
            slab.close()
    except OSError as error:
        return error.errno or errno.ENOMEM
    return 0


def connect(rank: int, wanted: bool, made: HostLinks | None, hosts: Sequence[str] | None,
            exchange: Callable[[bytes], list[bytes]]) -> tuple[HostLinks | None, str | None]:
    """Return the links with the ranks of this host if all ranks want some; and why not, where that is to be told. All
    ranks must call it.

    Args:
        made: the links of an earlier call.
        hosts: the name of each rank's host, if known.
        exchange: gives all ranks some bytes, and returns those of all.
    """
    state, error = (_UNAVAILABLE, 0) if not is_available() else (_OFFERED, 0)
    if not wanted or (made is not None and made.full):
        state = _UNWANTED
    elif state == _OFFERED and made is None and (error := _test_memory()):
        state = _NO_MEMORY
    name, token = secrets.token_bytes(16), secrets.token_bytes(16)
    listener: socket.socket | None = None
    if state == _OFFERED and made is None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(_address(name))
        listener.listen(1024)
    offers = [_OFFER.unpack(row) for row in exchange(_OFFER.pack(state, error, _boot(), name, token))]
    connected: dict[int, socket.socket] = {}
    try:
        refusal = _refusal(offers)
        if refusal is not None or listener is None:
            return (None, refusal or None) if refusal is not None else (made, None)
        boot = offers[rank][2]
        near = [peer for peer, offer in enumerate(offers) if peer != rank and offer[2] == boot]
        for peer in (peer for peer in near if peer > rank):
            _, _, _, their_name, their_token = offers[peer]
            if (reached := _reach(their_name, _HELLO.pack(rank, their_token))) is not None:
                connected[peer] = reached
        reach = exchange(_flags(connected, len(offers)))
        coming = {peer for peer in near if peer < rank and reach[peer][rank]}
        connected |= _accept_all(listener, coming, token)
        agreed = exchange(_flags(connected, len(offers)))
        links = {peer: Link(peer, connected.pop(peer)) for peer in sorted(connected) if agreed[peer][rank]}
        apart = [(a, b) for b in range(len(offers)) for a in range(b) if offers[a][2] == offers[b][2]
                 and (hosts is None or hosts[a] == hosts[b]) and not (agreed[a][b] and agreed[b][a])]
        why = f"ranks {apart[0][0]} and {apart[0][1]} have no sockets in common: they are in different containers or " \
              "belong to different users" if apart else None
        return HostLinks(links, len(links) == len(offers) - 1, rank < min(links, default=0)), why
    finally:
        if listener is not None:
            listener.close()
        for left in connected.values():
            left.close()


def _refusal(offers: Sequence[tuple[int, int, bytes, bytes, bytes]]) -> str | None:
    """Return why there are no links; empty where nobody asks."""
    first = next(((rank, state, error) for rank, (state, error, *_) in enumerate(offers) if state != _OFFERED), None)
    if first is None:
        return None
    rank, state, error = first
    if state == _NO_MEMORY:
        return f"rank {rank} got none: {os.strerror(error)}"
    if state == _UNAVAILABLE:
        return f"the system of rank {rank} has none without a name (Linux has)"
    return f"rank {rank} is set to shared_memory false" if any(offer[0] == _OFFERED for offer in offers) else ""


def _reach(name: bytes, hello: bytes) -> socket.socket | None:
    reached = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        reached.settimeout(5.0)
        reached.connect(_address(name))
        if _is_own_user(reached):
            reached.send(hello)
            return reached
    except OSError:
        pass
    reached.close()
    return None


def _accept_all(listener: socket.socket, coming: Collection[int], token: bytes) -> dict[int, socket.socket]:
    """Accept the ranks that have connected; who does not know the token is none."""
    connected: dict[int, socket.socket] = {}
    listener.setblocking(False)
    with suppress(OSError):  # no more
        while len(connected) < len(coming):
            accepted, _ = listener.accept()
            try:
                accepted.setblocking(False)
                peer, theirs = _HELLO.unpack(accepted.recv(_HELLO.size + 1))
                if secrets.compare_digest(theirs, token) and peer in coming and peer not in connected \
                        and _is_own_user(accepted):
                    connected[peer] = accepted
                    continue
            except (OSError, struct.error):
                pass
            accepted.close()
    return connected


def _is_own_user(connected: socket.socket) -> bool:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _flags(ranks: Collection[int], count: int) -> bytes:
    return bytes(rank in ranks for rank in range(count))


def _address(name: bytes) -> bytes:
    return b"\0vpipe-" + name.hex().encode()


def _boot() -> bytes:
    """Return 16 bytes that tell this boot of this host from others; of a system that does not say, any."""
    with suppress(OSError, ValueError), open("/proc/sys/kernel/random/boot_id") as file:
        return bytes.fromhex(file.read().strip().replace("-", ""))
    return secrets.token_bytes(16)
