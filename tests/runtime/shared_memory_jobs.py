"""Jobs for a test world about shared memory."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jobs
import pytest
import torch.distributed as dist

from vpipe.pipeline import Pipeline
from vpipe.runtime.engine import Engine
from vpipe.runtime.transport import connect_host, link, process_group
from vpipe.runtime.transport.process_group import DistributedTransport


def transport_of(engine: Engine) -> DistributedTransport:
    [worker] = engine.workers.values()
    transport = worker.transport
    assert isinstance(transport, DistributedTransport)
    return transport


def open_files() -> int:
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
    there = dict(process_group._host_links)
    process_group._host_links.clear()
    with pytest.MonkeyPatch.context() as patch:
        yield patch
    for links in process_group._host_links.values():
        links.close()  # the watchdog's thread may refer to them until its next beat
    process_group._host_links.clear()
    process_group._host_links.update(there)


def train(*, inline_bytes: int = 0, memories: int | None = None, hosts: list[str] | None = None,
          unwanted: list[int] = [], **arguments: Any) -> list[Any]:  # noqa: B006 - it is not changed
    """What ``jobs.train`` returns, the ranks that this one has links with, and the open files that were left.

    Args:
        inline_bytes: of transfers without a buffer.
        memories: buffers of rank 1 that there is memory for.
        hosts: of the ranks.
        unwanted: ranks that want no shared memory.
    """
    rank, seen, before = dist.get_rank(), [], open_files()
    with new_links() as patch:
        patch.setattr(link, "INLINE_BYTES", inline_bytes)
        if hosts is not None:
            patch.setattr(connect_host, "_boot", lambda: hosts[rank])
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
            shared = transport_of(pipe.engine)._shared
            seen.append([] if shared is None else sorted(shared.links.links))

        patch.setattr(Pipeline, "_set_up", looking)
        result = jobs.train(**arguments, shared_memory=rank not in unwanted)
    return [result, *seen, open_files() - before]
