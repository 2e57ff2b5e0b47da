"""File descriptors: the limit is raised where it may be, else their number is named before a rank starts, or where none
is left."""

from __future__ import annotations

import errno
import os
import resource

import pytest
from golden import refusal

from vpipe.distributed import RankEnvironment
from vpipe.distributed.environment import reserve_for_joining
from vpipe.errors import RunError, UserError, hint_if_exhausted


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of this process, soft and hard, as it seems; ten files are open."""
    now = [40, 40]

    def change(kind: int, new: tuple[int, int]) -> None:
        now[:] = new

    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", change)
    monkeypatch.setattr(os, "listdir", lambda folder: ["0"] * 10)
    return now


def test_too_low_a_hard_limit_is_refused_with_the_number_needed() -> None:
    assert refusal(reserve_for_joining, 0, 8) == (
        "error: rank 0 of 8 needs about 63 file descriptors, but a process here may have 40\n"
        "hint: raise the limit before it starts: ulimit -n 63; above the hard limit (ulimit -Hn) only root may")
    with pytest.raises(UserError, match="each of 4 ranks, and what starts them, needs about 61 file descriptors"):
        RankEnvironment.reserve_descriptors(range(4), 4)
    with pytest.raises(UserError, match="needs about 226 file"):  # what starts 200 of them has a pipe to each
        RankEnvironment.reserve_descriptors(range(1, 201), 1)


@pytest.mark.parametrize(("before", "after"), [
    ((40, 4096), [4096, 4096]), ((40, resource.RLIM_INFINITY), [1 << 16, resource.RLIM_INFINITY]),
    ((40, 1 << 20), [1 << 16, 1 << 20]), ((63, 63), [63, 63]),
    ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), [resource.RLIM_INFINITY] * 2)])
def test_the_soft_limit_is_raised_where_the_hard_one_suffices(before: tuple[int, int], after: list[int],
                                                              limits: list[int]) -> None:
    limits[:] = before
    reserve_for_joining(0, 8)
    assert limits == after


def test_an_error_for_want_of_a_descriptor_is_named() -> None:
    cause = OSError(errno.EMFILE, "Too many open files")
    error = RunError("rank 0 could not reach rank 0", hint="a firewall is in the way", rank=0)
    error.__cause__ = cause
    assert str(RunError.for_want_of_descriptors(cause, 3)) == (
        "error: rank 3 has no file descriptor left, of 40: [Errno 24] Too many open files (rank 3)\n"
        "hint: raise the limit before it starts: ulimit -n 80")
    assert "rank 0 has no file descriptor left, of 40: error: rank 0 could not" in str(
        RunError.for_want_of_descriptors(error, 0))
    assert "ulimit -n 80" in (hint_if_exhausted(RuntimeError("gloo: accept: Too many open files")) or "")
    assert str(RunError.for_want_of_descriptors(MemoryError(), 3)).startswith(
        "error: rank 3 has too little memory: MemoryError (rank 3)\nhint: smaller microbatches")
    assert "fs.file-max" in (hint_if_exhausted(OSError(errno.ENFILE, "Too many open files in system")) or "")
    assert RunError.for_want_of_descriptors(other := OSError(errno.ENOENT, "none"), 0) is None
    assert hint_if_exhausted(other) is None
