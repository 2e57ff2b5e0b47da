"""Pass tensors on round the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vpipe.runtime.transport.process_group import DistributedTransport
from vpipe.runtime.transport.transport import TransferKey, TransferKind, Transport


class Ring:
    """Send tensors of any shapes to the next rank, and receive those of the one before, in the order of their sends.

    Args:
        transport: of one of the ranks.
        ranks: how many there are, two at least.
    """

    def __init__(self, transport: Transport, ranks: int) -> None:
        self.rank, self.ranks = transport.rank, ranks
        self._transport = transport
        self._sent = self._received = 0

    @classmethod
    def join(cls, ranks: int, timeout_s: float, under_way: int, describe: Callable[[int], str]) -> Ring:
        """Return the ring of all processes, after :func:`~vpipe.distributed.join_world`.

        Args:
            timeout_s: how long one message may take.
            under_way: how many messages may be on their way to a rank before a send waits.
            describe: ``rank -> "rank 2 (stage 2)"``, for messages.
        """
        return cls(DistributedTransport(torch.device("cpu"), timeout_s, under_way, describe, buckets=0), ranks)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors to the next rank."""
        peer = (self.rank + 1) % self.ranks
        self._transport.send(peer, TransferKey(TransferKind.ACTIVATIONS, peer, self._sent), tensors, announce=True)
        self._sent += 1

    def receive(self) -> list[Tensor]:
        """Wait for the next tensors of the rank before."""
        peer, key = (self.rank - 1) % self.ranks, TransferKey(TransferKind.ACTIVATIONS, self.rank, self._received)
        self._transport.post(peer, key, None)
        self._received += 1
        self._transport.receive_specs(peer, key)
        return self._transport.receive(peer, key)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        self._transport.finish()
