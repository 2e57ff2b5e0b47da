"""The text form of actions, and of the lines that ranks write into the record of a run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vpipe.errors import UserError
from vpipe.schedules import kinds
from vpipe.schedules.kinds import Action, Op, backward, forward, input_half, step, use, weight_half
from vpipe.schedules.trace import RecordedAction, RecordedEvaluation

ACTIONS = st.builds(Action, st.sampled_from(kinds.known()), st.integers(0, 9999), st.integers(0, 10**9))


@given(ACTIONS)
def test_text_and_back(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert Action.parse(f"  {action}\n") == action


@pytest.mark.parametrize(("text", "action"), [
    ("2F0", forward(2, 0)), ("0B13", backward(0, 13)), ("3STEP1", step(3, 1)), ("1SEND_F4", Action(Op.SEND_F, 1, 4)),
    ("2I0", input_half(2, 0)), ("2W0", weight_half(2, 0)), ("1R3", Action(Op.RECOMPUTE, 1, 3)), ("1USE2", use(1, 2)),
    ("0RECV_TIED_G2", Action(Op.RECV_G, 0, 2)), ("0NORM7", Action(Op.NORM, 0, 7))])
def test_text(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2f0", "2X0", "-1F0", "2F-1", "2F0B0", "2 F 0", "2SEND0", "2SEND_G0"])
def test_bad_text(text: str) -> None:
    with pytest.raises(UserError) as raised:
        Action.parse(text)
    assert f"'{text}' is not an action" in str(raised.value)
    assert "hint: write <stage><operation><index>, such as 2F0" in str(raised.value)


def test_a_kind_that_is_not_installed() -> None:
    with pytest.raises(UserError, match="for EMA of a package install it, or name its file with --import"):
        Action.parse("2EMA0")


def test_every_operation_is_of_one_kind() -> None:
    known = set(kinds.known())
    sends, receives, computes = (
        {op for op in known if getattr(op, trait)} for trait in ("sends", "receives", "computes"))
    assert not sends & receives
    assert not computes & (sends | receives)
    copies = {op for op in known if op.host_bytes is not None}
    assert known == sends | receives | computes | copies | {
        Op.STEP, Op.USE, Op.NORM, Op.REDUCE, Op.GATHER, Op.UNSHARD, Op.RESHARD}
    assert {op for op in known if op.per_microbatch} >= computes >= {op for op in known if op.returns or op.completes}


def test_records_are_lines_of_json() -> None:
    record = RecordedAction(Op.FORWARD, 2, 17, 1.5, 1.75, 0.125, 4096, 3)
    assert json.loads(record.to_json()) == ["2F17", 1.5, 1.75, 0.125, 4096, 3]
    assert json.loads(RecordedEvaluation(1.5, 2.0).to_json()) == {"evaluation": [1.5, 2.0]}
