"""The number that an oracle in fp16 multiplies losses with, so that small gradients do not vanish."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vpipe.verify.arithmetic import Arithmetic

FIRST, LEAST, MOST = 65536.0, 1.0, 2.0**24
GROWS_AFTER = 2000
"""Good updates in a row, after which it doubles."""


class LossScale:
    """Halved by every update with a gradient that is not finite, doubled after many without one; or a fixed number.

    Source: Micikevicius et al., Mixed Precision Training (arXiv:1710.03740), section 3.2; the constants are those of
    ``torch.amp.GradScaler``, but that it grows to 2**24 at most.

    Args:
        fixed: the number; None: it moves.
        layer: the first one that it is for, which names it in a checkpoint.
        tensors: of a checkpoint. It takes the entry of the last layer at or before its own.
    """

    def __init__(self, fixed: float | None, layer: int, tensors: Mapping[str, Tensor]) -> None:
        self._moves, self._layer = fixed is None, layer
        self.value, self.good = FIRST if fixed is None else fixed, 0
        layers = [number for number in range(layer + 1) if f"loss_scale.{number}.value" in tensors]
        if self._moves and layers:
            self.value = float(tensors[f"loss_scale.{layers[-1]}.value"])
            self.good = int(tensors[f"loss_scale.{layers[-1]}.good"])

    @classmethod
    def of(cls, arithmetic: Arithmetic, layer: int, tensors: Mapping[str, Tensor]) -> LossScale | None:
        """None where losses are not scaled."""
        return cls(arithmetic.loss_scale, layer, tensors) if arithmetic.scaled else None

    def updated(self, overflow: bool) -> None:
        """After an update, which an overflow made impossible."""
        if not self._moves:
            return
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.value = max(LEAST, self.value / 2)
        elif self.good == GROWS_AFTER:
            self.value, self.good = min(MOST, 2 * self.value), 0

    def kept(self) -> dict[str, Tensor]:
        """By its names in a checkpoint."""
        return {} if not self._moves else {
            f"loss_scale.{self._layer}.value": torch.tensor(self.value, dtype=torch.float64),
            f"loss_scale.{self._layer}.good": torch.tensor(self.good)}
