"""Have as many file descriptors as the ranks need, or say how many that is."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
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
    reserve(open_files() + joining(rank, ranks), f"rank {rank} of {ranks} needs")


def reserve(needed: int, who: str) -> None:
    """Raise this process's limit to so many descriptors and more. Raises UserError: the hard limit is too low."""
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


@contextmanager
def named_if_none_left() -> Iterator[None]:
    """Raise an error of this rank because no descriptor was left as one that says so."""
    try:
        yield
    except Exception as error:
        if (named := RunError.for_want_of_descriptors(error, int(os.environ.get("RANK", "0")))) is None:
            raise
        raise named from error


def open_files() -> int:
    """Return how many descriptors this process has."""
    with suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return AT_START
