"""Tell modules which slice of its sequences a microbatch is at, so that they draw random numbers for each token.

A module with an attribute ``sequence_slice``, None at first, draws the numbers of the whole sequence and takes those of
its slice: then it draws what it draws without slices, if its layer starts each slice from the seed of the microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_DRAWING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Torch's own modules that draw: under one seed each slice would drop the same places."""


class SliceAware:
    """The modules of a layer that are told of slices.

    Attributes:
        by_element: whether all that draws in the layer, as far as it is known, is told.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._told: list[Any] = [module for module in layer.modules() if hasattr(module, "sequence_slice")]
        self.by_element = bool(self._told) and not any(
            isinstance(module, _DRAWING) and module.p and not hasattr(module, "sequence_slice")
            for module in layer.modules())

    @contextmanager
    def told(self, start: int, length: int) -> Iterator[None]:
        """While active, the modules know the first token of the slice, and how many the whole sequence has."""
        try:
            for module in self._told:
                module.sequence_slice = (start, length)
            yield
        finally:
            for module in self._told:
                module.sequence_slice = None
