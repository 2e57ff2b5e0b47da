"""How ranks agree on a checkpoint while they train: each gives a vote, rank 0 decides, all hear the verdict.

No collective: the threads that write meet here, and gloo's collectives in a thread can abort a process that ends.
"""

from __future__ import annotations

import base64
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import Store

LINGER_S = 5.0
"""For the other ranks to hear the last verdict before rank 0 ends, which may keep the notes."""

_NONE = "\0"
"""How the words begin that stand where rank 0 came to no verdict, and the others shall not wait for one."""

_POLL_S = 0.02
_SLICE_S = 60.0

Decide = Callable[[list[str]], str]
"""The verdict on the votes, which come by rank."""


class Votes(Protocol):
    """What a run's ranks decide together, one thing after the other, each rank in the same order."""

    def meet(self, vote: str, decide: Decide) -> str:
        """The verdict, when all ranks have voted.

        Args:
            vote: any text, such as JSON.
            decide: called on rank 0 alone; what it raises, rank 0 raises.

        Raises:
            RuntimeError: rank 0, or whoever keeps the notes, is gone, or ``decide`` raised there.
        """

    def close(self) -> None:
        """Wait a moment until all have heard the verdicts, for the notes may end with this process."""


class LocalVotes:
    """Of a run in one process."""

    def meet(self, vote: str, decide: Decide) -> str:
        """See :class:`Votes`."""
        return decide([vote])

    def close(self) -> None:
        """Nobody else listens."""


class StoreVotes:
    """Notes in a store of torch, over a connection of its own: it serves one thread, and keeps that waiting.

    A wait ends when all have spoken or the store is gone. How long a rank may take is not judged here: a disk may be
    slow, and the watch sees who died.

    Args:
        store: such as ``open_store("checkpoints", ...)``; of this attempt of the run alone.
        rank: of this process.
        ranks: how many vote.
    """

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._meetings = 0

    def meet(self, vote: str, decide: Decide) -> str:
        """See :class:`Votes`."""
        number, self._meetings = self._meetings, self._meetings + 1
        if self._rank:
            self._tell(f"vote {number} {self._rank}", vote)
            verdict = self._wait(f"verdict {number}")
            self._store.add("heard", 1)
            if verdict.startswith(_NONE):
                raise RuntimeError(verdict.removeprefix(_NONE))
            return verdict
        votes = [vote]
        for rank in range(1, self._ranks):
            votes.append(self._wait(f"vote {number} {rank}"))
            self._store.delete_key(f"vote {number} {rank}")
        self._store.delete_key(f"verdict {number - 1}")  # who votes has heard the one before
        try:
            verdict = decide(votes)
        except BaseException as error:
            self._tell(f"verdict {number}", f"{_NONE}rank 0 could not decide: {type(error).__name__}: {error}")
            raise
        self._tell(f"verdict {number}", verdict)
        return verdict

    def close(self) -> None:
        """See :class:`Votes`."""
        if self._rank:
            return
        deadline = time.monotonic() + LINGER_S
        try:
            while self._store.add("heard", 0) < self._meetings * (self._ranks - 1) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        except RuntimeError:
            return  # the notes are gone, and with them who read them

    def _tell(self, key: str, text: str) -> None:
        # Packed, for a store hangs up on more than 8 MiB: what a rank says of 90,000 tensors.
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
