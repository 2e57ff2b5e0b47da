"""Describe the order of a pipeline's work: a schedule, with what only it takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from vpipe.arguments import Arguments, as_number


def is_path(text: str) -> bool:
    """Tell whether a text that names a schedule is the path of a file."""
    return isinstance(text, str) and text.endswith(".csv")  # anything but text is refused as a name


@dataclass(frozen=True)
class Order:
    """A schedule, its stages per rank, and the slices of its microbatches.

    Attributes:
        schedule: a name that ``vpipe schedule`` lists, or the path of a schedule as a CSV file; what another part says,
            or the default one, when empty.
        chunks: stages per rank, for schedules that may have any number of them; when None, the number that follows from
            the processes of ``torchrun``, or the schedule's own.
        slices: equal parts into which the sequences of every microbatch are cut, for ``seq1f1b`` and ``gpipe`` and for
            files: an action is then of a slice; 1 when None.

    Raises:
        UserError: a value is of another kind.
    """

    COUNTS: ClassVar[tuple[str, ...]] = ("update_every", "slices")  # what the file of a plan says, too, as numbers

    schedule: str = ""
    _: KW_ONLY
    chunks: int | None = None
    slices: int | None = None

    def __post_init__(self) -> None:
        given = Arguments()
        self._check(given)
        given.check()

    @property
    def late(self) -> Asynchronous:
        """This order with what only one without a flush takes: its defaults, where this is another."""
        return self if isinstance(self, Asynchronous) else Asynchronous(**vars(self))

    @property
    def update_every(self) -> int | None:
        """Of an order without a flush, microbatches per update and replica; the fewest possible if None."""
        return None

    @property
    def warmup(self) -> tuple[int, ...] | None:
        """Forwards of every stage before its first backward; those of 1F1B, or of a schedule with a flush, if None."""
        return None

    def over(self, other: Order) -> Order:
        """Return this order, with what the other one says where this one says nothing."""
        kind = Asynchronous if isinstance(self, Asynchronous) else type(other)
        said = {name: value for name, value in vars(self).items() if value not in (None, "")}
        return kind(**vars(other) | said)

    @staticmethod
    def of(schedule: str, chunks: int | None = None, *, slices: int | None = None, update_every: int | None = None,
           warmup: Sequence[int] | None = None, delay_correction: float | None = None) -> Order:
        """Return the order for values from a file: an :class:`Asynchronous` where one is given that only it has."""
        if update_every is None and warmup is None and not delay_correction:
            return Order(schedule, chunks=chunks, slices=slices)
        return Asynchronous(schedule, chunks=chunks, slices=slices, update_every=update_every, warmup_depth=warmup,
                            delay_correction=delay_correction)

    def _check(self, given: Arguments) -> None:
        if isinstance(self.schedule, os.PathLike):
            object.__setattr__(self, "schedule", os.fspath(self.schedule))
        if self.schedule != "":
            given.name("schedule", self.schedule, "1f1b")
        object.__setattr__(self, "chunks", given.integer("chunks", self.chunks, least=1, or_none=True))
        object.__setattr__(self, "slices", given.integer("slices", self.slices, least=1, or_none=True))


@dataclass(frozen=True)
class Asynchronous(Order):
    """A schedule without a flush: the pipeline stays full, and gradients are late.

    Attributes:
        update_every: microbatches per update, and replica (must divide the microbatches of a batch); as few as the
            schedule can have when None.
        warmup_depth: forwards of every stage before its first backward, under ``pipedream``,
            ``pipedream_vertical_sync`` and ``2bw``; those of 1F1B when None. See docs/schedules.md.
        delay_correction: every step of an optimizer is extrapolated over this share of the mean delay of its stage, in
            updates: 1.0 is all of it, 0.0 nothing, as None. See docs/optimizers.md.
    """

    update_every: int | None = None
    warmup_depth: Sequence[int] | None = None
    delay_correction: float | None = None

    @property
    def warmup(self) -> tuple[int, ...] | None:
        return None if self.warmup_depth is None else tuple(self.warmup_depth)

    def _check(self, given: Arguments) -> None:
        super()._check(given)
        depths = given.integers("warmup_depth", self.warmup_depth, "[3, 2, 1, 0]")
        values = {"update_every": given.integer("update_every", self.update_every, or_none=True),
                  "warmup_depth": None if depths is None else tuple(depths),
                  "delay_correction": 0.0 if as_number(self.delay_correction) == 0 else given.number(
                      "delay_correction", self.delay_correction, 1.0, or_none=True, most=1e9)}
        for name, value in values.items():
            object.__setattr__(self, name, value)
