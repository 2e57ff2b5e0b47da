"""Tensors through shared memory: both ends in one process, then the ranks of a world."""

from __future__ import annotations

import errno
import gc
import os
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from world import World

from vpipe.errors import RunError
from vpipe.extras.shared_memory import host_links, link, shared_buffers, transport
from vpipe.extras.shared_memory.host_links import HostLinks, SharedMemoryTransfers, connect
from vpipe.extras.shared_memory.link import HEAD, INLINE_BYTES, LinkClosedError, SharedMemoryLink
from vpipe.extras.shared_memory.shared_buffers import BufferLayout
from vpipe.extras.shared_memory.transport import SharedMemoryTransport
from vpipe.pipeline import Pipeline
from vpipe.runtime.engine import Engine
from vpipe.runtime.transport.transport import TensorSpec, TransferKey, TransferKind

pytestmark = pytest.mark.jobs


def links_of(engine: Engine) -> list[int]:
    [worker] = engine.workers.values()
    used = worker.transport
    return sorted(used._shared.links.links) if isinstance(used, SharedMemoryTransport) and used._shared else []


def open_memories() -> int:
    """Memories, and what waits for links."""
    gc.collect()
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += any(word in os.readlink(f"/proc/self/fd/{name}") for word in ("memfd:vpipe", "eventpoll"))
    return found


@contextmanager
def new_links() -> Iterator[pytest.MonkeyPatch]:
    """Links of this job alone, and changes that end with it."""
    there = dict(transport._host_links)
    transport._host_links.clear()
    with pytest.MonkeyPatch.context() as patch:
        yield patch
    for links in transport._host_links.values():
        links.close()  # the watchdog's thread may refer to them until its next beat
    transport._host_links.clear()
    transport._host_links.update(there)


def train(*, inline_bytes: int = 0, memories: int | None = None, hosts: list[str] | None = None,
          unwanted: list[int] = [], **arguments: Any) -> list[Any]:  # noqa: B006 - it is not changed
    """What ``jobs.train`` returns, the ranks that this one has links with, and the open files that were left.

    Args:
        inline_bytes: of transfers without a buffer.
        memories: buffers of rank 1 that there is memory for.
        hosts: of the ranks.
        unwanted: ranks that want no shared memory.
    """
    rank, seen, before = dist.get_rank(), [], open_memories()
    with new_links() as patch:
        patch.setattr(link, "INLINE_BYTES", inline_bytes)
        if hosts is not None:
            patch.setattr(host_links, "_boot", lambda: hosts[rank])
        if memories is not None and rank == 1:
            allocate, left = os.posix_fallocate, iter(range(memories + 1))  # one at the start

            def allocating(*given: int) -> None:
                if next(left, None) is None:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                allocate(*given)

            patch.setattr(os, "posix_fallocate", allocating)
        set_up = Pipeline._set_up

        def looking(pipe: Pipeline, *given: Any) -> None:
            set_up(pipe, *given)
            seen.append(links_of(pipe.engine))

        patch.setattr(Pipeline, "_set_up", looking)
        result = jobs.train(**arguments, shared_memory=rank not in unwanted)
    return [result, *seen, open_memories() - before]


F, B = TransferKey(TransferKind.ACTIVATIONS, 1, 7), TransferKey(TransferKind.GRADIENTS, 0, 7)


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def ends() -> Iterator[tuple[SharedMemoryTransfers, SharedMemoryTransfers]]:
    """The transfers of rank 0 and of rank 1; nothing is open afterwards."""
    before = open_files()
    links = linked()
    yield transfers(links[0]), transfers(links[1])
    for each in links:
        each.close()
    del links, each
    assert open_files() == before


def linked() -> tuple[HostLinks, HostLinks]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return HostLinks({1: SharedMemoryLink(1, left)}, complete=True, reports=True), \
        HostLinks({0: SharedMemoryLink(0, right)}, complete=True, reports=False)


def transfers(links: HostLinks, generation: int = 0, most: int = 2) -> SharedMemoryTransfers:
    return SharedMemoryTransfers(links, generation, most, timeout_s=0.2)


def received(end: SharedMemoryTransfers, key: TransferKey, specs: list[TensorSpec] | None = None) -> list[Tensor]:
    [peer] = end.links.links
    assert end.wait_for(peer, key)
    end.post(peer, key, end.arrived[peer, key][0].layout.specs if specs is None else specs)
    return end.take(peer, key)


def pool_bytes(end: SharedMemoryTransfers) -> int:
    [link] = end.links.links.values()
    return sum(len(slab.buffers) * slab.capacity for slab in link._pool._slabs)


Ends = tuple[SharedMemoryTransfers, SharedMemoryTransfers]
ONE = [TensorSpec((1,), torch.float32, wants_gradient=False)]


@pytest.mark.parametrize("large", [False, True])
def test_tensors_of_all_kinds_arrive_as_leaves(ends: Ends, large: bool) -> None:
    left, right = ends
    scale = 100 if large else 1
    sent = [torch.arange(6.0 * scale, requires_grad=True).view(-1, 3).t(), torch.tensor(3.5), torch.empty(2, 0, 3),
            torch.ones(5, scale, dtype=torch.bfloat16), torch.tensor([True, False]), torch.ones(3).expand(4, 3),
            torch.randn(3, scale, dtype=torch.complex64).conj(), torch.ones(7, dtype=torch.float8_e4m3fn),
            torch.arange(5), torch.empty(0, dtype=torch.int8)]
    left.send(1, F, sent)
    got = received(right, F)
    for tensor, copy in zip(sent, got, strict=True):
        assert TensorSpec.from_tensor(copy) == TensorSpec.from_tensor(tensor)
        assert torch.equal(copy.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else copy,
                           tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor)
        assert copy.is_leaf
        assert copy.is_contiguous()
        assert not copy._is_view()
        assert copy.data_ptr() % 64 == 0
    assert (pool_bytes(left) > 0) == large
    wanted = [TensorSpec((3,), torch.float32, wants_gradient=True)]
    left.send(1, F, [torch.ones(3)])
    assert received(right, F, wanted)[0].requires_grad, "as its receiver expects it"


def test_sent_tensors_may_change_and_received_ones_are_kept_while_used(ends: Ends) -> None:
    left, right = ends
    tensor = torch.zeros(INLINE_BYTES)
    kept = []
    for number in range(5):
        left.send(1, TransferKey(TransferKind.GRADIENTS, 0, number), [tensor.fill_(number)])
        kept.append(received(right, TransferKey(TransferKind.GRADIENTS, 0, number))[0])
        right.send(0, F, [torch.ones(1)])  # returns buffers
        received(left, F)
    rows = [t[:3] for t in kept]
    del kept
    assert pool_bytes(left) == 5 * tensor.nbytes
    assert [row.tolist() for row in rows] == [[float(number)] * 3 for number in range(5)]
    del rows
    for number in range(100):
        left.send(1, TransferKey(TransferKind.GRADIENTS, 0, number), [tensor.fill_(number)])
        last = received(right, TransferKey(TransferKind.GRADIENTS, 0, number))[0][-1].item()
        assert last == number
        right.send(0, F, [torch.ones(1)])
        received(left, F)
    assert pool_bytes(left) == 6 * tensor.nbytes, "the first was sent before the others came back"


def test_memory_of_sizes_that_come_no_more_is_given_back(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_buffers, "IDLE_SENDS", 10)
    left, right = ends
    [there] = right.links.links.values()
    for size in (1 << 14, 1 << 16, 1 << 18):
        for _ in range(12):
            left.send(1, F, [torch.ones(size)])
            received(right, F)
            right.send(0, B, [torch.ones(1)])
            received(left, B)
    assert pool_bytes(left) <= 4 * ((1 << 16) + (1 << 18)) * 2
    assert len(there._memories) == 2


def test_activations_wait_for_posted_receives(ends: Ends) -> None:
    left, right = ends
    keys = [TransferKey(TransferKind.ACTIVATIONS, 1, number) for number in range(3)]
    for number, key in enumerate(keys[:2]):
        assert not left.is_crowded(1), number
        left.send(1, key, [torch.ones(1)])
    assert left.is_crowded(1)
    with pytest.raises(RuntimeError, match=r"Timed out waiting 200ms for rank 1"):
        left.wait(1, lambda: not left.is_crowded(1))
    right.post(0, keys[1], ONE)
    right.links.receive(0.0)
    right.links.receive(0.0)
    with pytest.raises(RuntimeError, match="Timed out"):  # it waits, and tells what it has posted
        right.wait_for(0, TransferKey(TransferKind.ACTIVATIONS, 1, 9))
    left.wait(1, lambda: not left.is_crowded(1))
    assert [key for _, key, _ in left.unfinished()] == [keys[1]]
    right.post(0, keys[0], ONE)
    list(right.unfinished())
    left.wait(1, lambda: not list(left.unfinished()))
    right.take(0, keys[0])
    right.take(0, keys[1])


def test_transfers_with_equal_keys_come_in_order(ends: Ends) -> None:
    left, right = ends
    for number in range(3):
        left.send(1, F, [torch.tensor(number)])
    assert [int(received(right, F)[0]) for _ in range(3)] == [0, 1, 2]


def test_pipelines_have_their_own_transfers() -> None:
    here, there = linked()
    first, second, first_there = transfers(here, 0), transfers(here, 1), transfers(there, 0)
    second.send(1, F, [torch.tensor(1.0)])
    first.send(1, F, [torch.tensor(0.0)])
    assert float(received(first_there, F)[0]) == 0
    del first_there
    gc.collect()
    first.send(1, F, [torch.ones(INLINE_BYTES)])  # that pipeline is no more: its buffer comes back
    second_there = transfers(there, 1)
    assert float(received(second_there, F)[0]) == 1
    second_there.links.receive(0.0)
    assert there.links[0].returned
    here.close()
    there.close()


def test_other_shapes_than_expected_are_a_defect(ends: Ends) -> None:
    left, right = ends
    left.send(1, F, [torch.ones(2)])
    with pytest.raises(RunError, match=r"the activations of microbatch 7 for stage 1 from rank 0 are float32\[2\], not "
                                       r"float32\[3\]"):
        received(right, F, [TensorSpec((3,), torch.float32, wants_gradient=False)])


@pytest.mark.parametrize("unread", [False, True])
def test_messages_sent_before_the_end_are_received(ends: Ends, unread: bool) -> None:
    left, right = ends
    if unread:
        right.send(0, B, [torch.ones(1)])  # after which the kernel reports the end before what was sent
    left.send(1, F, [torch.ones(INLINE_BYTES)])
    left.links.close()
    assert received(right, F)[0].sum() == INLINE_BYTES
    with pytest.raises(LinkClosedError):
        received(right, B)
    with pytest.raises(LinkClosedError):
        right.send(0, B, [torch.ones(1)])


def test_more_messages_than_a_socket_takes_are_sent_later(ends: Ends) -> None:
    left, right = ends
    for number in range(1000):
        left.send(1, TransferKey(TransferKind.LOSSES, 0, number), [torch.tensor(number)])
    [link] = left.links.links.values()
    assert link.unsent
    for number in range(1000):
        left.links.receive(0.0)
        assert int(received(right, TransferKey(TransferKind.LOSSES, 0, number))[0]) == number
    assert not link.unsent


@pytest.fixture
def one_end() -> Iterator[tuple[SharedMemoryLink, socket.socket]]:
    """A link, and the socket of its peer."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield (link := SharedMemoryLink(1, left)), right
    right.close()
    link.close()


@pytest.mark.parametrize("message", [
    b"", b"x", b"x" * 60, HEAD.pack(0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0) + b"\xff\0\0",
    HEAD.pack(0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0) + struct.pack("<I", 9),
    HEAD.pack(0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0),
    HEAD.pack(0, 0, 26, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0, 0, 0) + b'[[[-4], "float32", false]]',
    HEAD.pack(0, 0, 25, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0, 0, 0) + b'[[[4], "float31", false]]',
    HEAD.pack(9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)])
def test_an_invalid_message_ends_the_link(message: bytes, one_end: tuple[SharedMemoryLink, socket.socket]) -> None:
    link, other = one_end
    other.send(message)
    assert link.receive() is None
    assert link.closed


def test_a_memory_that_could_shrink_is_refused(one_end: tuple[SharedMemoryLink, socket.socket]) -> None:
    link, other = one_end
    layout = BufferLayout.parse(b'[[[4096], "float32", false]]')
    descriptor = os.memfd_create("made")
    os.ftruncate(descriptor, 1 << 20)
    head = HEAD.pack(0, 0, len(layout.code), 0, 0, 0, 0, 0, 0, 0, 0, 1 << 20)
    socket.send_fds(other, [head + layout.code], [descriptor])
    assert link.receive() is None
    assert link.closed
    os.close(descriptor)


def test_a_limit_of_descriptors_is_named(ends: Ends) -> None:
    here, there = ends
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    here.send(1, F, [torch.ones(5000)])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        with pytest.raises(RunError, match=r"no file descriptor is left for memory that rank 0 shares: .* is 0"):
            there.links.receive(0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_child_has_no_end_of_a_link(ends: Ends) -> None:
    left, right = ends
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    left.links.close()
    with pytest.raises(LinkClosedError):
        received(right, F)
    os.close(writer)
    os.close(reader)
    os.waitpid(pid, 0)


@pytest.mark.parametrize(("here", "there", "why"), [
    ("on a processor", "", None), ("on a GPU", "", None),
    ("on a processor", "rank 1 got none: it has gone", "rank 1 got none: it has gone"),
    ("full", None, "rank 0 got none: No space left on device"),
    ("another system", None, "the system of rank 0 has none without a name (Linux has)")])
def test_all_ranks_use_it_or_none(here: str, there: str | None, why: str | None,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_links, "is_available", lambda: here != "another system")
    monkeypatch.setattr(host_links, "memory_error", lambda: errno.ENOSPC * (here == "full"))
    assert connect(0, here != "on a GPU", None, None, lambda row: [row, [there, "", "", ""]]) == (None, why)


# -- the ranks of a world ------------------------------------------------------------------------------


RUN: dict[str, Any] = {"model": "rich", "microbatches": 2, "samples": 4, "lengths": [6, 9], "partition": [2, 2, 2, 2],
                       "evaluate_after": [1], "recompute": 0.5}


@pytest.mark.parametrize(("arguments", "links"), [
    *((arguments, [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]) for arguments in (
        {"schedule": "pipedream"}, {"schedule": "zb_v", "partition": [1] * 8, "grad_clip": 0.5},
        {"schedule": "1f1b", "partition": [4, 4], "replicas": 2, "compress": "int8"},
        {"model": "dtypes", "schedule": "1f1b", "partition": [1, 1, 1, 2], "executor": "naive"})),
    ({"hosts": ["a", "a", "b", "b"], "schedule": "interleaved", "partition": [1] * 8, "microbatches": 4},
     [[1], [0], [3], [2]]),
    ({"hosts": ["a", "b", "b", "c"], "schedule": "pipedream"}, [[], [2], [1], []]),
    ({"unwanted": [0, 1, 2, 3], "schedule": "1f1b"}, [[]] * 4), ({"unwanted": [2], "schedule": "pipedream"}, [[]] * 4)])
def test_ranks_of_a_host_share_memory_others_use_gloo_and_all_compute_the_same(
        world: World, arguments: dict[str, Any], links: list[Any]) -> None:
    """The other tests over worlds share memory, too, but nearly all that they send is a part of the messages."""
    run = {**RUN, **arguments}
    expected = jobs.train(**{name: value for name, value in run.items() if name not in ("hosts", "unwanted")})
    assert world.run(train, **run) == [[expected, linked, 0] for linked in links]


def test_without_memory_gloo_carries_everything_and_the_first_rank_says_so(pair: World) -> None:
    run = {**RUN, "partition": [4, 4], "schedule": "pipedream"}
    expected, said = jobs.train(**run), "gloo carries tensors between ranks of a host"
    for memories in (3, 0):  # then there is no more
        found = pair.run(train, **run, memories=memories)
        assert found == [[expected, [1], 0], [expected, [0], 0]]
    for _ in range(2):
        assert pair.run(train, **run, memories=-1) == [[expected, [], 0]] * 2
    assert [process.log.read_text() for process in pair.processes] == [
        2 * f"{said} from now on: there is no more shared memory (No space left on device)\n"
        + f"{said}, not shared memory: rank 1 got none: No space left on device\n", ""]
