"""Transfer tensors between ranks: the protocol, and the transport within one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vpipe.errors import RunError

DESCRIPTIONS = {
    "F": "the activations of microbatch", "B": "the gradients of microbatch", "W": "tied weights, version",
    "G": "the tied gradient of update", "N": "the gradient norms of update", "L": "the loss of step",
    "D": "a replica's gradients, bucket", "S": "the sum of gradients, bucket",
    "C": "the checksums of batches, message"}
"""What is transferred, by the kind of its key."""


class TransferKey(NamedTuple):
    """Identify a transfer between two ranks.

    Attributes:
        kind: see :data:`DESCRIPTIONS`.
        stage: the stage concerned; for tied weights the number of the pair of owner and borrower.
        number: of the microbatch, step, update or version; of sums over replicas the update times the buckets per
            update, plus the bucket.
    """

    kind: str
    stage: int
    number: int

    def __str__(self) -> str:
        if self.kind in "WG":
            return f"{DESCRIPTIONS[self.kind]} {self.number} of tie {self.stage}"
        return f"{DESCRIPTIONS[self.kind]} {self.number} {'from' if self.kind in 'NLDS' else 'for'} stage {self.stage}"


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a transferred tensor, and whether its gradient is sent back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Transport(Protocol):
    """Transfer tensors from and to one rank. Only ``receive``, ``receive_specs`` and the waits at the end block.

    A tensor must not be changed between its send and its arrival.

    Attributes:
        ordered: whether transfers must be issued in the order of :mod:`vpipe.schedules.transfer_order`.
        wait_s: seconds in which this rank has waited for others.
    """

    ordered: bool
    rank: int
    bytes_sent: int
    wait_s: float

    def send(self, peer: int, key: TransferKey, tensors: Sequence[Tensor], announce: bool = False) -> None:
        """Send tensors; with ``announce`` first a header with their specs, which the peer does not know."""

    def post(self, peer: int, key: TransferKey, specs: Sequence[TensorSpec] | None) -> None:
        """Post a receive; without specs, that of the header."""

    def receive_specs(self, peer: int, key: TransferKey) -> list[TensorSpec]:
        """Wait for the header of a transfer that was posted without specs, and post its receive."""

    def is_ready(self, peer: int, key: TransferKey) -> bool:
        """Return whether ``receive`` may be called: within one process, when the tensors are there."""

    def receive(self, peer: int, key: TransferKey) -> list[Tensor]:
        """Wait for a posted transfer; its tensors are leaves, which require a gradient as their spec says."""

    def wait_sent(self, kind: str) -> None:
        """Wait until all sends of a kind have arrived, except those whose receiver still waits for a header. What is in
        shared memory has arrived."""

    def abandon(self) -> None:
        """Drop all transfers under way between ranks of this process."""

    def finish(self) -> None:
        """Wait until all sends have arrived, except checksums of batches: the last ones are received when ranks agree
        that the batches have ended.

        Raises:
            RunError: a posted transfer was never received.
        """


Mailbox = dict[tuple[int, int, TransferKey], list[Tensor]]
"""Tensors sent between the ranks of one process and not yet received, by sender, receiver and key."""


class InProcessTransport:
    """Transfer tensors between ranks of one process, without a copy."""

    ordered = False

    def __init__(self, rank: int, mailbox: Mailbox) -> None:
        self.rank, self._mailbox = rank, mailbox
        self.bytes_sent = 0
        self.wait_s = 0.0

    def send(self, peer: int, key: TransferKey, tensors: Sequence[Tensor], announce: bool = False) -> None:
        self._mailbox[self.rank, peer, key] = list(tensors)
        for tensor in tensors:
            self.bytes_sent += tensor.nbytes

    def post(self, peer: int, key: TransferKey, specs: Sequence[TensorSpec] | None) -> None:
        """Do nothing: tensors are in the mailbox when they are sent."""

    def receive_specs(self, peer: int, key: TransferKey) -> list[TensorSpec]:
        return [TensorSpec.from_tensor(tensor) for tensor in self._mailbox[peer, self.rank, key]]

    def is_ready(self, peer: int, key: TransferKey) -> bool:
        return (peer, self.rank, key) in self._mailbox

    def receive(self, peer: int, key: TransferKey) -> list[Tensor]:
        return self._mailbox.pop((peer, self.rank, key))

    def wait_sent(self, kind: str) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        self._mailbox.clear()

    def finish(self) -> None:
        left = [str(key) for _, peer, key in self._mailbox if peer == self.rank]
        if left:
            raise RunError(f"{len(left)} transfer(s) were never taken: {', '.join(left[:3])}",
                           hint="this is a defect of the schedule or of vpipe: please report it", rank=self.rank)
