"""A checkpoint of a run, taken up in Python: ``Pipeline.load`` knows where in the data it is."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from small_run import losses, write_config

from vpipe.app.config.config import load_config
from vpipe.app.train.job import Job
from vpipe.app.train.loop import build_pipeline, train


@pytest.mark.parametrize(("changes", "within"), [({}, 0), ({"parallel__schedule": "pipedream",
                                                            "parallel__update_every": 2}, 2)])
def test_a_checkpoint_of_a_run_goes_on_in_a_pipeline(tmp_path: Path, changes: dict[str, Any], within: int) -> None:
    job = Job.from_config(load_config(write_config(tmp_path, checkpoint__every_steps=3, training__max_steps=6,
                                                   **changes)))
    train(job, tmp_path)
    pipe = build_pipeline(job)
    position = pipe.load(tmp_path / "checkpoints" / "step-3")
    assert (position.steps, position.begun) == (3, within)
    assert position.samples == position.microbatches * job.config.microbatch_size
    data = islice(job.training_batches(tuple(job.model.batch)), position.microbatches // pipe.microbatches, None)
    assert [step.loss for step in pipe.train(data, updates=3)] == losses(tmp_path)[3:]
