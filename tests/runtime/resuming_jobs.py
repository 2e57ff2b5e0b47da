"""Jobs for a test world that save and load checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
from models import rich_batches

from vpipe.errors import UserError, VpipeError


def stretch(*, folder: str | None, into: str, steps: int, batches: int, cadence: int | None = None,
            model: str = "rich", samples: int = 8, **arguments: Any) -> dict[str, Any]:
    """Go on from a checkpoint, or begin; train so many steps, save, and say what was done.

    Args:
        folder: of the checkpoint to go on from.
        into: which to make.
        batches: of the whole run.
        cadence: after how many steps the pipeline runs empty.
    """
    pipe = jobs.pipeline(jobs.MODELS[model](), **arguments)
    data = rich_batches(batches, samples)
    begin = 0
    if folder is not None:
        begin = pipe.load(folder).microbatches // pipe.microbatches
    made: list[list[Any]] = []
    for step in pipe.engine.train(data[begin:], pauses=lambda before: cadence and (before // cadence + 1) * cadence):
        made.append([step.index, step.loss, step.gradient_norm])
        if len(made) == steps:
            break
    pipe.save(into)
    position = pipe.engine.position
    return {"steps": made, "state": jobs.fingerprint(pipe.state_dict()), "samples": position.samples,
            "position": [position.steps, position.microbatches, position.begun]}


def refused(*, folder: str, into: str | None = None, **arguments: Any) -> list[Any]:
    """The words with which a load is refused, or a save fails, and whether the pipeline then still trains."""
    pipe = jobs.pipeline(jobs.MODELS["rich"](), **arguments)
    try:
        if into is None:
            pipe.load(folder)
        else:
            pipe.save(into)
    except VpipeError as error:
        said = str(error).replace(str(Path(folder).parent), "FOLDER")
        return [isinstance(error, UserError), said, [step.index for step in pipe.train(rich_batches(1, 8))]]
    return ["nothing was refused"]
