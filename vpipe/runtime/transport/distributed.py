"""The transport between processes: torch.distributed, over gloo or a backend with nccl's rules."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.distributed.watchdog import current_watchdog
from vpipe.errors import RunError, UserError
from vpipe.runtime.transport.broadcast import failure_of, note
from vpipe.runtime.transport.process_groups import GROUP_OF_KIND, as_sent, control_group, is_ordered, tensor_groups
from vpipe.runtime.transport.transport import Key, Spec

SENDS_BEHIND = 4
"""Transfers per peer and kind that may be under way before a further send waits for the oldest, or as many as a rank
has in flight if that is more; what is sent once per update (losses, tied weights and their gradients) is taken a whole
pipeline depth later, so as many more there as there are ranks. The checker has proved that even 0 would not deadlock
where receives are posted as the program says; in the first batch those wait for the shapes, hence the second number."""

HEADER_BYTES = 4096
MOST_TENSORS = 62
_KINDS = "FBWGLNDSC"
_HOST = torch.device("cpu")
_generations = count()


@dataclass
class _Posted:
    specs: Sequence[Spec] | None
    work: list[dist.Work]
    buffers: list[Tensor]


class Distributed:
    """One process per rank.

    Attributes:
        ordered: whether tensors go over a backend with nccl's rules (:mod:`vpipe.runtime.transport.process_groups`).
            Transfers must then be posted and sent in the order of :mod:`vpipe.schedules.receive_order`.

    Args:
        device: where received tensors are wanted. gloo carries tensors in host memory, so those of a GPU are
            copied on their way.
        timeout_s: how long a transfer may take before the run fails.
        in_flight: most microbatch-stages whose activations a rank holds at once.
        describe: ``rank -> "rank 2 (stage 2)"``, for messages.
        buckets: transfers that a sum over replicas takes per peer.
    """

    def __init__(self, device: torch.device, timeout_s: float, in_flight: int, describe: Callable[[int], str],
                 buckets: int) -> None:
        self.rank = dist.get_rank()
        self.bytes_sent = 0
        self.wait_s = 0.0
        self._device, self._timeout, self._describe = device, timedelta(seconds=timeout_s), describe
        self._watch = current_watchdog()
        if self._watch is not None:
            self._watch.describe = describe
        self._behind = {kind: max(SENDS_BEHIND, in_flight) if kind in "FB" else SENDS_BEHIND + dist.get_world_size()
                        for kind in _KINDS}
        # Nobody waits for a peer before a sum, which waits for all: of one update the last one's sends have ended.
        self._behind |= {"D": 2 * buckets, "S": 2 * buckets}
        self._control = control_group(self._timeout)
        self.ordered = is_ordered(device)
        self._groups = tensor_groups(device, self._timeout) if self.ordered else None
        # What an abandoned pipeline left under way must not match a later one's; every rank builds them in one order.
        self._generation = next(_generations)
        self._posted: dict[tuple[int, Key], _Posted] = {}
        self._sent: dict[tuple[int, str], deque[tuple[Key, list[dist.Work], list[Tensor]]]] = defaultdict(deque)
        # By peer and stage, microbatches with announced shapes of which no gradient came back: until then the peer may
        # not have learned them, and holds up the receives behind.
        self._announced: dict[tuple[int, int], set[int]] = defaultdict(set)

    def send(self, peer: int, key: Key, tensors: Sequence[Tensor], announce: bool = False) -> None:
        group, device = self._way(key)
        carried = [t.detach().to(device).contiguous() for t in tensors]
        # Even an empty tensor keeps its turn, so that both sides count alike.
        with self._failing(peer, key, "sending"):
            work = [self._isend(_header(tensors), peer, key, MOST_TENSORS, self._control)] if announce else []
            work += [self._isend(t, peer, key, i, group) for i, t in enumerate(carried) if t.numel()]
        self.bytes_sent += sum(t.nbytes for t in carried)
        if announce and not self.ordered:
            self._announced[peer, key.stage].add(key.number)
        behind = self._sent[peer, key.kind]
        behind.append((key, work, carried))
        while len(behind) > self._behind[key.kind]:  # only now: the peer waits for what was just sent
            self._complete(peer, *behind.popleft())

    def post(self, peer: int, key: Key, specs: Sequence[Spec] | None) -> None:
        with self._failing(peer, key, "receiving"):
            if specs is None:
                header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                posted = _Posted(None, [self._irecv(header, peer, key, MOST_TENSORS, self._control)], [header])
            else:
                posted = self._receive(peer, key, specs)
        self._posted[peer, key] = posted

    def ready(self, peer: int, key: Key) -> bool:
        return True

    def learn(self, peer: int, key: Key) -> list[Spec]:
        posted = self._posted[peer, key]
        started = perf_counter()
        with self._failing(peer, key, "waiting for"):
            self._wait(posted.work, on_host=True)
            specs = _specs(posted.buffers[0])
            self._posted[peer, key] = self._receive(peer, key, specs)
        self.wait_s += perf_counter() - started
        return specs

    def take(self, peer: int, key: Key) -> list[Tensor]:
        posted = self._posted.pop((peer, key))
        started = perf_counter()
        with self._failing(peer, key, "waiting for"):
            self._wait(posted.work, on_host=key.kind not in GROUP_OF_KIND)
        self.wait_s += perf_counter() - started
        if key.kind == "B":
            self._announced[peer, key.stage + 1].discard(key.number)
        assert posted.specs is not None, "what is announced is learned first"
        device = self._device if key.kind in GROUP_OF_KIND else _HOST
        return [buffer.to(device).requires_grad_(spec.wants_gradient)
                for buffer, spec in zip(posted.buffers, posted.specs, strict=True)]

    def settle(self, kind: str) -> None:
        started = perf_counter()
        for (peer, of), behind in self._sent.items():
            if of == kind:
                for _ in range(len(behind)):
                    sent = behind.popleft()
                    if kind == "F" and self._announced[peer, sent[0].stage]:
                        behind.append(sent)
                    else:
                        self._complete(peer, *sent)
        self.wait_s += perf_counter() - started

    def abandon(self) -> None:
        raise AssertionError("what is on its way to another process cannot be called back")

    def finish(self) -> None:
        started = perf_counter()
        for (peer, kind), behind in self._sent.items():
            while behind and kind != "C":
                self._complete(peer, *behind.popleft())
        self._announced.clear()
        self.wait_s += perf_counter() - started
        if self._posted:
            keys = ", ".join(str(key) for _, key in list(self._posted)[:3])
            raise RunError(f"{len(self._posted)} transfer(s) were never taken: {keys}",
                           hint="this is a defect of the schedule or of vpipe: please report it", rank=self.rank)
        if self._groups is not None:
            self._groups.idle = True

    def _receive(self, peer: int, key: Key, specs: Sequence[Spec]) -> _Posted:
        group, device = self._way(key)
        buffers = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
        return _Posted(specs, [self._irecv(b, peer, key, i, group) for i, b in enumerate(buffers) if b.numel()],
                       buffers)

    def _way(self, key: Key) -> tuple[dist.ProcessGroup, torch.device]:
        """The group that carries a transfer, and where its tensors must be."""
        if self._groups is None or key.kind not in GROUP_OF_KIND:
            return self._control, _HOST
        self._groups.idle = False  # until all has ended
        return self._groups.groups[GROUP_OF_KIND[key.kind]], self._device

    def _isend(self, tensor: Tensor, peer: int, key: Key, number: int, group: dist.ProcessGroup) -> dist.Work:
        work = dist.isend(as_sent(tensor) if self.ordered else tensor, peer, group,
                          _tag(key, number, tensor.nbytes, self._generation))
        assert work is not None, "this rank is in the group"
        return work

    def _irecv(self, tensor: Tensor, peer: int, key: Key, number: int, group: dist.ProcessGroup) -> dist.Work:
        work = dist.irecv(as_sent(tensor) if self.ordered else tensor, peer, group,
                          _tag(key, number, tensor.nbytes, self._generation))
        assert work is not None, "this rank is in the group"
        return work

    def _wait(self, works: Sequence[dist.Work], on_host: bool) -> None:
        """Wait for what gloo carries; let the current stream wait for what nccl does, which returns at once.

        Given a timeout nccl would look for the end on the host, again and again: the watchdog has the limit there.
        """
        for work in works:
            if on_host or self._device.type == "cpu" or self._groups is None:
                work.wait(self._timeout)
            else:
                work.wait()

    def _complete(self, peer: int, key: Key, works: list[dist.Work], tensors: list[Tensor]) -> None:
        with self._failing(peer, key, "sending"):
            self._wait(works, on_host=key.kind not in GROUP_OF_KIND)
        tensors.clear()

    def _failing(self, peer: int | None, key: Key, doing: str) -> _Failing:
        return _Failing(self, peer, key, doing)

    def failure(self, error: RuntimeError, peer: int | None, key: Key, doing: str) -> RunError:
        """What a transfer's failure means to the user."""
        return failure_of(error, self.rank, peer, f"{doing} {key}", self._describe, self._watch,
                          self._timeout.total_seconds())

    @property
    def timeout_s(self) -> float:
        """How long a transfer may take before the run fails."""
        return self._timeout.total_seconds()

    def doing(self, transfer: _Failing | None) -> None:
        """Note what this rank is at, for the others."""
        note(self._watch, transfer)

    def describe(self, rank: int) -> str:
        """A rank with its stages, for messages."""
        return self._describe(rank)


class _Failing:
    """Turns what torch.distributed raises into a :class:`RunError` that names the transfer and who failed."""

    __slots__ = ("_doing", "_key", "_transport", "peer")

    def __init__(self, transport: Distributed, peer: int | None, key: Key, doing: str) -> None:
        self._transport, self.peer, self._key, self._doing = transport, peer, key, doing

    def __enter__(self) -> None:
        self._transport.doing(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            try:
                raise self._transport.failure(error, self.peer, self._key, self._doing) from error
            finally:
                self._transport.doing(None)  # not before: it is what this rank has waited for
        self._transport.doing(None)

    @property
    def limit_s(self) -> float | None:
        """Over gloo each wait has one. nccl may make a communicator here, for which it waits without end."""
        return self._transport.timeout_s if self._transport.ordered else None

    def __str__(self) -> str:
        """In words, for when this process is ended in the middle of it."""
        other = "all ranks" if self.peer is None else self._transport.describe(self.peer)
        return f"{self._doing} {self._key} with {other}"

    @property
    def said(self) -> str:
        """For when it takes long: it has waited ..."""
        what = str(self._key).removesuffix(f" for stage {self._key.stage}")  # which is the other one, or this one
        return {"waiting for": f"for {what} from", "sending": f"to send {what} to",
                "receiving": f"to receive {what} from"}[self._doing]


def _tag(key: Key, number: int, size: int, generation: int) -> int:
    """Return a number below 2**31 for one tensor of a transfer, by which gloo matches its send and its receive.

    It depends on the size in bytes: a receive that waits for another size than what is sent must not match, since gloo
    aborts the process then. Where two tensors under way have the same tag, they match in the order of sending.
    """
    turn = generation % 16 * 256 + key.number % 256
    mixed = (size * 0x9E3779B1 + number * 0x85EBCA77 & 0xFFFFFFFF) >> 22
    return ((turn * 16 + _KINDS.index(key.kind)) * 32 + key.stage % 32) * 1024 + mixed


def _header(tensors: Sequence[Tensor]) -> Tensor:
    """Shapes, dtypes and gradient flags as JSON in a tensor of fixed size."""
    if len(tensors) > MOST_TENSORS:
        raise UserError(f"{len(tensors)} tensors cross a cut between stages", hint=f"at most {MOST_TENSORS} can")
    text = json.dumps([[list(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad] for t in tensors])
    if len(text) > HEADER_BYTES:
        raise UserError(f"the shapes of {len(tensors)} tensors between stages take {len(text)} bytes",
                        hint=f"at most {HEADER_BYTES} are provided: let fewer tensors cross the cut")
    return torch.frombuffer(bytearray(text.encode().ljust(HEADER_BYTES)), dtype=torch.uint8)


def _specs(header: Tensor) -> list[Spec]:
    return [Spec(tuple(shape), getattr(torch, dtype), wants)
            for shape, dtype, wants in json.loads(bytes(header.cpu().numpy()).decode())]
