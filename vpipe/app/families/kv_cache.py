"""Keep the keys and values of earlier tokens, so that a text grows by one token without computing all others again.

A layer that can do so has a method ``step``: its ``forward`` for the tokens behind those in the cache. The arguments
are those of ``forward`` and a :class:`KeyValueCache`, one per layer. The first call gets the whole prompt and an empty
cache; every later one gets one token per row, and None for what does not grow, such as the output of an encoder: the
layer keeps of that what it needs.

Shapes, as names end: b batch (rows: texts), s sequence (tokens), g heads of keys and values, d head size.
"""

from __future__ import annotations

from torch import Tensor, nn


class KeyValueCache:
    """The keys and values of one attention layer, of all rows.

    Args:
        capacity: most tokens of a row.

    Attributes:
        length: tokens of every row.
    """

    def __init__(self, capacity: int) -> None:
        self.length, self._capacity = 0, capacity
        self._stored: tuple[Tensor, Tensor] | None = None

    def append(self, key_bgsd: Tensor, value_bgsd: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of tokens to those of every row; return all of them, [B, G, S, D]."""
        if self._stored is None:
            rows, groups, _, size = key_bgsd.shape
            self._stored = (key_bgsd.new_empty(rows, groups, self._capacity, size),
                            value_bgsd.new_empty(rows, groups, self._capacity, value_bgsd.shape[3]))
        start, self.length = self.length, self.length + key_bgsd.shape[2]
        for stored, new in zip(self._stored, (key_bgsd, value_bgsd), strict=True):
            stored[:, :, start:self.length] = new
        return self.contents()

    def keep(self, key_bgsd: Tensor, value_bgsd: Tensor) -> None:
        """Keep the keys and values of a source, which do not grow."""
        self._stored, self.length = (key_bgsd, value_bgsd), key_bgsd.shape[2]

    def contents(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens, [B, G, S, D]."""
        assert self._stored is not None, "something was appended"
        keys_bgsd, values_bgsd = self._stored
        return keys_bgsd[:, :, :self.length], values_bgsd[:, :, :self.length]


class PerToken(nn.Module):
    """A layer that computes every token by itself, so that it needs no cache."""

    def step(self, h_bsh: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the output for the new tokens."""
        return self(h_bsh)  # type: ignore[no-any-return]
