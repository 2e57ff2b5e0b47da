"""What ranks in processes of their own record, and by how much their clocks differ."""

from __future__ import annotations

from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from models import rich_batches, rich_model
from world import World

from vpipe import Cut, Pipeline
from vpipe.runtime.collectives import clock_offset
from vpipe.schedules.trace import RecordedAction


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
            "actions": {rank: [[f"{note.stage}{note.op}{note.number}", note.held_bytes, note.versions]
                               for note in own if isinstance(note, RecordedAction)] for rank, own in notes.items()},
            "waits_within_actions": all(0 <= note.waited_s <= note.end_s - note.start_s
                                        for own in notes.values() for note in own if isinstance(note, RecordedAction))}


def test_ranks_record_themselves_and_find_how_their_clocks_differ(world: World) -> None:
    alone = recorded()
    results = world.run(recorded)
    for rank, result in enumerate(results):
        assert result["losses"] == alone["losses"]
        assert result["actions"].keys() == {str(rank)}
        assert result["actions"][str(rank)] == alone["actions"][rank], "what is done, and what is held after it"
        assert result["waits_within_actions"]
        # A clock that is an hour ahead per rank; both ways of the quickest answer take no minute.
        assert abs(result["offset_s"] + 3600 * rank) < 60
