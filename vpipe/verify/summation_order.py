"""Gradients of an update, added up in the order of a pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor


class GradientSums:
    """What the microbatches of an update contribute to every parameter, replica by replica.

    Microbatch i is worked on by replica ``i mod width`` of a stage. Each replica adds up its own microbatches in their
    order; then the replicas' sums are added, replica 0's first. Stages that borrow a tied weight do the same with their
    side of it; the sides are added, the last stage's first, which is autograd's order, and then to the owner's sum.

    Args:
        stage_of: the stage of every parameter and of every borrower's side of one.
        owners: side -> the parameter that it is a side of, in the order of the stages.
        widths: replicas per stage.
    """

    def __init__(self, stage_of: Mapping[str, int], owners: dict[str, str], widths: Sequence[int]) -> None:
        self._width = {name: widths[stage] for name, stage in stage_of.items()}
        self._owners = owners
        self._shares: dict[str, dict[int, Tensor]] = defaultdict(dict)  # by replica

    def add(self, microbatch: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Note what the backward of a microbatch contributed."""
        for name, gradient in gradients.items():
            replica = microbatch % self._width[name]
            before = self._shares[name].get(replica)
            if gradient is not None:
                self._shares[name][replica] = gradient if before is None else before + gradient

    def take(self, names: Iterable[str]) -> dict[str, Tensor | None]:
        """The sums for some parameters, which start from nothing again; None where there was no gradient at all."""
        return {name: _added([self._reduced(name),
                              _added([self._reduced(side) for side in reversed(self._owners)
                                      if self._owners[side] == name])]) for name in names}

    def _reduced(self, name: str) -> Tensor | None:
        return _added([share for _, share in sorted(self._shares.pop(name, {}).items())])


def _added(parts: Iterable[Tensor | None]) -> Tensor | None:
    """The parts from the first to the last; those that are None are left out."""
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total
