"""Jobs for a test world that run other jobs under nccl's rules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jobs
import torch
import torch.distributed as dist
from models import int16_model, rich_batches
from torch import Tensor

from vpipe.errors import UserError
from vpipe.profiling.links import measure_links
from vpipe.profiling.rank_group import RankGroup
from vpipe.runtime import engine
from vpipe.runtime.interpreter import RankPrograms
from vpipe.runtime.p2p import P2PTransfers
from vpipe.runtime.transport import process_group
from vpipe.testing import nccl_rules


def under(*, run: str, eager: bool, buffered: bool, **arguments: Any) -> Any:
    """What a job, ``module.function``, returns when its tensors go over a backend with nccl's rules."""
    module, _, function = run.rpartition(".")
    with nccl_rules(eager=eager, buffered=buffered):
        return getattr(importlib.import_module(module), function)(**arguments)


def communicators(*, model: str, **arguments: Any) -> list[tuple[str, int]]:
    """The communicators that a run has made at its end, by group and peer."""
    with nccl_rules(eager=False, buffered=False) as rules:
        pipe = jobs.pipeline(jobs.MODELS[model](), **arguments)
        list(pipe.train(rich_batches(2, 8)))
        names = list(dict.fromkeys(process_group.GROUP_OF_KIND.values()))
        assert rules.communicators is not None
        return sorted((names[number - 1], peer) for number, peer in rules.communicators)


def without(*, remedy: str, schedule: str, timeout_s: float) -> None:
    """Train under the rules without one of the things that keep ranks from waiting for each other."""
    remedies: dict[str, Callable[[], None]] = {
        "order": lambda: setattr(engine, "RankPrograms", _Unordered),
        "host messages over gloo": lambda: process_group.GROUP_OF_KIND.update(L="parameters", N="parameters"),
        "shapes at their place": lambda: setattr(P2PTransfers, "post_activations", _post_as_over_gloo)}
    with nccl_rules(eager=False, buffered=False, limit_s=timeout_s):
        remedies[remedy]()
        pipe = jobs.pipeline(jobs.MODELS["rich"](), schedule=schedule, stages=2, microbatches=2, grad_clip=0.5,
                             timeout_s=timeout_s)
        list(pipe.train(rich_batches(6, 4, lengths=(6, 9, 3))))


class _Unordered(RankPrograms):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments[:-1], False)


def _post_as_over_gloo(self: P2PTransfers, stage: int, microbatch: int) -> None:
    peer, key = self.source("F", stage, microbatch)
    channel = (stage, peer, self._segment.training, self._segment.signature(microbatch))
    queue, specs = self._queued[stage, peer], self._incoming.get(channel)
    if not queue:
        self._transport.post(peer, key, specs)
    if queue or specs is None:
        queue.append((key, channel))


def one_after_another() -> list[Any]:
    """How many groups two pipelines make, and what a third says while the second has microbatches in flight."""
    with nccl_rules(eager=False, buffered=False):
        made = []
        first = jobs.pipeline(jobs.MODELS["rich"](), schedule="1f1b", stages=4, microbatches=2)
        list(first.train(rich_batches(1, 4)))
        made.append(len(process_group._tensor_groups[dist.group.WORLD].groups))
        second = jobs.pipeline(jobs.MODELS["rich"](), schedule="pipedream", stages=4, microbatches=2)
        next(second.train(rich_batches(8, 4)))
        made.append(len(process_group._tensor_groups))
        try:
            jobs.pipeline(jobs.MODELS["rich"](), schedule="1f1b", stages=4, microbatches=2)
        except UserError as error:
            made.append(str(error))
        second.state_dict()
        third = jobs.pipeline(jobs.MODELS["rich"](), schedule="1f1b", stages=4, microbatches=2)
        return [*made, len(list(third.train(rich_batches(2, 4))))]


def with_dtypes_that_nccl_lacks() -> list[str]:
    """The dtypes in which tensors of a model were handed to the backend."""
    seen: set[str] = set()
    with nccl_rules(eager=False, buffered=False):
        as_sent = process_group.as_sent

        def watched(tensor: Tensor) -> Tensor:
            sent = as_sent(tensor)
            seen.add(f"{tensor.dtype} as {sent.dtype}")
            return sent

        process_group.as_sent = watched
        try:
            pipe = jobs.pipeline(int16_model(), schedule="1f1b", stages=4, microbatches=2)
            losses = [step.loss for step in pipe.train([{"ids": torch.arange(8).reshape(4, 2)}] * 2)]
        finally:
            process_group.as_sent = as_sent
    return [str(losses), *sorted(seen)]


def measured_links() -> list[list[int]]:
    """The pairs of ranks between which the profiler has measured how fast tensors are."""
    with nccl_rules(eager=False, buffered=False):
        _, found = measure_links(RankGroup(torch.device("cpu")), torch.device("cpu"), 30.0)
    return sorted(map(list, found))
