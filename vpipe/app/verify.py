"""Compare a run with its oracle, step by step.

With a flush the oracle is plain PyTorch on one device (in a reduced precision under ``torch.autocast``, or with rounded
layers and master weights), without one the sequential program of :mod:`vpipe.testing.reference`. On one CPU thread both
give the same bits, in any precision, if sums have the same order. The pipeline adds the gradients of a weight tied
across two stages per stage, and those of a stage with several replicas per replica. The oracle does the same and must
be met to the bit; plain PyTorch, which adds microbatch by microbatch, must be met within :attr:`Reference.bound`. A
schedule from a file may complete its microbatches out of order; then only that bound holds, for losses and norms. The
replicas of a stage must equal each other in any case.

With compression the oracle encodes and decodes at the cuts what the pipeline sends. Then only equality can be tested:
where a sum differs in its last bit, a number between two codes becomes another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from vpipe import accelerator
from vpipe.app.config.config import TrainingSection
from vpipe.app.train.job import Job, device_of, join
from vpipe.app.train.loop import build_pipeline
from vpipe.description.execution import THREADED
from vpipe.errors import RunError, UserError
from vpipe.model.split import split, ties_between
from vpipe.pipeline import Pipeline
from vpipe.runtime.compiled import compile_backend, compiled_model
from vpipe.runtime.transport.compression import Compression
from vpipe.schedules.build import build
from vpipe.schedules.graph import Graph
from vpipe.schedules.prepare import is_file
from vpipe.schedules.registry import recipe_named
from vpipe.schedules.schedule import Schedule
from vpipe.testing.compression import CutCompression
from vpipe.testing.reference import asynchronous_oracle, flush_oracle
from vpipe.testing.reference_model import ReferencePrecision
from vpipe.testing.reference_optimizer import TrainingRecipe, Versions, uncompressed, version_rule
from vpipe.testing.trajectory import Trajectory

_DEFECT = "this is a defect of vpipe: please report it"


@dataclass(frozen=True)
class Reference:
    """The name and trajectory of an oracle, and how near a run must come to it.

    Attributes:
        bound: largest relative difference of a loss or a norm; 0: losses, norms and weights must be equal. Above 0 the
            weights are not compared: an adaptive optimizer makes a whole step of the rounding of a gradient near 0.
    """

    name: str
    trajectory: Trajectory
    bound: float


@dataclass(frozen=True)
class Difference:
    """A step of a run compared with the reference.

    Attributes:
        step: its number.
        loss, gradient_norm: of the run; the norm is before clipping and over all updates of the step: without a flush,
            stages of different widths make several.
        loss_difference, norm_difference: relative to the reference. Two norms that are both not finite do not differ:
            of an update that an overflow prevented, the weights tell the result.
        weight_difference: the largest absolute one of any weight after any update; infinite where one is NaN.
        weight: the weight with that difference; None without a difference.
    """

    step: int
    loss: float
    gradient_norm: float
    loss_difference: float
    norm_difference: float
    weight_difference: float
    weight: str | None

    def within(self, bound: float) -> bool:
        """Return whether the run is as near as it must be; NaN never is."""
        near = self.loss_difference <= bound and self.norm_difference <= bound
        return near and (math.isfinite(self.weight_difference) if bound else self.weight_difference == 0)


def batches_for_steps(job: Job, steps: int) -> int:
    """Return how many batches make at least ``steps`` steps; without a flush, enough to see every weight version."""
    least = 1 if job.schedule.flush else 2 * len(job.placement)
    return -(-max(steps, least) * _microbatches_of_step(job) // job.config.microbatches)


def steps_in_batches(job: Job, batches: int) -> int:
    """Return how many steps ``batches`` batches make; without a flush the last may have fewer microbatches."""
    return -(-batches * job.config.microbatches // _microbatches_of_step(job))


def references(job: Job, batches: int) -> Iterator[Reference]:
    """Yield the oracles of a job, the exact one first, computed on the job's device."""
    device = make_deterministic(job)
    config, model, schedule = job.config, job.model, job.schedule
    if config.training.compile:
        model = compiled_model(model, compile_backend(config.training.compile))
    parallel, training, partition = config.parallel.standing_in, config.training, job.partition
    widths = [len(ranks) for ranks in job.placement]
    data, microbatches = _batches(job, batches), batches * job.config.microbatches
    precision = reference_precision(training)
    rounding = _rounding(precision, job.config.microbatches, training.optimizer) * steps_in_batches(job, batches)
    # async_threaded reverses the backwards of gpipe, but keeps gradients apart and adds them in order.
    bound = 0.0 if _in_order(schedule) or parallel.executor == THREADED else rounding
    compression = Compression.described(parallel.transfers, len(partition), training.seed)
    if compression is not None and bound:
        raise UserError(f"'{parallel.schedule}' completes microbatches out of order, and with parallel.compress there "
                        "is no bound to compare within", hint="verify it with parallel.compress=none")
    compress = uncompressed if compression is None else CutCompression(model, partition, job.placement, compression)

    def recipe(trajectory: Trajectory) -> TrainingRecipe:
        return TrainingRecipe(job.optimizer().from_named, job.config.microbatches, training.seed, job.lr_policy(),
                        training.grad_clip, trajectory, compress, training.on_nan == "skip", precision, device,
                        training.extrapolation)

    trajectory = Trajectory()
    if schedule.flush:
        regrouped = [what for what, there in (("tied gradients summed by stage", ties_between(split(
            model, partition))), ("gradients summed by replica", max(widths) > 1),
            ("tensors coded at the cuts", compression is not None)) if there]
        flush_oracle(model, data, recipe(trajectory), partition if regrouped else None,
                     widths if regrouped else None)
        plain = f"plain PyTorch{precision.description} on one device"
        yield Reference(", ".join([plain, *regrouped]), trajectory, bound)
        if regrouped and compression is None and training.optimizer != "soap":  # it normalizes rounding errors too
            trajectory = Trajectory()
            flush_oracle(model, data, recipe(trajectory))
            yield Reference(plain, trajectory, rounding)
        return
    drained = range(0, microbatches, schedule.microbatches) if is_file(parallel.schedule) else ()
    known = None if _closed_form(parallel.schedule) else min(microbatches, schedule.microbatches)
    asynchronous_oracle(model, data, recipe(trajectory), partition, schedule.update_every, drained,
                        _version_rule(parallel.schedule, schedule, microbatches), widths, known=known)
    yield Reference(f"the sequential oracle{precision.description}", trajectory, bound)


def compare(trajectory: Trajectory, reference: Trajectory) -> Iterator[Difference]:
    """Yield the difference of every step of a run from the reference.

    Raises:
        RunError: their numbers of steps differ, or of updates of a stage.
    """
    if len(trajectory.losses) != len(reference.losses):
        raise RunError(f"the run made {len(trajectory.losses)} steps, its oracle {len(reference.losses)}", hint=_DEFECT)
    if other := sorted(trajectory.updates() ^ reference.updates()):
        update, name = other[0]
        who = "run, but not its oracle," if other[0] in trajectory.updates() else "oracle, but not the run,"
        raise RunError(f"the {who} made update {update} of {name}", hint=_DEFECT)
    for step, updates in enumerate(reference.step_updates):
        weight, largest = None, 0.0
        for update, name in updates:
            difference = _largest(trajectory.values[update][name], reference.values[update][name])
            if difference > largest:
                weight, largest = name, difference
        loss, norm = trajectory.losses[step], trajectory.norm(updates)
        theirs = reference.norm(updates)
        off = 0.0 if not math.isfinite(norm) and not math.isfinite(theirs) else _relative(norm, theirs)
        yield Difference(step, loss, norm, _relative(loss, reference.losses[step]), off, largest, weight)


def run_in_process(job: Job, batches: int) -> Trajectory:
    """Run all ranks of a job in this process, and return their trajectory."""
    return Trajectory.join(_recorded(build_pipeline(job), job, batches))


def make_deterministic(job: Job) -> torch.device:
    """Return the device of a job in this process; on a GPU, let torch choose kernels that add in a fixed order."""
    device = device_of(job.config)
    accelerator.add_in_fixed_order(device)
    return device


def record_rank(job: Job, folder: Path, batches: int) -> None:
    """Run one rank of a job, and save its trajectory in the folder."""
    torch.set_num_threads(1)
    make_deterministic(job)
    join(job.config)
    for rank, trajectory in _recorded(build_pipeline(job), job, batches).items():
        trajectory.save(folder, rank)


def _recorded(pipe: Pipeline, job: Job, batches: int) -> dict[int, Trajectory]:
    """Train, and return the trajectory of each rank of this process."""
    trajectories = {rank: Trajectory() for rank in pipe.local_usage()}
    pipe.observe(trajectories)
    losses = [step.loss for step in pipe.train(_batches(job, batches))]
    for trajectory in trajectories.values():
        trajectory.losses = losses
    return trajectories


def reference_precision(training: TrainingSection) -> ReferencePrecision:
    """Return the precision of a config."""
    return ReferencePrecision(training.precision, None if training.loss_scale == "dynamic" else training.loss_scale)


def _rounding(precision: ReferencePrecision, microbatches: int, optimizer: str) -> float:
    """Return a bound on the relative difference of a step whose gradients are added in another order.

    A sum of 2m numbers has as many roundings. Where layers round weights, or Muon its momentum to bf16, one that
    differs in its last bit may become the next number of the reduced precision; that such steps do not add up to more
    is measured, not derived.
    """
    added = precision.dtype if precision.pure else None
    sums = 2 * microbatches * torch.finfo(added or torch.float32).eps
    reduced = (precision.dtype, torch.bfloat16 if optimizer == "muon" else None)
    return max(sums, *(torch.finfo(dtype or torch.float32).eps for dtype in reduced))


def _batches(job: Job, batches: int) -> list[Mapping[str, Tensor]]:
    return list(islice(job.training_batches(job.model.batch), batches))


def _microbatches_of_step(job: Job) -> int:
    """Return how many microbatches make a step: without a flush, the fewest that are whole updates of every stage."""
    schedule = job.schedule
    return schedule.update_every * (1 if schedule.flush else math.lcm(*(len(ranks) for ranks in job.placement)))


def _version_rule(name: str, schedule: Schedule, microbatches: int) -> Versions:
    """Return the closed form of a schedule's versions; without one, or for a file, the versions in its actions."""
    if _closed_form(name):
        return version_rule(name, schedule.warmup)
    if schedule.stream:
        schedule = build(name, schedule.placement, microbatches, schedule.update_every, warmup=schedule.warmup)
    used = Graph.from_schedule(schedule).version
    return lambda microbatch, stage, widths, every: used[stage, microbatch]


def _closed_form(name: str) -> bool:
    """Return whether a schedule is registered with a closed form of its versions."""
    return not is_file(name) and recipe_named(name).version_of is not None


def _in_order(schedule: Schedule) -> bool:
    """Return whether every stage adds its gradients in the order of the microbatches, as plain PyTorch does."""
    for program in schedule.programs:
        latest: dict[int, int] = {}
        for action in program:
            if action.op.completes:
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
