"""What a rank does to malloc, in processes of their own: a test's must not change."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vpipe.app.launch.rank_env import keep_memory

PROGRAM = """
import resource
from vpipe.app.launch.rank_env import keep_memory
print(keep_memory())
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(24 << 20) for _ in range(4)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(), faults(), faults(), faults())
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", ()), reason="needs glibc")
@pytest.mark.parametrize(("variables", "said", "kept"), [
    ({}, "malloc keeps what is freed", True),
    ({"MALLOC_ARENA_MAX": "2", "MALLOC_TOP_PAD_": "0"},
     "malloc is left as MALLOC_ARENA_MAX, MALLOC_TOP_PAD_ in the environment says", False)])
def test_large_blocks_come_back_without_page_faults(variables: dict[str, str], said: str, kept: bool) -> None:
    environment = {name: text for name, text in os.environ.items()
                   if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment | variables, capture_output=True, text=True,
                          check=True, timeout=60)
    line, counts = done.stdout.splitlines()
    assert line == said
    first, *again = map(int, counts.split())
    assert first > 10  # a few where the system gives huge pages
    assert all((count < first / 10) is kept for count in again)


def test_glibcs_tunables_go_before() -> None:
    tuned = {"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=on:glibc.malloc.trim_threshold=0", "PATH": "/bin"}
    assert keep_memory(tuned) == "malloc is left as GLIBC_TUNABLES in the environment says"
