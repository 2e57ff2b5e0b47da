"""What is emulated: how many devices, how many microbatches, how long they take."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from device import Times


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        ranks: devices.
        microbatches: per update.
        times: of a microbatch on a device.
        turns: of every system, after an update to warm up.
    """

    ranks: int
    microbatches: int
    times: Times
    turns: int

    def __str__(self) -> str:
        return f"P = {self.ranks}, m = {self.microbatches}, {self.times}"


SHORT, LONG = (Times(Fraction(f, 1000), Fraction(2 * f, 1000)) for f in (5, 20))
CASES = (Case(4, 8, SHORT, 5), Case(8, 16, SHORT, 3), Case(4, 8, LONG, 2), Case(8, 16, LONG, 2))
