"""The comparison as text."""

from __future__ import annotations

from collections.abc import Iterator

from vpipe.compare.outcome import Comparison, Outcome
from vpipe.compare.turns import WARM_UP
from vpipe.draw.table import filled, fitted, terminal_columns
from vpipe.errors import counted
from vpipe.measures import share_text
from vpipe.sizes import size_text

_FIGURES = ("", "samples/s", "spread", "against", "kept", "pred. kept", "bubble", "pred. bubble", "loss, samples",
            "loss, time", "evaluation")
SAME = "(=)"
"""Marks a contender that is the same program as one before it."""


def text(comparison: Comparison) -> str:
    """What took part, the figures, and what the columns mean."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: Comparison) -> Iterator[str]:
    yield comparison.title
    limit = comparison.memory_bytes
    yield "" if limit is None else f"each rank may use {size_text(limit)}"
    for outcome in comparison.outcomes:
        yield f"{outcome.name}: {outcome.words}"
        fits = "" if outcome.largest_size is None else f" (the largest that fits: {outcome.largest_size})"
        yield (f"    schedule {outcome.schedule}, {counted(outcome.microbatches, 'microbatch')} of "
               f"{counted(outcome.microbatch_size, 'sample')}{fits} per update, layers "
               f"{list(outcome.partition)}, recomputed {list(outcome.recomputed)}")
        if outcome.same_as is not None:
            yield f"    {SAME} the same program as {outcome.same_as}, which ran for both"
    for name, why in comparison.refused.items():
        yield f"{name}: does not take part: {why}"
    if not comparison.outcomes:
        return
    yield ""
    if comparison.too_short:
        yield comparison.too_short
    width = terminal_columns()
    yield from fitted(_FIGURES, [_row(outcome, comparison) for outcome in comparison.outcomes], width, left=1)
    first = comparison.outcomes[0].name
    yield from filled(
        f"(samples/s: median over turns, with half the distance between their quartiles, after {WARM_UP} updates of "
        f"each that do not count; against {first}; kept: tensors of the rank that keeps most, counted and predicted; "
        "bubble: share of time in which ranks wait for others, measured and predicted)", width)
    then = comparison.equal_time_s
    yield from filled(
        f"(training loss after {counted(comparison.equal_samples, 'sample')} of each" +
        ("" if then is None else f", and after {then:.1f} s of each, when the first has made its last update") +
        ": the mean of the latest tenth of the updates)", width)


def _row(outcome: Outcome, comparison: Comparison) -> list[str]:
    prediction, by_then = outcome.prediction, comparison.updates_by_then(outcome)
    predicted = outcome.predicted_bytes
    return [outcome.name + (f" {SAME}" if outcome.same_as else ""), _or_dash(outcome.samples_per_s, "{:.1f}"),
            "-" if outcome.spread is None else f"{100 * outcome.spread:.1f} %",
            _or_dash(outcome.against(comparison.outcomes[0]), "{:.2f}x"), size_text(outcome.peak_bytes),
            "-" if predicted is None else size_text(predicted),
            share_text(outcome.bubble), "-" if prediction is None else share_text(prediction.bubble),
            f"{comparison.loss_after_equal_samples(outcome):.4f}",
            f"{outcome.loss_after(by_then):.4f}" if by_then else "-", f"{outcome.evaluation_loss:.4f}"]


def _or_dash(figure: float | None, form: str) -> str:
    return "-" if figure is None else form.format(figure)
