"""The record of executed actions: the ranks of a run write it, ``vpipe trace`` reads it without torch.

The file of a rank is ``RUN/trace/rank<N>.jsonl``. Its first line is the header, an object. Every other line is an
action, ``["2F17", start_s, end_s, waited_s, held_bytes, versions]``, or one of the objects
``{"evaluation": [start_s, end_s]}``, ``{"clock": [at_s, offset_s]}`` (to be added for the time of rank 0; one at the
start, one at a regular end) and ``{"truncated": true}`` (there were more actions).
"""

from __future__ import annotations

from typing import NamedTuple

from vpipe.schedules.action import Action, Kind


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
