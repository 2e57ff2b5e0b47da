"""The trace of a run: the lines that each rank writes of its executed actions, and what these needed of each other.

``vpipe trace`` reads them without torch. The file of a rank is ``RUN/trace/rank<N>.jsonl``. Its first line is the
header, an object. Every other line is an action, ``["2F17", start_s, end_s, waited_s, held_bytes, versions]``, or one
of the objects ``{"evaluation": [start_s, end_s]}``, ``{"clock": [at_s, offset_s]}`` (to be added for the time of rank
0; one at the start, one at a regular end) and ``{"truncated": true}`` (there were more actions).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import NamedTuple

from vpipe.schedules.assignment import Assignment, Placement, Setting
from vpipe.schedules.kinds import PART, SUM, Action, Kind, with_exchanges


class RecordedAction(NamedTuple):
    """One action as it was executed: it waited until ``start_s + waited_s`` and worked until ``end_s``.

    Attributes:
        op, stage: of the action.
        number: of the microbatch, or of the stage's update or version; a resumed run counts on.
        start_s, end_s: by the ``perf_counter`` of the rank's process; in a report by a common clock.
        waited_s: the time spent waiting for another rank; in a forward or backward it comes first.
        held_bytes: activations that the rank keeps for backwards after it, and between the halves of backwards.
        versions: of its weights that the stage holds after it; 0 where the stage is on another rank (tied weights).
    """

    op: Kind
    stage: int
    number: int
    start_s: float
    end_s: float
    waited_s: float
    held_bytes: int
    versions: int

    @staticmethod
    def file_format() -> int:
        """Return the number of the file's format, which its header has."""
        return 1

    @property
    def begun_s(self) -> float:
        """Return the end of the waiting."""
        return self.start_s + self.waited_s

    @property
    def action(self) -> Action:
        return Action(self.op, self.stage, self.number)

    def to_json(self) -> str:
        op, stage, number, start_s, end_s, waited_s, held, versions = self
        return f'["{stage}{op}{number}", {start_s:.7f}, {end_s:.7f}, {waited_s:.7f}, {held}, {versions}]'


class RecordedEvaluation(NamedTuple):
    """An evaluation, whose actions are not recorded."""

    start_s: float
    end_s: float

    def to_json(self) -> str:
        return f'{{"evaluation": [{self.start_s:.7f}, {self.end_s:.7f}]}}'


class Dependencies:
    """Tell of executed actions which value of which other action each of them needed.

    A value is a key: that of the action that made it equals that of the actions that needed it.

    Args:
        placement: the ranks of every stage.
        update_every: microbatches per update with a flush; per update and replica without.
        flush: the pipeline is empty at every update.
        present: the kinds of the actions.
        slices: of every microbatch; then the number of microbatches of an update counts slices.

    Attributes:
        assignment: the microbatches of every rank and update, of which there is no last.
    """

    def __init__(self, placement: Placement, update_every: int, flush: bool, present: Collection[Kind],
                 slices: int = 1) -> None:
        self.assignment = Assignment(placement, update_every, flush, lambda number: number >= 0, slices=slices)
        # A simulated sum is a transfer, no action.
        plain = Setting(self.assignment, is_lowered=any(SUM in kind.made for kind in present))
        self._setting = with_exchanges(plain, present)

    def made(self, action: Action) -> list[Hashable]:
        """Return the values that an action made; a send of an update or a version, what it sent."""
        op, stage, index = action
        if op.transfer is not None and op.sends and not op.per_microbatch:
            return [(op.transfer.value, stage, index)]
        return [(value, stage + offset, self.assignment.update_of(stage, index) if value is PART else index)
                for value, offset in op.makes]

    def needed(self, action: Action, rank: int) -> list[Hashable]:
        """Return the values that an action needed on a rank and that others may have made."""
        op, stage, index = action
        return [needed for needed in op.needs(self._setting, stage, index, rank) if needed[0].homes is not None]

    def transferred(self, action: Action) -> tuple[Hashable, bool] | None:
        """Return the value of a microbatch that an action sent, or needed of another rank; and whether it sent it."""
        op, stage, index = action
        if not op.per_microbatch or op.receives:
            return None
        if op.transfer is not None:
            return (op.transfer.value, stage + op.transfer.value_offset, index), True
        used = [needed for needed in op.needs(self._setting, stage, index, 0) if needed[0].carrier is not None]
        return (used[0], False) if used else None
