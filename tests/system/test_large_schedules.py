"""Schedules of 128 ranks and 4,096 microbatches are proved, simulated and drawn within 1 GB, by closed forms."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

RANKS, MICROBATCHES, MEMORY = 128, 4096, 1 << 30
TIMES_3 = 3 * (RANKS - 1)  # (p-1)(F+I+W) with all of them 1


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


@pytest.mark.long
@pytest.mark.parametrize(("name", "bubble", "makespan", "peaks"), [
    ("1f1b", TIMES_3, 3 * MICROBATCHES + TIMES_3, [RANKS - rank for rank in range(RANKS)]),
    ("gpipe", TIMES_3, 3 * MICROBATCHES + TIMES_3, [MICROBATCHES] * RANKS),
    ("zb_v", 0, None, [2 * RANKS] * RANKS),
    ("interleaved", TIMES_3 / 2, None, [2 * (RANKS - 1 - rank) + RANKS + 1 for rank in range(RANKS)]),
    ("pipedream", TIMES_3, 3 * MICROBATCHES + TIMES_3, [RANKS - rank for rank in range(RANKS)])])
def test_a_large_schedule(name: str, bubble: float, makespan: int | None, peaks: list[int]) -> None:
    command = [str(Path(sys.executable).with_name("vpipe")), "schedule", name, "--ranks", str(RANKS),
               "--microbatches", str(MICROBATCHES)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^bubble (\S+) .*, makespan (\S+)", done.stdout, re.MULTILINE)
    assert found is not None
    assert float(found[1]) == bubble
    assert makespan is None or float(found[2]) == makespan
    assert re.search(r"~: times \d+ to \d+ of \S+ are left out, in which the ranks repeat [\d,]+ times what they do "
                     r"for \d+ microbatch", done.stdout)
    table = done.stdout[done.stdout.index("peak activations"):].splitlines()[1:1 + RANKS]
    stages = 2 if name in ("zb_v", "interleaved") else 1
    assert [int(row.split()[1 + stages]) for row in table] == peaks
    if name == "pipedream":
        assert [int(row.split()[3]) for row in table] == [RANKS - rank for rank in range(RANKS)]  # weight versions
