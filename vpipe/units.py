"""Write amounts of memory: ``8 GiB``, ``500 MiB``, ``1.5 GiB``."""

from __future__ import annotations

import math
from fractions import Fraction

__all__ = ["size_text"]

def size_text(size: float, up: bool = False) -> str:
    """Return ``8 GiB``, ``1.25 GiB``, ``411 MiB``: three digits, in a unit of which there is about one.

    Args:
        up: whether to round up, as for a limit that must be enough.
    """
    if abs(size) < 1024:
        return f"{math.ceil(size) if up else size:.0f} B"
    power = 1
    while abs(size) / 1024**power >= 999.5 and power < len(_NAMES):
        power += 1
    value = size / 1024**power
    digits = max(0, 3 - len(str(int(abs(value)))))
    if up:
        value = math.ceil(value * 10**digits) / 10**digits
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {_NAMES[power - 1]}"


_NAMES = ("KiB", "MiB", "GiB", "TiB")


def rounded_up(size: float) -> int:
    """Return the bytes that ``size_text(size, up=True)`` says."""
    amount, unit = size_text(size, up=True).split()
    return int(Fraction(amount) * (1 if unit == "B" else 1024 ** (1 + _NAMES.index(unit))))
