"""Build the stages and workers of this process from a model, a schedule and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from vpipe.model.layer import Model
from vpipe.model.split import StageSpec, ties_between
from vpipe.runtime.batch_comparison import BatchComparison
from vpipe.runtime.executors.async_threaded import ThreadedWorker
from vpipe.runtime.executors.naive import NaiveWorker
from vpipe.runtime.executors.registry import Executor
from vpipe.runtime.loss_scaler import LossScaler
from vpipe.runtime.optimizer_step import OptimizerSteps
from vpipe.runtime.precision import FP32, Precision
from vpipe.runtime.reducer import count_buckets
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_layers import check_not_shared
from vpipe.runtime.stage_optimizer import MakeOptimizer, StageOptimizer
from vpipe.runtime.tied_weights import TiedWeights
from vpipe.runtime.transport.compression import CompressedTransport, Compression
from vpipe.runtime.transport.distributed import DistributedTransport
from vpipe.runtime.transport.transport import InProcessTransport, Mailbox, Transport
from vpipe.runtime.worker import Worker
from vpipe.schedules.schedule import Schedule, describe_rank


@dataclass(frozen=True)
class Settings:
    """Settings of an engine beside the model and the schedule.

    Attributes:
        microbatches: per batch.
        recompute: per stage the numbers, in the model, of the layers that are recomputed.
        factor: learning rate of an update relative to the optimizer's own.
        clip: greatest gradient norm; of all stages with a flush, of each stage without.
        seed: of initialisation and dropout.
        device: where this process computes.
        timeout_s: how long a transfer may take.
        compression: how tensors travel between stages; None: as they are.
        skip: whether an update from a loss or a gradient that is not finite is skipped.
        precision: in which numbers layers compute.
        executor: how actions are carried out.
    """

    microbatches: int
    recompute: Sequence[frozenset[int]]
    factor: Callable[[int], float]
    clip: float | None
    seed: int
    device: torch.device
    timeout_s: float
    compression: Compression | None
    skip: bool = False
    precision: Precision = FP32
    executor: Executor = "overlapped"

    @property
    def needs_norms(self) -> bool:
        """Return whether an update depends on the norms of gradients: with a flush on those of all stages."""
        return self.clip is not None or self.skip or self.precision.scaled


def build_workers(model: Model, specs: Sequence[StageSpec], schedule: Schedule, make_optimizer: MakeOptimizer,
                  settings: Settings, distributed: bool) -> dict[int, Worker]:
    """Build the stages and workers of this process; return the workers by rank.

    Args:
        distributed: whether there are other processes; then this one has one rank, else all of them take turns.

    Raises:
        UserError: a layer cannot work, or not in this precision under this schedule, or is one with another's.
    """
    placement, ties = schedule.placement, ties_between(specs)
    ranks = [dist.get_rank()] if distributed else list(range(len(schedule.programs)))
    kinds: dict[Executor, Callable[..., Worker]] = {
        "overlapped": Worker, "naive": NaiveWorker,
        "async_threaded": partial(ThreadedWorker, in_turn=not distributed)}
    built = {rank: {spec.index: Stage(model, spec, seed=settings.seed, device=settings.device,
                                      recomputed=settings.recompute[spec.index], precision=settings.precision)
                    for spec in specs if rank in placement[spec.index]} for rank in ranks}
    check_not_shared(stage for stages in built.values() for stage in stages.values())
    mailbox: Mailbox = {}
    workers: dict[int, Worker] = {}
    for rank, stages in built.items():
        for stage in stages.values():
            stage.renew_leaves(versions=not schedule.flush)
        optimizers = {s: StageOptimizer.build(make_optimizer, stage.weights.masters, s) for s, stage in stages.items()}
        for stage in stages.values():
            stage.weights.adopt_hooks()
        replicated = [stage for s, stage in stages.items() if len(placement[s]) > 1]
        transport: Transport = (
            DistributedTransport(settings.device, settings.timeout_s, max(schedule.peak_activations),
                                 partial(describe_rank, placement), count_buckets(replicated) if replicated else 0)
            if distributed else InProcessTransport(rank, mailbox))
        if settings.compression is not None:
            transport = CompressedTransport(transport, settings.compression)
        scaler = LossScaler.build(settings.precision, stages, schedule) if settings.precision.scaled else None
        tied = TiedWeights(ties, placement, stages, transport,
                           scaler if scaler is not None and scaler.per_stage else None)
        steps = OptimizerSteps(placement, stages, optimizers, tied, transport, settings.factor, settings.clip,
                               settings.skip, scaler)
        workers[rank] = kinds[settings.executor](
            rank, placement, stages, steps, tied, transport,
            BatchComparison(transport, placement, model.batch) if distributed else None)
    return workers
