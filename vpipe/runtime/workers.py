"""The worker that goes with an executor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vpipe.runtime.executor import Executor
from vpipe.runtime.naive import NaiveWorker
from vpipe.runtime.threaded import ThreadedWorker
from vpipe.runtime.worker import Worker


def worker_of(executor: Executor, distributed: bool) -> Callable[..., Worker]:
    """What makes the workers of this process.

    Args:
        distributed: whether there are other processes; then this one has one rank, else all of them take turns.
    """
    kinds: dict[Executor, Callable[..., Worker]] = {
        "overlapped": Worker, "naive": NaiveWorker,
        "async_threaded": partial(ThreadedWorker, in_turn=not distributed)}
    return kinds[executor]
