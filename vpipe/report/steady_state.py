"""Choose the steps of a run to measure and the steps to draw: those in its steady state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from vpipe.report.recording import Recording
from vpipe.schedules.action import Op


@dataclass(frozen=True)
class Window:
    """A part of a run.

    Attributes:
        first: its first step.
        steps: their number; 0 where no whole step was recorded.
        start_s, end_s: its limits.
        cut: whether its only step is not in it as a whole.
    """

    first: int
    steps: int
    start_s: float
    end_s: float
    cut: bool = False

    @property
    def span_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def step_s(self) -> float:
        """Return the mean time of one of its steps."""
        return self.span_s / max(1, self.steps)


def step_ends(recording: Recording) -> dict[int, float]:
    """Return the end of each step on all ranks of stage 0, where its last backward ends; by the number of the step."""
    rounds, ends = recording.rounds, dict[int, float]()
    span, per_step = rounds.per_update(0), rounds.per_step
    seen: dict[int, int] = {}
    for rank in recording.placement[0]:
        for done in recording.tracks[rank].actions:
            if done.op is Op.STEP and done.stage == 0 and (done.number + 1) * span % per_step == 0:
                step = (done.number + 1) * span // per_step - 1
                ends[step] = max(done.end_s, ends.get(step, 0.0))
                seen[step] = seen.get(step, 0) + 1
    return {step: ends[step] for step in sorted(ends)
            if seen[step] == rounds.width(0) and ends[step] <= recording.covered_s}


def steady_window(recording: Recording) -> Window:
    """Return the window that figures are of: all whole steps without the first ones and, where the pipeline drains, the
    last.

    A run of very few steps is measured as a whole.
    """
    ends = step_ends(recording)
    numbers = list(ends)
    stages = len(recording.placement)
    begin = min(stages + 1, len(numbers) // 3)
    drain = 0 if recording.flush else min(stages, len(numbers) // 3)
    last = len(numbers) - 1 - drain
    if begin == 0 or last < begin:
        return Window(min(numbers, default=0), len(numbers), 0.0, recording.covered_s)
    return Window(numbers[begin], last - begin + 1, ends[numbers[begin - 1]], ends[numbers[last]])


def step_times(recording: Recording) -> list[float]:
    """Return the times of the steady steps that no evaluation interrupts."""
    ends, part = step_ends(recording), steady_window(recording)
    return [end - start for start, end in pairwise(ends.values())
            if part.start_s <= start and end <= part.end_s and not _evaluated(recording, start, end)]


def _evaluated(recording: Recording, start_s: float, end_s: float) -> bool:
    return any(start < end_s and start_s < end for track in recording.tracks for start, end in track.evaluations)


def typical_window(recording: Recording, most_actions: int, steps: int | None = None) -> Window:
    """Return a few steady steps in a row that take as long as such steps usually do: those that are drawn.

    Args:
        most_actions: that a rank may carry out in them. One step is drawn even with more, up to twice as many.
        steps: their number; as many as that allows when left out.
    """
    ends, part = step_ends(recording), steady_window(recording)
    if part.steps == 0 or len(ends) < 2:
        return _cut(recording, Window(part.first, len(ends), 0.0, recording.covered_s), most_actions)
    bounds = [(step, end) for step, end in ends.items() if part.start_s <= end <= part.end_s]
    if part.start_s == 0.0:
        bounds.insert(0, (part.first - 1, 0.0))
    per_step = max(1, _busiest(recording, part) / part.steps)
    steps = max(1, min(len(bounds) - 1, steps or int(most_actions / per_step)))
    found = [(bounds[at], bounds[at + steps]) for at in range(len(bounds) - steps)]
    took = step_times(recording)
    usual = steps * (median(took) if took else part.step_s)
    (before, start_s), (_, end_s) = min(found, key=lambda pair: abs(pair[1][1] - pair[0][1] - usual))
    return _cut(recording, Window(before + 1, steps, start_s, end_s), most_actions)


def _cut(recording: Recording, window: Window, most_actions: int) -> Window:
    """Return the window, shorter if it has twice as many actions as wanted."""
    ends_s = []
    for track in recording.tracks:
        ends = [done.end_s for done in track.actions
                if done.op in _DRAWN and window.start_s < done.end_s <= window.end_s]
        if len(ends) > 2 * most_actions:
            ends_s.append(ends[2 * most_actions - 1])
    return replace(window, end_s=min(ends_s), cut=True) if ends_s else window


def _busiest(recording: Recording, window: Window) -> int:
    """Return the most actions that a rank carries out in a window."""
    return max(sum(1 for done in track.actions
                   if done.op in _DRAWN and window.start_s <= done.end_s <= window.end_s)
               for track in recording.tracks)


_DRAWN = frozenset({Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT, Op.RECOMPUTE})
