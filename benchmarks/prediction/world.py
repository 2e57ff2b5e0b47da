"""A world of ranks: processes of their own over gloo, ended whatever happens."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_world(arguments: Sequence[str], case: str, ranks: int, timeout_s: float) -> list[dict[str, Any]]:
    """Run this program as so many ranks; what the first of them wrote.

    Raises:
        SystemExit: a rank failed, or the time is up.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the ranks are ended, too
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        out = Path(folder) / "found.json"
        processes = []
        try:
            for rank in range(ranks):
                environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                               "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PREDICTION_OUT": str(out),
                               "PREDICTION_CASE": case}
                processes.append(subprocess.Popen([sys.executable, *arguments], env=environment))
            _wait(processes, timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    ends = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        if time.monotonic() > ends:
            raise SystemExit(f"not done after {timeout_s:.0f} s")
        if failed := [rank for rank, process in enumerate(processes) if process.poll()]:
            raise SystemExit(f"rank {failed[0]} failed: see above")
        time.sleep(0.2)
    if failed := [rank for rank, process in enumerate(processes) if process.returncode]:
        raise SystemExit(f"rank {failed[0]} failed: see above")
