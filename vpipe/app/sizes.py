"""Read amounts of memory: ``8GiB``, ``500 MB``."""

from __future__ import annotations

import re
from fractions import Fraction

from vpipe.errors import UserError

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
