"""The ranks as processes of their own, in one world or in two that take turns, ended whatever happens."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

RANKS = 2
OUT, SAYS, GROUPS, KEEPS = "THROUGHPUT_OUT", "THROUGHPUT_SAYS", "THROUGHPUT_GROUPS", "THROUGHPUT_KEEPS"
"""Environment variables of a rank: the file for its results, the descriptor on which it says that a turn is over, whose
systems live in its world, and whether its memory is kept by what vpipe's launcher calls."""

RAISED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}
"""glibc gives large freed blocks back to the system and faults them in again, unless told to keep them.
``MALLOC_MMAP_THRESHOLD_`` ends at 32 MiB, the logits of 16 samples take 64: so no block of its own for any."""


class World:
    """Two ranks, in which some systems live. Between its turns they wait for a line, and use no processor.

    Args:
        arguments: of the command line, the same as this program's.
        groups: whose systems live in it.
        malloc: ``default``; ``raised``, by the environment; or ``kept``, by
            :func:`vpipe.app.launch.rank_env.keep_memory`.
        folder: for the results.
    """

    def __init__(self, arguments: Sequence[str], groups: Sequence[str], malloc: str, folder: Path) -> None:
        self.groups = groups
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._files = [folder / f"{'-'.join(groups)}{rank}.json" for rank in range(RANKS)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._says: list[int] = []
        for rank, file in enumerate(self._files):
            says, said = os.pipe()
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(port), "OMP_NUM_THREADS": "2", OUT: str(file), SAYS: str(said),
                           GROUPS: " ".join(groups), KEEPS: str(int(malloc == "kept")),
                           **(RAISED if malloc == "raised" else {})}
            self._processes.append(subprocess.Popen([sys.executable, *arguments], env=environment, pass_fds=[said],
                                                    stdin=subprocess.PIPE))
            self._says.append(says)
            os.close(said)

    def do(self, order: dict[str, Any], timeout_s: float) -> None:
        """Have both ranks do something, and wait until they have.

        Raises:
            SystemExit: a rank failed, or the time is up.
        """
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # a rank that failed is found below
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()
        deadline = time.monotonic() + timeout_s
        for rank, says in enumerate(self._says):
            if not select.select([says], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise SystemExit(f"rank {rank} is not done after {timeout_s:.0f} s: {order}")
            if not os.read(says, 1):
                raise SystemExit(f"rank {rank} of {' and '.join(self.groups)} failed: see above")

    def results(self) -> list[dict[str, Any]]:
        """What each rank has written, after it was told to write."""
        return [json.loads(file.read_text())["results"] for file in self._files]

    def close(self) -> None:
        """End both."""
        for process, says in zip(self._processes, self._says, strict=True):
            process.kill()
            process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            os.close(says)


@contextmanager
def worlds(arguments: Sequence[str], malloc: str, groups: Sequence[str]) -> Iterator[list[World]]:
    """One for all systems; two where ``malloc`` is ``own``: vpipe's ranks as its launcher starts them, the others as
    glibc comes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the ranks are ended, too
    parts = [(groups, malloc)] if malloc != "own" else [
        (["vpipe"], "kept"), ([group for group in groups if group != "vpipe"], "default")]
    made: list[World] = []
    with TemporaryDirectory() as folder:
        try:
            for part, kind in parts:
                if part:
                    made.append(World(arguments, part, kind, Path(folder)))
            yield made
        finally:
            for world in made:
                world.close()
