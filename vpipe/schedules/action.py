"""The action of a rank in a pipeline schedule, the one record that everything reads.

The text form is that of PyTorch's pipelining (``torch.distributed.pipelining.schedules``):
``<stage><operation><index>``, so ``2F0`` is the forward of stage 2 on microbatch 0.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from vpipe.errors import UserError


class Op(StrEnum):
    """The operation of an action; the value is its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"  # first half of a backward: the gradients of the inputs
    WEIGHT = "W"  # second half: the gradients of the weights
    RECOMPUTE = "R"  # recompute dropped activations now, ahead of the backward
    STEP = "STEP"  # optimizer step of a stage: makes its next weight version; the index is the update's
    USE = "USE"  # forwards from here on use this weight version; without any, the latest; the index is the version
    REDUCE = "REDUCE_GRAD"  # sum a stage's gradients over its replicas; the index is the update's
    NORM = "NORM"  # publish the norms of a stage's gradients, for clipping by the global norm; index: the update's
    SEND_F = "SEND_F"  # output activations to the next stage
    RECV_F = "RECV_F"  # input activations from the previous stage
    SEND_B = "SEND_B"  # input gradients to the previous stage
    RECV_B = "RECV_B"  # output gradients from the next stage
    # Weights tied across ranks. The stage is the one that owns the weight, on both sides.
    SEND_W = "SEND_TIED_W"  # owner: a weight version to the ranks that borrow it; the index is the version
    RECV_W = "RECV_TIED_W"  # borrower: that version
    SEND_G = "SEND_TIED_G"  # borrower: its gradient of an update to the owner; the index is the update
    RECV_G = "RECV_TIED_G"  # owner: that gradient from every borrower


SENDS = frozenset({Op.SEND_F, Op.SEND_B, Op.SEND_W, Op.SEND_G})
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B, Op.RECV_W, Op.RECV_G})
COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT, Op.RECOMPUTE})
PER_MICROBATCH = COMPUTE | {Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B}
RETURNS = frozenset({Op.BACKWARD, Op.INPUT})  # they take the gradient of the output and make that of the input
COMPLETES = frozenset({Op.BACKWARD, Op.WEIGHT})  # they complete the weight gradients of a microbatch
OF_MODELS = frozenset({Op.NORM, Op.SEND_W, Op.RECV_W, Op.SEND_G, Op.RECV_G})
"""Operations that only a model asks for, with tied weights or clipping; no file has to contain them."""

# Longest first, so that F does not match the end of SEND_F.
_TEXT = re.compile(rf"(\d+)({'|'.join(sorted((op.value for op in Op), key=len, reverse=True))})(\d+)")


class Action(NamedTuple):
    """One operation of one stage. ``microbatch`` is the index of a microbatch, an update or a version, by ``op``."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action written as ``text``.

        Raises:
            UserError: ``text`` is not ``<stage><operation><index>``.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise UserError(f"'{text}' is not an action",
                            hint="write <stage><operation><index>, such as 2F0; operations: "
                                 + ", ".join(op.value for op in Op if op not in OF_MODELS))
        return cls(Op(match[2]), int(match[1]), int(match[3]))


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
