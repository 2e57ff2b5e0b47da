"""Compare the summaries of runs: as a table, as rows of CSV and as a page with their losses over time."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from vpipe.app.config.config import Config, parse_resolved
from vpipe.app.launch.rank_env import ranks_of
from vpipe.app.metric_formulas import share_text
from vpipe.app.report.line_chart import Line, chart, render, thinned
from vpipe.app.report.report_data import History, read_history
from vpipe.app.train.run_folder import CONFIG, SUMMARY
from vpipe.app.train.summary import figure_columns
from vpipe.app.visualize.table import filled, fitted, terminal_columns
from vpipe.errors import counted
from vpipe.extras.comparison.contenders import Contender

SAME = "(=)"
"""Marks a contender whose config is that of one before it."""

FIGURES = ("samples_per_s", "tokens_per_s", "step_median_s", "step_p95_s", "mfu", "hfu", "bubble", "memory_bytes",
           "sent_bytes", "last_loss", "evaluation_loss")
"""Figures of a run's summary, of which the table has the medians."""

COLOURS = ("#3b7dd8", "#d9822b", "#2a9d6f", "#a45cc9", "#c94f5c", "#2aa3b0", "#8a7a2e", "#7a7f87")


@dataclass(frozen=True)
class Outcome:
    """The runs of one contender.

    Attributes:
        folders: of its runs, in the order of the rounds.
        histories: what they wrote of their updates, and their summaries.
        config: of its runs, with what was planned.
        same_as: the earlier contender with the same config, whose runs these are; None for one that ran.
    """

    contender: Contender
    folders: Sequence[Path]
    histories: Sequence[History]
    config: Config
    same_as: str | None = None

    @classmethod
    def read(cls, contender: Contender, folders: Sequence[Path], same_as: str | None = None) -> Outcome:
        """Read what the runs of a contender have written."""
        return cls(contender, folders, [read_history(folder) for folder in folders],
                   parse_resolved((folders[0] / CONFIG).read_text()), same_as)

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def medians(self) -> dict[str, float | None]:
        """The median over runs of each of :data:`FIGURES`; None for one that no run knows."""
        summaries = [history.summary or {} for history in self.histories]
        known = {name: [summary[name] for summary in summaries if summary.get(name) is not None] for name in FIGURES}
        return {name: median(values) if values else None for name, values in known.items()}

    @property
    def spread(self) -> float | None:
        """Half the distance between the fastest run and the slowest, over the median; None of less than two runs."""
        speeds = [history.summary["samples_per_s"] for history in self.histories if history.summary]
        return (max(speeds) - min(speeds)) / 2 / median(speeds) if len(speeds) > 1 else None

    @property
    def program(self) -> str:
        """The schedule, the microbatches and the layers of its runs, in words."""
        parallel, recompute = self.config.parallel, self.config.parallel.recompute
        again = recompute if isinstance(recompute, float | str) else [
            len(own) if isinstance(own, Sequence) else own for own in recompute]
        return (f"schedule {parallel.schedule}, {counted(self.config.microbatches, 'microbatch')} of "
                f"{counted(self.config.microbatch_size, 'sample')}, layers {list(parallel.partition)}, recomputed "
                f"{again}")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row of CSV for each run: its config and figures, as its own ``summary.csv`` has them."""
        for number, folder in enumerate(self.folders, 1):
            with (folder / SUMMARY).open(encoding="utf-8", newline="") as file:
                [figures] = csv.DictReader(file)
            yield {"contender": self.name, "model": self.contender.model, "round": number, "run": folder.name,
                   "failed": None, "same_as": self.same_as, **figures}


@dataclass(frozen=True)
class Comparison:
    """All contenders.

    Attributes:
        outcomes: in the order in which they were named; at least one.
        refused: by name, why one could not take part.
    """

    outcomes: Sequence[Outcome]
    refused: Mapping[str, str]

    @property
    def title(self) -> str:
        """What was trained, on how many ranks."""
        return "; ".join(dict.fromkeys(
            f"{config.model.name} on {counted(ranks_of(config), 'rank')}, "
            f"{counted(config.dataset.batch_size, 'sample')} per batch"
            for config in (one.config for one in self.outcomes)))

    def as_rows(self) -> list[dict[str, Any]]:
        """Return rows of CSV: one for each run, then one for each contender that did not take part."""
        return [*(row for one in self.outcomes for row in one.rows()),
                *({"contender": name, "failed": why} for name, why in self.refused.items())]

    def as_text(self) -> str:
        """Return the contenders, the table of their figures, and the meaning of its columns."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        width, first = terminal_columns(), self.outcomes[0]
        yield self.title
        yield ""
        for one in self.outcomes:
            yield f"{one.name}: {one.contender.description}"
            yield from (f"    {line}" for line in filled(one.program, width - 4))
            if one.same_as is not None:
                yield f"    {SAME} the same config as {one.same_as}, whose runs these are"
        for name, why in self.refused.items():
            yield f"{name}: does not take part: {why}"
        yield ""
        rows = [self._row(one) for one in self.outcomes]
        heads = [head for head in rows[0] if any(row[head] != "-" for row in rows)]
        yield from fitted(heads, [[row[head] for head in heads] for row in rows], width, left=1)
        planned = "planned: samples per second as its plan predicts; " if "planned" in heads else ""
        yield from filled(f"(medians over {counted(len(first.folders), 'run')} of each, of the figures in their "
                          "summaries; spread: half the distance between the fastest run and the slowest; against "
                          f"{first.name}; {planned}loss: in training, at the end)", width)

    def _row(self, one: Outcome) -> dict[str, str]:
        def shown(figure: float | None, form: str) -> str:
            return "-" if figure is None else form.format(figure)

        figures, plan = one.medians, one.contender.plan
        speed, of_first = figures["samples_per_s"], self.outcomes[0].medians["samples_per_s"]
        columns = figure_columns(figures)
        return {"": one.name + (f" {SAME}" if one.same_as else ""), "samples/s": columns.pop("samples/s"),
                "spread": share_text(one.spread),
                "against": shown(speed / of_first if speed and of_first else None, "{:.2f}x"),
                "planned": shown(None if plan is None else 1 / plan.predicted.seconds_per_sample, "{:,.1f}"), **columns,
                "loss": shown(figures["last_loss"], "{:.4f}"),
                "evaluation": shown(figures["evaluation_loss"], "{:.4f}")}

    def as_page(self) -> str:
        """Return the losses of all contenders over the time of their training, in their first runs, as HTML; those with
        the same config are one line."""
        ran = [one for one in self.outcomes if one.same_as is None]
        lines = [Line(" = ".join([one.name, *(other.name for other in self.outcomes if other.same_as == one.name)]),
                      thinned([(line["time_s"], line["loss"]) for line in one.histories[0].lines]), colour)
                 for one, colour in zip(ran, cycle(COLOURS), strict=False)]
        drawn = chart("training loss over time", lines, "The loss of each contender, from left to right over the "
                      "seconds of its training.", "s", lambda loss: f"{loss:.3g}", height=360)
        title = escape(self.title)
        return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
                f'<style>\n{render("page.css")}</style></head><body><main>\n<h1>{title}</h1>\n{drawn}'
                "</main></body></html>\n")
