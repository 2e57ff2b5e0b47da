"""Have as many file descriptors as the ranks need, or say how many that is; name the limit where none is left."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from vpipe.errors import RunError, UserError

SPARE = 16
"""Descriptors for files that a rank opens while it trains: data, logs, checkpoints, modules that are imported late."""

AT_START = 8
"""Descriptors that a rank has when its launcher has started it, before it joins the others."""

ENOUGH = 1 << 16
"""Largest limit that is asked for, even where the hard limit is higher."""


def joining(rank: int, ranks: int) -> int:
    """Return how many descriptors a rank opens to join ``ranks``, as measured over gloo on Linux.

    Rank 0 has four per rank: of the store, the failure detector, gloo and shared memory. The others have the last two.
    """
    return 21 + 4 * ranks if rank == 0 else 9 + 2 * ranks


def reserve_for_joining(rank: int, ranks: int) -> None:
    """Raise this process's limit so that it can join the others. Raises UserError: the hard limit is too low."""
    _reserve(_open_files() + joining(rank, ranks), f"rank {rank} of {ranks} needs")


def reserve_for_starting(here: Collection[int], ranks: int) -> None:
    """Raise the launcher's limit, which its ranks ``here`` inherit. Raises UserError: the hard limit is too low."""
    each = AT_START + max(joining(rank, ranks) for rank in here)
    _reserve(max(_open_files() + len(here), each) + SPARE, f"each of {ranks} ranks, and what starts them, needs")


def _reserve(needed: int, who: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed + SPARE:
        return
    if hard != unlimited and hard < needed:
        raise UserError(f"{who} about {needed} file descriptors, but a process here may have {hard}",
                        hint=f"raise the limit before it starts: ulimit -n {needed}; above the hard limit (ulimit -Hn) "
                             "only root may")
    wanted = max(needed + SPARE, ENOUGH)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == unlimited else min(hard, wanted), hard))


def hint_if_none_left(error: BaseException) -> str | None:
    """Return the remedy for an error because no file descriptor was left; None for any other error."""
    seen = set[int]()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        number = one.errno if isinstance(one, OSError) else None
        if number == errno.ENFILE or "Too many open files in system" in str(one):
            return "the whole machine has none left: end other programs, or raise fs.file-max"
        if number == errno.EMFILE or "Too many open files" in str(one):
            return f"raise the limit before it starts: ulimit -n {2 * resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
        one = one.__cause__ or one.__context__
    return None


def name_if_none_left(error: Exception, rank: int | None = None) -> Exception:
    """Return an error of a rank, or of a process that is none; where no file descriptor was left one that says so."""
    hint = hint_if_none_left(error)
    if hint is None or (isinstance(error, RunError) and error.hint == hint):
        return error
    who = "this process" if rank is None else f"rank {rank}"
    named = RunError(f"{who} has no file descriptor left, of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}: "
                     f"{str(error).partition(chr(10))[0]}", hint=hint, rank=rank)
    named.__cause__ = error
    return named


@contextmanager
def named_if_none_left() -> Iterator[None]:
    """Raise what :func:`name_if_none_left` returns for an error of this rank."""
    try:
        yield
    except Exception as error:
        named = name_if_none_left(error, int(os.environ.get("RANK", "0")))
        raise named from (None if named is error else error)


def _open_files() -> int:
    with suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return AT_START
