"""Read and write amounts of memory: ``8GiB``, ``500 MB``, ``1.5 GiB``."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from vpipe.errors import UserError

__all__ = ["size_text"]

HINT = "write bytes with a unit, such as 8GiB, 500 MB or 1.5GB"

_UNITS = {"b": 1} | {f"{letter}{'i' * binary}b": (1024 if binary else 1000) ** power
                     for power, letter in enumerate("kmgt", 1) for binary in (False, True)}
_AMOUNT = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_size(value: str | int, name: str) -> int:
    """Return the bytes of a whole number or a text such as ``8GiB``; GB is 1000³ bytes, GiB 1024³; case does not
    matter.

    Args:
        name: of the amount in a message, such as ``--memory``.

    Raises:
        UserError: it is no amount, has an ambiguous unit, or is below one byte.
    """
    found = _AMOUNT.fullmatch(str(value).strip()) if type(value) in (str, int) else None
    if found is None or len(found[1]) > 20:
        raise UserError(f"{name} is {value!r}, which is no amount of memory", hint=HINT)
    amount, unit = found[1], found[2].lower()
    if unit in ("k", "m", "g", "t", "ki", "mi", "gi", "ti"):
        letter = unit[0].upper()
        raise UserError(f"{name} is '{value}', which may be {letter}B (of 1000s) or {letter}iB (of 1024s)",
                        hint=f"write {amount}{letter}iB or {amount}{letter}B")
    if unit and unit not in _UNITS:
        raise UserError(f"{name} is '{value}', with the unknown unit '{found[2]}'", hint=HINT)
    size = int(Fraction(amount) * _UNITS[unit or "b"])
    if size < 1:
        raise UserError(f"{name} is {value}", hint=f"give more than nothing; {HINT}")
    if not unit and size < 1024:
        raise UserError(f"{name} is {value}, which would be {size} bytes", hint=HINT)
    return size


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
