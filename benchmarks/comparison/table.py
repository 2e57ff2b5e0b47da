"""The results as tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from case import Case, Run

Runs = Mapping[str, Run | str]
Measured = Mapping[str, Sequence[float]]


def ratios(cases: Mapping[str, Runs]) -> str:
    """A row per case: the microbatches chosen, and how much faster vpipe is, simulated."""
    lines = ["| setting | gpipe: microbatch | pipedream | vpipe | vpipe's recomputed layers | vpipe / gpipe | "
             "vpipe / pipedream |", "|---|---:|---:|---:|---|---:|---:|"]
    for name, runs in cases.items():
        cells = [name]
        for system in ("gpipe", "pipedream", "vpipe"):
            run = runs[system]
            cells.append("does not fit" if isinstance(run, str) else str(run.microbatch_size) +
                         ("" if run.largest_size is None else f" (fits {run.largest_size})"))
        vpipe = runs["vpipe"]
        cells.append("-" if isinstance(vpipe, str) else ", ".join(str(len(own)) for own in vpipe.plan.recomputed))
        lines.append(f"| {' | '.join([*cells, _ratio(runs, 'gpipe'), _ratio(runs, 'pipedream')])} |")
    return "\n".join(lines)


def _ratio(runs: Runs, other: str) -> str:
    vpipe, run = runs["vpipe"], runs[other]
    return "-" if isinstance(vpipe, str) or isinstance(run, str) else f"{vpipe.samples_per_s / run.samples_per_s:.2f}"


def results(runs: Runs, measured: Measured) -> str:
    """A row per system of one case, simulated and run."""
    lines = ["| | partition | recomputed | microbatch | memory GB | bubble | simulated samples/s | measured | "
             "measured / simulated | vpipe / this, simulated | measured |",
             "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    vpipe = runs["vpipe"]
    for name, run in runs.items():
        if isinstance(run, str):
            lines.append(f"| {name} | {run} |")
            continue
        peak = max(stage.memory.peak for stage in run.prediction.stages)
        cells = [name, "-".join(map(str, run.plan.partition)), "-".join(str(len(own)) for own in run.plan.recomputed),
                 str(run.microbatch_size), f"{peak / 1e9:.1f}", f"{100 * run.prediction.bubble:.0f} %",
                 f"{run.samples_per_s:.1f}"]
        figures = measured.get(name)
        found = median(figures) if figures else None
        cells += (["-", "-"] if found is None or not figures else
                  [f"{found:.1f} ({min(figures):.1f} to {max(figures):.1f})", f"{found / run.samples_per_s:.3f}"])
        cells += ["-" if isinstance(vpipe, str) else f"{vpipe.samples_per_s / run.samples_per_s:.2f}",
                  "-" if found is None or "vpipe" not in measured else f"{median(measured['vpipe']) / found:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parts(runs: Runs) -> str:
    """Where the time of a sample goes, in milliseconds of a rank."""
    there = {name: run.parts_s() for name, run in runs.items() if not isinstance(run, str)}
    names = next(iter(there.values()))
    lines = ["| ms of a rank per sample | " + " | ".join(there) + " |", "|---|" + "---:|" * len(there)]
    lines += [f"| {name} | " + " | ".join(f"{1e3 * own[name]:.2f}" for own in there.values()) + " |" for name in names]
    total = " | ".join(f"{1e3 * sum(own.values()):.2f}" for own in there.values())
    return "\n".join([*lines, f"| in all | {total} |"])


def title(case: Case) -> str:
    """A case in words."""
    how = (f"microbatches and updates as published (16, 16 and 4; without a flush an update per microbatch), "
           f"optimizer {case.step_passes:g} x fused Adam"
           if case.as_published else "every system its best microbatch, 512 samples per update")
    return f"{case.tokens} tokens, curve {case.curve.name}, {how}"
