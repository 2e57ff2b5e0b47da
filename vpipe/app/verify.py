"""Compare a job with its oracles: see :mod:`vpipe.testing.differences`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from vpipe import accelerator
from vpipe.app.train.job import Job, device_of
from vpipe.app.train.loop import build_pipeline
from vpipe.distributed import join_world
from vpipe.testing import Reference, Trajectory, microbatches_of_step, record, record_ranks
from vpipe.testing import references as references_of


def batches_for_steps(job: Job, steps: int) -> int:
    """Return how many batches make at least ``steps`` steps; without a flush, enough to see every weight version."""
    least = 1 if job.schedule.flush else 2 * len(job.placement)
    return -(-max(steps, least) * microbatches_of_step(job.schedule) // job.config.microbatches)


def steps_in_batches(job: Job, batches: int) -> int:
    """Return how many steps ``batches`` batches make; without a flush the last may have fewer microbatches."""
    return -(-batches * job.config.microbatches // microbatches_of_step(job.schedule))


def references(job: Job, batches: int) -> Iterator[Reference]:
    """Yield the oracles of a job, the exact one first, computed on the job's device."""
    optimizer = job.config.training.optimizer
    return references_of(job.model, job.description, job.schedule, _batches(job, batches),
                         device=make_deterministic(job),
                         optimizer_eps=torch.finfo(torch.bfloat16).eps if optimizer == "muon" else 0.0,
                         plain=optimizer != "soap")  # it normalizes rounding errors, too


def run_in_process(job: Job, batches: int) -> Trajectory:
    """Run all ranks of a job in this process, and return their trajectory."""
    return record(build_pipeline(job), _batches(job, batches))


def make_deterministic(job: Job) -> torch.device:
    """Return the device of a job in this process; on a GPU, let torch choose kernels that add in a fixed order."""
    device = device_of(job.config)
    accelerator.add_in_fixed_order(device)
    return device


def record_rank(job: Job, folder: Path, batches: int) -> None:
    """Run one rank of a job, and save its trajectory in the folder."""
    torch.set_num_threads(1)
    make_deterministic(job)
    join_world(**job.config.parallel.joining)
    for rank, trajectory in record_ranks(build_pipeline(job), _batches(job, batches)).items():
        trajectory.save(folder, rank)


def _batches(job: Job, batches: int) -> list[Mapping[str, Tensor]]:
    return list(islice(job.training_batches(job.model.batch), batches))
