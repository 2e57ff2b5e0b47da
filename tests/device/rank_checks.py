"""Jobs for a test world whose ranks compute on the late device (rank_with_late.py)."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "runtime")]

import jobs  # noqa: E402
import late_device  # noqa: E402
import late_nccl  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import waits  # noqa: E402
from models import rich_batches  # noqa: E402
from torch import Tensor  # noqa: E402

from vpipe.distributed.watchdog import watch  # noqa: E402
from vpipe.runtime.transport.process_group import DistributedTransport  # noqa: E402
from vpipe.runtime.transport.transport import TransferKey, TransferKind  # noqa: E402
from vpipe.schedules.kinds import Action, Op  # noqa: E402

SIZE = 512

late: Any = torch.get_device_module("late") if late_device._libraries else None


def carried_by(rules: Mapping[str, bool] | None) -> AbstractContextManager[Any]:
    """Return the context in which tensors go by rules of nccl, or else over gloo, by way of the host."""
    return nullcontext() if rules is None else late_nccl.late_rules(**rules)


def under(*, run: str, rules: Mapping[str, bool] | None, seed: int, **arguments: Any) -> Any:
    """What a job, ``module.function``, returns."""
    module, _, function = run.rpartition(".")
    late.configure(seed, patience_ms=5)
    with late_device.without_dropout(), carried_by(rules) as carried:
        returned = getattr(importlib.import_module(module), function)(**arguments)
        assert rules is None or carried.communicators
    return returned


def without_a_wait(*, place: str, **arguments: Any) -> Any:
    """What :func:`under` returns where the wait at a place is taken away."""
    with waits.without(place):
        return under(**arguments)


def ended(*, place: str | None, **arguments: Any) -> bool:
    """Whether the device has done all, sends too, when the batches have ended: the process may end then."""
    late.configure(1, patience_ms=500)  # longer than a rank waits for a processor
    with nullcontext() if place is None else waits.without(place), late_nccl.late_rules(eager=False, buffered=False):
        list(jobs.pipeline(jobs.MODELS["rich"](), **arguments).train(rich_batches(2, 8)))
        return bool(late.current_stream().query())


def evaluated_by_slow_ranks(**words: Any) -> list[float]:
    """The ranks behind the first come later: its sends wait for them, while it has far more than it may have under
    way."""
    pipe = jobs.pipeline(jobs.MODELS["rich"](), **words)
    losses = [step.loss for step in pipe.train(rich_batches(1, words["microbatches"]))]
    if dist.is_initialized() and dist.get_rank():
        time.sleep(0.3)
    return [*losses, pipe.evaluate(rich_batches(2, words["microbatches"], seed=9))]


def summed_by_a_slow_replica(**words: Any) -> dict[str, Any]:
    """Rank 0 asks late for the sums of the other replica, which makes the last update alone meanwhile."""
    post = DistributedTransport.post

    def posting(self: DistributedTransport, peer: int, key: TransferKey, *more: Any) -> None:
        if self.rank == 0 and key.kind is TransferKind.SUMS:
            time.sleep(0.5)
        post(self, peer, key, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedTransport, "post", posting)
        return jobs.train(**words)


def host_waits(**words: Any) -> dict[str, float]:
    """How often the host waits for the device, per update, after the first."""
    pipe = jobs.pipeline(jobs.MODELS["untied"](), **words)
    batches = rich_batches(8, 8)
    list(pipe.train(batches[:4]))
    before = late.host_waits()
    count = len(list(pipe.train(batches[4:])))
    return {reason: (number - before.get(reason, 0)) / count for reason, number in late.host_waits().items()
            if number != before.get(reason, 0)}


def in_time(**words: Any) -> list[tuple[str, float]]:
    """When, in seconds of the device, transfers could begin, streams waited for them, and computations of a second each
    ended; with the action, as they were queued. Of the second batch, when shapes are known."""
    pipe = jobs.pipeline(jobs.MODELS["untied"](), **words)
    events: list[tuple[str, Any]] = []
    begin, wait, receive = late_nccl.LateRules._begin, late_nccl.Transfer.wait, dist.irecv

    def note(what: object, stream: Any = None) -> None:
        events.append((str(what), (stream or late.current_stream()).record_event(late.Event(enable_timing=True))))

    def beginning(self: late_nccl.LateRules, tensor: Tensor, peer: int) -> Any:
        line, host = begin(self, tensor, peer)
        note(watch.activity.now[0], line.stream)
        return line, host

    def waiting(self: late_nccl.Transfer, timeout: timedelta | None = None) -> bool:
        note(f"wait in {watch.activity.now[0]}")
        return wait(self, timeout)

    def posting(*arguments: Any) -> Any:
        note(f"post in {watch.activity.now[0]}")
        return receive(*arguments)

    def lasting(operation: Callable[[int, int], None], op: Any, stage: int, index: int) -> None:
        operation(stage, index)
        late.busy()
        note(Action(op, stage, index))

    batches = rich_batches(2, words["microbatches"])
    list(pipe.train(batches[:1]))
    [worker] = pipe.engine.workers.values()
    for op in (Op.FORWARD, Op.BACKWARD, Op.STEP):
        worker.operations[op] = partial(lasting, worker.operations[op], op)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late_nccl.LateRules, "_begin", beginning)
        patch.setattr(late_nccl.Transfer, "wait", waiting)
        patch.setattr(dist, "irecv", posting)
        began = late.current_stream().record_event(late.Event(enable_timing=True))
        list(pipe.train(batches[1:]))
        late.synchronize()
    return [(what, round(began.elapsed_time(event) / 1000, 1)) for what, event in events]


def recorded(*, rules: Mapping[str, bool] | None) -> list[list[Any]]:
    """The records of a step, as text, how long each action took, and how long it waited for another rank."""
    late.configure(1, patience_ms=5)
    with carried_by(rules):
        pipe = jobs.pipeline(jobs.MODELS["rich"](), schedule="1f1b", stages=2, microbatches=4)
        list(pipe.train(rich_batches(1, 8)))
        [recorder] = pipe.record().values()
        list(pipe.train(rich_batches(1, 8)))
        return [[str(note.action), note.end_s - note.start_s, note.waited_s] for note in recorder.pop_records()]


# -- transfers that are wrong, and mended, between the ranks of a pair -------------------------------------------------

def full(value: float) -> Tensor:
    return torch.full((SIZE,), float(value), device=torch.accelerator.current_accelerator())


def waited_for(work: Any, mended: bool) -> None:
    if mended:
        work.wait()


def received_too_early(sends: bool, peer: int, group: Any, mended: bool) -> bool:
    """A tensor is read before its receive is waited for."""
    tensor = full(3)
    if sends:
        late.busy()
        dist.isend(tensor + 1, peer, group).wait()
        return True
    waited_for(dist.irecv(tensor, peer, group), mended)
    return bool((tensor.sum() == 4 * SIZE).item())


def sent_and_overwritten(sends: bool, peer: int, group: Any, mended: bool) -> bool:
    """A tensor is changed before its send is waited for."""
    tensor = full(3)
    if sends:
        waited_for(dist.isend(tensor, peer, group), mended)
        tensor.fill_(7)
        return True
    late.busy()
    dist.irecv(tensor, peer, group).wait()
    return bool((tensor.sum() == 3 * SIZE).item())


def sent_and_freed(sends: bool, peer: int, group: Any, mended: bool) -> bool:
    """A tensor is freed before its send is waited for: the next takes its memory."""
    tensor = full(3)
    if sends:
        waited_for(dist.isend(tensor, peer, group), mended)
        del tensor
        full(7)
        return True
    late.busy()
    dist.irecv(tensor, peer, group).wait()
    return bool((tensor.sum() == 3 * SIZE).item())


def received_into_what_another_stream_reads(sends: bool, peer: int, group: Any, mended: bool) -> bool:
    """A receive is posted into a tensor that another stream still reads."""
    tensor = full(3)
    if sends:
        dist.isend(tensor + 1, peer, group).wait()
        return True
    side, current = late.Stream(), late.current_stream()
    side.wait_stream(current)
    with late.stream(side):
        late.busy()
        total = tensor.sum()
    if mended:
        current.wait_stream(side)
    dist.irecv(tensor, peer, group).wait()
    current.wait_stream(side)
    return bool((total == 3 * SIZE).item())


WRONG = (received_too_early, sent_and_overwritten, sent_and_freed, received_into_what_another_stream_reads)


def tried(*, wrong: str, rules: Mapping[str, bool], mended: bool, seeds: int) -> list[bool]:
    """Whether it was right, of each seed."""
    results = []
    with late_nccl.late_rules(**rules):
        group, rank = dist.new_group(backend=late_nccl.LateRules.NAME), dist.get_rank()
        for seed in range(seeds):
            late.configure(seed, patience_ms=500)  # longer than a rank waits for a processor
            results.append(globals()[wrong](rank % 2 == 0, rank ^ 1, group, mended))
            late.synchronize()
            dist.monitored_barrier()
    return results


def order_of_a_pair(*, rules: Mapping[str, bool]) -> list[Any]:
    """Tags are ignored; the host waits for nothing but the result."""
    with late_nccl.late_rules(**rules):
        group, rank = dist.new_group(backend=late_nccl.LateRules.NAME), dist.get_rank()
        late.configure(1, patience_ms=500)
        tensors, works = [full(value + 10 * (rank % 2)) for value in range(4)], []
        for tag, tensor in enumerate(tensors):
            if (tag + rank) % 2:
                works.append(dist.irecv(tensor, rank ^ 1, group, tag=9 - tag))
            else:
                works.append(dist.isend(tensor, rank ^ 1, group, tag=tag))
        for work in works:
            work.wait()
        waits = late.host_waits()
        return [[tensor[0].item() for tensor in tensors], waits]


if __name__ == "__main__":  # in one process, the same device
    torch.set_num_threads(1)
    late = late_device.load()
    print(json.dumps(under(**json.loads(sys.argv[1]))))
