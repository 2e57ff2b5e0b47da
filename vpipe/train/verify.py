"""A run beside its oracle: the same few updates, and whether they give the same numbers.

With a flush the oracle is plain PyTorch on one device, without one the sequential program of
:mod:`vpipe.train.oracle`. In fp32 on one CPU thread both give the same bits. The one exception is a sum whose terms
come in another order. A weight tied across two stages has such a sum: the pipeline adds up each side's gradients
of an update before the two sides meet. The oracle does the same and must be met to the bit; plain PyTorch, which
adds the sides microbatch by microbatch, is compared within :attr:`Reference.bound`. A schedule from a file may
complete its microbatches out of order; then that bound is all that holds, for losses and norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from vpipe.errors import RunError
from vpipe.launch.world import join_world
from vpipe.model.split import split, ties_between
from vpipe.pipeline import Pipeline
from vpipe.schedules.action import COMPLETES
from vpipe.schedules.arrange import is_file
from vpipe.schedules.order import Schedule, build
from vpipe.schedules.reading import Reading
from vpipe.train.job import Job
from vpipe.train.loop import build as build_pipeline
from vpipe.train.oracle import VERSIONS, Training, VersionRule, asynchronous_oracle, flush_oracle
from vpipe.train.trail import Trail


@dataclass(frozen=True)
class Reference:
    """What a run must give.

    Attributes:
        name: of the oracle.
        trail: what it gave.
        bound: how far a loss or a norm may be from it, relatively; 0: not at all, and no weight either. Where it is
            above 0 nothing is said of the weights: an adaptive optimizer makes a whole step of the rounding of a
            gradient near 0.
    """

    name: str
    trail: Trail
    bound: float


@dataclass(frozen=True)
class Difference:
    """One update of a run beside the reference's.

    Attributes:
        update: its number.
        loss, gradient_norm: of the run; the norm before clipping.
        loss_difference, norm_difference: from the reference, relative to it.
        weight_difference: the largest of any weight after the update, absolutely; infinite where one is no number.
        weight: where that is; None when there is no difference.
    """

    update: int
    loss: float
    gradient_norm: float
    loss_difference: float
    norm_difference: float
    weight_difference: float
    weight: str | None

    def within(self, bound: float) -> bool:
        """Whether the run is as near as it must be. A number that is none (NaN) is never near."""
        near = self.loss_difference <= bound and self.norm_difference <= bound
        return near and (math.isfinite(self.weight_difference) if bound else self.weight_difference == 0)


def updates_of(job: Job, steps: int) -> int:
    """As many updates as asked, rounded up to whole batches; without a flush enough to see every weight version."""
    config = job.config
    per_batch = config.updates_per_batch
    least = 2 * len(job.placement) if config.parallel.asynchronous else 1
    return -(-max(steps, least) // per_batch) * per_batch


def references(job: Job, updates: int) -> Iterator[Reference]:
    """The oracles of a job, the exact one first."""
    config, model = job.config, job.model
    parallel, training = config.parallel, config.training
    assert not isinstance(parallel.partition, str), "a job's partition is a list"
    batches = _batches(job, updates)
    schedule = job.schedule
    rounding = 2 * training.num_microbatches * updates * torch.finfo(torch.float32).eps
    bound = 0.0 if _in_order(schedule) else rounding

    def recipe(trail: Trail) -> Training:
        return Training(job.optimizer().from_named, training.num_microbatches, training.seed, job.policy(),
                      training.grad_clip, trail)

    trail = Trail()
    if schedule.flush:
        tied = bool(ties_between(split(model, parallel.partition)))
        flush_oracle(model, batches, recipe(trail), parallel.partition if tied else None)
        yield Reference("plain PyTorch on one device" + (", tied gradients summed by stage" if tied else ""), trail,
                        bound)
        if tied:
            trail = Trail()
            flush_oracle(model, batches, recipe(trail))
            yield Reference("plain PyTorch on one device", trail, rounding)
        return
    drained = range(0, updates * schedule.update_every, schedule.microbatches) if is_file(parallel.schedule) else ()
    asynchronous_oracle(model, batches, recipe(trail), parallel.partition, schedule.update_every, drained,
                        _version_rule(parallel.schedule, schedule, updates))
    yield Reference("the sequential oracle", trail, bound)


def compare(trail: Trail, reference: Trail) -> Iterator[Difference]:
    """Every update of a run beside the reference's.

    Raises:
        RunError: it made fewer or more.
    """
    if len(trail.losses) != len(reference.losses):
        raise RunError(f"the run made {len(trail.losses)} updates, its oracle {len(reference.losses)}",
                       hint="this is a defect of vpipe: please report it")
    for update, (loss, expected) in enumerate(zip(trail.losses, reference.losses, strict=True)):
        weight, largest = None, 0.0
        values = reference.values[update]
        assert values.keys() == trail.values[update].keys(), "both train the same parameters"
        for name, value in trail.values[update].items():
            difference = _largest(value, values[name])
            if difference > largest:
                weight, largest = name, difference
        norm, expected_norm = trail.norm(update), reference.norm(update)
        yield Difference(update, loss, norm, _relative(loss, expected), _relative(norm, expected_norm), largest, weight)


def in_process(job: Job, updates: int) -> Trail:
    """What all ranks do, taking turns in this process."""
    return _observed(build_pipeline(job), job, updates)


def leave_trail(job: Job, folder: Path, updates: int) -> None:
    """What one rank of several does; it writes what it saw into the folder."""
    torch.set_num_threads(1)
    join_world(job.config.parallel.backend, job.config.parallel.timeout_s)
    pipe = build_pipeline(job)
    _observed(pipe, job, updates).save(folder, pipe.rank)


def _observed(pipe: Pipeline, job: Job, updates: int) -> Trail:
    trail = Trail()
    for worker in pipe.engine.workers.values():
        worker.observer = trail
    trail.losses += [step.loss for step in pipe.train(_batches(job, updates))]
    return trail


def _batches(job: Job, updates: int) -> list[Mapping[str, Tensor]]:
    return list(islice(job.training_batches(job.model.batch), updates // job.config.updates_per_batch))


def _version_rule(name: str, schedule: Schedule, updates: int) -> VersionRule:
    """What is known of the schedule; else, for one that a user registered or wrote into a file, what it says itself."""
    if name in VERSIONS:
        return VERSIONS[name]
    if schedule.recipe is not None:
        schedule = build(name, schedule.placement, updates * schedule.update_every, schedule.update_every)
    used = Reading.of(schedule).version
    return lambda microbatch, stage, stages, every: used[stage, microbatch]


def _in_order(schedule: Schedule) -> bool:
    """Whether every stage adds up its gradients in the order of the microbatches, as plain PyTorch does."""
    for program in schedule.programs:
        latest: dict[int, int] = {}
        for action in program:
            if action.op in COMPLETES:
                if action.microbatch < latest.get(action.stage, 0):
                    return False
                latest[action.stage] = action.microbatch
    return True


def _largest(ours: Tensor, theirs: Tensor) -> float:
    if torch.equal(ours, theirs):
        return 0.0
    difference = float((ours - theirs).abs().max())
    return math.inf if math.isnan(difference) else difference


def _relative(ours: float, theirs: float) -> float:
    return 0.0 if ours == theirs else abs(ours - theirs) / max(abs(theirs), 1e-30)
