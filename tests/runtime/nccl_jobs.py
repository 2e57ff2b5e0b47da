"""Jobs for a test world that run other jobs under nccl's rules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import dtensor_jobs
import jobs
import torch
import torch.distributed as dist
from models import int16_model, rich_batches
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vpipe.description.transfers import Transfers
from vpipe.errors import UserError
from vpipe.profiling.links import measure_links
from vpipe.profiling.rank_group import RankGroup
from vpipe.runtime import engine
from vpipe.runtime.interpreter import RankPrograms
from vpipe.runtime.p2p import P2PTransfers
from vpipe.runtime.transport import process_group
from vpipe.testing import nccl_rules
from vpipe.testing.nccl import NcclRules


def under(*, run: str, eager: bool, buffered: bool, **arguments: Any) -> Any:
    """What a job, ``module.function``, returns when its tensors go by nccl's rules, its layers', too."""
    name, _, function = run.rpartition(".")
    module = importlib.import_module(name)
    with nccl_rules(eager=eager, buffered=buffered), patch.object(module, "init_device_mesh", mesh_beside, create=True):
        return getattr(module, function)(**arguments)


def mesh_beside(kind: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """A mesh whose dimensions for layers keep nccl's rules."""
    return init_device_mesh(kind, shape, mesh_dim_names=mesh_dim_names, backend_override={
        name: NcclRules.NAME for name in mesh_dim_names if name != "pp"})


def communicators(*, run: str, **arguments: Any) -> list[tuple[str, int | None]]:
    """The communicators that a job has made at its end, by group and peer."""
    name, _, function = run.rpartition(".")
    module = importlib.import_module(name)
    with nccl_rules(eager=False, buffered=False) as rules, \
            patch.object(module, "init_device_mesh", mesh_beside, create=True):
        getattr(module, function)(**arguments)
        own = process_group._tensor_groups[dist.group.WORLD].groups
        names = {group: name for name, group in own.items()}
        return sorted(((names.get(group, "layers"), peer) for group, peer in rules.communicators), key=str)


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
    segment = self._segment
    channel = (stage, peer, segment.training, segment.loader.signature(segment.first + microbatch))
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
        _, found = measure_links(RankGroup(torch.device("cpu")), torch.device("cpu"), Transfers(timeout_s=30.0))
    return sorted(map(list, found))


def receives_posted_early() -> None:
    """Layers that gather shards, where receives are posted early, as over gloo."""
    with nccl_rules(eager=False, buffered=False, limit_s=3), patch.object(engine, "RankPrograms", _Unordered):
        mesh = mesh_beside("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        dtensor_jobs.exactly_trained(dtensor_jobs.sequence_parallel(mesh["tp"]), mesh=mesh, schedule="1f1b",
                                     timeout_s=30)
