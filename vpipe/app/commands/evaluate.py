"""Run ``vpipe evaluate``: compute the held-out loss of a checkpoint, in this process."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from vpipe.app.commands.checkpoint import checkpoints_in
from vpipe.app.progress import byte_progress, progress
from vpipe.app.train.job import Job
from vpipe.app.train.loop import build_pipeline, read_batches
from vpipe.app.train.resume import check_fits_job, data_settings, find_resume_point, resumed_config
from vpipe.app.train.run_folder import run_in
from vpipe.app.train.summary import evaluation_text
from vpipe.checkpoint import Checkpoint
from vpipe.errors import UserError


def run_evaluate(options: argparse.Namespace) -> None:
    """Print the loss of a run's newest checkpoint, or of one that is named, on the run's held-out data or on others.

    The weights are hashed as they are read. The device is this machine's own, and layers are whole.
    """
    checkpoints_in(folder := run_in(options.folder))  # refuses a folder without
    start = find_resume_point(folder)
    checkpoint, manifest = start.checkpoint, start.manifest
    if start.folder is None or checkpoint is None or manifest is None:
        raise UserError(f"no run made the checkpoint '{checkpoint}', so nothing says on which data",
                        hint="begin a run with it: vpipe train CONFIG --resume CHECKPOINT")
    settings = ["parallel.backend=gloo", "parallel.device=null", "parallel.tensor=1"]
    if options.data is not None:
        settings += data_settings(start.folder, options.data)
        start = replace(start, other_data=True)
    job = Job.from_config(resumed_config(start, None, settings))
    check_fits_job(start, manifest, job)
    torch.set_num_threads(job.config.training.threads)
    pipe, losses = build_pipeline(job), list[float]()
    for averaged in (False, True)[:1 + (job.config.training.average is not None)]:
        with byte_progress(f"reading {checkpoint.name}") as show:
            pipe.load_state_dict(Checkpoint(checkpoint, manifest).weights(progress=show, averaged=averaged))
        batches = progress(job.evaluation_batches(tuple(job.model.batch)), "evaluating", unit="batch",
                           total=job.config.training.evaluation_batches)
        with read_batches(batches, "evaluation batch", pipe, 0) as read:
            losses.append(pipe.evaluate(read))
    print(f"{checkpoint}: {evaluation_text(job, manifest.step, *losses)}")
