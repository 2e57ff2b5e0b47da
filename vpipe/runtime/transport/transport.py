"""How tensors get from rank to rank: one small protocol, and the transport within one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vpipe.errors import RunError

WHAT = {"F": "the activations of microbatch", "B": "the gradients of microbatch", "W": "tied weights, version",
        "G": "the tied gradient of update", "N": "the gradient norms of update", "L": "the loss of step",
        "D": "a replica's gradients, bucket", "S": "the sum of gradients, bucket",
        "C": "the checksums of batches, message"}


class Key(NamedTuple):
    """What is transferred: ``kind`` (see ``WHAT``), the stage it concerns (for tied weights the number of the pair of
    owner and borrower), and the microbatch, step, update or version; of sums over replicas the update times the buckets
    per update, and the bucket."""

    kind: str
    stage: int
    number: int

    def __str__(self) -> str:
        if self.kind in "WG":
            return f"{WHAT[self.kind]} {self.number} of tie {self.stage}"
        return f"{WHAT[self.kind]} {self.number} {'from' if self.kind in 'NLDS' else 'for'} stage {self.stage}"


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor that travels, and whether its gradient travels back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Transport(Protocol):
    """One rank's end. Sends and posts return at once; only ``take`` waits.

    A tensor that was sent must not be changed until its receiver has it.

    Attributes:
        ordered: whether transfers must be issued in the order of :mod:`vpipe.schedules.receive_order`.
    """

    ordered: bool
    rank: int
    bytes_sent: int
    wait_s: float

    def send(self, peer: int, key: Key, tensors: Sequence[Tensor], announce: bool = False) -> None:
        """Send tensors; ``announce`` their shapes when the peer cannot know them."""

    def post(self, peer: int, key: Key, specs: Sequence[Spec] | None) -> None:
        """Get ready to receive; with no specs, the peer announces them."""

    def learn(self, peer: int, key: Key) -> list[Spec]:
        """Wait for what the peer announces of a transfer posted without specs; it is still to be taken."""

    def ready(self, peer: int, key: Key) -> bool:
        """Whether ``take`` may be called. Always, where it can wait."""

    def take(self, peer: int, key: Key) -> list[Tensor]:
        """What was posted, waiting for it; leaves, those requiring a gradient whose spec says so."""

    def settle(self, kind: str) -> None:
        """Wait until every transfer of a kind that was sent has arrived, but for those whose receiver gets ready only
        when it has learned shapes that were announced before."""

    def abandon(self) -> None:
        """Drop what is on its way between ranks, all of which are in this process."""

    def finish(self) -> None:
        """Wait until everything sent has arrived, and complain if something posted was never taken.

        Checksums of batches are not waited for: the last ones are taken when ranks agree that the batches have ended.
        """


Mailroom = dict[tuple[int, int, Key], list[Tensor]]
"""What is on its way between the ranks of one process, by sender, receiver and key."""


class InProcess:
    """One rank's end of a mailroom: tensors change hands without a copy."""

    ordered = False

    def __init__(self, rank: int, room: Mailroom) -> None:
        self.rank, self._room = rank, room
        self.bytes_sent = 0
        self.wait_s = 0.0

    def send(self, peer: int, key: Key, tensors: Sequence[Tensor], announce: bool = False) -> None:
        self._room[self.rank, peer, key] = list(tensors)
        self.bytes_sent += sum(t.nbytes for t in tensors)

    def post(self, peer: int, key: Key, specs: Sequence[Spec] | None) -> None:
        """Nothing to get ready: mail waits in the mailroom."""

    def learn(self, peer: int, key: Key) -> list[Spec]:
        return [Spec.of(tensor) for tensor in self._room[peer, self.rank, key]]

    def ready(self, peer: int, key: Key) -> bool:
        return (peer, self.rank, key) in self._room

    def take(self, peer: int, key: Key) -> list[Tensor]:
        return self._room.pop((peer, self.rank, key))

    def settle(self, kind: str) -> None:
        """What was sent is in the mailroom."""

    def abandon(self) -> None:
        self._room.clear()

    def finish(self) -> None:
        left = [str(key) for _, peer, key in self._room if peer == self.rank]
        if left:
            raise RunError(f"{len(left)} transfer(s) were never taken: {', '.join(left[:3])}",
                           hint="this is a defect of the schedule or of vpipe: please report it", rank=self.rank)
