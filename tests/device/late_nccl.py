"""Keep nccl's rules for tensors of the late device: a transfer is a part of a stream, for which other streams wait.

The rules, and what carries tensors, are those of vpipe.testing.nccl. A communicator has a stream of the device. A
transfer waits there for what the caller's stream had to do when it was issued; ``work.wait()`` lets the current stream
wait for the transfer, and returns at once. A send reads the tensor when its turn has come, and no sooner than the
receiver asks for it. A receive spoils the tensor when its turn has come, and writes it when all has arrived.

Neither keeps a tensor's memory. nccl's group in torch does: up to 2.7 by ``record_stream``, since then until the work
is waited for; vpipe must not rely on it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import late_device
import torch
from torch import Tensor

from vpipe.testing import nccl

FIRST_STREAM = 33  # those before are the default one and torch's pool

_communicators: dict[object, Communicator] = {}
_apart = False


class Communicator(nccl.InTurn):
    """A stream of transfers, and the thread of the host that lets them go on."""

    def __init__(self, device: torch.device, number: int) -> None:
        super().__init__()
        kind = torch.accelerator.current_stream(device).device_type
        self.stream = torch.Stream(stream_id=number, device_index=device.index, device_type=kind)
        self._library, self._place = late_device.library(), (device.index, number)

    def copy(self, to: int, source: int | None, size: int) -> int:
        """Queue a copy between addresses of the device and the host; returns its number."""
        self._library.late_copy(*self._place, to, source, size)
        return self.queued()

    def queued(self) -> int:
        return int(self._library.late_queued(*self._place))

    def wait_for(self, number: int) -> None:
        """Wait until the stream has done so much, which the device does in its own time."""
        self._library.late_wait_quietly(*self._place, number)

    def gate(self) -> None:
        """Let what is queued from here on wait for :meth:`open`."""
        self._library.late_gate(*self._place)

    def open(self) -> None:
        self._library.late_open(*self._place)


class Transfer(nccl.Ended):
    """An operation that was issued on the device."""

    def __init__(self, stream: torch.Stream) -> None:
        super().__init__()
        self._index, self._event = stream.device_index, torch.Event(late_device.NAME)
        self._event.record(stream)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.error is not None:
            raise RuntimeError(str(self.error))
        if timeout is None:
            torch.accelerator.current_stream(self._index).wait_event(self._event)
            return True
        self._event.synchronize()
        return super().wait(timeout)


class LateRules(nccl.NcclRules):
    """A process group with nccl's rules, for the late device."""

    NAME, KIND = "late_rules", late_device.NAME

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Transfer:
        (tensor,), rendezvous, device = tensors, not nccl.rules.buffered, self._device
        line, host = self._begin(tensor, peer)
        begun = line.queued()
        if rendezvous:
            line.gate()
        copied = line.copy(host.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        if rendezvous:
            line.gate()

        def carry() -> None:
            line.wait_for(begun)
            if rendezvous:
                device.carrier.recv([torch.zeros(1)], peer, self._tag(nccl.CLEAR)).wait(nccl.rules.limit)
                line.open()
            line.wait_for(copied)
            sent = device.carrier.send([host], peer, self._tag(nccl.DATA))
            if rendezvous:
                sent.wait(nccl.rules.limit)
                line.open()
            else:
                device.unsent.append((sent, host))

        return self._issue(line, carry)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Transfer:
        (tensor,), rendezvous, device = tensors, not nccl.rules.buffered, self._device
        line, host = self._begin(tensor, peer)
        begun = line.copy(tensor.data_ptr(), None, tensor.nbytes)
        line.gate()
        arrived = line.copy(tensor.data_ptr(), host.data_ptr(), tensor.nbytes)

        def carry() -> None:
            line.wait_for(begun)
            if rendezvous:
                device.carrier.send([torch.zeros(1)], peer, self._tag(nccl.CLEAR)).wait(nccl.rules.limit)
            device.carrier.recv([host], peer, self._tag(nccl.DATA)).wait(nccl.rules.limit)
            line.open()
            line.wait_for(arrived)  # and keep the host's memory meanwhile

        return self._issue(line, carry)

    def _begin(self, tensor: Tensor, peer: int) -> tuple[Communicator, Tensor]:
        """Return the communicator, which waits for the caller's stream, and the host's memory for a transfer."""
        assert tensor.is_contiguous(), "nccl carries no other"
        self._meet(peer)
        pair = self._number if nccl.rules.eager else (self._number, peer)
        key = tensor.device, nccl.rules.eager, pair if _apart else None
        if key not in _communicators:
            _communicators[key] = Communicator(tensor.device, FIRST_STREAM + len(_communicators))
        line = _communicators[key]
        line.stream.wait_stream(torch.accelerator.current_stream(tensor.device))
        return line, torch.empty(tensor.nbytes, dtype=torch.uint8)

    def _issue(self, line: Communicator, carry: Callable[[], None]) -> Transfer:
        def carried() -> None:
            try:
                carry()
            except BaseException:
                traceback.print_exc()
                line.open(), line.open()  # what waits for it would wait for ever
                raise

        work = Transfer(line.stream)
        line.issue("a transfer", carried, work)
        return work


@contextmanager
def late_rules(*, eager: bool, buffered: bool, apart: bool = False, limit_s: float = 30.0) -> Iterator[nccl.Rules]:
    """Let tensors of the late device between ranks go by nccl's rules. All ranks must enter together.

    Args:
        apart: whether communicators progress apart; else a rank's transfers follow one another, whatever their group
            and peer.
    """
    global _apart
    _apart = apart
    with nccl.nccl_rules(eager=eager, buffered=buffered, limit_s=limit_s, backend=LateRules) as rules:
        yield rules
        for line in _communicators.values():
            line.issue("nothing", lambda: None).wait()  # the threads have nothing to do any more
