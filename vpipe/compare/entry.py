"""What a contender runs, as rank 0 tells it to the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vpipe.errors import Problem
from vpipe.plan.plan import Plan


@dataclass(frozen=True)
class Entry:
    """One of those that take turns.

    Attributes:
        name: for tables.
        words: what it is.
        plan: with everything that a job needs: partition, recomputed layers, placement, schedule, microbatches.
        largest_size: the largest microbatch that fits, in samples, where several were tried.
    """

    name: str
    words: str
    plan: Plan
    largest_size: int | None = None

    def as_json(self) -> dict[str, Any]:
        """As values that JSON has."""
        return {"name": self.name, "words": self.words, "plan": self.plan.as_json(),
                "largest_size": self.largest_size}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Entry:
        """What :meth:`as_json` gave."""
        return cls(content["name"], content["words"], Plan.of_json(content["plan"]), content["largest_size"])


@dataclass(frozen=True)
class Field:
    """All of them.

    Attributes:
        entries: in order.
        refused: by name, why one cannot take part, and the remedy.
        memory_bytes: that each rank may use; None without a limit.
    """

    entries: tuple[Entry, ...]
    refused: Mapping[str, Problem]
    memory_bytes: int | None

    def as_json(self) -> dict[str, Any]:
        """As values that JSON has."""
        return {"entries": [entry.as_json() for entry in self.entries],
                "refused": {name: [why.what, why.hint] for name, why in self.refused.items()},
                "memory_bytes": self.memory_bytes}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Field:
        """What :meth:`as_json` gave."""
        refused = {name: Problem(what, hint) for name, (what, hint) in content["refused"].items()}
        return cls(tuple(map(Entry.of_json, content["entries"])), refused, content["memory_bytes"])
