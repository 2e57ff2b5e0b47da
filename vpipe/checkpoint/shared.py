"""Whether all ranks see the folder that rank 0 keeps checkpoints in."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress
from pathlib import Path

from vpipe.checkpoint.folder import SEEN
from vpipe.checkpoint.votes import Votes
from vpipe.errors import UserError

LOOK_S = 5.0
"""For a file of rank 0 to be seen by the others: a network's file system may take a moment."""

_POLL_S = 0.05
_HINT = "checkpoints need a folder that all hosts see, such as one on a network's file system: set checkpoint.directory"


def shared_folder_check(root: Path, votes: Votes, rank: int, host: str) -> None:
    """Refuse a folder that some rank does not share with rank 0, before half of a checkpoint is written there.

    All ranks call it, and all raise the same.

    Args:
        root: the absolute path of rank 0's folder; it is made there.
        host: of this rank, for the message.

    Raises:
        UserError: rank 0 cannot write there, or a rank does not see what it wrote.
        RuntimeError: see :meth:`Votes.meet`.
    """
    token = root / f"{SEEN}{secrets.token_hex(8)}"

    def judge(blind: list[str]) -> str:
        seers = ", ".join(filter(None, blind))
        return f"the folder for checkpoints '{root}' of rank 0 ({host}) is not the one seen by {seers}" if seers else ""

    try:
        problem = _write(token, host) if rank == 0 else ""
        name, problem = json.loads(votes.meet("", lambda _: json.dumps([token.name, problem])))
        if not problem:
            problem = votes.meet("" if _seen(root / name) else f"rank {rank} ({host})", judge)
    finally:
        if rank == 0:
            with suppress(OSError):
                token.unlink()
    if problem:
        raise UserError(problem, hint=_HINT)


def _write(token: Path, host: str) -> str:
    """What is wrong with rank 0's folder, or nothing."""
    try:
        token.parent.mkdir(parents=True, exist_ok=True)
        token.write_text("for a moment\n")
    except OSError as error:
        return f"rank 0 ({host}) cannot write checkpoints to '{token.parent}': {error.strerror}"
    return ""


def _seen(path: Path) -> bool:
    deadline = time.monotonic() + LOOK_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
