"""torch.distributed.pipelining under its schedules, as fast as it goes: no outputs kept, gradients not rescaled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from batches import batches
from model import adamw, loss_of, part
from precision import autocast
from system import System, Updates
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

PARTS = {ScheduleGPipe: "gpipe", Schedule1F1B: "1f1b", ScheduleInterleaved1F1B: "interleaved"}


def _updates(kind: type[Any], microbatches: int, cut: Sequence[int], precision: str) -> Updates:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ends = list(accumulate(cut))
    own = range(rank, len(cut), ranks)
    parts = [part(range(ends[i] - cut[i], ends[i])) for i in own]
    stages = [PipelineStage(module, i, len(cut), torch.device("cpu")) for module, i in zip(parts, own, strict=True)]

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return loss_of(logits, labels) / microbatches

    single = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, microbatches, loss_fn=loss_fn, scale_grads=False)
    optimizer = adamw(list(chain.from_iterable(module.parameters() for module in parts)))
    for batch in batches():
        losses: list[Tensor] = []
        with autocast(precision):  # of the whole step, so that weights are cast once in it
            if rank == 0:
                schedule.step(batch["ids"], return_outputs=False)
            else:
                schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        yield float(torch.stack(losses).detach().double().sum()) if losses else None


def torch_systems(microbatches: Sequence[int], cut: Sequence[int], quarters: Sequence[int],
                   precision: str) -> Iterator[System]:
    """1F1B, GPipe and interleaved 1F1B (two stages per rank) for every number of microbatches."""
    for m in microbatches:
        for kind, name in PARTS.items():
            layers = quarters if kind is ScheduleInterleaved1F1B else cut
            yield System(f"torch {name} m{m}", "torch", partial(_updates, kind, m, layers, precision))
