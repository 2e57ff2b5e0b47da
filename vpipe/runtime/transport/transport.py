"""Transfer tensors between ranks: the protocol, and the transport within one process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from vpipe.errors import RunError, UserError


class TransferKind(StrEnum):
    """What is transferred, by a letter.

    Attributes:
        what: in messages, before the number of the key.
        where: in messages, before its stage.
    """

    what: str
    where: str

    ACTIVATIONS = "F", "the activations of microbatch", "for stage"
    GRADIENTS = "B", "the gradients of microbatch", "for stage"
    TIED_WEIGHTS = "W", "tied weights, version", "of tie"
    TIED_GRADIENTS = "G", "the tied gradient of update", "of tie"
    NORMS = "N", "the gradient norms of update", "from stage"
    LOSSES = "L", "the loss of step", "from stage"
    SHARES = "D", "a replica's gradients, bucket", "from stage"
    SUMS = "S", "the sum of gradients, bucket", "from stage"
    WEIGHTS = "U", "the weights of a replica, bucket", "from stage"
    SPECS = "H", "the shapes of microbatch", "for stage"

    __hash__ = str.__hash__  # an enumeration's own is a function of Python, and keys are looked up for every transfer

    def __new__(cls, letter: str, what: str, where: str) -> Self:
        kind = str.__new__(cls, letter)
        kind._value_, kind.what, kind.where = letter, what, where
        return kind


class TransferKey(NamedTuple):
    """Identify a transfer between two ranks.

    Attributes:
        kind: what is transferred.
        stage: the stage concerned; for tied weights the number of the pair of owner and borrower.
        number: of the microbatch, step, update or version; of what replicas exchange the update times the buckets per
            update, plus the bucket.
    """

    kind: TransferKind
    stage: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind.what} {self.number} {self.kind.where} {self.stage}"


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


def check_all_taken(left: Sequence[TransferKey], rank: int) -> None:
    """Refuse to finish while transfers wait to be received."""
    if left:
        raise RunError(f"{len(left)} transfer(s) were never taken: {', '.join(map(str, left[:3]))}",
                       hint="this is a defect of the schedule or of vpipe: please report it", rank=rank)


def contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor as a transfer needs it: contiguous, a lazy conjugate or negation carried out.

    Within one process tensors get the same layout, hence the same numbers.
    """
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous().requires_grad_(tensor.requires_grad)


SPECS_SPEC = TensorSpec((4096,), torch.uint8, wants_gradient=False)
"""The tensor that tells the specs of a transfer."""

MOST_TENSORS = 62


def specs_as_tensor(specs: Sequence[TensorSpec]) -> Tensor:
    """Return the specs of a transfer as a tensor of :data:`SPECS_SPEC`."""
    if len(specs) > MOST_TENSORS:
        raise UserError(f"{len(specs)} tensors cross a cut between stages", hint=f"at most {MOST_TENSORS} can")
    code, [size] = encode_specs((spec.shape, spec.dtype, spec.wants_gradient) for spec in specs), SPECS_SPEC.shape
    if len(code) > size:
        raise UserError(f"the shapes of {len(specs)} tensors between stages take {len(code)} bytes",
                        hint=f"at most {size} are provided: let fewer tensors cross the cut")
    return torch.frombuffer(bytearray(code.ljust(size)), dtype=torch.uint8)


def encode_specs(specs: Iterable[tuple[Sequence[int], torch.dtype, bool]]) -> bytes:
    """Return shapes, dtypes and gradient flags as JSON."""
    return json.dumps([[shape, str(dtype).removeprefix("torch."), wants] for shape, dtype, wants in specs]).encode()


def decode_specs(code: bytes) -> list[TensorSpec]:
    """Return the specs that :func:`encode_specs` got. Raises ValueError if the bytes are none."""
    try:
        specs = [TensorSpec(tuple(shape), getattr(torch, dtype), wants) for shape, dtype, wants in json.loads(code)]
    except (AttributeError, TypeError) as error:
        raise ValueError("specs of tensors") from error
    if any(min(spec.shape, default=0) < 0 for spec in specs):
        raise ValueError("a dimension is negative")
    return specs


class Transport(Protocol):
    """Transfer tensors from and to one rank. Only ``receive`` and the waits at the end block.

    A tensor must not be changed between its send and its arrival.

    Attributes:
        ordered: whether transfers must be issued in the order of :mod:`vpipe.schedules.lowering`.
        needs_specs: whether a receive needs the specs of what will arrive; these are then a transfer of their own.
        wait_s: seconds in which this rank has waited for others.
        device_waits: where given, of each ordered receive marks of the device around its wait are added.
    """

    ordered: bool
    needs_specs: bool
    rank: int
    bytes_sent: int
    wait_s: float
    device_waits: list[tuple[torch.Event, torch.Event]] | None

    def send(self, peer: int, key: TransferKey, tensors: Sequence[Tensor]) -> None:
        """Send tensors."""

    def post(self, peer: int, key: TransferKey, specs: Sequence[TensorSpec]) -> None:
        """Post a receive; of no specs where none are needed."""

    def receive(self, peer: int, key: TransferKey) -> list[Tensor]:
        """Wait for a posted transfer; its tensors are leaves, which require a gradient as their spec says."""

    def wait_sent(self, kind: TransferKind) -> None:
        """Wait until all sends of a kind have arrived, except those whose receiver may still wait for specs. What is in
        shared memory has arrived."""

    def abandon(self) -> None:
        """Drop all transfers under way between ranks of this process; wait for those between processes."""

    def finish(self) -> None:
        """Wait until all sends have arrived.

        Raises:
            RunError: a posted transfer was never received.
        """


Mailbox = dict[tuple[int, int, TransferKey], list[Tensor]]
"""Tensors sent between the ranks of one process and not yet received, by sender, receiver and key."""


class InProcessTransport:
    """Transfer tensors between ranks of one process, without a copy."""

    ordered = needs_specs = False
    device_waits: list[tuple[torch.Event, torch.Event]] | None = None

    def __init__(self, rank: int, mailbox: Mailbox) -> None:
        self.rank, self._mailbox = rank, mailbox
        self.bytes_sent = 0
        self.wait_s = 0.0

    def send(self, peer: int, key: TransferKey, tensors: Sequence[Tensor]) -> None:
        self._mailbox[self.rank, peer, key] = list(tensors)
        for tensor in tensors if key.kind is not TransferKind.SPECS else ():
            self.bytes_sent += tensor.nbytes

    def post(self, peer: int, key: TransferKey, specs: Sequence[TensorSpec]) -> None:
        """Do nothing: tensors are in the mailbox when they are sent."""

    def receive(self, peer: int, key: TransferKey) -> list[Tensor]:
        return self._mailbox.pop((peer, self.rank, key))

    def wait_sent(self, kind: TransferKind) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        self._mailbox.clear()

    def finish(self) -> None:
        check_all_taken([key for _, peer, key in self._mailbox if peer == self.rank], self.rank)
