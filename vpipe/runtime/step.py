"""A step of training, as every rank knows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One optimizer step; without a flush, of a pipeline with replicas, the fewest that are whole on every stage.

    Attributes:
        index: its number, from 0.
        loss: mean over its microbatches, on every rank.
        learning_rate: of the first parameter group of this process's first stage that trains, with
            ``learning_rate_factor``; None without.
        gradient_norm: of all stages, before clipping; None when not clipped globally.
        stop: whether the last stage's rank was told to leave off.
        skipped: whether an update of it was left out, since a loss or a gradient was not finite: with a flush on all
            stages, without one on a stage of this process.
    """

    index: int
    loss: float
    learning_rate: float | None
    gradient_norm: float | None
    stop: bool
    skipped: bool = False
