"""Compute the figures of each contender and compare them: as a table, as JSON and as rows of CSV."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import fmean, median, quantiles
from typing import Any

from vpipe import Plan
from vpipe.app.config.config import config_row
from vpipe.app.metric_formulas import Utilization, bubble, p95, share_text
from vpipe.app.train.job import Job
from vpipe.app.train.metrics import Efficiency, finite
from vpipe.app.visualize.table import filled, fitted, milliseconds, terminal_columns
from vpipe.errors import counted
from vpipe.extras.comparison.planning import Contender
from vpipe.extras.comparison.round_robin import MIN_UPDATES, WARM_UP, Turn
from vpipe.runtime import StageUsage
from vpipe.units import size_text

RECENT = 0.1
"""Share of the updates, the latest, whose mean loss is the loss after an update."""

SAME = "(=)"
"""Marks a contender that is the same program as one before it."""


@dataclass(frozen=True)
class Outcome:
    """The measurements of one contender, and the figures that follow from them.

    Attributes:
        job: under the contender's plan.
        losses: of every update, in order.
        turns: those that count; none if it made no update after its warm-up.
        seconds: of all its turns, with the warm-up.
        usage: per rank, of its training after the warm-up.
        sent_bytes: by all ranks, per update after the warm-up.
        held_bytes: per rank, the most bytes of tensors: weights in all versions, gradients, optimizer state,
            activations.
        evaluation_loss: after all updates.
        efficiency: with what it recomputes; None where the FLOPs of its layers are unknown.
        same_as: the earlier contender with the same program, which ran for both; None for one that ran.
    """

    contender: Contender
    job: Job
    losses: tuple[float, ...]
    turns: tuple[Turn, ...]
    seconds: float
    usage: tuple[StageUsage, ...]
    sent_bytes: float
    held_bytes: tuple[int, ...]
    evaluation_loss: float
    efficiency: Efficiency | None = None
    same_as: str | None = None

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def schedule(self) -> str:
        return self.job.config.parallel.standing_in.schedule

    @property
    def plan(self) -> Plan | None:
        """That it followed, if something was predicted of it."""
        return None if self.job.plan is None or self.job.plan.predictions is None else self.job.plan

    @cached_property
    def update_s(self) -> float | None:
        """The seconds of an update, the median over turns; None without a turn."""
        return median(map(fmean, self.turns)) if self.turns else None

    @property
    def p95_s(self) -> float | None:
        """The seconds that 95 % of the counted updates do not exceed."""
        return p95(list(chain.from_iterable(self.turns))) if self.turns else None

    @property
    def samples_per_s(self) -> float | None:
        return None if self.update_s is None else self.job.samples_per_update / self.update_s

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.update_s is None else self.job.tokens_per_update / self.update_s

    @property
    def spread(self) -> float | None:
        """Half the distance between the quartiles of the turns' times over their median; None with less than two."""
        if len(self.turns) < 2 or self.update_s is None:
            return None
        low, _, high = quantiles(map(fmean, self.turns), n=4, method="inclusive")
        return (high - low) / 2 / self.update_s

    def relative_speed(self, other: Outcome) -> float | None:
        """Return its throughput over the other's."""
        if self.samples_per_s is None or other.samples_per_s is None:
            return None
        return self.samples_per_s / other.samples_per_s

    @property
    def utilization(self) -> Utilization | None:
        """MFU and HFU; None where they are unknown."""
        if self.efficiency is None or self.tokens_per_s is None:
            return None
        return self.efficiency.utilization(self.tokens_per_s)

    @property
    def doubt(self) -> str | None:
        """The reason why MFU or HFU cannot be right; None where it can."""
        return None if self.efficiency is None or not self.utilization else self.efficiency.warning(self.utilization)

    @property
    def bubble(self) -> float | None:
        """The measured bubble; None where the time that ranks waited is unknown."""
        return finite(bubble((rank.idle_s, rank.working_s) for rank in self.usage))

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the fullest rank."""
        return max(self.held_bytes)

    @property
    def predicted_bytes(self) -> int | None:
        """Predicted peak bytes of the fullest rank."""
        return None if self.plan is None else max(stage.memory.peak for stage in self.plan.predicted.stages)

    def loss_after(self, updates: int) -> float:
        """Return the mean over the last tenth of so many updates, at least one."""
        few = max(1, int(RECENT * updates))
        return sum(self.losses[updates - few:updates]) / few

    def as_json(self) -> dict[str, Any]:
        """Return its figures, and what they follow from."""
        job, names = self.job, ("name", "schedule", "losses", "samples_per_s", "spread", "bubble", "peak_bytes",
                                "predicted_bytes", "sent_bytes", "evaluation_loss", "same_as")
        return {**{name: getattr(self, name) for name in names}, "model": self.contender.model,
                "words": self.contender.description, "partition": job.partition,
                "recomputed": tuple(map(len, job.recomputed)), "microbatch_size": job.config.microbatch_size,
                "microbatches": job.schedule.assignment.step_microbatches, "largest_size": self.contender.largest_size,
                "prediction": None if self.plan is None else self.plan.predicted.as_json(),
                "turns": [{"updates": len(turn), "seconds": sum(turn)} for turn in self.turns],
                "rank_s": [(finite(rank.idle_s), rank.working_s) for rank in self.usage], "kept_bytes": self.held_bytes}

    def as_row(self) -> dict[str, Any]:
        """Return the config and the figures, under the names that a run's ``summary.csv`` has for its own.

        ``held_bytes`` is of the fullest rank. There is no ``memory_bytes``: that is of a process with all contenders.
        """
        used, peak = self.utilization, None if self.efficiency is None else self.efficiency.peak
        return {
            **config_row(self.job.config), "ranks": len(self.usage), "steps": len(self.losses),
            "samples_per_step": self.job.samples_per_update, "time_s": self.seconds,
            "counted_steps": sum(map(len, self.turns)), "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s, "spread": self.spread, "step_median_s": self.update_s,
            "step_p95_s": self.p95_s, "mfu": used and used.model, "hfu": used and used.hardware,
            "bubble": self.bubble, "held_bytes": self.peak_bytes, "sent_bytes": self.sent_bytes,
            "versions": max(rank.versions for rank in self.usage),
            "staleness": max(rank.staleness for rank in self.usage), "mean_delay": self.job.mean_delay,
            "evaluation_loss": finite(self.evaluation_loss), "doubt": self.doubt,
            "peak_tflops": peak and peak.tflops, "devices": peak and peak.devices, "peak_is": peak and str(peak)}


@dataclass(frozen=True)
class Comparison:
    """All contenders in the same processes.

    Attributes:
        title: what was trained, on how many ranks.
        memory_bytes: that each rank might use; None without a limit that all share.
        outcomes: in the order in which they were named; at least one.
        refused: by name, why one could not take part.
    """

    title: str
    memory_bytes: int | None
    outcomes: Sequence[Outcome]
    refused: Mapping[str, str]

    @property
    def equal_updates(self) -> int:
        """Updates that all have made."""
        return min(len(outcome.losses) for outcome in self.outcomes)

    @property
    def equal_samples(self) -> int:
        """Samples that all have trained on."""
        return min(len(outcome.losses) * outcome.job.samples_per_update for outcome in self.outcomes)

    def loss_after_equal_samples(self, outcome: Outcome) -> float:
        """Return its loss after :attr:`equal_samples`, in whole updates, at least one."""
        return outcome.loss_after(max(1, self.equal_samples // outcome.job.samples_per_update))

    @property
    def equal_time_s(self) -> float | None:
        """The shortest time in which one makes all its updates at its median pace; None if one has no median."""
        ends = [len(outcome.losses) * outcome.update_s for outcome in self.outcomes if outcome.update_s is not None]
        return min(ends) if len(ends) == len(self.outcomes) else None

    def loss_after_equal_time(self, outcome: Outcome) -> float | None:
        """Return its loss at :attr:`equal_time_s`; None if there is no such time, or no update by then."""
        if self.equal_time_s is None or outcome.update_s is None:
            return None
        updates = min(len(outcome.losses), int(self.equal_time_s / outcome.update_s * (1 + 1e-9)))
        return outcome.loss_after(updates) if updates else None

    @property
    def too_short(self) -> str | None:
        """A warning about a run with less than two turns that count."""
        if all(len(outcome.turns) > 1 for outcome in self.outcomes):
            return None
        return f"too short: {counted(self.equal_updates, 'update')}, {MIN_UPDATES} are needed for two counted turns"

    def as_json(self) -> Any:
        """Return JSON values; a loss that is not finite is None."""
        names = ("title", "memory_bytes", "equal_updates", "equal_samples", "equal_time_s", "too_short", "refused")
        return _all_finite({**{name: getattr(self, name) for name in names}, "outcomes": [
            {**one.as_json(), "loss_after_equal_samples": self.loss_after_equal_samples(one),
             "loss_after_equal_time": self.loss_after_equal_time(one)} for one in self.outcomes]})

    def as_rows(self) -> list[dict[str, Any]]:
        """Return rows of CSV: one for each that took part, then one for each that did not."""
        ran = [{"contender": one.name, "model": one.contender.model, "schedule": one.schedule, "failed": None,
                "same_as": one.same_as, **one.as_row(), "last_loss": finite(self.loss_after_equal_samples(one)),
                "loss_after": self.equal_samples} for one in self.outcomes]
        return ran + [{"contender": name, "failed": why} for name, why in self.refused.items()]

    def as_text(self) -> str:
        """Return the contenders, the table of their figures, and the meaning of its columns."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        width, then = terminal_columns(), self.equal_time_s
        yield self.title
        yield "" if self.memory_bytes is None else f"each rank may use {size_text(self.memory_bytes)}"
        for one in self.outcomes:
            job, largest = one.job, one.contender.largest_size
            yield f"{one.name}: {one.contender.description}"
            fits = "" if largest is None else f" (the largest that fits: {largest})"
            microbatches = counted(job.schedule.assignment.step_microbatches, "microbatch")
            program = (f"schedule {one.schedule}, {microbatches} of "
                       f"{counted(job.config.microbatch_size, 'sample')}{fits} per update, layers "
                       f"{list(job.partition)}, recomputed {list(map(len, job.recomputed))}")
            yield from (f"    {line}" for line in filled(program, width - 4))
            if one.same_as is not None:
                yield f"    {SAME} the same program as {one.same_as}, which ran for both"
        for name, why in self.refused.items():
            yield f"{name}: does not take part: {why}"
        yield ""
        if self.too_short:
            yield self.too_short
        rows = [self._row(one) for one in self.outcomes]
        heads = [head for head in rows[0] if any(row[head] != "-" for row in rows)]
        yield from fitted(heads, [[row[head] for head in heads] for row in rows], width, left=1)
        for one in self.outcomes:
            if one.doubt is not None and one.same_as is None:
                yield f"warning: {one.name}: {one.doubt}"
        yield from filled(
            f"(samples/s: median over turns, with half the distance between their quartiles, after {WARM_UP} updates "
            f"of each that do not count; against {self.outcomes[0].name}; kept: tensors of the rank that keeps most, "
            "counted and predicted; bubble: share of time in which ranks wait for others, measured and predicted)",
            width)
        yield from filled(
            f"(training loss after {counted(self.equal_samples, 'sample')} of each" +
            ("" if then is None else f", and after {then:.1f} s of each, when the first has made its last update") +
            ": the mean of the latest tenth of the updates)", width)

    def _row(self, one: Outcome) -> dict[str, str]:
        def shown(figure: float | None, form: str) -> str:
            return "-" if figure is None else form.format(figure)

        used = one.utilization
        return {
            "": one.name + (f" {SAME}" if one.same_as else ""), "samples/s": shown(one.samples_per_s, "{:,.1f}"),
            "spread": share_text(one.spread), "against": shown(one.relative_speed(self.outcomes[0]), "{:.2f}x"),
            "tokens/s": shown(one.tokens_per_s, "{:,.0f}"),
            "median": "-" if one.update_s is None else milliseconds(one.update_s),
            "p95": "-" if one.p95_s is None else milliseconds(one.p95_s),
            "MFU": share_text(used.model if used else None), "HFU": share_text(used.hardware if used else None),
            "kept": size_text(one.peak_bytes),
            "pred. kept": "-" if one.predicted_bytes is None else size_text(one.predicted_bytes),
            "bubble": share_text(one.bubble),
            "pred. bubble": share_text(one.plan.predicted.bubble if one.plan else None),
            "sent": size_text(one.sent_bytes), "loss, samples": f"{self.loss_after_equal_samples(one):.4f}",
            "loss, time": shown(self.loss_after_equal_time(one), "{:.4f}"), "evaluation": f"{one.evaluation_loss:.4f}"}


def _all_finite(value: Any) -> Any:
    """Replace each number that JSON cannot hold by None."""
    if isinstance(value, dict):
        return {name: _all_finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_all_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
