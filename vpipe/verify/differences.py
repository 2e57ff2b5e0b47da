"""A run beside its oracle: the same few updates, and whether they give the same numbers.

With a flush the oracle is plain PyTorch on one device (in a reduced precision under ``torch.autocast``, or with rounded
layers and master weights), without one the sequential program of :mod:`vpipe.verify.reference`. On one CPU thread both
give the same bits, in any precision. The one exception is a sum whose terms come in another order. A weight tied across
two stages has such a sum: the pipeline adds up each side's gradients of an update before the two sides meet; so does a
stage with several replicas, which adds up those of each. The oracle does the same and must be met to the bit; plain
PyTorch, which goes microbatch by microbatch, is compared within :attr:`Reference.bound`. A schedule from a file may
complete its microbatches out of order; then that bound is all that holds, for losses and norms. The replicas of a stage
must equal each other in any case.

With compression the oracle codes and decodes at the cuts what the pipeline sends. Then it is all or nothing: where a
sum differs in its last bit, a number between two codes becomes another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from vpipe.config.sections import TrainingSection
from vpipe.errors import RunError, UserError
from vpipe.model.split import split, ties_between
from vpipe.pipeline import Pipeline
from vpipe.runtime.compress import Compression
from vpipe.runtime.executor import last_first
from vpipe.schedules.action import COMPLETES
from vpipe.schedules.arrange import is_file
from vpipe.schedules.order import Schedule, build
from vpipe.schedules.reading import Reading
from vpipe.train.device import join
from vpipe.train.job import Job
from vpipe.train.loop import build as build_pipeline
from vpipe.verify.arithmetic import Arithmetic
from vpipe.verify.compression import Crossing
from vpipe.verify.reference import asynchronous_oracle, flush_oracle
from vpipe.verify.reference_optimizer import Training, uncompressed
from vpipe.verify.reference_versions import VERSIONS, VersionRule
from vpipe.verify.trajectory import Trail

_DEFECT = "this is a defect of vpipe: please report it"


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
    """One step of a run beside the reference's.

    Without a flush, stages of different widths make several updates in a step; then all of them count.

    Attributes:
        step: its number.
        loss, gradient_norm: of the run; the norm before clipping, of all the step's updates.
        loss_difference, norm_difference: from the reference, relative to it; norms that are both not finite, such as
            those of an update that an overflow made impossible, do not differ: the weights say what came of it.
        weight_difference: the largest of any weight after any update, absolutely; infinite where one is no number.
        weight: where that is; None when there is no difference.
    """

    step: int
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


def batches_of(job: Job, steps: int) -> int:
    """Batches for as many steps as asked or a few more; without a flush enough to see every weight version."""
    least = 1 if job.schedule.flush else 2 * len(job.placement)
    return -(-max(steps, least) * _microbatches_of_step(job) // job.config.training.num_microbatches)


def steps_of(job: Job, batches: int) -> int:
    """How many steps so many batches make; without a flush the last may have fewer microbatches than the others."""
    return -(-batches * job.config.training.num_microbatches // _microbatches_of_step(job))


def references(job: Job, batches: int) -> Iterator[Reference]:
    """The oracles of a job, the exact one first."""
    config, model, schedule = job.config, job.model, job.schedule
    parallel, training, partition = config.parallel.standing_in, config.training, job.partition
    widths = [len(ranks) for ranks in job.placement]
    data, microbatches = _batches(job, batches), batches * training.num_microbatches
    arithmetic = arithmetic_of(training)
    rounding = _rounding(arithmetic, training.num_microbatches) * steps_of(job, batches)
    # The executor that turns the backwards of gpipe round keeps gradients apart and adds them in order.
    bound = 0.0 if _in_order(schedule) or last_first(parallel.executor, parallel.schedule) else rounding
    compression = Compression.of(parallel.compress, parallel.compress_rounding, parallel.compress_feedback,
                                 len(partition), training.seed)
    if compression is not None and bound:
        raise UserError(f"'{parallel.schedule}' completes microbatches out of order, and with parallel.compress there "
                        "is no bound to compare within", hint="verify it with parallel.compress=none")
    cross = uncompressed if compression is None else Crossing(model, partition, job.placement, compression)

    def recipe(trail: Trail) -> Training:
        return Training(job.optimizer().from_named, training.num_microbatches, training.seed, job.policy(),
                        training.grad_clip, trail, cross, training.on_nan == "skip", arithmetic)

    trail = Trail()
    if schedule.flush:
        regrouped = [what for what, there in (("tied gradients summed by stage", ties_between(split(
            model, partition))), ("gradients summed by replica", max(widths) > 1),
            ("tensors coded at the cuts", compression is not None)) if there]
        flush_oracle(model, data, recipe(trail), partition if regrouped else None,
                     widths if regrouped else None)
        plain = f"plain PyTorch{arithmetic.words} on one device"
        yield Reference(", ".join([plain, *regrouped]), trail, bound)
        if regrouped and compression is None:
            trail = Trail()
            flush_oracle(model, data, recipe(trail))
            yield Reference(plain, trail, rounding)
        return
    drained = range(0, microbatches, schedule.microbatches) if is_file(parallel.schedule) else ()
    asynchronous_oracle(model, data, recipe(trail), partition, schedule.update_every, drained,
                        _version_rule(parallel.schedule, schedule, microbatches), widths)
    yield Reference(f"the sequential oracle{arithmetic.words}", trail, bound)


def compare(trail: Trail, reference: Trail) -> Iterator[Difference]:
    """Every step of a run beside the reference's.

    Raises:
        RunError: it made fewer or more, or a stage made fewer or more updates.
    """
    if len(trail.losses) != len(reference.losses):
        raise RunError(f"the run made {len(trail.losses)} steps, its oracle {len(reference.losses)}", hint=_DEFECT)
    if other := sorted(trail.updates() ^ reference.updates()):
        update, name = other[0]
        who = "run, but not its oracle," if other[0] in trail.updates() else "oracle, but not the run,"
        raise RunError(f"the {who} made update {update} of {name}", hint=_DEFECT)
    for step, made in enumerate(reference.made):
        weight, largest = None, 0.0
        for update, name in made:
            difference = _largest(trail.values[update][name], reference.values[update][name])
            if difference > largest:
                weight, largest = name, difference
        loss, norm = trail.losses[step], trail.norm(made)
        theirs = reference.norm(made)
        off = 0.0 if not math.isfinite(norm) and not math.isfinite(theirs) else _relative(norm, theirs)
        yield Difference(step, loss, norm, _relative(loss, reference.losses[step]), off, largest, weight)


def in_process(job: Job, batches: int) -> Trail:
    """What all ranks do, taking turns in this process."""
    return Trail.joined(_observed(build_pipeline(job), job, batches))


def leave_trail(job: Job, folder: Path, batches: int) -> None:
    """What one rank of several does; it writes what it saw into the folder."""
    torch.set_num_threads(1)
    join(job.config)
    for rank, trail in _observed(build_pipeline(job), job, batches).items():
        trail.save(folder, rank)


def _observed(pipe: Pipeline, job: Job, batches: int) -> dict[int, Trail]:
    """What each rank of this process sees of its training."""
    trails = {rank: Trail() for rank in pipe.engine.workers}
    for rank, worker in pipe.engine.workers.items():
        worker.updates.observer = trails[rank]
    losses = [step.loss for step in pipe.train(_batches(job, batches))]
    for trail in trails.values():
        trail.losses = losses
    return trails


def arithmetic_of(training: TrainingSection) -> Arithmetic:
    """What a config computes with."""
    return Arithmetic(training.precision, None if training.loss_scale == "dynamic" else training.loss_scale)


def _rounding(arithmetic: Arithmetic, microbatches: int) -> float:
    """How far a step may be from one whose gradients are added in another order, relatively.

    A sum of 2m numbers has as many roundings. Where layers round weights, one that differs in its last bit may become
    the next number of the reduced precision; that such steps do not add up to more is measured, not derived.
    """
    added = arithmetic.dtype if arithmetic.pure else None
    sums = 2 * microbatches * torch.finfo(added or torch.float32).eps
    return sums if arithmetic.dtype is None else max(sums, torch.finfo(arithmetic.dtype).eps)


def _batches(job: Job, batches: int) -> list[Mapping[str, Tensor]]:
    return list(islice(job.training_batches(job.model.batch), batches))


def _microbatches_of_step(job: Job) -> int:
    """With a flush a batch; without one the fewest that make whole updates on all replicas of every stage."""
    schedule = job.schedule
    return schedule.update_every * (1 if schedule.flush else math.lcm(*(len(ranks) for ranks in job.placement)))


def _version_rule(name: str, schedule: Schedule, microbatches: int) -> VersionRule:
    """What is known of the schedule; else, for one that a user registered or wrote into a file, what it says itself."""
    if name in VERSIONS:
        return VERSIONS[name]
    if schedule.recipe is not None:
        schedule = build(name, schedule.placement, microbatches, schedule.update_every)
    used = Reading.of(schedule).version
    return lambda microbatch, stage, widths, every: used[stage, microbatch]


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
