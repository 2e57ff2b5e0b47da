"""Memory that a rank has freed and keeps: glibc's malloc told not to give it back between two tensors.

By its defaults glibc takes a large block from the system and gives it back when it is freed, so the next tensor of the
same size costs a page fault for each of its pages, which the system has to fill with zeros.
Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of ``malloc.h``."""

NEVER, MOST_BYTES = -1, 32 << 20
"""What is free at the end of the heap is never given back. Only blocks of more than this, the most that can be set, are
still mapped by themselves, and given back: to keep those, too (``M_MMAP_MAX`` 0), leaves holes in the heap, which the
next one does not fit once a smaller one was put there. It made a rank with logits of 64 MiB half as large again."""

TUNABLES = "GLIBC_TUNABLES"


def keep_memory(environment: Mapping[str, str] = os.environ) -> str:
    """Let this process keep what it frees, if its C library is glibc and nobody has tuned that.

    Args:
        environment: that the process was started with; ``MALLOC_*`` or glibc's tunables for malloc in it go before.

    Returns:
        What was done, for the log.
    """
    tuned = sorted(name for name in environment if name.startswith("MALLOC_"))
    if "glibc.malloc." in environment.get(TUNABLES, ""):
        tuned.append(TUNABLES)
    if tuned:
        return f"malloc is left as {', '.join(tuned)} in the environment says"
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return "the C library is not glibc: malloc is left as it is"
    library.mallopt(M_MMAP_THRESHOLD, MOST_BYTES)
    library.mallopt(M_TRIM_THRESHOLD, NEVER)
    return "malloc keeps what is freed"
