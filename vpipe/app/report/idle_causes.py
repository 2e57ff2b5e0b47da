"""Find the cause of every idle second of a rank.

A rank that is idle has a next action. That action mostly needs the result of an action of another rank, its *producer*.
Let the producer's action end at e. Until e the rank could do nothing. As much of that time as the producer's action
took longer than the median of its kind on its stage is a straggler's fault; the rest is the schedule's: its order, and
unequal stages. After e the transfer is under way, as long as the rank waits in its next action. The time between two
actions after e, or without a producer, is dispatch: vpipe itself, reading data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from vpipe.app.report.recording import Recording, Track
from vpipe.schedules import Dependencies, RecordedAction, kinds


class Cause(StrEnum):
    """The cause of idle time; the value is its text for readers."""

    SCHEDULE = "schedule"
    TRANSFER = "waiting for a transfer"
    STRAGGLER = "straggler"
    DISPATCH = "between actions"
    UNKNOWN = "waiting, unknown for what"


class TimeSlice(NamedTuple):
    """A part of a rank's time: at work on ``done`` (no ``cause``), idle before it, or an evaluation (both are None)."""

    start_s: float
    end_s: float
    cause: Cause | None
    done: RecordedAction | None


class _Produced(NamedTuple):
    """The end of an action that other ranks wait for, and its seconds over the median of its kind."""

    rank: int
    end_s: float
    excess_s: float


@dataclass(frozen=True)
class Producers:
    """The actions that others wait for, by the value that they make or send, its stage and its index."""

    made: Mapping[Hashable, Sequence[_Produced]]
    dependencies: Dependencies

    @classmethod
    def from_recording(cls, recording: Recording, simulated: bool = False) -> Producers:
        """Index the actions of a recording.

        In a ``simulated`` one no action is late: durations differ only where ranks share cores.
        """
        usual, dependencies = medians(recording), recording.dependencies
        made: dict[Hashable, list[_Produced]] = defaultdict(list)
        for track in recording.tracks:
            for done in track.actions:
                op, stage, _, start_s, end_s, waited_s, *_ = done
                excess_s = 0.0 if simulated else max(0.0, end_s - start_s - waited_s - usual[stage, op])
                produced = _Produced(track.rank, end_s, excess_s)
                for value in dependencies.made(done.action):
                    made[value].append(produced)
        return cls(made, dependencies)

    def awaited(self, done: RecordedAction, rank: int) -> _Produced | None:
        """Return the producer that an action waited for: of several, the one that ended last."""
        found = [made for needed in self.dependencies.needed(done.action, rank)
                 for made in self.made.get(needed, ()) if made.rank != rank]
        return max(found, key=lambda made: made.end_s, default=None)


def medians(recording: Recording) -> dict[tuple[int, kinds.Kind], float]:
    """Return the median seconds at work, by stage and operation."""
    taken: dict[tuple[int, kinds.Kind], list[float]] = defaultdict(list)
    for track in recording.tracks:
        for op, stage, _, start_s, end_s, waited_s, *_ in track.actions:
            taken[stage, op].append(end_s - start_s - waited_s)
    return {kind: median(times) for kind, times in taken.items()}


def time_slices(recording: Recording, track: Track, producers: Producers) -> Iterator[TimeSlice]:
    """Yield all of a rank's time from second 0 on, in order and without a hole.

    It ends with the recording, or with the rank's own record where that breaks off.
    """
    now = 0.0
    evaluations = iter(sorted(track.evaluations))
    evaluation = next(evaluations, None)
    for number, done in enumerate(track.actions):
        if done.op.chooses:  # takes no time
            continue
        while evaluation is not None and evaluation[0] < done.start_s:
            start_s, end_s = max(now, evaluation[0]), min(max(now, evaluation[1]), done.start_s)
            if start_s > now:  # the rank is done while the pipeline empties
                yield TimeSlice(now, start_s, Cause.SCHEDULE, done)
            if end_s > start_s:
                yield TimeSlice(start_s, end_s, None, None)
                now = end_s
            evaluation = next(evaluations, None)
        if done.start_s > now:
            # The next action that waits for something itself.
            upcoming = next((later for at in range(number, len(track.actions))
                             if (later := track.actions[at]).op.transfer is None and not later.op.chooses), None)
            made = None if upcoming is None else producers.awaited(upcoming, track.rank)
            # Before the first action of a rank the pipeline fills.
            yield from _idle(now, done.start_s, done, made, Cause.DISPATCH if number else Cause.SCHEDULE)
        if done.waited_s > 0:
            made = producers.awaited(done, track.rank)
            after = Cause.TRANSFER if made is not None else Cause.SCHEDULE if done.op.sends else Cause.UNKNOWN
            yield from _idle(done.start_s, done.begun_s, done, made, after)
        yield TimeSlice(done.begun_s, done.end_s, None, done)
        now = done.end_s
    if track.reaches_end and recording.end_s > now:
        yield TimeSlice(now, recording.end_s, Cause.SCHEDULE, None)


def _idle(start_s: float, end_s: float, done: RecordedAction, made: _Produced | None,
          after: Cause) -> Iterator[TimeSlice]:
    """Yield the causes of idle time, in order; ``after`` is the cause after the end of the producer's action."""
    if made is None:
        yield TimeSlice(start_s, end_s, after, done)
        return
    arrives_s = min(max(made.end_s, start_s), end_s)
    late_s = min(max(made.end_s - made.excess_s, start_s), arrives_s)
    for start, end, cause in ((start_s, late_s, Cause.SCHEDULE), (late_s, arrives_s, Cause.STRAGGLER),
                              (arrives_s, end_s, after)):
        if end > start:
            yield TimeSlice(start, end, cause, done)
