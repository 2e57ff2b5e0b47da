"""The comparison as rows of CSV, in the form of those that runs leave: the config of each contender and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vpipe.compare.outcome import Comparison, Outcome, number
from vpipe.train.csv_rows import config_row
from vpipe.train.efficiency import Efficiency
from vpipe.train.job import Job


def rows(comparison: Comparison, jobs: Sequence[Job], efficiency: Efficiency | None) -> list[Mapping[str, Any]]:
    """One for each that took part, then for each that did not.

    A figure that a run leaves has its name here, too. ``held_bytes`` is of the tensors that the fullest rank kept;
    ``memory_bytes``, of a whole process, nobody knows of one contender among several.

    Args:
        jobs: of those that took part, in their order.
        efficiency: of the config's own job; None where nobody knows it.
    """
    made: list[Mapping[str, Any]] = [
        {"contender": outcome.name, "failed": None, "same_as": outcome.same_as, **config_row(job.config),
         **_figures(outcome, job, efficiency),
         "last_loss": number(comparison.loss_after_equal_samples(outcome)), "loss_after": comparison.equal_samples}
        for outcome, job in zip(comparison.outcomes, jobs, strict=True)]
    return made + [{"contender": name, "failed": why} for name, why in comparison.refused.items()]


def _figures(outcome: Outcome, job: Job, efficiency: Efficiency | None) -> dict[str, Any]:
    tokens = None if outcome.samples_per_s is None else outcome.samples_per_s * job.config.model.sequence_length
    own = None if efficiency is None else efficiency.recomputing(job.recomputed)
    used = None if own is None or tokens is None else own.at(tokens)
    return {"ranks": job.schedule.ranks, "steps": len(outcome.losses), "samples_per_s": outcome.samples_per_s,
            "tokens_per_s": tokens, "spread": outcome.spread, "step_median_s": outcome.update_s,
            "mfu": None if used is None else used.model, "hfu": None if used is None else used.hardware,
            "doubt": None if own is None or used is None else own.doubt(used), "bubble": outcome.bubble,
            "held_bytes": outcome.peak_bytes, "evaluation_loss": number(outcome.evaluation_loss)}
