"""What each contender did, and how they compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from statistics import median, quantiles
from typing import Any

from vpipe.compare.turns import NEEDED, Turn
from vpipe.errors import counted
from vpipe.measures import bubble
from vpipe.plan.prediction import Prediction

RECENT = 0.1
"""Share of the updates whose mean loss counts as the loss at a place."""


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
        turns: those that count; none if it made no update after its warm-up.
        rank_s: per rank, the seconds of its training after the warm-up in which it waited for others, and worked.
        kept_bytes: per rank, the tensors that it kept at most: weights, their versions, gradients, the optimizer's,
            activations.
        evaluation_loss: after all updates.
        largest_size: the largest microbatch that fits, where several were tried.
        same_as: which contender before it is the same program, so that only that one ran; None of one that ran.
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
    rank_s: tuple[tuple[float, float], ...]
    kept_bytes: tuple[int, ...]
    evaluation_loss: float
    largest_size: int | None = None
    same_as: str | None = None

    @property
    def samples_per_update(self) -> int:
        return self.microbatch_size * self.microbatches

    @cached_property
    def update_s(self) -> float | None:
        """An update, the median over turns; None without one."""
        return median(turn.seconds / turn.updates for turn in self.turns) if self.turns else None

    @property
    def samples_per_s(self) -> float | None:
        return None if self.update_s is None else self.samples_per_update / self.update_s

    @property
    def spread(self) -> float | None:
        """Half the distance between the quartiles of the turns' times, relative to their median; None of less than two.
        """
        times = [turn.seconds / turn.updates for turn in self.turns]
        if len(times) < 2 or self.update_s is None:
            return None
        low, _, high = quantiles(times, n=4, method="inclusive")
        return (high - low) / 2 / self.update_s

    def against(self, other: Outcome) -> float | None:
        """Its throughput, the other's = 1."""
        if self.samples_per_s is None or other.samples_per_s is None:
            return None
        return self.samples_per_s / other.samples_per_s

    @property
    def bubble(self) -> float | None:
        """As it was measured; None where nobody knows how long ranks waited."""
        return number(bubble(self.rank_s))

    @property
    def peak_bytes(self) -> int:
        """Tensors of the rank that kept most."""
        return max(self.kept_bytes)

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
        own = {**asdict(self), "prediction": None if self.prediction is None else self.prediction.as_json(),
               "losses": list(map(number, self.losses)), "rank_s": [list(map(number, rank)) for rank in self.rank_s],
               "evaluation_loss": number(self.evaluation_loss)}
        return {**own, "samples_per_s": self.samples_per_s, "spread": self.spread, "bubble": self.bubble,
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
    def equal_samples(self) -> int:
        """As many as all have trained on."""
        return min(len(outcome.losses) * outcome.samples_per_update for outcome in self.outcomes)

    def loss_after_equal_samples(self, outcome: Outcome) -> float:
        """Of one, after :attr:`equal_samples`, in whole updates, at least one."""
        return outcome.loss_after(max(1, self.equal_samples // outcome.samples_per_update))

    @property
    def equal_time_s(self) -> float | None:
        """When the first has made all of its updates, each at its own median pace; None if one has no pace."""
        ends = [len(outcome.losses) * outcome.update_s for outcome in self.outcomes if outcome.update_s is not None]
        return min(ends) if len(ends) == len(self.outcomes) else None

    def updates_by_then(self, outcome: Outcome) -> int:
        """The whole updates that one had made at :attr:`equal_time_s`; 0 if there is no such time."""
        if self.equal_time_s is None or outcome.update_s is None:
            return 0
        return min(len(outcome.losses), int(self.equal_time_s / outcome.update_s * (1 + 1e-9)))

    @property
    def too_short(self) -> str | None:
        """What is to be said of a run with less than two turns that count."""
        if all(len(outcome.turns) > 1 for outcome in self.outcomes):
            return None
        return f"too short: {counted(self.equal_updates, 'update')}, {NEEDED} are needed for two counted turns"

    def as_json(self) -> dict[str, Any]:
        """As values that JSON has, a loss that is no number as None."""
        return {"title": self.title, "memory_bytes": self.memory_bytes, "equal_updates": self.equal_updates,
                "equal_samples": self.equal_samples, "equal_time_s": self.equal_time_s,
                "too_short": self.too_short, "refused": dict(self.refused),
                "outcomes": [{**outcome.as_json(),
                              "loss_after_equal_samples": number(self.loss_after_equal_samples(outcome)),
                              "loss_after_equal_time": _late(outcome, self.updates_by_then(outcome))}
                             for outcome in self.outcomes]}


def _late(outcome: Outcome, updates: int) -> float | None:
    return number(outcome.loss_after(updates)) if updates else None


def number(value: float) -> float | None:
    """None for what JSON has no number for: a loss that grew without bounds."""
    return value if math.isfinite(value) else None


def smoothed(losses: Sequence[float], points: int = 80) -> list[tuple[int, float]]:
    """(update, mean loss of the updates since the point before), at most ``points`` of them."""
    size = max(1, -(-len(losses) // points))
    sums = [0.0, *accumulate(losses)]
    ends = [*range(size, len(losses), size), len(losses)] if losses else []
    return [(end, (sums[end] - sums[start]) / (end - start))
            for start, end in zip([0, *ends[:-1]], ends, strict=True)]
