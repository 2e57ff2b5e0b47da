"""The job of test_trace_gloo.py, here and on every rank."""

from __future__ import annotations

from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from models import rich_batches, rich_model

from vpipe import Cut, Pipeline
from vpipe.runtime.collectives import clock_offset
from vpipe.schedules.action_record import RecordedAction


def recorded() -> dict[str, Any]:
    """A pipeline with a tie and recomputation; the offset of a clock that is as many hours ahead as the rank says."""
    pipe = Pipeline(rich_model(), lambda own: torch.optim.AdamW(own, lr=1e-2),
                    stages=Cut([2, 2, 2, 2], recompute=[0.0, 0.5, 0.0, 1.0]), schedule="pipedream", microbatches=2)
    recorders = pipe.engine.record()
    losses = [step.loss for step in pipe.train(rich_batches(2, 4))]
    notes = {rank: recorder.pop_records() for rank, recorder in recorders.items()}
    assert all(isinstance(note, RecordedAction) for own in notes.values() for note in own)
    offset_s = 0.0
    if dist.is_initialized():
        with patch("vpipe.runtime.collectives.perf_counter", lambda: perf_counter() + 3600 * dist.get_rank()):
            offset_s = clock_offset()
    return {"losses": losses, "offset_s": offset_s,
            "actions": {rank: [[f"{note.stage}{note.op.value}{note.number}", note.held_bytes, note.versions]
                               for note in own if isinstance(note, RecordedAction)] for rank, own in notes.items()},
            "waits_within_actions": all(0 <= note.waited_s <= note.end_s - note.start_s
                                        for own in notes.values() for note in own if isinstance(note, RecordedAction))}
