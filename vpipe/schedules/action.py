"""The action of a rank in a pipeline schedule, the one record that everything reads.

The text form is that of PyTorch's pipelining (``torch.distributed.pipelining.schedules``):
``<stage><kind><index>``, so ``2F0`` is the forward of stage 2 on microbatch 0. The kinds are in
:mod:`vpipe.schedules.kinds`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from vpipe.errors import UserError
from vpipe.schedules import kinds
from vpipe.schedules.kinds import Kind, Op

__all__ = ["Action", "Kind", "Op", "RecordedAction", "RecordedEvaluation", "backward", "forward", "input_half", "step",
           "use", "weight_half"]

_TEXT = re.compile(r"(\d+)([A-Za-z_]+)(\d+)")


class Action(NamedTuple):
    """One operation of one stage on the microbatch, the update or the version with a number, as its kind counts."""

    op: Kind
    stage: int
    index: int  # type: ignore[assignment]  # of the tuple nobody asks for a position

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.index}"

    @property
    def microbatch(self) -> int:
        """The number of the microbatch, where the kind counts these."""
        return self.index

    @classmethod
    def forward(cls, stage: int, microbatch: int) -> Action:
        """Return F."""
        return cls(Op.FORWARD, stage, microbatch)

    @classmethod
    def backward(cls, stage: int, microbatch: int) -> Action:
        """Return B, a whole backward."""
        return cls(Op.BACKWARD, stage, microbatch)

    @classmethod
    def input_half(cls, stage: int, microbatch: int) -> Action:
        """Return I, the half of a backward that makes the gradients of the inputs."""
        return cls(Op.INPUT, stage, microbatch)

    @classmethod
    def weight_half(cls, stage: int, microbatch: int) -> Action:
        """Return W, the half of a backward that makes the gradients of the weights."""
        return cls(Op.WEIGHT, stage, microbatch)

    @classmethod
    def use(cls, stage: int, version: int) -> Action:
        """Return USE: the stage's next forwards use that version of its weights."""
        return cls(Op.USE, stage, version)

    @classmethod
    def step(cls, stage: int, update: int) -> Action:
        """Return STEP, the optimizer step of an update."""
        return cls(Op.STEP, stage, update)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action written as ``text``.

        Raises:
            UserError: ``text`` is not ``<stage><kind><index>``, or there is no such kind.
        """
        match = _TEXT.fullmatch(text.strip())
        kind = None if match is None else kinds.find(match[2])
        if match is None or kind is None:
            package = "" if match is None or len(match[2]) < 2 else \
                f"; for {match[2]} of a package install it, or name its file with --import"
            raise UserError(f"'{text}' is not an action", hint="write <stage><operation><index>, such as 2F0; "
                            f"operations: {', '.join(kind for kind in kinds.known() if not kind.of_model)}{package}")
        return cls(kind, int(match[1]), int(match[3]))


forward, backward, step, use = Action.forward, Action.backward, Action.step, Action.use
input_half, weight_half = Action.input_half, Action.weight_half
"""Short names, for generators."""


class RecordedAction(NamedTuple):
    """One action as it was executed: it waited until ``start_s + waited_s`` and worked until ``end_s``.

    The ranks of a run write these, ``vpipe trace`` reads them without torch. The file of a rank is
    ``RUN/trace/rank<N>.jsonl``. Its first line is the header, an object. Every other line is an action,
    ``["2F17", start_s, end_s, waited_s, held_bytes, versions]``, or one of the objects
    ``{"evaluation": [start_s, end_s]}``, ``{"clock": [at_s, offset_s]}`` (to be added for the time of rank 0; one at
    the start, one at a regular end) and ``{"truncated": true}`` (there were more actions).

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
