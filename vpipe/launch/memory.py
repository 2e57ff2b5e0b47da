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

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Of ``malloc.h``."""

NEVER, PAD_BYTES, NONE = -1, 64 << 20, 0
"""The top of the heap is never given back, it grows by so much at a time, and no block is mapped by itself.
(``M_MMAP_THRESHOLD`` would not do: it ends at 32 MiB, where logits begin.)"""

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
    settings = ((M_MMAP_MAX, NONE), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, PAD_BYTES))
    for name, value in settings:
        library.mallopt(name, value)
    return "malloc keeps what is freed"
