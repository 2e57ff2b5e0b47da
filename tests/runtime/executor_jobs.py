"""Jobs for a test world about executors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jobs import pipeline
from models import rich_batches, rich_model
from torch.distributed.distributed_c10d import _get_default_store

from vpipe.runtime.transport.process_group import DistributedTransport
from vpipe.runtime.transport.transport import TensorSpec, TransferKey, TransferKind
from vpipe.schedules.action import Action

_PATIENCE = timedelta(seconds=30)
_F = TransferKey(TransferKind.ACTIVATIONS, 1, 0)


def most_behind(*, executor: str, schedule: str) -> int:
    """Most sends of a program that over gloo were still under way after an action, once the shapes are known to all."""
    pipe = pipeline(rich_model(), schedule=schedule, partition=[2, 2, 2, 2], microbatches=4, executor=executor,
                    shared_memory=False)
    [worker] = pipe.engine.workers.values()
    transport = worker.transport
    assert isinstance(transport, DistributedTransport)
    most, execute = 0, worker.execute

    def counting(action: Action) -> None:
        nonlocal most
        execute(action)
        if steps:
            most = max(most, *(len(behind) for (_, kind), behind in transport._sent.items() if kind in "FBWG"), 0)

    worker.execute = counting  # type: ignore[method-assign]
    steps: list[Any] = []
    steps += pipe.train(rich_batches(1, 8))
    steps += pipe.train(rich_batches(2, 8))
    return most


def settles(*, announce: bool) -> bool:
    """Over gloo the first rank sends and settles: whether the second was ready to receive by then."""
    store = _get_default_store()
    transport = DistributedTransport(torch.device("cpu"), 30.0, 1, lambda rank: f"rank {rank}", 0, shared_memory=False)
    name, tensor = f"settles {announce}", torch.ones(3)
    ready = False
    if dist.get_rank() == 0:
        transport.send(1, _F, [tensor], announce=announce)
        store.set(f"{name} sent", "")
        transport.wait_sent(TransferKind.ACTIVATIONS)
        ready = store.check([f"{name} ready"])
        store.set(f"{name} settled", "")
    elif dist.get_rank() == 1:
        store.wait([f"{name} sent"], _PATIENCE)
        if announce:
            store.wait([f"{name} settled"], _PATIENCE)
        else:  # long enough for the other to go on if it does not wait
            if _never(store, f"{name} settled"):
                store.set(f"{name} ready", "")
        transport.post(0, _F, None if announce else [TensorSpec.from_tensor(tensor)])
        if announce:
            transport.receive_specs(0, _F)
        assert torch.equal(transport.receive(0, _F)[0], tensor)
    transport.finish()
    return ready


def _never(store: dist.Store, key: str) -> bool:
    """Whether nobody sets a key within a moment."""
    try:
        store.wait([key], timedelta(seconds=0.3))
    except dist.DistStoreError:
        return True
    return False


def layer_raises(*, executor: str) -> None:
    """The second stage raises in its second microbatch."""
    pipe = pipeline(rich_model(), schedule="gpipe", stages=2, microbatches=4, timeout_s=30, executor=executor)
    batch = rich_batches(1, 8)[0]
    batch["labels"][2:4] = 10_000  # outside the words
    list(pipe.train([batch]))
