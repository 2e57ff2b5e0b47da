"""Who waits for whom, and what it ends with: a slow rank, a circle, one that is silent or has left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vpipe.watch.fault import Fault
from vpipe.watch.seen import Seen, duration

LONG = 5
"""Ranks, above which those in the middle of a chain are counted, not named."""


@dataclass(frozen=True)
class Chain:
    """Ranks of which each waits for the next.

    Attributes:
        ranks: the first has waited, the last is what all of them wait for.
        circle: from where on they wait for one another, the last for this one; None when they do not.
        silent_s: how long nothing was heard of the last; 0 when it was.
    """

    seen: Sequence[Seen]
    ranks: tuple[int, ...]
    circle: int | None = None
    silent_s: float = 0.0

    @classmethod
    def of(cls, seen: Sequence[Seen], first: int, enough_s: float, beat_s: float) -> Chain:
        """From a rank on.

        Args:
            enough_s: of a wait, for the others that it may be the reason of. One that began later is work.
            beat_s: between two signs of life.
        """
        ranks = [first]
        while True:
            last = seen[ranks[-1]]
            if last.silent_s > max(2 * beat_s, enough_s / 2) and not last.left:
                return cls(seen, tuple(ranks), silent_s=last.silent_s)
            if last.left or last.waits is None or last.waits.peer is None or last.waits.seconds <= enough_s:
                return cls(seen, tuple(ranks))
            if last.waits.peer in ranks:
                return cls(seen, tuple(ranks), circle=ranks.index(last.waits.peer))
            ranks.append(last.waits.peer)

    @property
    def end(self) -> tuple[int, ...]:
        """The rank, or the circle of ranks, that the others wait for."""
        return self.ranks[-1:] if self.circle is None else self.ranks[self.circle:]

    @property
    def fault(self) -> Fault:
        """What is to be said when the first rank can wait no longer."""
        if self.circle is not None:
            return Fault.circle(*self.end)
        if self.silent_s:
            return Fault.silent(self.silent_s, *self.end)
        return Fault.left(*self.end) if self.seen[self.ranks[-1]].left else Fault.busy(*self.end)

    def in_words(self, place: Callable[[int], str]) -> list[str]:
        """A sentence for each rank.

        Args:
            place: ``rank -> "rank 2 (stage 2) on hostB"``.
        """
        sentences = [self._sentence(number, place) for number in range(len(self.ranks))]
        if len(sentences) > LONG:
            sentences[2:-2] = [f"{len(sentences) - 4} more in between wait in the same way"]
        return sentences

    def _sentence(self, number: int, place: Callable[[int], str]) -> str:
        rank, is_last = self.ranks[number], number == len(self.ranks) - 1
        seen = self.seen[rank]
        if is_last and self.silent_s:
            silence = f"has given no sign of life for {duration(self.silent_s)}"
            return f"{place(rank)} {silence}: it is stopped, or its host is down or cut off"
        if is_last and self.circle is not None:
            return f"{sentence(rank, seen, place)}: they wait for one another, a deadlock"
        slow = is_last and not seen.left and seen.at is not None and not seen.is_waiting
        return sentence(rank, seen, place) + (": the slow one" if slow else "")


def sentence(rank: int, seen: Seen, place: Callable[[int], str]) -> str:
    """What a rank waits for, or else is at; ``place`` as in :meth:`Chain.in_words`."""
    if seen.waits is None or not seen.is_waiting:
        return f"{place(rank)} {seen}"
    whom = "all ranks" if seen.waits.peer is None else place(seen.waits.peer)
    what = "" if seen.at is None or seen.at[0] is None else f", while {seen.at[0]}"
    return f"{place(rank)} has waited {duration(seen.waits.seconds)} {seen.waits.said} {whom}{what}"


def chains(seen: Sequence[Seen], enough_s: float, beat_s: float) -> list[Chain]:
    """For every end that ranks have waited for so long, the chain of most ranks that leads there.

    Args:
        enough_s, beat_s: as in :meth:`Chain.of`.
    """
    longest: dict[tuple[int, ...], Chain] = {}
    waiting = [rank for rank, one in enumerate(seen) if one.waited_s > enough_s]
    for rank in sorted(waiting, key=lambda rank: -seen[rank].waited_s):
        chain = Chain.of(seen, rank, enough_s, beat_s)
        end = tuple(sorted(chain.end))
        if end not in longest or len(chain.ranks) > len(longest[end].ranks):
            longest[end] = chain
    return list(longest.values())
