"""Jobs for a test world that run other jobs under nccl's rules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jobs
from models import rich_batches
from nccl_rules import nccl_rules

from vpipe.runtime import distributed, engine, process_groups
from vpipe.runtime.neighbours import Neighbours
from vpipe.runtime.programs import Programs


def under(*, run: str, eager: bool = False, buffered: bool = False, **arguments: Any) -> Any:
    """What a job, ``module.function``, returns when its tensors go over a backend with nccl's rules."""
    module, _, function = run.rpartition(".")
    with nccl_rules(eager=eager, buffered=buffered):
        return getattr(importlib.import_module(module), function)(**arguments)


def communicators(*, model: str, **arguments: Any) -> list[tuple[str, int]]:
    """The communicators that a run has made at its end, by group and peer."""
    with nccl_rules(eager=False, buffered=False) as rules:
        pipe = jobs.pipeline(jobs.MODELS[model](), **arguments)
        list(pipe.train(rich_batches(2, 8)))
        names = list(dict.fromkeys(process_groups.GROUP_OF_KIND.values()))
        assert rules.communicators is not None
        first = min((number for number, _ in rules.communicators), default=0)
        return sorted((names[(number - first) % 3], peer) for number, peer in rules.communicators)


def without(*, remedy: str, schedule: str, timeout_s: float) -> None:
    """Train under the rules without one of the things that keep ranks from waiting for each other."""
    remedies: dict[str, Callable[[], None]] = {
        "order": lambda: setattr(engine, "Programs", _Unordered),
        "host messages over gloo": lambda: distributed.GROUP_OF_KIND.update(L="parameters", N="parameters"),
        "shapes at their place": lambda: setattr(Neighbours, "post_forward", _post_as_over_gloo)}
    with nccl_rules(eager=False, buffered=False, limit_s=timeout_s):
        remedies[remedy]()
        pipe = jobs.pipeline(jobs.MODELS["rich"](), schedule=schedule, stages=2, microbatches=2, grad_clip=0.5,
                             timeout_s=timeout_s)
        list(pipe.train(rich_batches(6, 4, lengths=(6, 9, 3))))


class _Unordered(Programs):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments[:-1], False)


def _post_as_over_gloo(self: Neighbours, stage: int, microbatch: int) -> None:
    peer, key = self.activations(stage, microbatch)
    seen = (stage, peer, self._segment.training, self._segment.signature(microbatch))
    queue, specs = self._queued[stage, peer], self._incoming.get(seen)
    if not queue:
        self._transport.post(peer, key, specs)
    if queue or specs is None:
        queue.append((key, seen))
