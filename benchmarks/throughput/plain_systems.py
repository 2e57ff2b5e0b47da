"""Training without a pipeline: one process with one or two threads, and data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from batches import batches
from model import adamw, loss_of, whole
from precision import autocast
from system import System, Updates
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def _updates(microbatches: int, replicated: bool, precision: str) -> Updates:
    module: nn.Module = whole()
    optimizer = adamw(list(module.parameters()))
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if replicated else (0, 1)
    if replicated:
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    for batch in batches():
        ids, labels = (batch[name].chunk(ranks)[rank].chunk(microbatches) for name in ("ids", "labels"))
        losses = []
        for i in range(microbatches):
            silent = isinstance(module, DistributedDataParallel) and i < microbatches - 1
            with module.no_sync() if silent else nullcontext():
                with autocast(precision):
                    loss = loss_of(module(ids[i]), labels[i]) / microbatches
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).double().sum()
        yield None if replicated else float(loss)  # a replica knows only its half of the loss


def plain_systems(precision: str) -> Iterator[System]:
    """Each with the batch in one piece and in four, because large pieces cost page faults."""
    for m in (1, 4):
        yield System(f"one process, 1 thread, m{m}", "plain", partial(_updates, m, False, precision), ranks=(0,))
        yield System(f"one process, 2 threads, m{m}", "plain", partial(_updates, m, False, precision), ranks=(0,),
                      threads=2)
        yield System(f"DDP 2 x 1 thread, m{m}", "plain", partial(_updates, m, True, precision))
