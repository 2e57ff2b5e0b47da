"""The comparison as text."""

from __future__ import annotations

from collections.abc import Iterator

from vpipe.compare.outcome import Comparison, Outcome
from vpipe.compare.turns import WARM_UP
from vpipe.draw.table import table
from vpipe.errors import counted
from vpipe.sizes import size_text

_FIGURES = ("", "samples/s", "spread", "against", "memory", "predicted", "bubble", "idle", "loss, samples",
            "loss, time", "evaluation")


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
    for name, why in comparison.refused.items():
        yield f"{name}: does not take part: {why}"
    if not comparison.outcomes:
        return
    yield ""
    if comparison.too_short:
        yield comparison.too_short
    yield from table(_FIGURES, [_row(outcome, comparison) for outcome in comparison.outcomes], left=1)
    first = comparison.outcomes[0].name
    yield (f"(samples/s: median over turns, with half the distance between their quartiles, after {WARM_UP} updates of "
           f"each that do not count; against {first}; memory: of the rank that holds most, counted and predicted; "
           "bubble: predicted share of a step without work; idle: measured share of the time in which ranks waited for "
           "others)")
    then = comparison.equal_time_s
    yield (f"(training loss after {counted(comparison.equal_samples, 'sample')} of each" +
           ("" if then is None else f", and after {then:.1f} s of each, when the first has made its last update") +
           ": the mean of the latest tenth of the updates)")


def _row(outcome: Outcome, comparison: Comparison) -> list[str]:
    prediction, by_then = outcome.prediction, comparison.updates_by_then(outcome)
    predicted = outcome.predicted_bytes
    return [outcome.name, _or_dash(outcome.samples_per_s, "{:.1f}"),
            "-" if outcome.spread is None else f"{100 * outcome.spread:.1f} %",
            _or_dash(outcome.against(comparison.outcomes[0]), "{:.2f}x"), size_text(outcome.peak_bytes),
            "-" if predicted is None else size_text(predicted),
            "-" if prediction is None else f"{100 * prediction.bubble:.1f} %", f"{100 * outcome.idle_share:.1f} %",
            f"{comparison.loss_after_equal_samples(outcome):.4f}",
            f"{outcome.loss_after(by_then):.4f}" if by_then else "-", f"{outcome.evaluation_loss:.4f}"]


def _or_dash(figure: float | None, form: str) -> str:
    return "-" if figure is None else form.format(figure)
