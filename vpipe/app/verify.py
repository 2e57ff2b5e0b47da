"""Compare a job with its oracles: see :mod:`vpipe.testing.differences`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe import Model, accelerator
from vpipe.app.train.job import Job, device_of
from vpipe.app.train.loop import build_pipeline
from vpipe.distributed import join_world
from vpipe.testing import Reference, Trajectory, microbatches_of_step, record, record_ranks
from vpipe.testing import references as references_of

ORACLES = "oracles.json"
"""The file with names and bounds of the oracles that processes have run which split layers."""


class SavedReference(NamedTuple):
    """What is left of a :class:`~vpipe.testing.Reference` that other processes have computed."""

    name: str
    trajectory: Trajectory
    bound: float


def batches_for_steps(job: Job, steps: int) -> int:
    """Return how many batches make at least ``steps`` steps; without a flush, enough to see every weight version."""
    least = 1 if job.schedule.flush else 2 * job.cut.count
    return -(-max(steps, least) * microbatches_of_step(job.schedule) // job.config.microbatches)


def steps_in_batches(job: Job, batches: int) -> int:
    """Return how many steps ``batches`` batches make; without a flush the last may have fewer microbatches."""
    return -(-batches * job.config.microbatches // microbatches_of_step(job.schedule))


def references(job: Job, batches: int, model: Model | None = None) -> Iterator[Reference]:
    """Yield the oracles of a job, the exact one first, computed on the job's device.

    Args:
        model: the job's, with layers that these processes split.
    """
    parts, device = job.config.parallel.tensor, make_deterministic(job)
    for found in references_of(model or job.model, job.description(device), job.schedule, _batches(job, batches),
                               device=device):
        name = found.name if model is None else found.name.replace(
            "on one device", f"on {parts} processes that split its layers")
        yield replace(found, name=name)


def lanes(job: Job, folder: Path) -> Iterator[tuple[Trajectory, list[SavedReference]]]:
    """Yield the trajectory of a run in each lane, and those of the oracles, which the ranks have saved in a folder."""
    parts, ranks = job.config.parallel.tensor, range(job.schedule.ranks)
    named = json.loads((folder / ORACLES).read_text()) if parts > 1 else []
    for lane in range(parts):
        yield (Trajectory.join({rank: Trajectory.load(folder, rank * parts + lane) for rank in ranks}),
               [SavedReference(name, Trajectory.load(folder / str(number), lane), bound)
                for number, (name, bound) in enumerate(named)])


def run_in_process(job: Job, batches: int) -> Trajectory:
    """Run all ranks of a job in this process, and return their trajectory."""
    return record(build_pipeline(job), _batches(job, batches))


def make_deterministic(job: Job) -> torch.device:
    """Return the device of a job in this process; on a GPU, let torch choose kernels that add in a fixed order."""
    device = device_of(job.config)
    accelerator.add_in_fixed_order(device)
    return device


def record_rank(job: Job, folder: Path, batches: int) -> None:
    """Run one process of a job, and save its trajectory in the folder.

    Those that split the layers of the first rank do so with their oracles, too: without a pipeline they have all
    layers.
    """
    torch.set_num_threads(1)
    make_deterministic(job)
    join_world(**job.config.parallel.joining)
    pipe = build_pipeline(job)
    [trajectory] = record_ranks(pipe, _batches(job, batches)).values()
    process, parts, named = dist.get_rank(), job.config.parallel.tensor, []
    trajectory.save(folder, process)
    if process < parts > 1:
        for number, oracle in enumerate(references(job, batches, pipe.model)):
            (folder / str(number)).mkdir(exist_ok=True)
            oracle.trajectory.save(folder / str(number), process)
            named.append([oracle.name, oracle.bound])
        if process == 0:
            (folder / ORACLES).write_text(json.dumps(named))


def first_loss(job: Job) -> tuple[float, float] | None:
    """Return the first loss with whole layers, and how far from it that with split layers may be; None where the
    schedule has updates within a step, or numbers of so few bits that nothing can be said.

    Splitting leaves all products as they are and changes the order of sums. A value is the end of a chain of sums; each
    term is rounded once, which in either computation moves the value by 2^-24 of the largest that meets it. The chain
    counted here is too long: it goes forward through the rows and columns of all parameters, and through the keys of an
    attention in every layer, and ends in the sum over the tokens.
    """
    config = job.config
    if not job.schedule.flush or config.training.precision != "fp32":
        return None
    whole = next(references(job, 1)).trajectory
    rows_and_columns = sum(sum(weight.shape) for weight in whole.values[0].values())
    roundings = rows_and_columns + (len(job.model) + config.dataset.batch_size) * config.model.sequence_length
    loss = whole.losses[0]
    return loss, 2 * roundings * 2.0 ** -24 * max(1.0, abs(loss))


def _batches(job: Job, batches: int) -> list[Mapping[str, Tensor]]:
    return list(islice(job.training_batches(job.model.batch), batches))
