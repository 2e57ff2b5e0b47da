"""Keep nccl's rules over gloo, on CPU tensors: a backend of torch.distributed for tests.

1. Without eager communicators the first operation of a group for a pair of ranks blocks the caller until the peer makes
   its first one for that pair; so does the first collective of a group, until all its ranks come to theirs.
2. Operations run in the order in which they were issued, whatever their direction.
3. Tags are ignored: order alone matches sends and receives, and the collectives of a group: others than its peers' are
   an error here, where nccl would wait or mix them up.
4. A send is buffered, or waits until its receive runs.
5. The worst case: operations of all groups of a rank run one after the other. A wait blocks the caller, which has no
   stream that could wait instead.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.runtime.transport import process_group

HELLO, CLEAR, DATA, JOIN, TOGETHER = range(5)


@dataclass
class Rules:
    """How the backend behaves.

    Attributes:
        eager: whether communicators are there from the beginning.
        buffered: whether sends do not wait for their receives.
        limit_s: how long anything may take.
        communicators: that were made here, as (group, peer); that of a group's collectives as (group, None).
    """

    eager: bool = False
    buffered: bool = False
    limit_s: float = 30.0
    communicators: set[tuple[dist.ProcessGroup, int | None]] = field(default_factory=set)

    @property
    def limit(self) -> timedelta:
        """For what an operation waits for: longer than who waits for the operation, and says behind which it is."""
        return timedelta(seconds=20 * self.limit_s)


rules = Rules()


class Ended(dist._Work):  # type: ignore[name-defined,misc] # torch's own name of it
    """An operation that was issued.

    Attributes:
        name: what it is.
        line: what carries it out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.name = ""
        self.line: InTurn

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ended.wait(rules.limit_s):
            behind = "" if self.line.doing is self else f" behind {self.line.doing.name}"
            raise RuntimeError(f"Timed out after {rules.limit_s:g} s: {self.name}{behind}")
        if self.error is not None:
            raise RuntimeError(str(self.error))
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class InTurn:
    """What carries out operations, one after the other.

    Attributes:
        doing: the operation that is under way, or was last.
    """

    doing: Ended

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[Callable[[], None], Ended]] = queue.SimpleQueue()
        threading.Thread(target=self._carry_out, daemon=True, name="device").start()

    def issue(self, name: str, operation: Callable[[], None], work: Ended | None = None) -> Ended:
        work = work or Ended()
        work.name, work.line = name, self
        self.queue.put((operation, work))
        return work

    def _carry_out(self) -> None:
        while True:
            operation, self.doing = self.queue.get()
            try:
                operation()
            except BaseException as error:
                self.doing.error = error
            self.doing.ended.set()


class Device(InTurn):
    """That of this rank.

    Attributes:
        carrier: the gloo group that carries what is sent.
        groups: that keep the rules.
        unsent: buffered sends.
    """

    def __init__(self, carrier: Any) -> None:
        super().__init__()
        self.carrier = carrier
        self.groups: list[NcclRules] = []
        self.unsent: list[Any] = []


_device: Device | None = None


class NcclRules(dist.ProcessGroup):
    """A process group with the rules.

    Attributes:
        NAME: of the backend.
        KIND: of the devices whose tensors it carries.
    """

    NAME, KIND = "nccl_rules", "cpu"

    def __init__(self, given: Any, options: Any) -> None:
        super().__init__(given.group_rank, given.group_size)  # type: ignore[call-arg] # its stub lacks this form
        assert _device is not None
        self._device = _device
        _device.groups.append(self)
        self._name = given.group_id
        self._number = zlib.crc32(self._name.encode()) % 2**20  # the same on all its ranks
        self._ranks: Sequence[int] = given.global_ranks_in_group or range(given.group_size)
        self._others = [rank for rank in self._ranks if rank != self._ranks[given.group_rank]]
        self.met: set[int | None] = set()  # peers with which there is a communicator

    def getBackendName(self) -> str:  # noqa: N802
        return self.NAME

    def getGroupName(self) -> str:  # noqa: N802
        return str(self._name)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Ended:
        peer = self._meet(peer)
        (tensor,) = tensors
        return self._device.issue(f"the send to rank {peer}", lambda: self._send(tensor, peer))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Ended:
        peer = self._meet(peer)
        (tensor,) = tensors
        return self._device.issue(f"the receive from rank {peer}", lambda: self._receive(tensor, peer))

    def _meet(self, peer: int) -> int:
        """Make the communicator of a pair when it is used first; return the peer as the job counts it."""
        self._make(peer, HELLO, [self._ranks[peer]])
        return self._ranks[peer]

    def _make(self, name: int | None, greeting: int, others: Sequence[int]) -> None:
        if name in self.met:
            return
        self.met.add(name)
        rules.communicators.add((self, name))
        if not rules.eager:
            nothing = torch.zeros(1)
            self._swap(greeting, dict.fromkeys(others, nothing), {rank: torch.zeros(1) for rank in others},
                       timedelta(seconds=2 * rules.limit_s))

    def _send(self, tensor: Tensor, peer: int) -> None:
        if rules.buffered:
            copied = tensor.clone()
            self._device.unsent.append((self._device.carrier.send([copied], peer, self._tag(DATA)), copied))
            return
        self._device.carrier.recv([torch.zeros(1)], peer, self._tag(CLEAR)).wait(rules.limit)
        self._device.carrier.send([tensor], peer, self._tag(DATA)).wait(rules.limit)

    def _receive(self, tensor: Tensor, peer: int) -> None:
        if not rules.buffered:
            self._device.carrier.send([torch.zeros(1)], peer, self._tag(CLEAR)).wait(rules.limit)
        self._device.carrier.recv([tensor], peer, self._tag(DATA)).wait(rules.limit)

    def _tag(self, kind: int) -> int:
        return self._number * (TOGETHER + 1) + kind

    # -- collectives: all ranks swap what each needs; sums are in the order of the ranks. torch's stubs have more forms

    def allreduce(self, tensors: list[Tensor], options: Any) -> Ended:  # type: ignore[override]
        (tensor,), reduction = tensors, options.reduceOp.op.name
        return self._together(f"all_reduce {reduction}", [tensor] * self.size(), [tensor] * self.size(),
                              lambda found: tensor.copy_(_reduced(found, reduction)))

    def broadcast(self, tensors: list[Tensor], options: Any) -> Ended:  # type: ignore[override]
        (tensor,), root = tensors, options.rootRank
        return self._together(f"broadcast from {root}", [tensor] * self.size(), [tensor] * self.size(),
                              lambda found: tensor.copy_(found[root]))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]],  # type: ignore[override]
                options: Any) -> Ended:
        (output,), root = outputs, options.rootRank
        parts = inputs[0] if self.rank() == root else [output] * self.size()
        return self._together(f"scatter from {root}", parts, [output] * self.size(),
                              lambda found: output.copy_(found[root]))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor],  # type: ignore[override]
                  options: Any = None) -> Ended:
        return self._together("all_gather", inputs * self.size(), outputs[0], lambda found: _fill(outputs[0], found))

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any = None) -> Ended:
        return self.allgather([list(output.view(self.size(), *own.shape).unbind())], [own])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor],
                                        options: Any = None) -> Ended:
        return [self.all_gather_single(output, own) for output, own in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any) -> Ended:
        reduction = options.reduceOp.op.name
        return self._together(f"reduce_scatter {reduction}", list(given.view(self.size(), *output.shape).unbind()),
                              [output] * self.size(), lambda found: output.copy_(_reduced(found, reduction)))

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor],  # type: ignore[override]
                                        options: Any) -> Ended:
        return [self.reduce_scatter_single(output, given, options)
                for output, given in zip(outputs, inputs, strict=True)][-1]

    def all_to_all_single(self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int],
                          options: Any = None) -> Ended:
        parts = [torch.split(tensor, sizes or len(tensor) // self.size()) for tensor, sizes in (
            (output, output_sizes), (given, input_sizes))]
        return self._together("all_to_all", parts[1], parts[0], lambda found: _fill(parts[0], found))

    # as torch 2.11 calls them
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single, reduce_scatter_single, all_to_all_single)  # type: ignore[assignment]

    def _together(self, name: str, parts: Sequence[Tensor], like: Sequence[Tensor],
                  end: Callable[[list[Tensor]], object]) -> Ended:
        """Issue a collective: give every rank its part, then call ``end`` with what every rank has given this one."""
        self._make(None, JOIN, self._others)

        @torch.no_grad()  # which is a thread's own, and tensors may be of a graph
        def operation() -> None:
            mark = torch.tensor([zlib.crc32(name.encode())])
            marks = {rank: torch.zeros_like(mark) for rank in self._others}
            self._swap(TOGETHER, dict.fromkeys(self._others, mark), marks)
            for rank, theirs in marks.items():
                if theirs != mark:
                    raise RuntimeError(f"rank {rank} has another collective where this one has {name}")
            found = [part.contiguous() if rank not in marks else torch.empty_like(
                given, memory_format=torch.contiguous_format)
                for rank, part, given in zip(self._ranks, parts, like, strict=True)]
            by_rank = dict(zip(self._ranks, zip(parts, found, strict=True), strict=True))
            self._swap(TOGETHER, {rank: by_rank[rank][0].contiguous() for rank in marks},
                       {rank: by_rank[rank][1] for rank in marks})
            end(found)

        return self._device.issue(name, operation)

    def _swap(self, kind: int, to: Mapping[int, Tensor], into: Mapping[int, Tensor],
              limit: timedelta | None = None) -> None:
        """Send and receive at the same time."""
        carrier, tag = self._device.carrier, self._tag(kind)
        works = [carrier.send([tensor], rank, tag) for rank, tensor in to.items() if tensor.numel()]
        works += [carrier.recv([tensor], rank, tag) for rank, tensor in into.items() if tensor.numel()]
        for work in works:
            work.wait(limit or rules.limit)


def _fill(outputs: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    for output, tensor in zip(outputs, found, strict=True):
        output.copy_(tensor)


def _reduced(found: Sequence[Tensor], reduction: str) -> Tensor:
    add: Any = {"SUM": Tensor.add_, "AVG": Tensor.add_, "MAX": torch.maximum, "MIN": torch.minimum}[reduction]
    total = found[0].clone()
    for other in found[1:]:
        total = add(total, other)
    return total / len(found) if reduction == "AVG" else total


@contextmanager
def nccl_rules(*, eager: bool, buffered: bool, limit_s: float = 30.0,
               backend: type[NcclRules] = NcclRules) -> Iterator[Rules]:
    """Let tensors between ranks go over a backend, one and the same in a process. All ranks must enter together.

    Layers' collectives go over it where their mesh asks for it: ``init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp",
    "tp"), backend_override={"tp": "nccl_rules"})``.
    """
    global _device
    if _device is None:
        dist.Backend.register_backend(backend.NAME, backend, extended_api=True, devices=[backend.KIND])
        _device = Device(dist.new_group(backend="gloo"))
    for group in _device.groups:
        group.met.clear()
    rules.eager, rules.buffered, rules.limit_s, rules.communicators = eager, buffered, limit_s, set()
    backend_of = process_group.backend_of
    process_group.backend_of = lambda device: backend.NAME
    try:
        yield rules
    finally:
        process_group.backend_of = backend_of
        for work, _ in _device.unsent:
            work.wait(rules.limit)
        _device.unsent.clear()
