"""Starting the two ranks as processes of their own, and ending them whatever happens."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = 2
RAISED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}
"""glibc gives large freed blocks back to the system and faults them in again, unless told to keep them.
``MALLOC_MMAP_THRESHOLD_`` ends at 32 MiB, the logits of 16 samples take 64: so no block of its own for any."""


def run_ranks(arguments: list[str], malloc: str, timeout_s: float) -> list[dict[str, Any]]:
    """Run this program as two ranks; what each of them wrote.

    Args:
        arguments: of the command line.
        malloc: ``default``, or ``raised``: glibc's thresholds raised for both ranks.
        timeout_s: after which both are killed.

    Raises:
        SystemExit: a rank failed, or the time is up.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the ranks are ended, too
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        files = [Path(folder) / f"rank{rank}.json" for rank in range(RANKS)]
        processes = []
        try:
            for rank, file in enumerate(files):
                environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
                               "MASTER_PORT": str(port), "OMP_NUM_THREADS": "2", "THROUGHPUT_OUT": str(file),
                               **(RAISED if malloc == "raised" else {})}
                processes.append(subprocess.Popen([sys.executable, *arguments], env=environment))
            _wait(processes, timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [json.loads(file.read_text()) for file in files]


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    ends = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:
            raise SystemExit(f"rank {failed[0]} failed: see above")
        if time.monotonic() > ends:
            raise SystemExit(f"not done after {timeout_s:.0f} s")
        time.sleep(0.2)
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        raise SystemExit(f"rank {failed[0]} failed: see above")
