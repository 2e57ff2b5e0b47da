"""Keep nccl's rules over gloo, on CPU tensors: a backend of torch.distributed for tests.

1. Without eager communicators the first operation of a group for a pair of ranks blocks the caller until the peer makes
   its first one for that pair.
2. Operations run in the order in which they were issued, whatever their direction.
3. Tags are ignored: order alone matches sends and receives.
4. A send is buffered, or waits until its receive runs.
5. The worst case: operations of all groups of a rank run one after the other. A wait blocks the caller, which has no
   stream that could wait instead.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.runtime.transport import process_group

HELLO, CLEAR, DATA = range(3)


@dataclass
class Rules:
    """How the backend behaves.

    Attributes:
        eager: whether communicators are there from the beginning.
        buffered: whether sends do not wait for their receives.
        limit_s: how long anything may take.
        communicators: that were made here, as (group, peer).
    """

    eager: bool = False
    buffered: bool = False
    limit_s: float = 30.0
    communicators: set[tuple[int, int]] | None = None

    @property
    def limit(self) -> timedelta:
        return timedelta(seconds=self.limit_s)


rules = Rules()


class Ended(dist._Work):  # type: ignore[name-defined,misc] # torch's own name of it
    """An operation that was issued."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ended.wait(rules.limit_s):
            raise RuntimeError(f"Timed out after {rules.limit_s:g} s")
        if self.error is not None:
            raise RuntimeError(str(self.error))
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class InTurn:
    """What carries out operations, one after the other."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[Callable[[], None], Ended]] = queue.SimpleQueue()
        threading.Thread(target=self._carry_out, daemon=True, name="device").start()

    def issue(self, operation: Callable[[], None], work: Ended | None = None) -> Ended:
        work = work or Ended()
        self.queue.put((operation, work))
        return work

    def _carry_out(self) -> None:
        while True:
            operation, work = self.queue.get()
            try:
                operation()
            except BaseException as error:
                work.error = error
            work.ended.set()


class Device(InTurn):
    """That of this rank.

    Attributes:
        carrier: the gloo group that carries what is sent.
        groups: that keep the rules.
        unsent: buffered sends.
    """

    def __init__(self, carrier: Any) -> None:
        super().__init__()
        self.carrier = carrier
        self.groups: list[NcclRules] = []
        self.unsent: list[Any] = []


_device: Device | None = None


class NcclRules(dist.ProcessGroup):
    """A process group with the rules; only sends and receives.

    Attributes:
        NAME: of the backend.
        KIND: of the devices whose tensors it carries.
    """

    NAME, KIND = "nccl_rules", "cpu"

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # its stub lacks this form
        assert _device is not None
        self._device = _device
        _device.groups.append(self)
        self._number = len(_device.groups)
        self.met: set[int] = set()  # peers with which there is a communicator

    def getBackendName(self) -> str:  # noqa: N802
        return self.NAME

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Ended:
        self._meet(peer)
        (tensor,) = tensors
        return self._device.issue(lambda: self._send(tensor, peer))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Ended:
        self._meet(peer)
        (tensor,) = tensors
        return self._device.issue(lambda: self._receive(tensor, peer))

    def _meet(self, peer: int) -> None:
        """Make the communicator of a pair when it is used first."""
        if peer in self.met:
            return
        self.met.add(peer)
        if rules.communicators is not None:
            rules.communicators.add((self._number, peer))
        if not rules.eager:
            here = self._device.carrier.send([torch.zeros(1)], peer, self._tag(HELLO))
            self._device.carrier.recv([torch.zeros(1)], peer, self._tag(HELLO)).wait(rules.limit)
            here.wait(rules.limit)

    def _send(self, tensor: Tensor, peer: int) -> None:
        if rules.buffered:
            copied = tensor.clone()
            self._device.unsent.append((self._device.carrier.send([copied], peer, self._tag(DATA)), copied))
            return
        self._device.carrier.recv([torch.zeros(1)], peer, self._tag(CLEAR)).wait(rules.limit)
        self._device.carrier.send([tensor], peer, self._tag(DATA)).wait(rules.limit)

    def _receive(self, tensor: Tensor, peer: int) -> None:
        if not rules.buffered:
            self._device.carrier.send([torch.zeros(1)], peer, self._tag(CLEAR)).wait(rules.limit)
        self._device.carrier.recv([tensor], peer, self._tag(DATA)).wait(rules.limit)

    def _tag(self, kind: int) -> int:
        return self._number * 3 + kind


@contextmanager
def nccl_rules(*, eager: bool, buffered: bool, limit_s: float = 30.0,
               backend: type[NcclRules] = NcclRules) -> Iterator[Rules]:
    """Let tensors between ranks go over a backend, one and the same in a process. All ranks must enter together."""
    global _device
    if _device is None:
        dist.Backend.register_backend(backend.NAME, backend, devices=[backend.KIND])
        _device = Device(dist.new_group(backend="gloo"))
    for group in _device.groups:
        group.met.clear()
    rules.eager, rules.buffered, rules.limit_s, rules.communicators = eager, buffered, limit_s, set()
    backend_of = process_group.backend_of
    process_group.backend_of = lambda device: backend.NAME
    try:
        yield rules
    finally:
        process_group.backend_of = backend_of
        for work, _ in _device.unsent:
            work.wait(rules.limit)
        _device.unsent.clear()
