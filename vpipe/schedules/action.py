"""The action of a rank in a pipeline schedule, the one record that everything reads.

The text form is that of PyTorch's pipelining (``torch.distributed.pipelining.schedules``):
``<stage><kind><index>``, so ``2F0`` is the forward of stage 2 on microbatch 0. The kinds are in
:mod:`vpipe.schedules.kinds`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from vpipe.errors import UserError
from vpipe.schedules.kinds import Kind, Op, kind_if_any, kinds

__all__ = ["Action", "Kind", "Op", "backward", "forward", "input_half", "step", "use", "weight_half"]

_TEXT = re.compile(r"(\d+)([A-Za-z_]+)(\d+)")


class Action(NamedTuple):
    """One operation of one stage. ``microbatch`` is the index of a microbatch, an update or a version, by ``op``."""

    op: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @property
    def index(self) -> int:  # type: ignore[override] # of the tuple nobody asks for a position
        """The number of the microbatch, the update or the version, as its kind counts."""
        return self.microbatch

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action written as ``text``.

        Raises:
            UserError: ``text`` is not ``<stage><kind><index>``, or there is no such kind.
        """
        match = _TEXT.fullmatch(text.strip())
        kind = None if match is None else kind_if_any(match[2])
        if match is None or kind is None:
            package = "" if match is None or len(match[2]) < 2 else \
                f"; for {match[2]} of a package install it, or name its file with --import"
            raise UserError(f"'{text}' is not an action", hint="write <stage><operation><index>, such as 2F0; "
                            f"operations: {', '.join(kind for kind in kinds() if not kind.of_model)}{package}")
        return cls(kind, int(match[1]), int(match[3]))


def forward(stage: int, microbatch: int) -> Action:
    return Action(Op.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    return Action(Op.BACKWARD, stage, microbatch)


def input_half(stage: int, microbatch: int) -> Action:
    return Action(Op.INPUT, stage, microbatch)


def weight_half(stage: int, microbatch: int) -> Action:
    return Action(Op.WEIGHT, stage, microbatch)


def use(stage: int, version: int) -> Action:
    return Action(Op.USE, stage, version)


def step(stage: int, update: int) -> Action:
    return Action(Op.STEP, stage, update)


def __getattr__(name: str) -> object:
    if name in ("SENDS", "RECEIVES", "COMPUTE", "PER_MICROBATCH", "RETURNS", "COMPLETES", "OF_MODELS"):
        raise ImportError(f"{name} is gone: ask the kind of an action, such as action.op.sends, .receives, .computes, "
                          ".per_microbatch, .returns, .completes or .of_model")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
