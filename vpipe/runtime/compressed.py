"""A transport whose tensors between stages travel coded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vpipe.errors import UserError
from vpipe.runtime.compress import Coder, Compression, decode
from vpipe.runtime.distributed import MOST_TENSORS
from vpipe.runtime.transport import Key, Spec, Transport


class Compressed:
    """Codes what is sent and decodes what is taken; posts follow from the specs of the tensors themselves.

    A peer that cannot know those gets them with the first transfer, as one empty tensor for each ahead of the coded
    ones: its shape behind a 0, its dtype, whether it wants a gradient, and not a byte.
    """

    def __init__(self, inner: Transport, compression: Compression) -> None:
        self.rank, self.ordered = inner.rank, inner.ordered
        self.coder = Coder(compression)
        self._inner, self._compression = inner, compression
        self._expected: dict[tuple[int, Key], Sequence[Spec]] = {}  # of transfers that travel coded

    @property
    def feedback(self) -> bool:
        """Whether what coding a gradient lost is added to the next one."""
        return self._compression.feedback

    @property
    def bytes_sent(self) -> int:
        """As they travelled."""
        return self._inner.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, count: int) -> None:
        self._inner.bytes_sent = count

    @property
    def wait_s(self) -> float:
        return self._inner.wait_s

    @wait_s.setter
    def wait_s(self, seconds: float) -> None:
        self._inner.wait_s = seconds

    def send(self, peer: int, key: Key, tensors: Sequence[Tensor], announce: bool = False) -> None:
        if self._compression.codec(key) is not None:
            blanks = [_blank(tensor) for tensor in tensors] if announce else []
            if 2 * len(blanks) > MOST_TENSORS:
                raise UserError(f"{len(tensors)} tensors cross a cut that is compressed",
                                hint=f"at most {MOST_TENSORS // 2} can: write compress: none for this cut")
            tensors = [*blanks, *self.coder.encode(key, tensors)]
        self._inner.send(peer, key, tensors, announce)

    def post(self, peer: int, key: Key, specs: Sequence[Spec] | None) -> None:
        codec = self._compression.codec(key)
        if codec is not None and specs is not None:
            self._expected[peer, key] = specs
            specs = [codec.wire(spec) or spec for spec in specs]
        self._inner.post(peer, key, specs)

    def learn(self, peer: int, key: Key) -> list[Spec]:
        specs = self._inner.learn(peer, key)
        if self._compression.codec(key) is not None:
            blanks = specs[:len(specs) // 2]
            specs = [Spec(blank.shape[1:], blank.dtype, blank.wants_gradient) for blank in blanks]
            self._expected[peer, key] = specs
        return specs

    def ready(self, peer: int, key: Key) -> bool:
        return self._inner.ready(peer, key)

    def take(self, peer: int, key: Key) -> list[Tensor]:
        tensors, codec = self._inner.take(peer, key), self._compression.codec(key)
        if codec is None:
            return tensors
        specs = self._expected.pop((peer, key))
        return decode(codec, tensors[len(tensors) - len(specs):], specs)

    def abandon(self) -> None:
        self._expected.clear()
        self._inner.abandon()

    def settle(self, kind: str) -> None:
        self._inner.settle(kind)

    def finish(self) -> None:
        self._inner.finish()


def _blank(tensor: Tensor) -> Tensor:
    return torch.empty((0, *tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad)
