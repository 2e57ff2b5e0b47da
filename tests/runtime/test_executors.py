"""Executors change how actions are carried out, never what they compute."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
from jobs import pipeline
from models import norm_model, rich_batches, rich_model
from torch.distributed.distributed_c10d import _get_default_store
from world import World

from vpipe import Model, Pipeline
from vpipe.description import Executor
from vpipe.runtime.transport.process_group import SENDS_UNDER_WAY, DistributedTransport
from vpipe.runtime.transport.transport import SPECS_SPEC, TensorSpec, TransferKey, TransferKind, specs_as_tensor
from vpipe.schedules.kinds import Action

# -- jobs ---------------------------------------------------------------------------------------------


_PATIENCE = timedelta(seconds=30)
_F, _H = (TransferKey(kind, 1, 0) for kind in (TransferKind.ACTIVATIONS, TransferKind.SPECS))


def most_behind(*, executor: str, schedule: str, microbatches: int = 4) -> int:
    """Most sends of a program that over gloo were still under way after an action, once the shapes are known to all."""
    pipe = pipeline(rich_model(), schedule=schedule, partition=[2, 2, 2, 2], microbatches=microbatches,
                    executor=executor, shared_memory=False)
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
    steps += pipe.train(rich_batches(1, 2 * microbatches))
    steps += pipe.train(rich_batches(2, 2 * microbatches))
    return most


def settles(*, announce: bool) -> bool:
    """Over gloo the first rank sends and settles: whether the second was ready to receive by then."""
    store = _get_default_store()
    transport = DistributedTransport(torch.device("cpu"), 30.0, 1, lambda rank: f"rank {rank}", 0)
    name, tensor = f"settles {announce}", torch.ones(3)
    ready = False
    if dist.get_rank() == 0:
        if announce:
            transport.send(1, _H, [specs_as_tensor([TensorSpec.from_tensor(tensor)])])
        transport.send(1, _F, [tensor])
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
        if announce:
            transport.post(0, _H, [SPECS_SPEC])
            transport.receive(0, _H)
        transport.post(0, _F, [TensorSpec.from_tensor(tensor)])
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
def test_all_executors_give_the_same_bits_over_gloo(world: World) -> None:
    """Where the threads of a rank and its transfers go on at one time; a stage has two replicas."""
    run: dict[str, Any] = {
        "model": "rich", "schedule": "gpipe", "microbatches": 4, "batches": 2, "partition": [2, 2, 4],
        "placement": [[0], [1, 2], [3]], "recompute": [1.0, 0.5, 0.0], "grad_clip": 0.5, "evaluate_after": [0]}
    expected = jobs.train(**run)
    for executor in Executor.names():
        assert world.run(jobs.train, executor=executor, **run) == [expected] * 4, executor


def test_naive_leaves_no_send_behind_and_others_a_few(world: World) -> None:
    assert world.run(most_behind, executor="naive", schedule="1f1b") == [0] * 4
    most = world.run(most_behind, executor="overlapped", schedule="1f1b", microbatches=3 * SENDS_UNDER_WAY)
    assert 0 < max(most) <= SENDS_UNDER_WAY


@pytest.mark.parametrize("announce", [False, True])
def test_to_settle_is_to_wait_until_the_receiver_is_ready_unless_it_must_learn_first(world: World,
                                                                                   announce: bool) -> None:
    assert world.run(settles, announce=announce)[0] is not announce


def out_of_turn(pipe: Pipeline) -> Pipeline:
    """Let the threads of forwards go on as in a process of its own."""
    for worker in pipe.engine.workers.values():
        assert worker._in_one_process  # type: ignore[attr-defined]
        worker._in_one_process = False  # type: ignore[attr-defined]
    return pipe


def check_on_a_gpu(executor: str, model: Callable[[], Model], stages: int,
                   prepared: Callable[[Pipeline], Pipeline] = lambda pipe: pipe) -> None:
    """In one process, within the bounds of sums in another order."""
    found = []
    for name in ("overlapped", executor):
        pipe = pipeline(model(), stages=stages, schedule="gpipe", microbatches=4, executor=name, device="cuda",
                        recompute=0.5, grad_clip=0.5)
        if name == executor:
            prepared(pipe)
        found.append(([step.loss for step in pipe.train(rich_batches(4, 16))], pipe.state_dict()))
    (losses, state), (others, other_state) = found
    assert others == pytest.approx(losses, rel=1e-5)
    for key, tensor in state.items():
        torch.testing.assert_close(other_state[key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("executor", Executor.names())
@pytest.mark.parametrize("model", [rich_model, norm_model])
def test_on_a_gpu_executors_give_the_numbers_of_overlapped(executor: str, model: Callable[[], Model]) -> None:
    check_on_a_gpu(executor, model, stages=2)
