"""Messages between ranks outside of any schedule: broadcast tensors, measure clock offsets, explain failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.distributed.watchdog import Watchdog, current_watchdog
from vpipe.errors import RunError
from vpipe.runtime.transport.process_groups import control_group

ROUND_TRIPS = 40

_SHARING = "sharing what each has"


def broadcast_tensors(tensors: Mapping[str, Tensor], source: int, timeout_s: float | None = None) -> dict[str, Tensor]:
    """Return the named tensors of one rank on every rank, in host memory. All ranks must call it.

    Sent from rank to rank, as everything else: the worker threads behind gloo's collectives may outlive the
    interpreter and then abort the process at its exit.

    Args:
        tensors: of the source; the other ranks give none.
        source: the rank that has them.
        timeout_s: how long one tensor may take; None: as long as the process group says.

    Raises:
        RunError: a rank did not answer in that time, or is gone.
    """
    group = control_group()

    def wait(work: dist.Work | None) -> None:
        assert work is not None, "this rank is in the group"
        if timeout_s is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout_s))

    if dist.get_rank() != source:
        with transferring_with(source, _SHARING, timeout_s):
            return _receive_named(lambda tensor: wait(dist.irecv(tensor, source, group)))
    shared = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    content = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in shared.items()]
    text = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    for peer in (other for other in range(dist.get_world_size()) if other != source):
        with transferring_with(peer, _SHARING, timeout_s):
            for tensor in (torch.tensor([text.numel()]), text, *shared.values()):
                if tensor.numel():
                    wait(dist.isend(tensor, peer, group))
    return {name: t.clone() for name, t in shared.items()}


def _receive_named(receive: Callable[[Tensor], None]) -> dict[str, Tensor]:
    size = torch.empty(1, dtype=torch.int64)
    receive(size)
    text = torch.empty(int(size), dtype=torch.uint8)
    receive(text)
    received: dict[str, Tensor] = {}
    for name, shape, dtype in json.loads(bytes(text.numpy()).decode()):
        received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        if received[name].numel():
            receive(received[name])
    return received


def clock_offset() -> float:
    """Return what to add to this process's ``perf_counter`` to have that of rank 0. All ranks must call it.

    Rank 0 sends its time in answer to each rank in turn. The quickest of some round trips counts, as if both ways took
    equally long (Cristian, Probabilistic clock synchronization, 1989); the error is at most half of that round trip.

    Raises:
        RunError: a rank did not answer in the process group's time, or is gone.
    """
    time_s, group = torch.zeros(1, dtype=torch.float64), control_group()
    if dist.get_rank() == 0:
        for peer in range(1, dist.get_world_size()):
            with transferring_with(peer, "comparing clocks"):
                for _ in range(ROUND_TRIPS):
                    dist.recv(time_s, peer, group)
                    dist.send(time_s.fill_(perf_counter()), peer, group)
        return 0.0
    found = []
    with transferring_with(0, "comparing clocks"):
        for _ in range(ROUND_TRIPS):
            asked_s = perf_counter()
            dist.send(time_s, 0, group)
            dist.recv(time_s, 0, group)
            theirs_s = time_s.item()
            answered_s = perf_counter()
            found.append((answered_s - asked_s, theirs_s - (asked_s + answered_s) / 2))
    return min(found)[1]


@contextmanager
def transferring_with(peer: int, doing: str, timeout_s: float | None = None) -> Iterator[None]:
    """Show other ranks that this one is in a transfer; explain its failure.

    Args:
        peer: the other rank.
        doing: what the transfer is for, in messages.
        timeout_s: how long one transfer may take; None: as long as the process group says.

    Raises:
        RunError: in place of what torch.distributed raises.
    """
    watch = current_watchdog()
    if watch is not None:
        watch.transfer = _Message(peer, doing)
    try:
        yield
    except RuntimeError as error:
        raise transfer_error(error, dist.get_rank(), peer, doing, lambda rank: f"rank {rank}", watch,
                             timeout_s) from error
    finally:
        if watch is not None:
            watch.transfer = None


@dataclass(frozen=True)
class _Message:
    """A transfer outside of any schedule, for the watch."""

    peer: int
    doing: str

    def __str__(self) -> str:
        return f"{self.doing} with rank {self.peer}"

    @property
    def limit_s(self) -> None:
        """Return None: each transfer has a limit of its own."""

    @property
    def purpose(self) -> str:
        return f"{self.doing} with"


def transfer_error(error: RuntimeError, rank: int, peer: int, doing: str, describe: Callable[[int], str],
                   watch: Watchdog | None, timeout_s: float | None) -> RunError:
    """Return the error of a transfer: the peer did not answer in time, or is gone; and who is to blame, if known.

    Args:
        doing: ``"waiting for the loss of update 3"``.
        describe: ``rank -> "rank 2 (stage 2)"``.
        watch: knows whether another rank failed before the peer; without it the peer is blamed.
        timeout_s: how long a peer is waited for; None: as long as the process group says.
    """
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    timed_out = "imed out" in text or "imeout" in text
    me, other = describe(rank), describe(peer)
    gave_up = f"{me} gave up {doing} with {other}" + (f" after {timeout_s:g} s" if timeout_s else "")
    if watch is not None:
        fault = watch.explain(peer, (timeout_s or watch.timing.silent_s) if timed_out else None)
        return watch.error(fault, gave_up if timed_out else f"{me} was {doing} with {other}")
    if timed_out:
        return RunError(gave_up, hint="a rank is stuck or much slower than the others: see what it printed, or its "
                                      "log; a slow start needs a larger timeout_s", rank=rank, peer=peer)
    return RunError(f"{me} lost {other} while {doing}: {text}", rank=rank, peer=peer,
                    hint="that rank ended first: see what it printed, or its log")
