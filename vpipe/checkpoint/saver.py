"""Saving while training goes on: a pause for a copy, then a thread that writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import perf_counter

from torch import Tensor

from vpipe.checkpoint.copies import HostCopies
from vpipe.checkpoint.folder import Checkpoints, step_of
from vpipe.checkpoint.manifest import About
from vpipe.checkpoint.parts import Part, check_kinds, merge, not_finite, words_of
from vpipe.checkpoint.votes import Votes
from vpipe.errors import RunError


@dataclass(frozen=True)
class Saved:
    """What became of a save.

    Attributes:
        step: how many steps of training it holds.
        pause_s: for how long this rank did not train; a wait for the save before is part of it.
        seconds: from the call until it was complete, or given up.
        bytes: of all ranks' files; 0 where it was given up.
        error: why it was given up; None where it is complete.
    """

    step: int
    pause_s: float
    seconds: float
    bytes: int
    error: str | None


class Saver:
    """Writes a run's checkpoints; every rank has one.

    A save that the disk or any rank cannot do is given up by all: what was written of it is removed, the checkpoints
    before stay, and training goes on. So is one of weights that are not finite: nobody can go on from those, and the
    good ones before them would be pruned.

    Args:
        root: the folder for checkpoints, seen by all ranks.
        keep: how many of the newest to keep; None keeps all.
        rank: of this process; rank 0 leads.
        votes: how the ranks agree.
        first: called on rank 0, in the thread, before a checkpoint gets its name; it does not raise.

    Attributes:
        facts: of the saves so far, in order; complete after :meth:`wait`.
    """

    def __init__(self, root: Path, keep: int | None, rank: int, votes: Votes,
                 first: Callable[[], None] = lambda: None) -> None:
        self._folder, self._keep, self._rank, self._votes = Checkpoints(root), keep, rank, votes
        self._first, self._copies = first, HostCopies()
        self._thread: Thread | None = None
        self._warnings: list[str] = []
        self._failure: BaseException | None = None
        self.facts: list[Saved] = []

    def reserve(self, sizes: Iterable[int], pinned: bool = False) -> None:
        """Take the memory for copies of tensors with so many bytes each, in a thread: else the first pause would be
        many times as long as the others, since a system hands out memory slower than it is filled.

        Args:
            pinned: where the tensors come from a GPU.
        """
        self.wait()
        self._thread = Thread(target=self._reserve, args=(list(sizes), pinned), name="vpipe-saver", daemon=True)
        self._thread.start()

    def _reserve(self, sizes: list[int], pinned: bool) -> None:
        with suppress(OSError, MemoryError, RuntimeError):  # too little memory: the save will say so
            self._copies.reserve(sizes, pinned)

    def save(self, about: About, tensors: Mapping[str, Tensor], began: float | None = None) -> None:
        """Copy the tensors and return; a thread writes them. All ranks call it after the same step.

        Args:
            about: the same on all ranks; rank 0's is written.
            tensors: of this rank; their names are unique among all ranks.
            began: when training paused, by ``perf_counter``; now, when left out.

        Raises:
            UserError: a tensor is of a kind that files cannot hold.
            RunError: see :meth:`wait`.
        """
        began = perf_counter() if began is None else began
        check_kinds(tensors)
        self.wait()
        try:
            copies: Mapping[str, Tensor] | Exception = self._copies.take(tensors)
        except (OSError, MemoryError, RuntimeError) as error:
            copies = error  # too little memory on the host: given up as if the disk were full
        pause_s = perf_counter() - began
        self._thread = Thread(target=self._write, args=(about, copies, began, pause_s), name="vpipe-saver",
                              daemon=True)  # a disk that hangs must not keep a process that failed
        self._thread.start()

    def wait(self) -> None:
        """Until the last save is complete or given up.

        Raises:
            RunError: the ranks could not agree on it, because one is gone.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def warnings(self) -> list[str]:
        """What the user should know of saves that were given up; each is handed out once."""
        taken, self._warnings = self._warnings, []
        return taken

    def close(self) -> None:
        """Wait for the last save, and until the other ranks know of it."""
        if self._thread is not None:
            self._thread.join()
        self._votes.close()

    def leave(self, seconds: float) -> None:
        """On a rank that fails of itself: let the last save be completed, for so long at most. The others know nothing
        of the failure yet, so their threads write."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _write(self, about: About, copies: Mapping[str, Tensor] | Exception, began: float, pause_s: float) -> None:
        try:
            verdict = json.loads(self._votes.meet(self._part(about.step, copies).text(),
                                                  lambda votes: self._decide(about, list(map(Part.of, votes)))))
        except RuntimeError as error:
            self._failure = RunError(f"could not save step {about.step}: {str(error).splitlines()[0]}", rank=self._rank,
                                     hint="rank 0, or who keeps its notes, has ended: see what it said")
            verdict = {"error": "rank 0 is gone", "bytes": 0}
        except Exception as error:
            verdict = {"error": self._why(error), "bytes": 0}
        self.facts.append(Saved(about.step, pause_s, perf_counter() - began, verdict["bytes"], verdict["error"]))

    def _part(self, step: int, copies: Mapping[str, Tensor] | Exception) -> Part:
        if isinstance(copies, Exception):
            return Part({}, {}, words_of(copies))
        try:
            if found := not_finite(copies):
                return Part({}, {}, found)
            return Part.write(self._folder.partial(step), self._rank, copies)
        except Exception as error:
            return Part({}, {}, self._why(error))

    def _decide(self, about: About, parts: list[Part]) -> str:
        """Rank 0: put the checkpoint in its place, or give it up; the verdict, whatever the disk does."""
        step, size = about.step, 0
        errors = [f"{part.error} (rank {rank})" for rank, part in enumerate(parts) if part.error]
        if not errors:
            try:
                size = merge(about, parts, self._folder.partial(step)).bytes
                self._first()
                self._folder.commit(step)
            except Exception as error:
                errors = [f"{self._why(error)} (rank {self._rank})"]
        if errors:
            self._folder.give_up(step)
            self._warnings.append(f"could not save step {step}: {', '.join(errors)}; training goes on, {self._last()}")
        else:
            self._tidy(step)
        return json.dumps({"error": ", ".join(errors) or None, "bytes": size})

    def _last(self) -> str:
        try:
            newest = self._folder.newest()
        except OSError as error:
            return f"and the folder of checkpoints cannot be read: {words_of(error)}"
        return f"the latest checkpoint is step {step_of(newest)}" if newest else "there is no checkpoint yet"

    def _tidy(self, step: int) -> None:
        for what, work in (("write the file 'latest'", self._folder.announce),
                           ("remove older checkpoints", self._prune)):  # which makes room, too
            try:
                work()
            except OSError as error:
                self._warnings.append(f"saved step {step}, but could not {what}: {words_of(error)}")

    def _prune(self) -> None:
        if self._keep is not None:
            self._folder.prune(self._keep)

    def _why(self, error: Exception) -> str:
        """In words; what is no trouble with files or memory is a mistake of ours, and raised by :meth:`wait`."""
        if not isinstance(error, (OSError, MemoryError)):
            self._failure = error
        return words_of(error)
