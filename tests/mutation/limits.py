"""Limits of reading a file that a user hands in: three seconds of a slow processor, 300 MB, and only errors of ours."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vpipe.errors import VpipeError

MOST_S, MOST_BYTES, LONGEST = 3.0, 300 << 20, 50_000


@contextmanager
def within_limits() -> Iterator[None]:
    """Hold what is done here to the limits; what would eat all memory ends in a MemoryError."""
    free, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_kib("VmSize") * 1024 + 2 * MOST_BYTES, hard))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start_s = _kib("VmRSS"), time.process_time()
    try:
        yield
        took_s, bytes_more = time.process_time() - start_s, (_kib("VmHWM") - before) * 1024
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (free, hard))
    assert took_s < MOST_S, f"it took {took_s:.2f} s of a processor"
    assert bytes_more < MOST_BYTES, f"it took {bytes_more >> 20} MiB"


def refusal(call: Callable[[], object]) -> str | None:
    """What ``call`` is refused with; None where it is not."""
    found: VpipeError | None = None
    with within_limits():
        try:
            call()
        except VpipeError as error:
            found = error
    if found is None:
        return None
    assert len(str(found)) < LONGEST
    assert all(problem.what and problem.hint for problem in getattr(found, "problems", ()))
    return str(found)


def shards() -> Any:
    """The module of an extra, which may be gone."""
    return pytest.importorskip("vpipe.extras.bert_hdf5.shards")


def _kib(name: str) -> int:
    """A figure of this process: ``VmRSS``, its peak ``VmHWM``, or all that it has mapped, ``VmSize``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
