"""Tables of text, and the one that compares schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vpipe.draw.summary import Summary
from vpipe.draw.words import number, percent
from vpipe.schedules.order import stages_of_rank
from vpipe.schedules.simulation.costs import ratio


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Columns as wide as their widest cell, aligned to the right but for the first ``left``."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(cell.ljust(width) if column < left else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in (head, *rows)]


def compare(found: Mapping[str, Summary | str]) -> str:
    """One line per schedule, the least bubble first; below them those that cannot be, and why.

    Args:
        found: by name, the summary or the reason.
    """
    summaries = sorted((one for one in found.values() if isinstance(one, Summary)),
                       key=lambda one: (one.timeline.bubble_s, _peak(one), one.schedule.name))
    head = ["schedule", "stages/rank", "bubble", "share", "makespan", "peak activations", "versions", "staleness"]
    rows = [[one.schedule.name, one.chunks, number(one.timeline.bubble_s), percent(one.bubble_share),
             number(one.timeline.makespan_s), _peak_text(one), str(max(stage.versions for stage in one.stages)),
             str(max(stage.staleness for stage in one.stages))] for one in summaries]
    lines = table(head, rows, left=1)
    reasons = [(name, why) for name, why in sorted(found.items()) if isinstance(why, str)]
    longest = max([len(name) for name in found], default=0)
    lines += [f"{name:{longest}}  not possible: {why}" for name, why in reasons]
    lines += ["", "peak activations: of the rank that holds most, in microbatches of a whole rank (of one stage);",
              "versions, staleness: of the stage with most"]
    streams = [one.schedule.name for one in summaries if not one.schedule.flush]
    if streams:
        lines.append(f"without a flush ({', '.join(streams)}) the bubble comes once in a run, not at every update")
    return "\n".join(lines) + "\n"


def _peak(summary: Summary) -> int | float:
    """The most that a rank holds, in microbatches of the whole rank."""
    return max(float(ratio(facts.peak_activations, len(stages_of_rank(summary.schedule.placement, rank))))
               for rank, facts in enumerate(summary.ranks))


def _peak_text(summary: Summary) -> str:
    most = max(facts.peak_activations for facts in summary.ranks)
    return number(_peak(summary)) + (f" ({most})" if summary.chunks != "1" else "")
