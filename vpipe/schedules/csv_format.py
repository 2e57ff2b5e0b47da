"""Read schedules from CSV files, in the form of PyTorch's pipelining.

One row per rank, one action per cell; an empty cell is a time at which the rank does nothing::

    0F0,0F1,,,0B0,0B1
    ,1F0,1B0,1F1,1B1

Files that :mod:`torch.distributed.pipelining` writes (its ``_dump_csv``, ``compute_only`` or ``compute_comms``) can be
read here. :meth:`Schedule.to_csv` writes files, :meth:`Schedule.to_torch_csv` those that its ``_load_csv`` reads.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, takewhile
from pathlib import Path

from vpipe.description.cut import Cut
from vpipe.description.order import Order, is_path
from vpipe.errors import UserError, counted, nearest
from vpipe.files import read_bounded
from vpipe.schedules import kinds
from vpipe.schedules.assignment import Placement
from vpipe.schedules.kinds import SAVED, Action, step
from vpipe.schedules.schedule import Schedule, StagePeaks, peak

LARGEST_BYTES = 8 << 20
"""A file beyond this is no schedule: 250,000 forwards and backwards with all of their transfers take 7 MB."""

LONGEST_CELL = 128

_SHARDED = re.compile(r"\d+(?:(UNSHARD|RESHARD)\d*|(REDUCE_GRAD))")
_PAIR = "OVERLAP_F_B"
_OVERLAP = re.compile(rf"\((.*)\){_PAIR}")
_ALMOST = re.compile(r"(\d+)\s*([A-Za-z_]+)\s*(\d+)")


@dataclass(frozen=True, slots=True)
class _Cell:
    """An action and where it was read."""

    action: Action
    rank: int
    column: int
    where: str

    def __str__(self) -> str:
        return f"{self.action} (rank {self.rank}, cell {self.column})"


@dataclass(frozen=True)
class CsvFile:
    """A schedule as it was read, and what its file has that a schedule here has not.

    Attributes:
        left_out: the operations that only a model can ask for, by name: how often.
        pairs: PyTorch's overlapped pairs, which were put one after the other.
    """

    schedule: Schedule
    left_out: Mapping[str, int]
    pairs: int

    @property
    def note(self) -> str | None:
        """Return in words what of the file has no place in the schedule; None for nothing."""
        said = ["left out " + ", ".join(f"{times} {name}" for name, times in self.left_out.items())
                + ": only a model's weights ask for them"] if self.left_out else []
        said += [f"{self.pairs} OVERLAP_F_B: each taken as one action after the other"] if self.pairs else []
        return f"{self.schedule.name}: {'; '.join(said)}" if said else None

    is_path = staticmethod(is_path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> CsvFile:
        """Read the schedule in a CSV file, unchanged; the checker finds what is wrong with its order.

        * The rows are the ranks; a stage lives on the rank that has its forwards. Several such ranks are replicas, in
          the order of their first microbatches.
        * A file without any STEP has a flush: every stage steps at the end of its rank's program. With STEPs, each
          is an update of as many microbatches, on every replica.
        * PyTorch's overlapped pairs, ``(0F1;3B0)OVERLAP_F_B``, are put one after the other.
        * Operations that only a model can ask for are left out: PyTorch's UNSHARD, RESHARD and REDUCE_GRAD (which has
          no index) of sharded or replicated stages, our exchanges of tied weights and of norms.
        * Transfers stay, so that the checker can prove them; see :meth:`Schedule.compute_only`.
        * The schedule states the peaks that it has as its bounds.

        Raises:
            UserError: the file cannot be read, or is no schedule; the error has the line.
        """
        try:
            state = os.stat(path)
        except (OSError, ValueError):
            return _read(Path(path))  # its error explains the path
        return _read_once(os.fspath(path), state.st_mtime_ns, state.st_size)

    @classmethod
    def ordered(cls, order: Order, cut: Cut, microbatches: int) -> Schedule:
        """Read the schedule in the file that an order names.

        Raises:
            UserError: the file cannot be read, or has other numbers than these.
        """
        file, update_every = order.schedule, order.update_every
        schedule = replace(cls.read(file).schedule, slices=order.slices or 1)
        for word, asked, there in (("stages", cut.count, schedule.stages),
                                   ("microbatches" if schedule.slices == 1 else "slices",
                                    microbatches * schedule.slices, schedule.microbatches),
                                   ("microbatches per update", update_every or schedule.update_every,
                                    schedule.update_every)):
            if asked != there:
                raise UserError(f"'{file}' is a schedule of {there} {word}, not {asked}",
                                hint=f"use {there} {word}, or another schedule")
        if order.warmup is not None:
            raise UserError(f"warmup_depth is {list(order.warmup)}, but '{file}' says the order of its actions",
                            hint="leave warmup_depth out, or take a schedule by its name")
        if cut.replicas > 1:
            raise UserError(f"{cut.replicas} replicas of the pipeline, but '{file}' says which ranks "
                            "there are", hint="leave the replicas out, or take a schedule by its name")
        if cut.placement not in (None, schedule.placement):
            raise UserError(f"'{file}' places the stages as {[list(r) for r in schedule.placement]}, not as "
                            f"{[list(r) for r in cut.placement or ()]}", hint="leave the placement out")
        return schedule


@lru_cache(maxsize=8)
def _read_once(path: str, modified_ns: int, size_bytes: int) -> CsvFile:
    return _read(Path(path))


def _read(path: Path) -> CsvFile:
    rows, computed, left_out = [], 0, Counter[str]()
    for rank, (line, cells) in enumerate(_lines(path)):
        where = f"{path}:{line}"
        rows.append([_Cell(action, rank, column, where) for column, cell in enumerate(cells, 1)
                     for action in _actions(cell.strip(), f"cell {column} of rank {rank}", where, left_out)])
        computed += sum(cell.action.op.computes for cell in rows[-1])
        if computed > Schedule.MOST_ACTIONS:
            raise UserError(f"'{path}' has more than {Schedule.MOST_ACTIONS:,} forwards and backwards",
                            hint="use fewer microbatches, stages or replicas", where=where)
    if not any(rows):
        raise UserError(f"there is no action in '{path}'", hint="write one row per rank, one action per cell, such as "
                        "0F0,0F1,0B0,0B1")
    placement = _placement(rows)
    microbatches = _microbatches(rows)
    programs = [[cell.action for cell in row] for row in rows]
    if not any(action.op.makes_version for program in programs for action in program):
        for stage, ranks in enumerate(placement):
            for rank in ranks:
                programs[rank].append(step(stage, 0))
    flush, per_update = _updates(placement, programs, microbatches, path)
    schedule = Schedule(
        path.name, placement, tuple(map(tuple, programs)), microbatches, per_update, flush,
        tuple(peak(program, SAVED) for program in programs),
        tuple(_versions([programs[rank] for rank in ranks], stage) for stage, ranks in enumerate(placement)), {})
    return CsvFile(schedule, left_out, left_out.pop(_PAIR, 0))


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Return the rows up to the last one that has an action, with their line numbers."""
    try:
        content = read_bounded(path, LARGEST_BYTES, "a schedule of a pipeline")
    except FileNotFoundError:
        raise UserError(f"there is no file '{path}'", hint="check the path; relative paths start at the "
                        "current folder") from None
    except OSError as error:
        raise UserError(f"the file '{path}' cannot be read: {error.strerror}",
                        hint="give a readable CSV file") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[:error.start].count(b"\n") + 1
        raise UserError(f"the file is not UTF-8 text: {error.reason}", hint="give a CSV file of actions",
                        where=f"{path}:{line}") from None
    reader = csv.reader(io.StringIO(text, newline=""))
    lines: list[tuple[int, list[str]]] = []
    try:
        for row in reader:
            lines.append((reader.line_num, row))
            if len(lines) > Schedule.MOST_RANKS:
                raise UserError(f"there are more than {Schedule.MOST_RANKS:,} rows", where=f"{path}:{reader.line_num}",
                                hint="every row is a rank: use fewer")
    except csv.Error as error:
        raise UserError(f"the file is not CSV: {error}", hint="write one row per rank, cells separated by "
                        "commas", where=f"{path}:{reader.line_num}") from None
    while lines and not any(cell.strip() for cell in lines[-1][1]):
        lines.pop()
    for rank, (line, row) in enumerate(lines):
        if not any(cell.strip() for cell in row):
            raise UserError(f"rank {rank} has no action", hint="every row is a rank: remove the empty row, or give the "
                            "rank a stage", where=f"{path}:{line}")
    return lines


def _actions(text: str, place: str, where: str, left_out: Counter[str]) -> Iterator[Action]:
    """Yield the actions of a cell: none, one, or those of a pair; count what is left out, and pairs."""
    if not text:
        return
    if len(text) > LONGEST_CELL:
        raise UserError(f"'{text[:20]}...' in {place} has {len(text)} characters and is not an action",
                        hint="separate actions by commas, such as 0F0,0F1", where=where)
    if (pair := _OVERLAP.fullmatch(text)) is not None:
        left_out[_PAIR] += 1
        for part in pair[1].split(";"):
            yield from _actions(part.strip(), place, where, left_out)
    elif (sharded := _SHARDED.fullmatch(text)) is not None:
        left_out[sharded[1] or sharded[2]] += 1
    else:
        try:
            action = Action.parse(text)
        except UserError as error:
            (problem,) = error.problems
            if "is not an action" not in problem.what:  # of a package
                raise UserError(problem.what, hint=problem.hint, where=where) from None
            raise UserError(f"'{text}' in {place} is not an action", hint=_remedy(text) or problem.hint,
                            where=where) from None
        if action.op.of_model:
            left_out[str(action.op)] += 1
        else:
            yield action


def _remedy(text: str) -> str | None:
    if text.startswith("("):
        return "write a pair as (0F1;3B0)OVERLAP_F_B"
    if re.search(r"\d\s*[;\t ]\s*\d", text):
        return "separate actions by commas, such as 0F0,0F1"
    if (almost := _ALMOST.fullmatch(text)) is None:
        return None
    close = nearest(almost[2].upper(), kinds.names())
    if not close.startswith("did you mean"):
        return None
    return f"did you mean '{almost[1]}{close.split(chr(39))[1]}{almost[3]}'?"


def _placement(rows: Sequence[Sequence[_Cell]]) -> Placement:
    """Place every stage on the ranks whose rows have its forwards, in the order of their first microbatches."""
    home: dict[int, _Cell] = {}
    firsts: dict[int, dict[int, int]] = defaultdict(dict)  # by stage: the first microbatch of each rank
    cells = list(chain.from_iterable(rows))
    for cell in cells:
        action = cell.action
        if action.op.uses_version:
            home.setdefault(action.stage, cell)
            there = firsts[action.stage]
            there[cell.rank] = min(action.index, there.get(cell.rank, action.index))
    for cell in cells:
        if cell.action.stage not in home:
            raise UserError(f"{cell} is of stage {cell.action.stage}, which has no forward", where=cell.where,
                            hint=f"add the forwards of that stage, such as {cell.action.stage}F0, to a row")
    if len(home) > Schedule.MOST_STAGES:
        raise UserError(f"there are {len(home)} stages", hint=f"use {Schedule.MOST_STAGES:,} at most",
                        where=rows[0][0].where)
    if (missing := next((number for number, stage in enumerate(sorted(home)) if number != stage), None)) is not None:
        last = home[max(home)]
        raise UserError(f"stage {missing} is in no row, but stage {max(home)} is: {last}",
                        hint=_numbered(len(home), "stage"), where=last.where)
    return tuple(tuple(sorted(firsts[stage], key=firsts[stage].__getitem__)) for stage in range(len(home)))


def _microbatches(rows: Sequence[Sequence[_Cell]]) -> int:
    """Return the number of microbatches, which is the most forwards that a stage has."""
    seen: dict[int, set[int]] = defaultdict(set)
    cells = [cell for cell in chain.from_iterable(rows) if cell.action.op.per_microbatch]
    for cell in cells:
        if cell.action.op.uses_version:
            seen[cell.action.stage].add(cell.action.index)
    count = max(map(len, seen.values()))
    for cell in cells:
        if cell.action.index >= count:
            raise UserError(f"{cell} is of microbatch {cell.action.index}, but no stage has more than "
                            f"{counted(count, 'forward')}", where=cell.where,
                            hint=f"{_numbered(count, 'microbatch')}, or add the missing forwards")
    return count


def _updates(placement: Placement, programs: Sequence[Sequence[Action]], microbatches: int,
             path: Path) -> tuple[bool, int]:
    """Return whether there is a flush, and the microbatches of an update; without a flush, on every replica.

    The microbatches of an update are those that a replica completes before its first STEP. The last update of
    replicas may have fewer.
    """
    steps = [sum(action.op.makes_version and action.stage == stage for action in programs[ranks[0]])
             for stage, ranks in enumerate(placement)]
    stage = steps.index(max(steps)) if steps[0] else 0  # of replicated stages those with fewer replicas step more often
    if steps[stage] == 1:
        return True, microbatches
    width, every, left = len(placement[stage]), 0, 1
    if width == 1 and steps[stage]:
        every, left = divmod(microbatches, steps[stage])
    elif steps[stage]:
        own = [action.op for action in programs[placement[stage][0]] if action.stage == stage]
        every = sum(op.completes for op in takewhile(lambda op: not op.makes_version, own))
        left = not every or microbatches % every or -(-microbatches // (every * width)) != steps[stage]
    if left:
        raise UserError(f"stage {stage} makes {counted(steps[stage], 'STEP')} from "
                        f"{counted(microbatches, 'microbatch')}" + f" on each of {width} ranks" * (width > 1) +
                        f" in '{path}'", hint="give every stage one STEP per update, each of as many microbatches; or "
                        "leave out all STEPs, for one update at the end")
    return False, every


def _numbered(count: int, word: str) -> str:
    return f"number the only {word} 0" if count == 1 else f"number the {counted(count, word)} 0 to {count - 1}"


def _versions(programs: Sequence[Sequence[Action]], stage: int) -> int:
    """Return the most weight versions that a stage holds, and enough for its staleness."""
    try:
        peaks = StagePeaks.of(programs, stage)
        return max(peaks.versions, peaks.staleness + 1)
    except KeyError:  # a backward without its forward: the checker stops there, before it looks at versions
        return 1
