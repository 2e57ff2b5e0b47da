"""Agree among the ranks on a checkpoint while they train: every rank votes, rank 0 decides, all get the verdict.

No collective: the threads that write call this, and gloo's collectives in a thread can abort a process that ends.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from torch._C._distributed_c10d import Store

from vpipe.checkpoint.directory import PROBE
from vpipe.errors import UserError

LINGER_S = 5.0
"""For the other ranks to read the last verdict before rank 0 ends, whose process may hold the store."""

VISIBLE_S = 5.0
"""For a file of rank 0 to be seen by the others: a network's file system may take a moment."""

_NO_VERDICT = "\0"
"""First character of an error in place of a verdict, which the other ranks then need not wait for."""

_POLL_S = 0.02
_SLICE_S = 60.0

Decide = Callable[[list[str]], str]
"""Return the verdict on the votes, which come by rank."""


class Agreement(Protocol):
    """Decide one thing after the other among the ranks of a run, each rank in the same order."""

    def agree(self, vote: str, decide: Decide) -> str:
        """Return the verdict, when all ranks have voted.

        Raises RuntimeError when rank 0 or the process of the store is gone, or ``decide`` raised on rank 0.

        Args:
            vote: any text, such as JSON.
            decide: called on rank 0 alone; what it raises, rank 0 raises.
        """

    def close(self) -> None:
        """Wait a moment until all ranks have read the verdicts, for the store may end with this process."""


class LocalAgreement:
    """The agreement of a run in one process."""

    def agree(self, vote: str, decide: Decide) -> str:
        """Return the verdict on the only vote."""
        return decide([vote])

    def close(self) -> None:
        """Do nothing: there is no other rank."""


class StoreAgreement:
    """Exchange votes and verdicts through a store of torch, over a connection of its own that serves one thread.

    A wait ends when all have voted or the store is gone. There is no timeout: a disk may be slow, and the watchdog
    notices dead ranks. ``store``: of this attempt of the run alone, such as ``own_store("checkpoints", ...)``.
    """

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._rounds = 0

    def agree(self, vote: str, decide: Decide) -> str:
        """Vote as :meth:`Agreement.agree` describes."""
        number, self._rounds = self._rounds, self._rounds + 1
        if self._rank:
            self._set(f"vote {number} {self._rank}", vote)
            verdict = self._wait(f"verdict {number}")
            self._store.add("heard", 1)
            if verdict.startswith(_NO_VERDICT):
                raise RuntimeError(verdict.removeprefix(_NO_VERDICT))
            return verdict
        votes = [vote]
        for rank in range(1, self._ranks):
            votes.append(self._wait(f"vote {number} {rank}"))
            self._store.delete_key(f"vote {number} {rank}")
        self._store.delete_key(f"verdict {number - 1}")  # every rank that votes has read the one before
        try:
            verdict = decide(votes)
        except BaseException as error:
            self._set(f"verdict {number}", f"{_NO_VERDICT}rank 0 could not decide: {type(error).__name__}: {error}")
            raise
        self._set(f"verdict {number}", verdict)
        return verdict

    def close(self) -> None:
        """Wait as :meth:`Agreement.close` describes."""
        deadline = time.monotonic() + LINGER_S
        with suppress(RuntimeError):  # the store is gone, and with it the ranks that read it
            while not self._rank and self._store.add("heard", 0) < self._rounds * (self._ranks - 1) \
                    and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def _set(self, key: str, text: str) -> None:
        # Packed, for a store hangs up on more than 8 MiB: the entries of 90,000 tensors.
        self._store.set(key, base64.b85encode(zlib.compress(text.encode())).decode())

    def _wait(self, key: str) -> str:
        while True:
            try:
                self._store.wait([key], timedelta(seconds=_SLICE_S))
            except RuntimeError as error:
                if "timeout" in str(error).lower():
                    continue
                raise
            return zlib.decompress(base64.b85decode(bytes(self._store.get(key)))).decode()


def check_shared_folder(root: Path, agreement: Agreement, rank: int, host: str) -> None:
    """Raise UserError on all ranks when rank 0 cannot write to ``root``, or a rank does not see what it wrote.

    All ranks call it, with rank 0's absolute path and, for the message, their host. Raises RuntimeError as
    :meth:`Agreement.agree` does.
    """
    probe = root / f"{PROBE}{secrets.token_hex(8)}"

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
        name, problem = json.loads(agreement.agree("", lambda _: json.dumps([probe.name, problem])))
        if not problem:
            problem = agreement.agree("" if _appears(root / name) else f"rank {rank} ({host})", judge)
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
