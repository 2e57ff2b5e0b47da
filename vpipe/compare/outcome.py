"""What each contender did, and how they compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from statistics import median, quantiles
from typing import Any

from vpipe.plan.prediction import Prediction

RECENT = 0.1
"""Share of the updates whose mean loss counts as the loss at a place."""


@dataclass(frozen=True)
class Turn:
    """Some updates one after the other.

    Attributes:
        updates: how many; not the one that the turn began with.
        seconds: that they took.
    """

    updates: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """One contender.

    Attributes:
        name: its name.
        words: what it is.
        schedule: its order of actions.
        partition: layers per stage.
        recomputed: layers recomputed, per stage.
        microbatch_size: samples.
        microbatches: per update.
        prediction: the planner's, if there is one.
        losses: of every update, in order.
        turns: those that count.
        idle: per rank, share of its training in which it waited for others.
        memory_bytes: per rank, what was counted: weights, their versions, gradients, the optimizer's, activations.
        evaluation_loss: after all updates.
    """

    name: str
    words: str
    schedule: str
    partition: tuple[int, ...]
    recomputed: tuple[int, ...]
    microbatch_size: int
    microbatches: int
    prediction: Prediction | None
    losses: tuple[float, ...]
    turns: tuple[Turn, ...]
    idle: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    evaluation_loss: float

    @property
    def samples_per_update(self) -> int:
        return self.microbatch_size * self.microbatches

    @cached_property
    def update_s(self) -> float:
        """An update, the median over turns."""
        return median(turn.seconds / turn.updates for turn in self.turns)

    @property
    def samples_per_s(self) -> float:
        return self.samples_per_update / self.update_s

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the turns' times, relative to their median."""
        times = [turn.seconds / turn.updates for turn in self.turns]
        if len(times) < 2:
            return 0.0
        low, _, high = quantiles(times, n=4, method="inclusive")
        return (high - low) / 2 / self.update_s

    @property
    def idle_share(self) -> float:
        """Mean over ranks."""
        return sum(self.idle) / len(self.idle)

    @property
    def peak_bytes(self) -> int:
        """Counted, of the rank that holds most."""
        return max(self.memory_bytes)

    @property
    def predicted_bytes(self) -> int | None:
        """Of the rank that should hold most."""
        return None if self.prediction is None else max(stage.memory.peak for stage in self.prediction.stages)

    def loss_after(self, updates: int) -> float:
        """The mean over the last tenth of so many updates, at least one."""
        few = max(1, int(RECENT * updates))
        return sum(self.losses[updates - few:updates]) / few

    def as_json(self) -> dict[str, Any]:
        """As values that JSON has, with the figures that follow from them."""
        own = {**asdict(self), "prediction": None if self.prediction is None else self.prediction.as_json()}
        return {**own, "samples_per_s": self.samples_per_s, "spread": self.spread, "idle_share": self.idle_share,
                "peak_bytes": self.peak_bytes, "predicted_bytes": self.predicted_bytes}


@dataclass(frozen=True)
class Comparison:
    """All contenders on the same model, data and machine.

    Attributes:
        title: what was trained, on how many ranks.
        memory_bytes: that each rank might use; None without a limit.
        outcomes: in the order in which they were named.
        refused: by name, why one could not take part.
    """

    title: str
    memory_bytes: int | None
    outcomes: Sequence[Outcome]
    refused: Mapping[str, str]

    @property
    def equal_updates(self) -> int:
        """As many as all have made."""
        return min(len(outcome.losses) for outcome in self.outcomes)

    @property
    def equal_time_s(self) -> float:
        """When the first has made all of its updates, each at its own median pace."""
        return min(len(outcome.losses) * outcome.update_s for outcome in self.outcomes)

    def updates_by_then(self, outcome: Outcome) -> int:
        """The whole updates that one had made at :attr:`equal_time_s`."""
        return min(len(outcome.losses), int(self.equal_time_s / outcome.update_s * (1 + 1e-9)))

    def as_json(self) -> dict[str, Any]:
        """As values that JSON has."""
        return {"title": self.title, "memory_bytes": self.memory_bytes, "equal_updates": self.equal_updates,
                "equal_time_s": self.equal_time_s, "refused": dict(self.refused),
                "outcomes": [{**outcome.as_json(), "loss_after_equal_samples": outcome.loss_after(self.equal_updates),
                              "loss_after_equal_time": _late(outcome, self.updates_by_then(outcome))}
                             for outcome in self.outcomes]}


def _late(outcome: Outcome, updates: int) -> float | None:
    return outcome.loss_after(updates) if updates else None


def smoothed(losses: Sequence[float], points: int = 80) -> list[tuple[int, float]]:
    """(update, mean loss of the updates since the point before), at most ``points`` of them."""
    size = max(1, -(-len(losses) // points))
    sums = [0.0, *accumulate(losses)]
    ends = [*range(size, len(losses), size), len(losses)] if losses else []
    return [(end, (sums[end] - sums[start]) / (end - start))
            for start, end in zip([0, *ends[:-1]], ends, strict=True)]
