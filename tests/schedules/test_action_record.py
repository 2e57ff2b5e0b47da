"""The lines that ranks write into the record of a run."""

from __future__ import annotations

import json

from vpipe.schedules.action import Op, RecordedAction, RecordedEvaluation


def test_records_are_lines_of_json() -> None:
    record = RecordedAction(Op.FORWARD, 2, 17, 1.5, 1.75, 0.125, 4096, 3)
    assert json.loads(record.to_json()) == ["2F17", 1.5, 1.75, 0.125, 4096, 3]
    assert json.loads(RecordedEvaluation(1.5, 2.0).to_json()) == {"evaluation": [1.5, 2.0]}
