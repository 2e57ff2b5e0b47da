"""The transport: what goes to ranks of this host through shared memory, and all else over gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.distributed import exchange, watch
from vpipe.extras.shared_memory.host_links import HostLinks, SharedMemoryTransfers, connect
from vpipe.extras.shared_memory.link import LinkClosedError
from vpipe.runtime import transport

PeerTransfer = transport.PeerTransfer
TensorSpec = transport.TensorSpec
TransferKey = transport.TransferKey
_ACTIVATIONS = transport.TransferKind.ACTIVATIONS

_host_links: WeakKeyDictionary[dist.ProcessGroup, HostLinks] = WeakKeyDictionary()


def host_links(device: torch.device, timeout_s: float) -> HostLinks | None:
    """Return the links through shared memory, which the pipelines of a process share. All ranks must call it together.

    Args:
        device: on which this rank computes; if any rank's is no processor, none has links.
    """
    group, watchdog = dist.group.WORLD, watch.watchdog
    assert group is not None, "torch.distributed is initialised"
    made = _host_links.get(group)
    links, why = connect(dist.get_rank(), device.type == "cpu", made, None if watchdog is None else watchdog.hosts,
                         exchange(timeout_s=timeout_s).all_gather)
    if why is not None and dist.get_rank() == 0:
        transport.say_once(f"gloo carries tensors between ranks of a host, not shared memory: {why}")
    if links is not None and made is None:
        _host_links[group] = links
        if watchdog is not None:
            watchdog.break_off = partial(_break_off, watchdog.break_off, ref(links))
    return links


def _break_off(others: Callable[[], None], links: ref[HostLinks]) -> None:
    others()
    if (there := links()) is not None:
        there.break_off()


class SharedMemoryTransport(transport.DistributedTransport):
    """Transfer tensors through shared memory to the ranks with which this one has links."""

    def __init__(self, device: torch.device, timeout_s: float, *arguments: Any) -> None:
        super().__init__(device, timeout_s, *arguments)
        links = host_links(device, timeout_s)
        self._shared = None if links is None or not links.links else SharedMemoryTransfers(
            links, self.generation, self.most_under_way[_ACTIVATIONS], timeout_s)
        if self._shared is not None:
            self.unhurried = self._shared.links.links

    def send(self, peer: int, key: TransferKey, tensors: Sequence[Tensor]) -> None:
        shared, rank = self._shared, self.lane[peer]
        if shared is None or (link := shared.links.links.get(rank)) is None or link.full_here \
                or not self._send_shared(shared, rank, key, tensors):
            super().send(peer, key, tensors)

    def post(self, peer: int, key: TransferKey, specs: Sequence[TensorSpec]) -> None:
        if self._shared is not None and self.lane[peer] in self._shared.links.links:
            self._shared.post(self.lane[peer], key, specs)
        else:
            super().post(peer, key, specs)

    def receive(self, peer: int, key: TransferKey) -> list[Tensor]:
        if self._shared is not None and self._await(self._shared, peer, key):
            return self._shared.take(self.lane[peer], key)
        return super().receive(peer, key)

    def finish(self) -> None:
        if self._shared is not None:  # first, since gloo sends by itself
            started = perf_counter()
            for peer, key, is_done in self._shared.unfinished():
                with PeerTransfer(peer, "sending", self.timeout_s, key, self):
                    self._shared.wait(peer, is_done)
            self.wait_s += perf_counter() - started
        super().finish()

    def untaken(self) -> list[TransferKey]:
        return super().untaken() + ([] if self._shared is None else [key for _, key in self._shared.posted])

    def _send_shared(self, shared: SharedMemoryTransfers, peer: int, key: TransferKey,
                     tensors: Sequence[Tensor]) -> bool:
        """Send to a rank of the job through shared memory; return False if the memory is full."""
        try:
            shared.send(peer, key, tensors)
        except LinkClosedError as error:
            with PeerTransfer(peer, "sending", self.timeout_s, key, self):
                raise RuntimeError(str(error)) from error
        except OSError as error:
            shared.links.give_up(error.errno or 0)
            return False
        if key.kind != transport.TransferKind.SPECS:
            self.bytes_sent += sum([tensor.nbytes for tensor in tensors])
        if key.kind == _ACTIVATIONS and shared.is_crowded(peer):
            started = perf_counter()
            with PeerTransfer(peer, "sending", self.timeout_s, key, self):
                shared.wait(peer, lambda: not shared.is_crowded(peer))
            self.wait_s += perf_counter() - started
        return True

    def _await(self, shared: SharedMemoryTransfers, peer: int, key: TransferKey) -> bool:
        """Wait for a transfer that was posted through shared memory; return False if the transfer comes over gloo,
        where its receive is then posted."""
        rank = self.lane[peer]
        if (rank, key) not in shared.posted:
            return False
        started = perf_counter()
        if (rank, key) not in shared.arrived:
            shared.links.receive(0.0)
        if not (arrived := (rank, key) in shared.arrived):
            with PeerTransfer(rank, "waiting for", self.timeout_s, key, self):
                arrived = shared.wait_for(rank, key)
            if not arrived:
                super().post(peer, key, shared.posted.pop((rank, key)))
        self.wait_s += perf_counter() - started
        return arrived
