"""A schedule as a value: where the stages live, the actions of every rank, and what these use and hold.

What an action takes, leaves and frees stands in the row of its kind (:mod:`vpipe.schedules.kinds`). A step makes the
next weight version, and a USE chooses the one that the following forwards use. Without any that is the latest.
"""

from __future__ import annotations

import csv
import io
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

from vpipe.description.cut import Placement
from vpipe.errors import CheckError, UserError, counted
from vpipe.schedules.assignment import Assignment, Setting, default_warmup, describe_rank, passes, stages_of_rank
from vpipe.schedules.costs import Number
from vpipe.schedules.graph import Graph, Spot
from vpipe.schedules.kinds import HALF, KEPT, RECOMPUTED, SAVED, UPDATED, Action, Kind, Needed, Value, with_exchanges

MARK = "<-- here"
SIDE = 8  # columns on either side of the mark: with transfers, a screen holds about this many
MOST_ROWS, NEAR = 32, 3  # of more ranks those near a mark are shown


@dataclass(frozen=True)
class Schedule:
    """Hold one list of actions per rank, and the bounds that the checker proves for them.

    Attributes:
        name: of the registered schedule, or of the file.
        placement: ranks per stage; with several, they take turns.
        programs: actions per rank.
        microbatches: how many flow through; where they are cut into slices, how many slices.
        update_every: microbatches per optimizer step; without a flush, on every replica.
        flush: the pipeline is empty at every step.
        peak_activations: per rank, microbatch-stages whose activations it may hold at once.
        versions: per stage, weight versions it may hold at once.
        ties: stages that borrow a stage's tied weights, by owning stage.
        stream: these programs are the beginning of a stream, which the generator registered as ``name`` continues.
        warmup: of a stream, per stage, how many forwards of a replica precede its first backward; otherwise empty.
        frozen: how many stages from the first on train nothing: they have no backwards (:func:`~.builder.freeze`).
        slices: of every microbatch, along its sequence; what counts microbatches above then counts slices.
    """

    MOST_STAGES: ClassVar[int] = 1024
    MOST_RANKS: ClassVar[int] = 16_384
    MOST_MICROBATCHES: ClassVar[int] = 65_536
    MOST_ACTIONS: ClassVar[int] = 250_000
    """Forwards and backwards of a schedule whose actions are listed: to prove it takes half a minute and 300 MB."""

    name: str
    placement: Placement
    programs: tuple[tuple[Action, ...], ...]
    microbatches: int
    update_every: int
    flush: bool
    peak_activations: tuple[int, ...]
    versions: tuple[int, ...]
    ties: Mapping[int, tuple[int, ...]]
    stream: bool = False
    warmup: tuple[int, ...] = ()
    frozen: int = 0
    slices: int = 1

    default_warmup = staticmethod(default_warmup)

    @staticmethod
    def check_work(ranks: int, microbatches: int, chunks: int = 1, *, replicated: bool = False, why: str = "",
                   most: int = MOST_ACTIONS) -> None:
        """Refuse a schedule that takes too long to prove, before any of it is made.

        Args:
            ranks: of all replicas.
            replicated: some are replicas. Their sums cost no more than what is counted.
            why: explains the number of microbatches, where nobody asked for it.

        Raises:
            UserError: with the numbers.
        """
        actions = 2 * ranks * microbatches * chunks
        if actions > most:
            raise UserError(f"{counted(ranks, 'rank')} and {counted(microbatches, 'microbatch')}{why} are {actions:,} "
                            f"forwards and backwards{' or parts of sums' * replicated}",
                            hint=f"stay below {most:,}: use fewer microbatches, stages or replicas")

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def ranks(self) -> int:
        return len(self.programs)

    @cached_property
    def assignment(self) -> Assignment:
        """The microbatches of every replica and of every update."""
        return Assignment(self.placement, self.update_every, self.flush, range(self.microbatches).__contains__,
                          self.frozen, self.slices)

    @cached_property
    def setting(self) -> Setting:
        """What the rows of :mod:`vpipe.schedules.kinds` ask about the pipeline."""
        plain = Setting(self.assignment, self.ties, lambda owner, index: self.versions_used.get((owner, index), 0),
                        self.is_lowered)
        return with_exchanges(plain, self.kinds)

    @cached_property
    def graph(self) -> Graph:
        """Which action waits for which."""
        return Graph(self.programs, self.setting, self.kinds)

    @property
    def steps_begun(self) -> int:
        """Return how many steps beyond the last finished one any rank of a stream may have begun.

        Those of as many microbatches as the replicas of a stage hold in flight, and with several replicas those of the
        next update, which one replica may have ended before another ends this one, and the next forward of each.
        """
        widest = max(map(len, self.placement))
        in_flight = max(len(ranks) * self.peak_activations[rank] for ranks in self.placement for rank in ranks)
        in_flight += (self.update_every + 1) * widest * (widest > 1)
        return -(-in_flight // self.assignment.per_step)

    @property
    def unit(self) -> str:
        """Name what its actions are of, for messages."""
        return "microbatch" if self.slices == 1 else "slice"

    @cached_property
    def kinds(self) -> set[Kind]:
        """Return the kinds of its actions."""
        return {action.op for program in self.programs for action in program}

    @property
    def is_lowered(self) -> bool:
        """Tell whether there are transfers or sums; without any, actions wait directly for each other."""
        return any(kind.transfer is not None or kind.summed for kind in self.kinds)

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """Stage and microbatch of every backward that comes in two halves."""
        return frozenset((stage, index) for program in self.programs for op, stage, index in program
                         if op.returns and not op.completes)

    @property
    def offloaded_stages(self) -> set[int]:
        """Return the stages of which saved activations are put elsewhere, such as on the host."""
        return {action.stage for program in self.programs for action in program
                if action.op.memory is not None and SAVED in action.op.memory.frees and not action.op.returns}

    @cached_property
    def rank_peaks(self) -> tuple[RankPeaks, ...]:
        """The most that every rank ever holds; the schedule must have passed the checker."""
        return tuple(RankPeaks(peak(program, SAVED, frozen=self.frozen), peak(program, HALF, frozen=self.frozen))
                     for program in self.programs)

    @cached_property
    def stage_peaks(self) -> tuple[StagePeaks, ...]:
        """The most that every stage ever holds, likewise."""
        return tuple(StagePeaks.of([self.programs[rank] for rank in ranks], stage, self.frozen)
                     for stage, ranks in enumerate(self.placement))

    @cached_property
    def versions_used(self) -> Mapping[tuple[int, int], int]:
        """By stage and microbatch, the weight version that the forward uses."""
        return {(stage, microbatch): version for program in self.programs
                for stage, microbatch, version in versions_used(program)}

    def meaning(self, kind: Kind) -> str:
        """Return what ranks must have in common to mean the same by a kind: its row, and what its actions here need."""
        needs = [(rank, action, *kind.needs(self.setting, action.stage, action.index, rank))
                 for rank, program in enumerate(self.programs) for action in program if action.op == kind]
        row = zlib.crc32(repr((kind.makes, kind.memory, needs)).encode())
        return f"{kind} ({kind.name}, of each {kind.counts}, {kind.runs}, {row:08x})"

    @property
    def partial_gradients(self) -> list[tuple[str, str]]:
        """Why the gradient of a microbatch is not made whole, by one backward: every reason, and what to do instead."""
        remedy = "choose a schedule with a flush and whole backwards, such as gpipe or 1f1b"
        return [(why, instead) for there, why, instead in (
            (not self.flush, f"'{self.name}' has no flush: gradients are added over several versions of a parameter",
             remedy),
            (self.split_backwards, f"'{self.name}' splits the backward: gradients of weights are made later, without "
             "autograd", remedy),
            (self.slices > 1, "each slice of a microbatch has a backward of its own", "leave the slices out")) if there]

    @property
    def recomputed_stages(self) -> set[int]:
        """The stages of which something is recomputed before its backward."""
        return {stage for program in self.programs for stage, _ in recomputations(program)}

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that live on a rank, in order."""
        return stages_of_rank(self.placement, rank)

    def describe(self, rank: int) -> str:
        """Return a rank with its stages for messages: ``rank 2 (stage 2)``."""
        return describe_rank(self.placement, rank)

    def passes(self, rank: int) -> int:
        """Return how many stages of a rank the same microbatch passes, at most; see :func:`passes`."""
        return passes(self.placement, rank)

    def updates(self, stage: int) -> int:
        """Return the number of updates of a stage; the last may have fewer microbatches."""
        return -(-self.microbatches // self.assignment.per_update(stage))

    def actions(self) -> Iterator[tuple[Action, Spot]]:
        """Yield every action with its spot, rank after rank."""
        for rank, program in enumerate(self.programs):
            for position, action in enumerate(program):
                yield action, (rank, position)

    def of_stage(self, stage: int, rank: int) -> Iterator[tuple[Action, Spot]]:
        """Yield the actions of a stage on a rank in order, with their spots."""
        for position, action in enumerate(self.programs[rank]):
            if action.stage == stage:
                yield action, (rank, position)

    def replicas(self) -> Iterator[tuple[int, int]]:
        """Yield every stage with each of its ranks."""
        for stage, ranks in enumerate(self.placement):
            for rank in ranks:
                yield stage, rank

    def end(self, rank: int) -> Spot:
        return rank, len(self.programs[rank])

    def said(self, action: Action) -> str:
        """Return an action for messages, such as ``0F3``; where there are slices, ``0F3 (microbatch 1, slice 1)``."""
        sliced = action.op.per_microbatch and self.slices > 1
        return f"{action} ({self.assignment.name_of(action.index)})" if sliced else str(action)

    def error(self, what: str, hint: str, *marks: Spot, cursors: Sequence[int] | None = None) -> CheckError:
        """Return the error that a rule raises: what is wrong, the grid with ``marks``, the remedy."""
        error = CheckError(f"schedule '{self.name}': {what}\n{draw_grid(self.programs, marks, cursors)}", hint=hint)
        error.marks = marks
        return error

    def with_programs(self, programs: Sequence[Sequence[Action]]) -> Schedule:
        """Return the same schedule with other programs; this one, with its graph, where they are the same."""
        rows = tuple(map(tuple, programs))
        return self if rows == self.programs else replace(self, programs=rows)

    def compute_only(self) -> Schedule:
        """Return the schedule with what a generator yields: no transfers, no exchanges."""
        return self.with_programs([[action for action in program if action.op.generated] for program in self.programs])

    def to_csv(self) -> str:
        """Return the schedule as the text of a CSV file; see :mod:`vpipe.schedules.csv_format`."""
        return _csv(self.programs)

    def to_torch_csv(self) -> str:
        """Return the schedule as the text of a CSV file that PyTorch's ``_PipelineScheduleRuntime._load_csv`` runs.

        It has the forwards and backwards only: PyTorch adds the transfers, its caller steps the optimizer, and its
        modules recompute within their backward (:mod:`torch.utils.checkpoint`). Any placement with one rank per stage
        will do.

        Raises:
            UserError: PyTorch cannot run it: it has no flush, replicated stages, or a last stage that takes
                microbatches out of turn, whose losses PyTorch numbers in the order in which they come.
        """
        if not self.flush:
            raise UserError(f"'{self.name}' updates weights before its pipeline is empty, and PyTorch's runtime can "
                            "neither update within a schedule nor keep an older version of the weights",
                            hint="take a schedule with a flush, such as zb_v; vpipe train runs this one")
        if self.slices > 1:
            raise UserError(f"'{self.name}' cuts every microbatch into {self.slices} slices, which PyTorch's runtime "
                            "knows nothing of", hint="take it without slices; vpipe train runs this one")
        for stage, ranks in enumerate(self.placement):
            if len(ranks) > 1:
                raise UserError(f"stage {stage} has {len(ranks)} replicas, ranks {', '.join(map(str, ranks))}, but in "
                                "PyTorch's runtime a stage has one rank", hint=_one_rank_per_stage(self.placement))
        (last,), end = self.placement[-1], self.stages - 1
        turns = [action.index for action in self.programs[last]
                 if action.op.uses_version and action.stage == end]
        if (late := next((turn for turn, microbatch in enumerate(turns) if turn != microbatch), None)) is not None:
            raise UserError(f"stage {end}, the last, takes microbatch {turns[late]} in turn {late}, but PyTorch's "
                            f"runtime would take its loss for that of microbatch {late}",
                            hint="let the last stage take the microbatches from the first to the last one")
        return _csv([action for action in program if not action.op.torch] for program in self.programs)


def _one_rank_per_stage(placement: Placement) -> str:
    if sum(map(len, set(placement))) > len({rank for ranks in placement for rank in ranks}):  # copies of other stages
        return ("take a schedule that places every stage once, such as zb_v, or dualpipe_v in place of dualpipe; vpipe "
                "train runs this one")
    return ("take the schedule without replicas, and wrap the modules of its stages in DistributedDataParallel or "
            "fully_shard there")


def _csv(programs: Iterable[Sequence[Action]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(programs)
    return text.getvalue()


def draw_grid(programs: Sequence[Sequence[Action]], marks: Collection[Spot],
              cursors: Sequence[int] | None = None) -> str:
    """Return one row per rank, columns aligned, the marked actions followed by ``<-- here``.

    Long programs are cut to a window of :data:`SIDE` columns on either side, many ranks to those near a mark.

    Args:
        programs: actions per rank.
        marks: where to put the mark.
        cursors: the position in the middle of each rank's window; without it every rank is shown as far
            into its program as the first mark is into its own, since ranks have different numbers of transfers.
    """
    ranks = max([len(programs), *(rank + 1 for rank, _ in marks)])
    rows = [[str(action) for action in programs[rank]] if rank < len(programs) else [] for rank in range(ranks)]
    for rank, position in marks:
        rows[rank] += ["end"] if position == len(rows[rank]) else []
        rows[rank][position] += f" {MARK}"
    longest = max(map(len, rows), default=0)
    if longest <= 2 * SIDE + 1:
        cells = [[*row, *[""] * (longest - len(row))] for row in rows]
    else:
        rank, position = min(marks, default=(0, 0))
        abreast = [position * len(row) // max(1, len(rows[rank])) for row in rows]
        middles = cursors or [dict(marks).get(rank, middle) for rank, middle in enumerate(abreast)]
        cells = [_window(row, middle) for row, middle in zip(rows, middles, strict=True)]
    shown = list(range(ranks))
    if ranks > MOST_ROWS:
        near = {rank for marked, _ in marks for rank in range(marked - NEAR, marked + NEAR + 1)} & set(shown)
        shown = sorted(near)[:MOST_ROWS]
    widths = [max(map(len, column)) for column in zip(*(cells[rank] for rank in shown), strict=True)]
    label, lines = len(f"rank {ranks - 1}"), []
    for before, rank in zip([-1, *shown], [*shown, ranks], strict=True):
        lines += ["..."] * (rank > before + 1)
        if rank < ranks:
            line = " ".join(cell.ljust(width) for cell, width in zip(cells[rank], widths, strict=True))
            lines.append(f"{f'rank {rank}':{label}} {line}".rstrip())
    return "\n".join(lines)


def _window(row: Sequence[str], middle: int) -> list[str]:
    first, last = middle - SIDE, middle + SIDE + 1
    cells = [row[column] if 0 <= column < len(row) else "" for column in range(first, last)]
    return ["..." if first > 0 else "", *cells, "..." if last < len(row) else ""]


# -- what programs use and hold ---------------------------------------------------------------------------

SizeOf = Callable[[Value, int, int], Number]
"""The size of a value of a stage and an index while it is held."""

@dataclass(slots=True)
class VersionRegister:
    """The versions of a stage on one rank: the number of the latest, 0 at first, and the chosen one."""

    latest: int = 0
    chosen: int | None = None

    @property
    def in_use(self) -> int:
        return self.latest if self.chosen is None else self.chosen

    def follow(self, action: Action) -> None:
        if action.op.makes_version:
            self.latest += 1
        elif action.op.chooses:
            self.chosen = action.index


def versions_used(program: Iterable[Action]) -> Iterator[tuple[int, int, int]]:
    """Yield the stage and microbatch of every forward, with the weight version that it uses."""
    registers: dict[int, VersionRegister] = defaultdict(VersionRegister)
    for action in program:
        if action.op.uses_version:
            yield action.stage, action.index, registers[action.stage].in_use
        elif action.op.touches_versions:
            registers[action.stage].follow(action)


@dataclass(frozen=True)
class RankPeaks:
    """The most that a rank ever holds."""

    peak_activations: int  # microbatch-stages between their forward and the passing of their gradient (B or I)
    peak_weight_halves: int  # microbatch-stages between their I and their W


@dataclass(frozen=True)
class StagePeaks:
    """The most that a stage ever holds; see :func:`stage_loads`."""

    versions: int
    staleness: int

    @classmethod
    def of(cls, programs: Iterable[Sequence[Action]], stage: int, frozen: int = 0) -> StagePeaks:
        loads = [load for program in programs for _, *load in stage_loads(program, stage, frozen)]
        return cls(*map(max, zip(*loads, strict=True)))


def stage_loads(program: Iterable[Action], stage: int, frozen: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yield the position of each forward, backward, half, step and USE of ``stage``, its versions, and its staleness.

    The weight versions are those from the one in use to the latest, since a later forward may use any of them, and
    those that microbatches in flight use; each of the ``frozen`` stages in front needs no version beyond the forward.
    The staleness is latest version - version used when a gradient passes; otherwise 0.
    """
    register = VersionRegister()
    pinned: dict[int, int] = {}  # version by microbatch in flight
    users: Counter[int] = Counter()  # microbatches in flight by version
    for position, action in enumerate(program):
        op, own, microbatch = action
        if own != stage or not op.touches_versions:
            continue
        staleness = 0
        if op.uses_version:
            if stage >= frozen:
                pinned[microbatch] = register.in_use
                users[register.in_use] += 1
        else:
            register.follow(action)
        if op.returns:
            staleness = register.latest - pinned[microbatch]
        if op.completes:
            used = pinned.pop(microbatch)
            users[used] -= 1
            if not users[used]:
                del users[used]
        oldest = register.in_use
        older = len(users) - (oldest in users)  # versions are used in order
        yield position, register.latest - oldest + 1 + older, staleness


def recomputations(program: Sequence[Action]) -> set[tuple[int, int]]:
    """Return (stage, microbatch) of everything that ``program`` recomputes before the backward."""
    return {(action.stage, action.index) for action in program
            if action.op.memory is not None and RECOMPUTED in action.op.memory.takes}


def count_of(*values: Value) -> SizeOf:
    """Return a size function that counts some values."""
    return lambda value, stage, index: value in values


def peak(program: Iterable[Action], *values: Value, frozen: int = 0) -> int:
    """Return the most values of these that a rank holds at once; see :func:`moments`."""
    return int(max(moment.size for moment in moments(program, count_of(*values), frozen)))


class Moment(NamedTuple):
    """What a rank holds once an action has changed it.

    Attributes:
        position: of the action in the program, -1 at the beginning.
        at_start: it is the start of the action: a forward and a recomputation, also one within a backward, take memory
            as they start.
        held: how many there are of each value of a stage and an index; until the next moment.
        size: of all of them.
    """

    position: int
    at_start: bool
    held: Mapping[Needed, int]
    size: Number


def moments(program: Iterable[Action], size: SizeOf, frozen: int = 0, versions: Iterable[int] = ()) -> Iterator[Moment]:
    """Yield what a rank holds at the beginning, and whenever an action may change it.

    The ``frozen`` stages in front of the pipeline save nothing. The weight versions of the stages in ``versions`` count
    as so many of :data:`~vpipe.schedules.kinds.UPDATED` at index 0.
    """
    held = {(UPDATED, stage, 0): 1 for stage in versions}
    counts = {position: count for _, stage, _ in held for position, count, _ in stage_loads(program, stage, frozen)}
    total: Number = sum(size(*key) for key in held)
    yield Moment(-1, True, held, total)
    waiting: dict[int, Needed] = {}  # by index
    for position, (op, stage, index) in enumerate(program):
        changes = dict[Needed, int]()
        if op.uses_version:
            if index in waiting:
                changes[waiting.pop(index)] = 0
            if size(KEPT, stage, index):
                waiting[index] = KEPT, stage, index
                changes[KEPT, stage, index] = 1
        memory = op.memory if stage >= frozen else None
        if stage >= frozen and position in counts:
            changes[UPDATED, stage, 0] = counts[position]
        if memory is not None:
            changes |= {(value, stage, index): 1 for value in memory.takes + memory.leaves}
            changes |= {(value, stage, index): 0 for value in memory.frees}
        if not changes:
            continue
        again = RECOMPUTED, stage, index
        if op.returns and again not in held and (more := size(*again)):
            held[again] = 1
            total += more
            yield Moment(position, True, held, total)
        for key, count in changes.items():
            total += (count - held.pop(key, 0)) * size(*key)
            if count:
                held[key] = count
        yield Moment(position, op.memory is not None and bool(op.memory.takes), held, total)
