"""Waiting for other ranks before they watch one another: not for ever, and not less than they need."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Generic, TypeVar

from torch._C._distributed_c10d import Store

MEET_S = 120.0
"""For all processes to be started."""

QUIET_S = 60.0
"""Without a sign of life from one that has come. Preparing a large text takes minutes, in which it gives signs."""

BEAT_S = 1.0

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Silence:
    """How long nothing was heard of a rank, and whether anything ever was."""

    seconds: float
    came: bool

    @property
    def too_long(self) -> bool:
        return self.seconds > (QUIET_S if self.came else MEET_S)

    @property
    def how(self) -> str:
        """``did not come within 120 s``."""
        return f"gave no sign of life for {QUIET_S:g} s" if self.came else f"did not come within {MEET_S:g} s"


class Asked(Generic[Answer]):
    """A question to a store, which may never answer."""

    def __init__(self, question: Callable[[], Answer]) -> None:
        self._question = question
        self._answers: list[Answer] = []
        self._error: Exception | None = None
        self._thread = Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self._answers.append(self._question())
        except Exception as error:  # raised where the answer is read
            self._error = error

    def answered(self, timeout_s: float) -> bool:
        """Whether it is within that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def answer(self) -> Answer:
        """Once it is answered.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._error is not None:
            raise self._error
        return self._answers[0]


class Pulse:
    """Says in a store, once a second, that this rank lives, and notices the same of others.

    Args:
        store: of its own: another thread may wait in one for long.
        others: the ranks to listen to.
    """

    def __init__(self, store: Store, rank: int, others: Collection[int]) -> None:
        self._store, self._rank = store, rank
        now = time.monotonic()
        self._heard = dict.fromkeys(others, (0, now))
        self._stopping = Event()
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone: whoever reads it will say so
            while not self._stopping.is_set():
                self._store.add(f"beats of rank {self._rank}", 1)
                for other, (beats, _) in self._heard.items():
                    now_at = self._store.add(f"beats of rank {other}", 0)
                    if now_at != beats:
                        self._heard[other] = (now_at, time.monotonic())
                self._stopping.wait(BEAT_S)

    def stop(self) -> None:
        self._stopping.set()

    def silences(self) -> Mapping[int, Silence]:
        """By rank; this one is never silent."""
        now = time.monotonic()
        return {self._rank: Silence(0.0, True)} | {
            other: Silence(now - heard_at, beats > 0) for other, (beats, heard_at) in self._heard.items()}
