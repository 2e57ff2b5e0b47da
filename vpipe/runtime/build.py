"""The workers of this process, of the kind that goes with the executor."""

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
from vpipe.runtime.layers import check_apart
from vpipe.runtime.loss_scaler import Scaling
from vpipe.runtime.optimizer_step import Update
from vpipe.runtime.precision import FP32, Precision
from vpipe.runtime.reducer import count_buckets
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import MakeOptimizer, StageOptimizer
from vpipe.runtime.transport.compression import Compressed, Compression
from vpipe.runtime.transport.distributed import Distributed
from vpipe.runtime.transport.transport import InProcess, Mailroom, Transport
from vpipe.runtime.worker import Worker
from vpipe.schedules.schedule import Schedule, describe_rank


@dataclass(frozen=True)
class Settings:
    """What the engine needs to know beside the model.

    Attributes:
        microbatches: per batch.
        recompute: per stage the numbers, in the model, of the layers that are recomputed.
        factor: learning rate of an update relative to the optimizer's own.
        clip: greatest gradient norm; of all stages with a flush, of each stage without.
        seed: of initialisation and dropout.
        device: where this process computes.
        timeout_s: how long a transfer may take.
        compression: how tensors travel between stages; None: as they are.
        skip: whether an update from a loss or a gradient that is not finite is left out.
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
        """Whether an update depends on the norms of gradients: with a flush on those of all stages."""
        return self.clip is not None or self.skip or self.precision.scaled


def make_workers(model: Model, specs: Sequence[StageSpec], schedule: Schedule, make_optimizer: MakeOptimizer,
                 settings: Settings, distributed: bool) -> dict[int, Worker]:
    """Build the stages of this process, and what carries out the programs of their ranks, by rank.

    Args:
        distributed: whether there are other processes; then this one has one rank, else all of them take turns.

    Raises:
        UserError: a layer cannot work, or not in this precision under this schedule, or is one with another's.
    """
    placement = schedule.placement
    ranks = [dist.get_rank()] if distributed else list(range(len(schedule.programs)))
    room: Mailroom = {}
    ties = ties_between(specs)
    kinds: dict[Executor, Callable[..., Worker]] = {
        "overlapped": Worker, "naive": NaiveWorker,
        "async_threaded": partial(ThreadedWorker, in_turn=not distributed)}
    make = kinds[settings.executor]
    built = {rank: {spec.index: Stage(model, spec, seed=settings.seed, device=settings.device,
                                      recomputed=settings.recompute[spec.index], precision=settings.precision)
                    for spec in specs if rank in placement[spec.index]} for rank in ranks}
    check_apart((stage.modules, stage.layer_names) for stages in built.values() for stage in stages.values())
    workers: dict[int, Worker] = {}
    for rank, stages in built.items():
        for stage in stages.values():
            stage.renew_leaves(versions=not schedule.flush)
        optimizers = {s: StageOptimizer.build(make_optimizer, stage.weights.masters, s) for s, stage in stages.items()}
        for stage in stages.values():
            stage.weights.adopt_hooks()
        transport: Transport = (Distributed(settings.device, settings.timeout_s, max(schedule.peak_activations),
                                            partial(describe_rank, placement), count_buckets(stages.values()))
                                if distributed else InProcess(rank, room))
        if settings.compression is not None:
            transport = Compressed(transport, settings.compression)
        scaling = Scaling.of(settings.precision, stages, schedule)
        workers[rank] = make(rank, placement, stages, Update(optimizers, settings.clip, settings.skip, scaling),
                             ties, transport, settings.factor,
                             BatchComparison(transport, placement, model.batch) if distributed else None)
    return workers
