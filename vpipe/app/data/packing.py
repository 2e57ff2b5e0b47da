"""Pack several texts into a sample: they follow one another in their order, and one that does not fit begins the next.

    tokens of texts    5 4 3 | 12 | 1 10 | 6 6          room 12

So the texts of a sample lie side by side where they are kept, and one array of borders says which they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vpipe.app.data.epoch import Array, Rows


def sample_borders(sizes: Rows, room: Sequence[int]) -> Rows:
    """Return where samples begin among the texts, and where the last one ends ``[M + 1]``.

    Args:
        sizes: ``[N, D]``: what each text takes, such as tokens of its source and of its target; none above its room.
        room: the most of each that a sample has.
    """
    assert (sizes <= np.array(room)).all(), "a text that fits no sample"
    ends = np.cumsum(np.pad(sizes, ((1, 0), (0, 0))), 0)
    found = [0]
    while found[-1] < len(sizes):
        found.append(min(int(np.searchsorted(column, column[found[-1]] + most, "right")) - 1
                         for column, most in zip(ends.T, room, strict=True)))
    return np.array(found)


def places(lengths: Sequence[int], width: int) -> Array:
    """Return the place of every token in its text ``[width]``; what is behind the last one is a text of its own."""
    return np.concatenate([np.arange(length) for length in (*lengths, width - sum(lengths))])


def packing_line(texts: int, samples: int, what: str) -> str:
    """Return what a run says of its packed samples."""
    return f"packed: {texts:,} {what} in {samples:,} samples"
