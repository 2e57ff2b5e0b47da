"""Compute the figures of a recording, of a run or of a simulated plan, over the steps of its steady state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from vpipe.app.metric_formulas import bubble
from vpipe.app.report.idle_causes import Cause, Producers, medians, time_slices
from vpipe.app.report.recording import Recording
from vpipe.schedules import kinds

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Window:
    """A part of a run.

    Attributes:
        first: its first step.
        steps: their number; 0 where no whole step was recorded.
        start_s, end_s: its limits.
        cut: whether it ends before its only step does.
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
    """Return by number the end of each step: of the last backward on all ranks of the first stage that trains."""
    assignment, ends, seen = recording.dependencies.assignment, dict[int, float](), Counter[int]()
    first, per_step = recording.frozen, assignment.per_step
    per_update = assignment.per_update(first)
    for rank in recording.placement[first]:
        for done in recording.tracks[rank].actions:
            if done.op.makes_version and done.stage == first and (done.number + 1) * per_update % per_step == 0:
                step = (done.number + 1) * per_update // per_step - 1
                ends[step] = max(done.end_s, ends.get(step, 0.0))
                seen[step] += 1
    return {step: ends[step] for step in sorted(ends)
            if seen[step] == assignment.width(first) and ends[step] <= recording.recorded_until_s}


def steady_window(recording: Recording) -> Window:
    """Return the window to measure: all whole steps but the first ones and, where the pipeline drains, the last ones.

    A run of very few steps is measured as a whole.
    """
    ends = step_ends(recording)
    numbers, stages = list(ends), len(recording.placement)
    begin = min(stages + 1, len(numbers) // 3)
    drain = 0 if recording.flush else min(stages, len(numbers) // 3)
    last = len(numbers) - 1 - drain
    if begin == 0 or last < begin:
        return Window(min(numbers, default=0), len(numbers), 0.0, recording.recorded_until_s)
    return Window(numbers[begin], last - begin + 1, ends[numbers[begin - 1]], ends[numbers[last]])


def step_times(recording: Recording) -> list[float]:
    """Return the times of the steady steps that no evaluation interrupts."""
    ends, steady = step_ends(recording), steady_window(recording)
    evaluations = [evaluation for track in recording.tracks for evaluation in track.evaluations]
    return [end - start for start, end in pairwise(ends.values())
            if steady.start_s <= start and end <= steady.end_s
            and not any(begun < end and start < ended for begun, ended in evaluations)]


def typical_window(recording: Recording, most_actions: int, steps: int | None = None) -> Window:
    """Return the window to draw: steady steps in a row that take as long as such steps usually do.

    Args:
        most_actions: of a rank. One step is drawn even with more, up to twice as many.
        steps: their number; as many as ``most_actions`` allows when left out.
    """
    ends, steady = step_ends(recording), steady_window(recording)
    if steady.steps == 0 or len(ends) < 2:
        return _cut(recording, Window(steady.first, len(ends), 0.0, recording.recorded_until_s), most_actions)
    bounds = [(step, end) for step, end in ends.items() if steady.start_s <= end <= steady.end_s]
    if steady.start_s == 0.0:
        bounds.insert(0, (steady.first - 1, 0.0))
    busiest = max(sum(done.op.computes and steady.start_s <= done.end_s <= steady.end_s for done in track.actions)
                  for track in recording.tracks)
    steps = max(1, min(len(bounds) - 1, steps or int(most_actions / max(1, busiest / steady.steps))))
    took = step_times(recording)
    usual = steps * (median(took) if took else steady.step_s)
    (before, start_s), (_, end_s) = min(zip(bounds, bounds[steps:], strict=False),
                                        key=lambda pair: abs(pair[1][1] - pair[0][1] - usual))
    return _cut(recording, Window(before + 1, steps, start_s, end_s), most_actions)


def _cut(recording: Recording, window: Window, most_actions: int) -> Window:
    """Return the window, shorter if it has twice as many actions as wanted."""
    cuts_s = []
    for track in recording.tracks:
        ends = [done.end_s for done in track.actions
                if done.op.computes and window.start_s < done.end_s <= window.end_s]
        if len(ends) > 2 * most_actions:
            cuts_s.append(ends[2 * most_actions - 1])
    return replace(window, end_s=min(cuts_s), cut=True) if cuts_s else window


@dataclass(frozen=True)
class RankTime:
    """A rank's time in seconds: ``work`` by operation and stage and ``idle`` by cause make up ``whole``."""

    rank: int
    whole: float
    work: Mapping[tuple[kinds.Kind, int], float]
    idle: Mapping[Cause, float]

    @property
    def compute(self) -> float:
        """Return the seconds of forwards and backwards."""
        return sum(seconds for (op, _), seconds in self.work.items() if op.computes and op.is_own)

    @property
    def update(self) -> float:
        """Return the seconds of optimizer steps."""
        return sum(seconds for (op, _), seconds in self.work.items() if op.makes_version)

    @property
    def others(self) -> float:
        """Return the seconds of actions of kinds that packages have added."""
        return sum(seconds for (op, _), seconds in self.work.items() if op.works and not op.is_own)


def rank_times(recording: Recording, window: Window, producers: Producers) -> list[RankTime]:
    """Return the ranks' times in a window; evaluations are not counted."""
    times = []
    for track in recording.tracks:
        work: dict[tuple[kinds.Kind, int], float] = defaultdict(float)
        idle: dict[Cause, float] = defaultdict(float)
        whole = 0.0
        for start_s, end_s, cause, done in time_slices(recording, track, producers):
            seconds = min(end_s, window.end_s) - max(start_s, window.start_s)
            if seconds <= 0 or (cause is None and done is None):
                continue
            if cause is not None:
                idle[cause] += seconds
            elif done is not None:
                work[done.op, done.stage] += seconds
            whole += seconds
        times.append(RankTime(track.rank, whole, work, idle))
    return times


@dataclass(frozen=True)
class StageFigures:
    """The figures of a stage, in seconds: of one microbatch, or of one step on each of its ranks.

    Attributes:
        forward_s, backward_s, weight_s, recompute_s: medians, of a microbatch; ``backward_s`` without a half that is in
            ``weight_s``. 0 where there is none.
        update_s: median of the optimizer step.
        others_s: per step, of kinds that packages have added.
        transfers_s: per step, of sends and receives and of waiting for tensors under way.
        idle_s: per step, all other idle time.
        kept_bytes: the most tensors that one of its ranks kept, see :func:`memory_curves`; None where it is unknown.
        staleness: the most versions that a backward's weights were older than the latest.
        mean_delay: the mean of that, over all backwards that were recorded from forward on.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    recompute_s: float
    update_s: float
    others_s: float
    transfers_s: float
    idle_s: float
    kept_bytes: float | None
    staleness: int
    mean_delay: float


@dataclass(frozen=True)
class Figures:
    """The figures of a recording.

    Attributes:
        window: the part that they are of.
        step_s: median of a step.
        samples_per_s: in that part.
        bubble: of that part, see :func:`~vpipe.app.metric_formulas.bubble`.
        ranks: work and idle time.
        stages: in order.
        memory: by rank, see :func:`memory_curves`.
    """

    window: Window
    step_s: float
    samples_per_s: float
    bubble: float
    ranks: Sequence[RankTime]
    stages: Sequence[StageFigures]
    memory: Mapping[int, Points]

    @classmethod
    def from_recording(cls, recording: Recording, producers: Producers) -> Figures:
        window = steady_window(recording)
        times, took = rank_times(recording, window, producers), step_times(recording)
        usual, staleness, memory = medians(recording), _staleness(recording), memory_curves(recording)
        stages = []
        for stage, ranks in enumerate(recording.placement):
            mine = [times[rank] for rank in ranks]
            handing = sum(seconds for time in mine for (op, own), seconds in time.work.items()
                          if not op.works and own == stage)
            others = sum(seconds for time in mine for (op, own), seconds in time.work.items()
                         if op.works and not op.is_own and own == stage)
            waiting = sum(time.idle.get(Cause.TRANSFER, 0.0) for time in mine)
            idle = sum(sum(time.idle.values()) for time in mine) - waiting
            per = max(1, window.steps) * len(ranks)
            forward, backward, split, weight, recompute, update = (
                usual.get((stage, kinds.having(trait)), 0.0) for trait in (
                    "uses_version", "whole_backward", "first_half", "second_half", "recomputation", "makes_version"))
            kept = max((held for rank in ranks for _, held in memory.get(rank, ())), default=None)
            stages.append(StageFigures(forward, split or backward, weight, recompute, update, others / per,
                                       (handing + waiting) / per, idle / per, kept, max(staleness[stage], default=0),
                                       fmean(staleness[stage] or [0])))
        samples, span_s = window.steps * recording.samples_per_step, sum(time.whole for time in times) / len(times)
        return cls(window, median(took) if took else window.step_s, samples / span_s if span_s else 0.0,
                   bubble(_waiting(recording, window)), times, stages, memory)

    @property
    def kept_bytes(self) -> dict[int, float]:
        """Return, by rank, the most bytes of tensors that it kept."""
        return {rank: max((held for _, held in curve), default=0.0) for rank, curve in self.memory.items()}


def _waiting(recording: Recording, window: Window) -> Iterator[tuple[float, float]]:
    """Yield for each rank the seconds of its actions in a window that it waited, and those that it worked."""
    for track in recording.tracks:
        inside = [done for done in track.actions if window.start_s < done.end_s <= window.end_s]
        waited = sum(done.waited_s for done in inside)
        yield waited, sum(done.end_s - done.start_s for done in inside) - waited


def _staleness(recording: Recording) -> list[list[int]]:
    """Return, per stage, how many versions older than the latest the weights of every backward were.

    The first version is the one before any update. A forward uses the version that was chosen last (``USE``; a schedule
    that chooses does so from its first forward on), else the latest on its rank.
    """
    delays: list[list[int]] = [[] for _ in recording.placement]
    for track in recording.tracks:
        latest: dict[int, int] = {}  # by stage; at first the version before the first recorded step
        chosen: dict[int, int] = {}
        for op, stage, index, *_ in track.actions:
            if op.makes_version:
                latest.setdefault(stage, index)
        used: dict[tuple[int, int], int] = {}
        for op, stage, index, *_ in track.actions:
            if op.makes_version:
                latest[stage] += 1
            elif op.chooses:
                chosen[stage] = index
            elif op.uses_version:
                used[stage, index] = chosen.get(stage, latest.get(stage, 0))
            elif op.returns and (stage, index) in used:
                delays[stage].append(latest.get(stage, 0) - used.pop((stage, index)))
    return delays


def memory_curves(recording: Recording) -> dict[int, Points]:
    """Return, by rank, (second, bytes of its kept tensors from then on).

    These are activations for backwards, weight versions, gradients and optimizer state. Ranks of which no bytes were
    recorded are left out.
    """
    curves: dict[int, Points] = {}
    for track in recording.tracks:
        if not track.weight_bytes and not any(done.held_bytes for done in track.actions):
            continue
        static = sum(track.static_bytes.values())
        curves[track.rank] = [(second, activations + versions + static)
                              for second, activations, versions in track.kept_bytes()]
    return curves


def in_window(curves: Mapping[int, Points], window: Window) -> dict[int, Points]:
    """Return the curves within a window, from its beginning on."""
    cut: dict[int, Points] = {}
    for rank, curve in curves.items():
        before = [held for second, held in curve if second <= window.start_s]
        points = [(window.start_s, before[-1])] if before else []
        cut[rank] = points + [(second, held) for second, held in curve if window.start_s < second <= window.end_s]
    return cut
