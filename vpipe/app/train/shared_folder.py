"""Check that all ranks see the folder for checkpoints."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path

from vpipe.checkpoint import Checkpoints
from vpipe.distributed.value_exchange import Exchange
from vpipe.errors import UserError

VISIBLE_S = 5.0
"""For a file of rank 0 to be seen by the others: a network's file system may take a moment."""

_POLL_S = 0.02


def check_shared_folder(root: Path, exchange: Exchange, host: str) -> None:
    """Raise UserError on all ranks when rank 0 cannot write to ``root``, or a rank does not see what it wrote.

    All ranks call it, with rank 0's absolute path and, for the message, their host.
    """
    rank = exchange.rank
    probe = root / f"{Checkpoints.PROBE}{secrets.token_hex(8)}"

    def judge(blind: list[str]) -> str:
        ranks = ", ".join(filter(None, blind))
        return f"the folder for checkpoints '{root}' of rank 0 ({host}) is not the one seen by {ranks}" if ranks else ""

    problem = ""
    try:
        if rank == 0:
            try:
                root.mkdir(parents=True, exist_ok=True)
                probe.write_text("for a moment\n")
            except OSError as error:
                problem = f"rank 0 ({host}) cannot write checkpoints to '{root}': {error.strerror}"
        name, problem = exchange.from_rank([probe.name, problem])
        if not problem:
            problem = exchange.agree("" if _appears(root / name) else f"rank {rank} ({host})", judge)
    finally:
        if rank == 0:
            with suppress(OSError):
                probe.unlink()
    if problem:
        raise UserError(problem, hint="checkpoints need a folder that all hosts see, such as one on a network's file "
                        "system: set checkpoint.directory")


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + VISIBLE_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
