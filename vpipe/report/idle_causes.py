"""Find the cause of every idle second of a rank.

A rank that is idle has a next action. That action mostly needs the result of an action of another rank, its *producer*.
Let the producer's action end at e. Until e the rank could do nothing. As much of that time as the
producer's action took longer than the median of its kind on its stage is a straggler's fault; the rest is the
schedule's: its order, and unequal stages. After e the transfer is under way, as long as the rank waits
in its next action. The time between two actions after e, or without a producer, is dispatch: vpipe itself, reading
data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from vpipe.report.recording import RecordedAction, Recording, Track
from vpipe.report.steady_state import Window
from vpipe.schedules.action import COMPLETES, RECEIVES, RETURNS, SENDS, Op


class Cause(StrEnum):
    """The cause of idle time; the value is its text for readers."""

    SCHEDULE = "schedule"
    TRANSFER = "waiting for a transfer"
    STRAGGLER = "straggler"
    DISPATCH = "between actions"
    UNKNOWN = "waiting, unknown for what"


class TimeSlice(NamedTuple):
    """A part of a rank's time: at work on ``done``, or idle before it; ``cause`` is None at work.

    An evaluation is neither: both are None.
    """

    start_s: float
    end_s: float
    cause: Cause | None
    done: RecordedAction | None


class _Produced(NamedTuple):
    """The end of an action that other ranks wait for."""

    rank: int
    end_s: float
    excess_s: float  # over the median of its kind


@dataclass(frozen=True)
class Producers:
    """The actions that others wait for, and their ends.

    Attributes:
        forward: by stage and microbatch.
        returned: backwards and input halves, by stage and microbatch.
        shared: results that several ranks wait for, by operation, stage and index.
        norms: by update.
        completed: by stage, update and rank, its last gradients of weights; of replicated stages.
    """

    forward: Mapping[tuple[int, int], _Produced]
    returned: Mapping[tuple[int, int], _Produced]
    shared: Mapping[tuple[Op, int, int], list[_Produced]]
    norms: Mapping[int, list[_Produced]]
    completed: Mapping[tuple[int, int], Mapping[int, _Produced]]

    @classmethod
    def from_recording(cls, recording: Recording, simulated: bool = False) -> Producers:
        """Index the actions of a recording. In a ``simulated`` one nobody is late: durations differ only where ranks
        share cores.
        """
        usual = medians(recording)
        forward, returned = dict[tuple[int, int], _Produced](), dict[tuple[int, int], _Produced]()
        shared: dict[tuple[Op, int, int], list[_Produced]] = defaultdict(list)
        norms: dict[int, list[_Produced]] = defaultdict(list)
        completed: dict[tuple[int, int], dict[int, _Produced]] = defaultdict(dict)
        rounds = recording.rounds
        for track in recording.tracks:
            for done in track.actions:
                op, stage, index, start_s, end_s, waited_s, *_ = done
                excess_s = 0.0 if simulated else max(0.0, end_s - start_s - waited_s - usual[stage, op])
                made = _Produced(track.rank, end_s, excess_s)
                if op is Op.FORWARD:
                    forward[stage, index] = made
                elif op in RETURNS:
                    returned[stage, index] = made
                elif op in _SHARED:
                    shared[op, stage, index].append(made)
                    if op is Op.NORM:
                        norms[index].append(made)
                if op in COMPLETES and rounds.width(stage) > 1:
                    completed[stage, index // rounds.per_update(stage)][track.rank] = made
        return cls(forward, returned, shared, norms, completed)

    def awaited(self, done: RecordedAction, rank: int, last_stage: int) -> _Produced | None:
        """Return the producer that an action waited for: of several, the one that ended last."""
        op, stage, index, *_ = done
        if op is Op.FORWARD:
            return self.forward.get((stage - 1, index))
        if op in RETURNS:
            return self.returned.get((stage + 1, index)) if stage < last_stage else None
        found: list[_Produced] = []
        sums = self.shared.get((Op.REDUCE, stage, index), ())
        if op is Op.REDUCE or (op is Op.STEP and not sums):  # a simulated sum is a transfer, no action
            found += self.completed.get((stage, index), {}).values()
        elif op in (Op.NORM, Op.STEP):
            found += sums
        if op in (Op.NORM, Op.STEP):
            found += self.shared.get((Op.SEND_G, stage, index), ())
            if op is Op.STEP:
                found += self.norms.get(index, ())
        return max((made for made in found if made.rank != rank), key=lambda made: made.end_s, default=None)


_SHARED = frozenset({Op.REDUCE, Op.SEND_G, Op.NORM})


def medians(recording: Recording) -> dict[tuple[int, Op], float]:
    """Return the median seconds at work, by stage and operation."""
    taken: dict[tuple[int, Op], list[float]] = defaultdict(list)
    for track in recording.tracks:
        for op, stage, _, start_s, end_s, waited_s, *_ in track.actions:
            taken[stage, op].append(end_s - start_s - waited_s)
    return {kind: median(times) for kind, times in taken.items()}


def time_slices(recording: Recording, track: Track, producers: Producers) -> Iterator[TimeSlice]:
    """Yield all of a rank's time from second 0 on, in order and without a hole.

    It ends with the recording, or with the rank's own record where that breaks off.
    """
    last_stage, now = len(recording.placement) - 1, 0.0
    evaluations = iter(sorted(track.evaluations))
    evaluation = next(evaluations, None)
    for number, done in enumerate(track.actions):
        if done.op is Op.USE:  # takes no time
            continue
        between = Cause.DISPATCH if number else Cause.SCHEDULE  # before its first action the pipeline fills
        while evaluation is not None and evaluation[0] < done.start_s:
            start_s, end_s = max(now, evaluation[0]), min(max(now, evaluation[1]), done.start_s)
            if start_s > now:  # the rank is done while the pipeline empties
                yield TimeSlice(now, start_s, Cause.SCHEDULE, done)
            if end_s > start_s:
                yield TimeSlice(start_s, end_s, None, None)
                now = end_s
            evaluation = next(evaluations, None)
        if done.start_s > now:
            upcoming = _upcoming(track.actions, number)
            made = None if upcoming is None else producers.awaited(upcoming, track.rank, last_stage)
            yield from _idle(now, done.start_s, done, made, between)
        if done.waited_s > 0:
            made = producers.awaited(done, track.rank, last_stage)
            yield from _idle(done.start_s, done.begun_s, done, made,
                             Cause.UNKNOWN if made is None else Cause.TRANSFER)
        yield TimeSlice(done.begun_s, done.end_s, None, done)
        now = done.end_s
    if track.whole and recording.end_s > now:
        yield TimeSlice(now, recording.end_s, Cause.SCHEDULE, None)


def _upcoming(actions: Sequence[RecordedAction], number: int) -> RecordedAction | None:
    """Return the first action from ``number`` on that is no transfer."""
    while number < len(actions):
        if actions[number].op not in _HANDED:
            return actions[number]
        number += 1
    return None


_HANDED = SENDS | RECEIVES | {Op.USE}


def _idle(start_s: float, end_s: float, done: RecordedAction, made: _Produced | None,
          behind: Cause) -> Iterator[TimeSlice]:
    """Yield the causes of idle time, in order; ``behind``: the cause after the end of the producer's action."""
    if made is None:
        yield TimeSlice(start_s, end_s, behind, done)
        return
    arrives_s = min(max(made.end_s, start_s), end_s)
    late_s = min(max(made.end_s - made.excess_s, start_s), arrives_s)
    for start, end, cause in ((start_s, late_s, Cause.SCHEDULE), (late_s, arrives_s, Cause.STRAGGLER),
                              (arrives_s, end_s, behind)):
        if end > start:
            yield TimeSlice(start, end, cause, done)


@dataclass(frozen=True)
class RankTime:
    """A rank's time in seconds: ``work`` by operation and stage and ``idle`` by cause make up ``span``."""

    rank: int
    span: float
    work: Mapping[tuple[Op, int], float]
    idle: Mapping[Cause, float]

    def compute(self, of: frozenset[Op]) -> float:
        """Return the seconds at work on these operations."""
        return sum(seconds for (op, _), seconds in self.work.items() if op in of)


def rank_times(recording: Recording, window: Window, producers: Producers) -> list[RankTime]:
    """Return the ranks' times in a window; evaluations are not counted."""
    times = []
    for track in recording.tracks:
        work: dict[tuple[Op, int], float] = defaultdict(float)
        idle: dict[Cause, float] = defaultdict(float)
        span = 0.0
        for start_s, end_s, cause, done in time_slices(recording, track, producers):
            seconds = min(end_s, window.end_s) - max(start_s, window.start_s)
            if seconds <= 0:
                continue
            if cause is not None:
                idle[cause] += seconds
            elif done is not None:
                work[done.op, done.stage] += seconds
            else:
                continue
            span += seconds
        times.append(RankTime(track.rank, span, work, idle))
    return times
