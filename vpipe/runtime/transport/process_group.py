"""Transfer tensors between processes with torch.distributed, over gloo or a backend with nccl's rules.

A transport of another package (:func:`transport_class`) derives :class:`DistributedTransport`: it carries what it can,
and leaves the rest to gloo. One between the processes of a host is in ``vpipe/extras/shared_memory``.

Values for the host (losses, gradient norms, stop flags, shapes, votes) are sent over gloo in host memory. Tensors
between stages are, too, unless their device has a backend of its own. Such a backend is taken to keep nccl's rules
(docs/nccl.md): it has no tags, and executes the operations of a group for a pair of ranks in the order of issue. Then
there are three groups, so that activations, gradients and tensors of parameters do not wait for each other. nccl makes
a communicator for each group and pair of ranks at their first transfer (with ``device_id`` in ``init_process_group``
one for all ranks of a group), which blocks the first rank until the second one joins. Since transfers have an order, so
have these (:mod:`vpipe.schedules.lowering`).
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from time import perf_counter
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe import accelerator
from vpipe.description.transfers import TRANSPORTS, Transfers
from vpipe.distributed.init import exchange
from vpipe.distributed.watchdog import watch
from vpipe.errors import RunError, UserError
from vpipe.runtime.transport.transport import TensorSpec, TransferKey, TransferKind, check_all_taken

SENDS_UNDER_WAY = 4
"""Transfers per peer and kind that may be under way before a further send waits for the oldest, or as many as a rank
has in flight if that is more: in the first batch receives wait for specs. Losses, tied weights and their gradients
are received a pipeline depth later: of them it is this many and one per rank. The checker has proved that even 0 would
not deadlock where receives are posted as the program says."""

_PLACES = {kind: place for place, kind in enumerate(TransferKind)}
_HOST = torch.device("cpu")
_generations = count()

GROUP_OF_KIND: dict[str, str] = {
    TransferKind.ACTIVATIONS: "activations", TransferKind.GRADIENTS: "gradients",
    TransferKind.TIED_WEIGHTS: "parameters", TransferKind.TIED_GRADIENTS: "parameters",
    TransferKind.SHARES: "parameters", TransferKind.SUMS: "parameters", TransferKind.WEIGHTS: "parameters"}
"""The group of a transfer of tensors between stages, by the kind of its key; the other kinds are for the host."""

_NCCL_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
                          torch.int32, torch.int64, torch.bool})


@dataclass
class TensorGroups:
    """The groups for tensors over a backend with nccl's rules, which the pipelines of a process share.

    Attributes:
        groups: by name, see :data:`GROUP_OF_KIND`.
        idle: whether all that was issued in them has ended.
    """

    groups: Mapping[str, dist.ProcessGroup]
    idle: bool = True


_control: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_tensor_groups: WeakKeyDictionary[dist.ProcessGroup, TensorGroups] = WeakKeyDictionary()


def backend_of(device: torch.device) -> str | None:
    """Return the backend that the default process group has for tensors on a device; None when it has none."""
    entries = (entry.partition(":") for entry in dist.get_backend_config().split(","))
    return next((name for kind, _, name in entries if kind == device.type), None)


def is_ordered(device: torch.device) -> bool:
    """Return whether tensors on a device go over a backend with nccl's rules."""
    return backend_of(device) not in (None, "gloo")


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "torch.distributed is initialised"
    return dist.group.WORLD


def control_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return the gloo group for values of the host: the default group if it has gloo for the CPU, else a group made by
    the first call, which all ranks must make together."""
    default = _world()
    if backend_of(_HOST) == "gloo":
        return default
    if default not in _control:
        _control[default] = dist.new_group(backend="gloo", timeout=timeout)
    return _control[default]


def tensor_groups(device: torch.device, timeout: timedelta) -> TensorGroups:
    """Return the groups for tensors on a device. The first call makes them, and all ranks must make it together.

    Raises:
        UserError: another pipeline has transfers under way, with which those of a new one could be confused.
    """
    default = _world()
    if default not in _tensor_groups:
        backend = backend_of(device)
        _tensor_groups[default] = TensorGroups({name: dist.new_group(backend=backend, timeout=timeout)
                                                for name in dict.fromkeys(GROUP_OF_KIND.values())})
    if not _tensor_groups[default].idle:
        raise UserError("another pipeline of this process has transfers under way",
                        hint="let its training come to its end, or call its state_dict(), before you build the next "
                             "one; after a failure start new processes")
    return _tensor_groups[default]


def is_idle() -> bool:
    """Return whether no pipeline of this process has transfers under way in such groups."""
    return all(groups.idle for groups in _tensor_groups.values())


def transport_class(transfers: Transfers, device: torch.device) -> type[DistributedTransport]:
    """Return the class of the transport that all ranks want (:attr:`Transfers.transport`); that of gloo and nccl where
    one wants another. All ranks must call it together.

    Raises:
        UserError: the transport's package cannot be imported.
    """
    if is_ordered(device):
        return DistributedTransport
    wanted = transfers.transport
    found: list[type[DistributedTransport]] = TRANSPORTS.added(wanted) if wanted else []
    of_ranks = exchange(timeout_s=transfers.timeout_s).all_gather(wanted)
    if not (named := [name for name in of_ranks if name]):
        return DistributedTransport
    others = [(rank, name) for rank, name in enumerate(of_ranks) if name != named[0]]
    if others and dist.get_rank() == 0:
        other, name = others[0]
        say_once(f"gloo carries tensors between ranks of a host, not {named[0].replace('_', ' ')}: rank {other} "
             + ("has not installed it" if name is None else f"is set to {name or 'shared_memory false'}"))
    return DistributedTransport if others else found[0]


@cache
def say_once(text: str) -> None:
    """Print a line, once."""
    print(text, file=sys.stderr, flush=True)


class PeerTransfer:
    """The context of a transfer with another rank: the watchdog sees it, and its failure becomes a :class:`RunError`.

    Args:
        peer: the other rank.
        doing: what the transfer does, for messages: ``comparing clocks``; of a scheduled one ``waiting for``,
            ``sending`` or ``receiving``.
        timeout_s: how long one transfer may take; None: as long as the process group says.
        key, transport: of a scheduled one.
    """

    __slots__ = ("_doing", "_key", "_timeout_s", "_transport", "_watch", "peer")

    def __init__(self, peer: int, doing: str, timeout_s: float | None = None, key: TransferKey | None = None,
                 transport: DistributedTransport | None = None) -> None:
        self.peer, self._doing, self._timeout_s, self._key, self._transport = peer, doing, timeout_s, key, transport
        self._watch = watch.watchdog if transport is None else transport.watch

    def __enter__(self) -> None:
        if self._watch is not None:
            self._watch.transfer = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                raise self._failure(error) from error
        finally:
            if self._watch is not None:  # not before: the error says what this rank has waited for
                self._watch.transfer = None

    def _describe(self, rank: int) -> str:
        return f"rank {rank}" if self._transport is None else self._transport.describe(rank)

    @property
    def _what(self) -> str:
        return self._doing if self._key is None else f"{self._doing} {self._key}"

    def __str__(self) -> str:
        return f"{self._what} with {self._describe(self.peer)}"

    @property
    def limit_s(self) -> float | None:
        """Return how long the watchdog lets this transfer take; None: each wait has a limit of its own. nccl may make
        a communicator here, for which it waits without end."""
        return self._timeout_s if self._transport is not None and self._transport.ordered else None

    @property
    def purpose(self) -> str:
        """Return the words between ``has waited 31 s`` and the other rank."""
        if self._key is None:
            return f"{self._doing} with"
        what = str(self._key).removesuffix(f" for stage {self._key.stage}")  # which is the other one, or this one
        return {"waiting for": f"for {what} from", "sending": f"to send {what} to",
                "receiving": f"to receive {what} from"}[self._doing]

    def _failure(self, error: RuntimeError) -> RunError:
        """Return the error: the peer did not answer in time, or is gone, or another rank failed before."""
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        timed_out, timeout_s = "imed out" in text or "imeout" in text, self._timeout_s
        me, watchdog = self._describe(dist.get_rank()), self._watch
        assert watchdog is not None, "ranks that exchange tensors watch one another"
        gave_up = f"{me} gave up {self}" + (f" after {timeout_s:g} s" if timeout_s else "")
        fault = watchdog.explain(self.peer, (timeout_s or watchdog.timing.silent_s) if timed_out else None)
        return watchdog.error(fault, gave_up if timed_out else f"{me} was {self}")


class _Posted(NamedTuple):
    """A posted receive."""

    specs: Sequence[TensorSpec]
    work: list[dist.Work]
    buffers: list[Tensor]


class DistributedTransport:
    """Transfer tensors from and to the one rank of this process.

    A subclass overrides ``send``, ``post`` and ``receive`` for what it carries another way, and calls those here for
    the rest.

    Attributes:
        ordered: whether tensors are sent over a backend with nccl's rules. Transfers must then be posted and sent in
            the order of :mod:`vpipe.schedules.lowering`.
        watch: the watchdog of this process.
        describe: ``rank of the job -> "rank 2 (stage 2)"``, for messages.
        timeout_s: how long a transfer may take before the run fails.
        lane: the job's rank of every rank of the pipeline.
        generation: the number of this transport among those of the process, equal on all ranks: what an abandoned
            pipeline left must not be taken for a transfer of a later one.
        most_under_way: transfers of each kind to a rank that may not have arrived.
        unhurried: the job's ranks that receive what is sent over gloo only once they learn of it.

    Args:
        device: of the received tensors. gloo carries tensors in host memory, so those of a GPU are copied.
        in_flight: most microbatch-stages whose activations a rank holds at once.
        buckets: transfers that a sum over replicas takes per peer.
        lane: None where the pipeline has all ranks of the job.
    """

    needs_specs = True

    def __init__(self, device: torch.device, timeout_s: float, in_flight: int, describe: Callable[[int], str],
                 buckets: int, lane: Sequence[int] | None = None) -> None:
        self.lane = lane = range(dist.get_world_size()) if lane is None else lane
        self.rank = lane.index(dist.get_rank())
        self.bytes_sent = 0
        self.wait_s = 0.0
        self.device_waits: list[tuple[torch.Event, torch.Event]] | None = None
        self.timeout_s, self.describe = timeout_s, describe
        self._device, self._timeout = device, timedelta(seconds=timeout_s)
        self.watch = watch.watchdog
        self.most_under_way = dict.fromkeys(TransferKind, SENDS_UNDER_WAY + len(lane))
        self.most_under_way |= dict.fromkeys((TransferKind.ACTIVATIONS, TransferKind.GRADIENTS, TransferKind.SPECS),
                                              max(SENDS_UNDER_WAY, in_flight))
        # A sum over replicas waits for all peers, so the sends of the update before have ended.
        self.most_under_way |= dict.fromkeys((TransferKind.SHARES, TransferKind.SUMS, TransferKind.WEIGHTS),
                                              2 * buckets)
        self._control = control_group(self._timeout)
        self.ordered = is_ordered(device)
        self._groups = tensor_groups(device, self._timeout) if self.ordered else None
        # A receive waits for the stream in which it is posted: in one of its own for nothing that is being computed.
        self._receives = accelerator.new_stream(device) if self.ordered and device.type != "cpu" else None
        self.generation = exchange(timeout_s=timeout_s).from_rank(next(_generations))  # a build may fail on one alone
        self.unhurried: Container[int] = ()
        self._posted: dict[tuple[int, TransferKey], _Posted] = {}
        self._sent: dict[tuple[int, TransferKind], deque[tuple[TransferKey, list[dist.Work], list[Tensor]]]] = \
            defaultdict(deque)
        # By peer and stage, microbatches whose specs were sent, and of which no gradient has arrived: until then the
        # peer may not have received the specs, and does not post the receives after them.
        self._announced: dict[tuple[int, int], set[int]] = defaultdict(set)

    # Methods of the protocol take the pipeline's ranks, all others the job's.

    def send(self, peer: int, key: TransferKey, tensors: Sequence[Tensor]) -> None:
        peer = self.lane[peer]
        group, device = self._group_and_device(key)
        detached = [t.detach() for t in tensors]
        carried = accelerator.on_host(detached) if device == _HOST else [t.to(device).contiguous() for t in detached]
        # Even an empty tensor keeps its number, so that both sides count alike.
        with PeerTransfer(peer, "sending", self.timeout_s, key, self):
            work = self._start(dist.isend, peer, key, group, enumerate(carried))
        if key.kind is not TransferKind.SPECS:
            self.bytes_sent += sum(t.nbytes for t in carried)
        elif not self.ordered:
            self._announced[peer, key.stage].add(key.number)
        under_way = self._sent[peer, key.kind]
        under_way.append((key, work, carried))
        while len(under_way) > self.most_under_way[key.kind] and peer not in self.unhurried:
            self._complete(peer, *under_way.popleft())  # only now: the peer waits for what was just sent

    def post(self, peer: int, key: TransferKey, specs: Sequence[TensorSpec]) -> None:
        peer = self.lane[peer]
        group, device = self._group_and_device(key)
        with (PeerTransfer(peer, "receiving", self.timeout_s, key, self),
              nullcontext() if self._receives is None else accelerator.using(self._device, self._receives)):
            buffers = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
            self._posted[peer, key] = _Posted(
                specs, self._start(dist.irecv, peer, key, group, enumerate(buffers)), buffers)

    def receive(self, peer: int, key: TransferKey) -> list[Tensor]:
        peer = self.lane[peer]
        specs, works, buffers = self._posted.pop((peer, key))
        for_host = key.kind not in GROUP_OF_KIND
        with PeerTransfer(peer, "waiting for", self.timeout_s, key, self):
            if self.device_waits is None:
                self._wait(works, for_host)
            else:
                begun = accelerator.mark(self._device)
                self._wait(works, for_host)
                self.device_waits.append((begun, accelerator.mark(self._device)))
        if key.kind == TransferKind.GRADIENTS:
            self._announced[peer, key.stage + 1].discard(key.number)
        device = _HOST if for_host else self._device
        for buffer in () if for_host or self._receives is None else buffers:
            buffer.record_stream(accelerator.current_stream(device))  # or the next receive could have its memory
        arrived = [b if b.device == device else accelerator.queued_copy(b, device) for b in buffers]
        return [tensor.requires_grad_(spec.wants_gradient) for tensor, spec in zip(arrived, specs, strict=True)]

    def wait_sent(self, kind: TransferKind) -> None:
        for (peer, of), under_way in self._sent.items():
            if of == kind and peer not in self.unhurried:
                for _ in range(len(under_way)):
                    sent = under_way.popleft()
                    if kind == TransferKind.ACTIVATIONS and self._announced[peer, sent[0].stage]:
                        under_way.append(sent)
                    else:
                        self._complete(peer, *sent)

    def abandon(self) -> None:
        self.finish()  # all ranks have gone through the transfers of their programs

    def finish(self) -> None:
        for (peer, _), under_way in self._sent.items():
            while under_way:
                self._complete(peer, *under_way.popleft())
        self._announced.clear()
        check_all_taken(self.untaken(), self.lane[self.rank])
        if self._groups is not None:
            self._groups.idle = True

    def untaken(self) -> list[TransferKey]:
        """Return the posted receives that were never taken."""
        return [key for _, key in self._posted]

    def _group_and_device(self, key: TransferKey) -> tuple[dist.ProcessGroup, torch.device]:
        """Return the group that carries a transfer, and where its tensors must be."""
        if self._groups is None or key.kind not in GROUP_OF_KIND:
            return self._control, _HOST
        self._groups.idle = False  # until all has ended
        return self._groups.groups[GROUP_OF_KIND[key.kind]], self._device

    def _start(self, way: Callable[..., dist.Work | None], peer: int, key: TransferKey, group: dist.ProcessGroup,
               tensors: Iterable[tuple[int, Tensor]]) -> list[dist.Work]:
        """Begin to send or to receive the tensors of a transfer, each with its number there; an empty one is not."""
        works = [way(as_sent(tensor) if self.ordered else tensor, peer, group,
                     _tag(key, number, tensor.nbytes, self.generation))
                 for number, tensor in tensors if tensor.numel()]
        assert None not in works, "this rank is in the group"
        return cast("list[dist.Work]", works)

    def _wait(self, works: Sequence[dist.Work], on_host: bool) -> None:
        """Wait for transfers over gloo; let the current stream wait for those over nccl, which returns at once.

        With a timeout nccl would poll for the end on the host: the watchdog has the limit there.
        """
        started = perf_counter()
        for work in works:
            if on_host or self._device.type == "cpu" or self._groups is None:
                work.wait(self._timeout)
            else:
                work.wait()
        self.wait_s += perf_counter() - started

    def _complete(self, peer: int, key: TransferKey, works: list[dist.Work], tensors: list[Tensor]) -> None:
        """Wait for a send and free its tensors."""
        with PeerTransfer(peer, "sending", self.timeout_s, key, self):
            self._wait(works, on_host=key.kind not in GROUP_OF_KIND)
        tensors.clear()


def as_sent(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as nccl takes it: of other dtypes than its own the bytes."""
    return tensor if tensor.dtype in _NCCL_DTYPES else tensor.reshape(-1).view(torch.uint8)


def _tag(key: TransferKey, number: int, size: int, generation: int) -> int:
    """Return a number below 2**31 for one tensor of a transfer, by which gloo matches its send and its receive.

    It depends on the size in bytes: a receive that waits for another size than what is sent must not match, since gloo
    aborts the process then. Where two tensors under way have the same tag, they match in the order of sending.
    """
    turn = generation % 16 * 256 + key.number % 256
    mixed = (size * 0x9E3779B1 + number * 0x85EBCA77 & 0xFFFFFFFF) >> 22
    return ((turn * 16 + _PLACES[key.kind]) * 32 + key.stage % 32) * 1024 + mixed

