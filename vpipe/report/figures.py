"""Compute the figures of a recording, of a run or of a simulated plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from vpipe.metric_formulas import bubble
from vpipe.report.idle_causes import Cause, Producers, RankTime, medians, rank_times
from vpipe.report.recording import Recording
from vpipe.report.steady_state import Window, steady_window, step_times
from vpipe.schedules.action import COMPUTE, RETURNS, Op

WORK = COMPUTE | {Op.STEP}
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class StageFigures:
    """One stage, in seconds: of one microbatch, or of one step on each of its ranks.

    Attributes:
        forward_s, backward_s, weight_s, recompute_s: medians, of a microbatch; ``backward_s`` without a half that is in
            ``weight_s``. 0 where there is none.
        update_s: median of the optimizer step.
        transfers_s: per step, of sends and receives and of waiting for tensors under way.
        idle_s: per step, all other idle time.
        kept_bytes: the most tensors that one of its ranks kept, see :func:`memory_curves`; None where it is unknown.
        staleness: the most versions that a backward's weights were behind.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    recompute_s: float
    update_s: float
    transfers_s: float
    idle_s: float
    kept_bytes: float | None
    staleness: int


@dataclass(frozen=True)
class Figures:
    """The figures of a recording.

    Attributes:
        window: the part that they are of.
        step_s: median of a step.
        samples_per_s: in that part.
        bubble: of that part, see :func:`~vpipe.metric_formulas.bubble`.
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
        times = rank_times(recording, window, producers)
        usual, steps = medians(recording), max(1, window.steps)
        took = step_times(recording)
        step_s = median(took) if took else window.step_s
        counted_s = sum(time.span for time in times) / len(times)
        stages = []
        staleness, memory = _staleness(recording), memory_curves(recording)
        for stage, ranks in enumerate(recording.placement):
            mine = [times[rank] for rank in ranks]
            handing = sum(seconds for time in mine for (op, own), seconds in time.work.items()
                          if op not in WORK and own == stage)
            waiting = sum(time.idle.get(Cause.TRANSFER, 0.0) for time in mine)
            idle = sum(sum(time.idle.values()) for time in mine) - waiting
            per = steps * len(ranks)

            def of(op: Op, stage: int = stage) -> float:
                return usual.get((stage, op), 0.0)

            stages.append(StageFigures(
                of(Op.FORWARD), of(Op.INPUT) or of(Op.BACKWARD), of(Op.WEIGHT), of(Op.RECOMPUTE), of(Op.STEP),
                (handing + waiting) / per, idle / per,
                max((held for rank in ranks for _, held in memory.get(rank, ())), default=None), staleness[stage]))
        whole = window.steps * recording.samples_per_step
        return cls(window, step_s, whole / counted_s if counted_s else 0.0, bubble(_waiting(recording, window)), times,
                   stages, memory)

    @property
    def kept_bytes(self) -> dict[int, float]:
        """Return, by rank, the most bytes of tensors that it kept."""
        return {rank: max((held for _, held in curve), default=0.0) for rank, curve in self.memory.items()}


def _waiting(recording: Recording, window: Window) -> Iterator[tuple[float, float]]:
    """Yield for each rank the seconds of its actions in a window that it waited, and those that it worked."""
    for track in recording.tracks:
        waited = spent = 0.0
        for done in track.actions:
            if window.start_s < done.end_s <= window.end_s:
                waited, spent = waited + done.waited_s, spent + done.end_s - done.start_s
        yield waited, spent - waited


def _staleness(recording: Recording) -> list[int]:
    """Return, per stage, the most versions that a backward's weights were behind the latest.

    The first version is the one before any update. A forward uses the version that was chosen last (``USE``; a schedule
    that chooses does so from its first forward on), else the latest on its rank.
    """
    most = [0] * len(recording.placement)
    for track in recording.tracks:
        made: dict[int, int] = defaultdict(int)  # the latest version
        for op, stage, index, *_ in reversed(track.actions):
            if op is Op.STEP:
                made[stage] = index  # in the end that before the first recorded step
        chosen: dict[int, int] = {}
        used: dict[tuple[int, int], int] = {}
        for op, stage, index, *_ in track.actions:
            if op is Op.STEP:
                made[stage] = index + 1
            elif op is Op.USE:
                chosen[stage] = index
            elif op is Op.FORWARD:
                used[stage, index] = chosen.get(stage, made[stage])
            elif op in RETURNS and (stage, index) in used:
                most[stage] = max(most[stage], made[stage] - used.pop((stage, index)))
    return most


def memory_curves(recording: Recording) -> dict[int, Points]:
    """Return, by rank, (second, bytes of its kept tensors from then on).

    These are activations for backwards, weight versions, gradients and optimizer state. Ranks of which no bytes were
    recorded are left out.
    """
    curves: dict[int, Points] = {}
    for track in recording.tracks:
        if not track.weight_bytes and not any(done.held_bytes for done in track.actions):
            continue
        static, versions = sum(track.static_bytes.values()), dict.fromkeys(track.weight_bytes, 1)
        curve: list[tuple[float, float]] = []
        for done in track.actions:
            if done.op not in WORK:
                continue
            if done.stage in versions:
                versions[done.stage] = done.versions
            held = done.held_bytes + static + sum(count * track.weight_bytes[stage]
                                                  for stage, count in versions.items())
            if not curve or curve[-1][1] != held:
                curve.append((done.end_s, held))
        curves[track.rank] = curve
    return curves


def in_window(curves: Mapping[int, Points], window: Window) -> dict[int, Points]:
    """Return the curves within a window, from its beginning on."""
    cut: dict[int, Points] = {}
    for rank, curve in curves.items():
        before = [held for second, held in curve if second <= window.start_s]
        points = [(window.start_s, before[-1])] if before else []
        cut[rank] = points + [(second, held) for second, held in curve if window.start_s < second <= window.end_s]
    return cut
