"""Dropout that drops of a part of a tensor what it drops of the whole: of slices of sequences, and of ranks' shares.

The numbers of the whole are drawn for every part, from the generator that a stage has seeded alike for all of them.
DTensor's own random state does so on some kinds of devices only.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class Dropout(nn.Dropout):
    """Dropout of activations [B, S, ..].

    Attributes:
        sequence_slice: what a stage tells where a schedule has slices: the first token of those at hand, and the number
            of tokens of the whole sequence; None for the whole.

    Args:
        along: the dimension of the tokens.
        seen: one of tokens up to those at hand, from the first on, such as that of keys; None for none.
        share: the ranks of which each has a part along a dimension, and that dimension.
    """

    def __init__(self, p: float, along: int = 1, seen: int | None = None,
                 share: tuple[DeviceMesh, int] | None = None) -> None:
        super().__init__(p)
        self.along, self.seen, self.share = along, seen, share
        self.sequence_slice: tuple[int, int] | None = None

    @property
    def of_parts(self) -> bool:
        """Return whether it drops of a part, which functions that drop by themselves do not."""
        return self.training and self.p > 0 and (self.share is not None or self.sequence_slice is not None)

    def forward(self, x: Tensor) -> Tensor:
        if not self.of_parts:
            return super().forward(x)
        here = list(x.shape)
        if self.share is not None:
            mesh, dim = self.share
            here[dim] *= mesh.size()
        parts = {}
        if self.sequence_slice is not None:
            start, length = self.sequence_slice
            parts = {self.along: start} | ({} if self.seen is None else {self.seen: 0})
        factors = F.dropout(x.new_ones([length if place in parts else size for place, size in enumerate(here)]), self.p)
        for place, first in parts.items():
            factors = factors.narrow(place, first, here[place])
        if parts:
            factors = factors.clone()  # else those of the whole sequence are kept for the backward
        return x * (factors if self.share is None else factors.chunk(mesh.size(), dim)[mesh.get_local_rank()])
