"""Prove and simulate a schedule that is too long to list by a short one of the same pattern.

Programs of many microbatches repeat: ``F3 B0 F4 B1 F5 B2 ...``. Of such a schedule :meth:`Repeating.find` simulates one
with few microbatches and looks for two moments of one state, a *window*: what every rank does next, what is left of
what it does, and what is on its way are the same, only the microbatches are shifted. What follows the second moment
then may follow the first, so the window can be put in again, as often as is wanted: rank by rank,
``start + window + end`` of the short schedule becomes ``start + window + ... + window + end``. Schedules whose ranks do
first all forwards and then all backwards have a window of each.

What is verified, in this order:

- The programs of :func:`vpipe.schedules.build` for one and for two windows more are, action by action, those
  of the short schedule with its windows put in, on every rank; an index grows by the same number with every window.
- Those of the wanted size are, on the first and the last rank and as many between as :data:`MOST_COMPARED` actions
  allow. (To generate all of 3 million actions takes longer than all else.
  ``tests/app/visualize/test_repeating.py`` compares all ranks of every registered schedule at many sizes.)
- The short schedule keeps every rule of :func:`vpipe.schedules.check`.

Why the long one then keeps them too. The actions that have begun at a moment of the simulation need no action that
begins later; so every program is cut at such a moment into parts that need nothing of a later part. The cuts
before and after a window lie alike in the pattern, so a window that is put in needs of earlier parts what the first
needed, shifted, and that is there: the index sets of a window's actions, shifted by a window, continue those of the
windows before, and the end is shifted by all of them. No rule knows more of an index than which others are equal to it
or next to it: each action has its makers before it, the microbatches of an update are whole, versions and transfers
come in one order, no rank waits in a circle, because these hold within each part and between neighbouring parts of the
short schedule. Only counts can grow. With one window, every stage begins in it as many microbatches as it ends, and
counts repeat; with several they grow by what the first begins, and :func:`_peaks` says when that is known exactly. In a
stream the versions that are in use belong to the state as well: see :func:`_settled`.

Times are exact as well: a rank does its actions in their order, each as soon as it can, so equal states have equal
futures. Each window adds its duration to the time of everything after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, lru_cache
from math import lcm
from operator import le
from typing import Any

from vpipe.app.visualize.table import Number
from vpipe.errors import CheckError, UserError, counted
from vpipe.schedules import Action, Costs, Schedule, Timeline, build, check, outline, simulate

MOST_COMPARED = 100_000
"""Actions of the wanted size that are generated and compared: those of at least two ranks, of small schedules all."""

MOST_SIMULATED = 250_000
"""Forwards and backwards of short schedules that are tried."""

MOST_SHOWN = 20_000
"""Events in a timeline of which the middle is left out."""

_MORE = 1_000
"""Actions of a short schedule that cost nothing to speak of."""

Placement = tuple[tuple[int, ...], ...]
"""The ranks of every stage."""

Part = tuple[int, int]
"""The first position of a part of a program, and that after it."""

StepOf = Callable[[Action], int]
"""Returns what the index of an action grows by from one copy of a window to the next."""


@dataclass(frozen=True)
class Pattern:
    """A program with parts that can be put in again, each after itself.

    All actions of a kind and stage that are repeated stand in one part. Their indices grow by the same number from one
    copy to the next: by the microbatches of a window, or by the updates that these are.

    Attributes:
        program: the actions, with every part once.
        parts: what can be put in again, in order.
    """

    program: Sequence[Action]
    parts: tuple[Part, ...]
    step_of: StepOf

    @cached_property
    def growth(self) -> Sequence[int]:
        """Per action, what its index grows by when all parts are put in once: those after their own part move on."""
        growth = [0] * len(self.program)
        for first, beyond in self.parts:
            repeated = {action[:2] for action in self.program[first:beyond]}
            for position, action in enumerate(self.program[beyond:], beyond):
                if action[:2] in repeated:
                    growth[position] = self.step_of(action)
        return growth

    def repeated(self, copies: int) -> tuple[Action, ...]:
        """Return the program with every part put in ``copies`` times."""
        base = [_moved(action, copies * more) for action, more in zip(self.program, self.growth, strict=True)]
        whole, done = [], 0
        for first, beyond in self.parts:
            whole += base[done:beyond]
            steps = [(action, self.step_of(action)) for action in self.program[first:beyond]]
            whole += [_moved(action, copy * step) for copy in range(1, copies + 1) for action, step in steps]
            done = beyond
        return (*whole, *base[done:])


def _moved(action: Action, more: int) -> Action:
    return Action(action.op, action.stage, action.index + more) if more else action


def _follow(later: Sequence[Action], actions: Sequence[Action], step_of: StepOf) -> bool:
    """Tell whether ``later`` is one copy more of ``actions``."""
    return len(later) == len(actions) and all(
        two == _moved(one, step_of(one)) for one, two in zip(actions, later, strict=True))


def _parting(program: Sequence[Action], longer: Sequence[Action], start: int = 0, offset: int = 0) -> int:
    """Return the first position from ``start`` on with an action of another kind than ``longer`` has so much later."""
    pairs = zip(program[start:], longer[start + offset:], strict=False)
    return next((at for at, (one, two) in enumerate(pairs, start) if one[:2] != two[:2]),
                min(len(program), len(longer) - offset))


def _parts(program: Sequence[Action], longer: Sequence[Action], step_of: StepOf) -> tuple[Part, ...]:
    """Return the shortest parts of ``program`` that ``longer`` has once more each, up to the first that it has not."""
    parts: list[Part] = []
    at = offset = 0
    while (at := _parting(program, longer, at, offset)) < len(longer) - offset:
        here = at + offset
        size = next((size for size in range(1, min(at, len(longer) - len(program) - offset) + 1)
                     if _follow(longer[here:here + size], longer[here - size:here], step_of)), None)
        if size is None:
            break
        parts.append((at - size, at))
        offset += size
    return tuple(parts)


@dataclass(frozen=True)
class RepeatedWindow:
    """A part of a simulated schedule between two moments of one state.

    Attributes:
        parts: per rank, what begins in it.
        end_s: the second moment.
        period_s: from the first moment to the second.
    """

    parts: tuple[Part, ...]
    end_s: Number
    period_s: Number


@dataclass(frozen=True)
class Repeating:
    """A schedule as a short one with windows that are put in ``copies`` times more.

    Attributes:
        schedule: of the wanted size and with its bounds, but with the programs of the short one.
        short: the short schedule, compute actions and steps only.
        timeline: of the wanted size, with the first and the last :data:`MOST_SHOWN` events at most.
        left_out_s: the time at which the events that are left out of it begin, and that at which they end.
        patterns: per rank, its short program with the parts of the windows.
        step: the microbatches of a window.
        rank_peaks, stage_peaks: of the wanted size, as those of a :class:`~vpipe.schedules.Schedule`.
    """

    schedule: Schedule
    short: Schedule
    timeline: Timeline
    left_out_s: tuple[Number, Number]
    patterns: tuple[Pattern, ...]
    step: int
    rank_peaks: tuple[Any, ...]
    stage_peaks: tuple[Any, ...]

    @property
    def copies(self) -> int:
        """How often every window is put in."""
        return (self.schedule.microbatches - self.short.microbatches) // self.step

    @property
    def versions_used(self) -> Mapping[tuple[int, int], int]:
        """By stage and microbatch, the weight version that the forward uses; of those in the middle none."""
        assignment = self.schedule.assignment
        later = self.schedule.microbatches - self.short.microbatches  # what the end has in place of the short one's
        first = self.short.versions_used
        return {**first, **{(stage, microbatch + later): version + later // assignment.per_update(stage)
                            for (stage, microbatch), version in first.items()
                            if microbatch + later >= self.short.microbatches}}

    @classmethod
    def find(cls, name: str, placement: Placement, microbatches: int, costs: Costs, update_every: int | None = None,
             warmup: Sequence[int] | None = None) -> Repeating | None:
        """Return the schedule ``name`` as one that repeats, proved; None where no short part of it is seen to repeat.

        Args:
            costs: with overlap, and a device per rank.
            update_every, warmup: see :func:`vpipe.schedules.build`.

        Raises:
            UserError: the numbers do not fit the schedule.
            CheckError: the schedule breaks a rule.
        """
        finder = _Finder(name, placement, microbatches, costs, update_every, warmup)
        positions, ranks = len(set(placement)), finder.wanted.ranks
        ahead = max(finder.wanted.warmup or Schedule.default_warmup(list(map(len, dict.fromkeys(placement))))) + 1
        depth = max(positions, ahead) * max(map(len, placement))  # microbatches that fill the pipeline, or half of them
        simulated, tried, fitting = 0, set[int](), set[int]()
        # In a stream those in flight must have begun in the part that repeats: see _settled.
        least = depth if finder.wanted.flush else 2 * depth
        while least < microbatches:
            for step in dict.fromkeys((finder.base, lcm(finder.base, positions), lcm(finder.base, 2 * positions))):
                actions = 2 * ranks * (len(placement) // positions)  # of a microbatch
                # A few steps more, where they cost little: times settle, and a picture has more to show.
                short = least + step * max(2 * (4 * step <= depth),
                                           min(32, _MORE // (actions * step), (microbatches - least) // (4 * step)))
                short += (microbatches - short) % step
                work = actions * short
                if short not in tried and max(work, simulated) > MOST_SIMULATED:
                    return None
                if short + 2 * step <= microbatches and (step in fitting or finder.may_repeat(short, step)):
                    found = finder.of(short, step)
                    if found is not None:
                        return found
                    simulated += 0 if short in tried else work
                    tried.add(short)
                    fitting.add(step)
            least += depth if least < 4 * depth else least
        return None


def _repeated(simulated: Timeline, windows: Sequence[RepeatedWindow], patterns: Sequence[Pattern],
              copies: int) -> tuple[Timeline, tuple[Number, Number]]:
    """Return the timeline with the windows put in, its middle left out, and between which times that is."""
    later = copies * sum((window.period_s for window in windows), start=0)
    share = Fraction(simulated.makespan_s) * MOST_SHOWN / max(MOST_SHOWN, 2 * sum(map(len, simulated.events)))
    begin = min(share, windows[0].end_s)
    end = max(simulated.makespan_s - share, windows[-1].end_s)
    shown, work = [], []
    for pattern, events, own_s in zip(patterns, simulated.events, simulated.work_s, strict=True):
        places = _places(pattern.program)
        work.append(own_s + copies * sum((
            event.end_s - event.start_s for first, beyond in pattern.parts
            for event in events[bisect_left(places, first):bisect_left(places, beyond)]), start=0))
        first, beyond = pattern.parts[-1]
        growth = [*map(pattern.step_of, pattern.program[first:beyond]), *pattern.growth[beyond:]]  # of the last copy on
        last = [event._replace(action=_moved(event.action, copies * growth[place - first]),
                               start_s=event.start_s + later, end_s=event.end_s + later)
                for event, place in zip(events, places, strict=True)
                if place >= first and (event.start_s >= end or event.end_s > end)]
        shown.append((*(event for event in events if event.start_s < begin), *last))
    return replace(simulated, events=tuple(shown), transfers=(), makespan_s=simulated.makespan_s + later,
                   busy_between_s=tuple((one, two + later) for one, two in simulated.busy_between_s),
                   work_s=tuple(work)), (begin, end + later)


def _places(program: Sequence[Action]) -> list[int]:
    """Return the position in ``program`` of the action of every event: of those that take time of the rank."""
    return [position for position, action in enumerate(program) if action.op.works]


class _Finder:
    """The search for a short schedule that repeats as one of the wanted size does.

    Attributes:
        wanted: the schedule of the wanted size, without its programs.
        base: the fewest microbatches that every replica, and every update, has equally many of.
    """

    def __init__(self, name: str, placement: Placement, microbatches: int, costs: Costs, update_every: int | None,
                 warmup: Sequence[int] | None) -> None:
        self._warmup = warmup
        self.wanted, program = outline(name, placement, microbatches, update_every, warmup)
        self._every = None if self.wanted.flush else self.wanted.update_every
        self.base = lcm(*map(len, placement)) if self.wanted.flush else self.wanted.assignment.per_step
        self._simulated = lru_cache(maxsize=1)(lambda short: (one := self._build(short), simulate(one, costs)))
        self._wanted = cache(lambda rank: tuple(program(rank)))

    def _step_of(self, step: int) -> StepOf:
        assignment = self.wanted.assignment
        return lambda action: step if action.op.per_microbatch else step // assignment.per_update(action.stage)

    def _program(self, rank: int, microbatches: int) -> tuple[Action, ...]:
        _, program = outline(self.wanted.name, self.wanted.placement, microbatches, self._every, self._warmup)
        return tuple(program(rank))

    def _build(self, microbatches: int) -> Schedule:
        return build(self.wanted.name, self.wanted.placement, microbatches, self._every, warmup=self._warmup)

    def may_repeat(self, short: int, step: int) -> bool:
        """Tell whether three ranks of so short a schedule repeat, before anything large is made."""
        step_of, ranks = self._step_of(step), self.wanted.ranks
        for rank in {0, ranks // 2, ranks - 1}:
            try:
                own, longer = self._program(rank, short), self._program(rank, short + step)
            except UserError:  # no such size
                return False
            pattern = Pattern(own, _parts(own, longer, step_of), step_of)
            if pattern.repeated((self.wanted.microbatches - short) // step) != self._wanted(rank):
                return False
        return True

    def of(self, short: int, step: int) -> Repeating | None:
        """Return the schedule as one of ``short`` microbatches and repetitions of ``step``; None where it is not."""
        ranks, copies = self.wanted.ranks, (self.wanted.microbatches - short) // step
        schedule, timeline = self._simulated(short)
        once, twice = self._build(short + step), self._build(short + 2 * step)
        step_of = self._step_of(step)
        windows = _Windows(schedule, once, timeline, step_of).find()
        if windows is None:
            return None
        patterns = [Pattern(program, tuple(window.parts[rank] for window in windows), step_of)
                    for rank, program in enumerate(schedule.programs)]
        if any(pattern.repeated(1) != one or pattern.repeated(2) != two
               for pattern, one, two in zip(patterns, once.programs, twice.programs, strict=True)):
            return None
        several = max(2, MOST_COMPARED // len(self._wanted(0)))
        for rank in {round(number * (ranks - 1) / (several - 1)) for number in range(several)}:
            if patterns[rank].repeated(copies) != self._wanted(rank):
                return None
        peaks = _peaks(schedule, once, len(windows), step, copies)
        if peaks is None or not _continues(patterns) or not (
                self.wanted.flush or (len(windows) == 1 and all(map(_settled, patterns)))):
            return None
        check(schedule)
        wanted = replace(self.wanted, programs=schedule.programs)
        # Of the wanted size the bounds may be lower than those that the short one keeps.
        for rank, (held, bound) in enumerate(zip(peaks[0], wanted.peak_activations, strict=True)):
            if held.peak_activations > bound:
                raise CheckError(f"schedule '{wanted.name}': rank {rank} holds the activations of "
                                 f"{counted(held.peak_activations, 'microbatch-stage')}; the schedule states at most "
                                 f"{bound}", hint="run backwards before forwards, or state a higher peak")
        for stage, (held, bound) in enumerate(zip(peaks[1], wanted.versions, strict=True)):
            if held.versions > bound:
                raise CheckError(f"schedule '{wanted.name}': stage {stage} holds "
                                 f"{counted(held.versions, 'weight version')}; the schedule states at most {bound}",
                                 hint="let fewer microbatches be in flight at a step, or state more versions")
        return Repeating(wanted, schedule, *_repeated(timeline, windows, patterns, copies), tuple(patterns), step,
                         *peaks)


def _continues(patterns: Sequence[Pattern]) -> bool:
    """Tell whether repeated parts have every index that their copies step over, equally often, on all ranks together.

    An action of one kind stands in one window only: else its copies in the first would reach into the second.
    """
    found: dict[tuple[object, int, int], Counter[int]] = defaultdict(Counter)
    for pattern in patterns:
        for window, (first, beyond) in enumerate(pattern.parts):
            for action in pattern.program[first:beyond]:
                step = pattern.step_of(action)
                found[action[:2], window, step][action.index % max(1, step)] += 1
    return len(found) == len({kind for kind, _, _ in found}) and all(
        len(times) == step and len(set(times.values())) == 1 for (_, _, step), times in found.items())


def _settled(pattern: Pattern) -> bool:
    """Tell whether what is in flight before the part of a stream began, and chose its weights, as the part does."""
    [(first, beyond)], program = pattern.parts, pattern.program
    began: dict[tuple[int, int], int] = {}
    for position, action in enumerate(program[:first]):
        if action.op.per_microbatch:
            began.setdefault(action[1:], position)
    left = [began[action[1:]] for action in program[first:] if action.op.per_microbatch and action[1:] in began]
    earliest = min([first, *left]) - (beyond - first)  # one part more has its choice of weights
    return earliest >= 0 and _follow(program[earliest + beyond - first:beyond], program[earliest:first],
                                     pattern.step_of)


def _peaks(schedule: Schedule, once: Schedule, windows: int, step: int,
           copies: int) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Return the peaks of a schedule with its windows put in ``copies`` times; None where they are not known exactly.

    With one window a stage begins in it as many microbatches as it ends, so nothing grows. With several, a peak is the
    highest of sums that grow evenly with the copies: once it grows as fast as any could, by all microbatches of a
    window on all stages of the rank, it does so for ever.
    """
    ranks, stages = schedule.rank_peaks, schedule.stage_peaks
    if windows == 1:
        return ranks, stages
    grown = []
    for rank, (peaks, more) in enumerate(zip(ranks, once.rank_peaks, strict=True)):
        own = schedule.stages_of(rank)
        most = len(own) * step // len(schedule.placement[own[0]])
        pairs = list(zip(astuple(peaks), astuple(more), strict=True))
        if any(later and later - now != most for now, later in pairs):
            return None
        grown.append(type(peaks)(*(now + copies * (later - now) for now, later in pairs)))
    return (tuple(grown), stages) if {astuple(peaks) for peaks in stages} == {(1, 0)} else None


class _Windows:
    """The search for the windows of a simulated schedule that a longer one has once more."""

    def __init__(self, schedule: Schedule, longer: Schedule, timeline: Timeline, step_of: StepOf) -> None:
        self._programs, self._longer, self._step_of = schedule.programs, longer.programs, step_of
        self._step = longer.microbatches - schedule.microbatches
        self._events = timeline.events
        self._places = list(map(_places, schedule.programs))
        self._starts = [[event.start_s for event in events] for events in timeline.events]
        self._flights = [each for each in timeline.transfers if each.start_s < each.end_s]
        self._arrivals = [each.end_s for each in self._flights]
        self._longest = max((each.end_s - each.start_s for each in self._flights), default=0)

    def find(self) -> tuple[RepeatedWindow, ...] | None:
        """Return the windows; None where there are none."""
        windows: list[RepeatedWindow] = []
        done = offsets = [0] * len(self._programs)
        while True:
            parting = [_parting(*each) for each in zip(self._programs, self._longer, done, offsets, strict=True)]
            if all(len(longer) == at + offset
                   for longer, at, offset in zip(self._longer, parting, offsets, strict=True)):
                return tuple(windows)
            window = self._before(parting, done, offsets)
            if window is None:
                return None
            windows.append(window)
            done = [beyond for _, beyond in window.parts]
            offsets = [offset + beyond - first for offset, (first, beyond) in zip(offsets, window.parts, strict=True)]

    def _before(self, parting: Sequence[int], done: Sequence[int], offsets: Sequence[int]) -> RepeatedWindow | None:
        """Return a window that ends before any rank begins what the longer schedule does otherwise."""
        common = [bisect_left(places, at) for places, at in zip(self._places, parting, strict=True)]
        if not all(common):
            return None
        end_s, rank = min((events[count - 1].end_s, rank) for rank, (events, count) in
                          enumerate(zip(self._events, common, strict=True)))
        state, beyond = self._state(end_s)
        *earlier, last = self._events[rank][:bisect_left(self._starts[rank], end_s)]
        same = [event for event in earlier if event.action[:2] == last.action[:2]]
        for event in reversed(same[-self._step:]):
            period = last.start_s - event.start_s
            before, first = self._state(end_s - period)
            parts = tuple(zip(first, beyond, strict=True))
            if before == state and all(map(le, done, first)) and self._repeats(parts, offsets):
                return RepeatedWindow(parts, end_s, period)
        return None

    def _repeats(self, parts: Sequence[Part], offsets: Sequence[int]) -> bool:
        """Tell whether the longer schedule has every part once more after it."""
        return any(first < beyond for first, beyond in parts) and all(
            _follow(longer[beyond + offset:2 * beyond - first + offset], longer[first + offset:beyond + offset],
                    self._step_of)
            for longer, (first, beyond), offset in zip(self._longer, parts, offsets, strict=True))

    def _state(self, moment: Number) -> tuple[object, tuple[int, ...]]:
        """Return what is left at a moment of actions and of transfers, and before which actions the ranks stand."""
        cursors = [bisect_left(starts, moment) for starts in self._starts]
        left = [max(0, events[cursor - 1].end_s - moment) if cursor else 0
                for events, cursor in zip(self._events, cursors, strict=True)]
        # What waits for a link follows from these: a link takes its transfers in the order of the programs.
        begin, end = (bisect_left(self._arrivals, at) for at in (moment, moment + self._longest + 1))
        flying = sorted((each.source, each.target, each.end_s - moment) for each in self._flights[begin:end]
                        if each.start_s <= moment < each.end_s)
        return (left, flying), tuple(
            places[cursor] if cursor < len(places) else len(program)
            for places, cursor, program in zip(self._places, cursors, self._programs, strict=True))
