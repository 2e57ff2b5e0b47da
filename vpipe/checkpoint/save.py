"""Save checkpoints: one while the caller waits (``save_checkpoint``), or a run's while training goes on (``Saver``)."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from vpipe.checkpoint.directory import Checkpoints, recover, replace_folder
from vpipe.checkpoint.manifest import MANIFEST, Manifest
from vpipe.checkpoint.shards import HostBuffer, WriteResult, check_dtypes, write_shards
from vpipe.distributed.value_exchange import Exchange
from vpipe.errors import RunError, UserError
from vpipe.files import read_record

_SHARD = re.compile(r"rank\d+(\.\d+)?\.safetensors", re.ASCII)

FAILURES = OSError, MemoryError, RuntimeError
"""What a disk, or too little memory, raises; all else is a mistake of ours."""


def save_checkpoint(folder: Path, about: Manifest, tensors: Mapping[str, Tensor],
                    exchange: Exchange | None = None,
                    undisturbed: AbstractContextManager[object] | None = None) -> None:
    """Write a checkpoint at exactly ``folder``, all at once or not at all; one that is there is replaced.

    All ranks call it. Nothing but a checkpoint is replaced: neither in ``folder``, nor in ``<folder>.tmp``, where it is
    written, nor ``<folder>.old``, which is the name of the replaced one for a moment.

    Args:
        about: the same on all ranks; rank 0's is written, with the tensors and files.
        tensors: of this rank, on any device; their names are unique among all ranks.
        exchange: with the other ranks; None in one process.
        undisturbed: entered while the new checkpoint takes the old one's place.

    Raises:
        UserError: a tensor is of a dtype that files cannot hold, or something that is no checkpoint is in the way.
        RunError: some rank could not write; what there was before is still there.
    """
    check_dtypes(tensors)
    folder = Path(os.path.realpath(folder))
    exchange = exchange or Exchange()
    partial = Path(f"{folder}.tmp")

    def begin(_: list[str]) -> str:
        try:
            if found := _obstacle(folder, partial):
                return found
            if not folder.exists() and (partial / MANIFEST).is_file():  # a save died while it replaced the one before
                recover(folder)
            if partial.exists():
                shutil.rmtree(partial)
        except OSError as error:
            return f"cannot write to '{folder.parent}': {error_text(error)}"
        return ""

    if found := exchange.agree("", begin):
        raise UserError(f"nothing was saved: {found}", hint="give a folder that does not exist yet, or move that away")

    def replace_old() -> None:
        with undisturbed or nullcontext():
            replace_folder(partial, folder)

    _, failed = write_together(partial, about, lambda: HostBuffer().copy(tensors), exchange, replace_old)
    if failed:
        raise RunError(f"could not save a checkpoint to '{folder}': {failed}",
                       hint="what was there before is still there; make room, or give another folder")


def write_together(partial: Path, about: Manifest, tensors: Callable[[], Mapping[str, Tensor]], exchange: Exchange,
                   place: Callable[[], None]) -> tuple[int, str]:
    """Write the tensors of all ranks and the manifest into ``partial``, and let rank 0 put the folder in its place.

    All ranks call it. Where one of them fails, what was written is removed on all.

    Args:
        tensors: returns those of this rank, in host memory.
        place: called on rank 0, once the folder is complete.

    Returns:
        The bytes of all files, and the errors of all ranks.
    """
    own: list[Exception] = []

    def decide(votes: list[dict[str, Any]]) -> tuple[int, str]:
        size, results = 0, [read_record(WriteResult, vote) for vote in votes]
        errors = [f"{result.error} (rank {rank})" for rank, result in enumerate(results) if result.error]
        if not errors:
            try:
                size = write_manifest(about, results, partial).bytes
                place()
            except Exception as error:
                own.append(error)
                errors = [f"{error_text(error)} (rank {exchange.rank})"]
        if errors:
            shutil.rmtree(partial, ignore_errors=True)
        return 0 if errors else size, ", ".join(errors)

    try:
        result = write_shards(partial, exchange.rank, tensors())
    except Exception as error:  # whatever it is, the others wait for this rank's vote
        own.append(error)
        result = WriteResult(error=error_text(error))
    size, errors = exchange.agree(asdict(result), decide, "saving a checkpoint")
    if errors:
        with suppress(OSError):  # on a host that does not see rank 0's folder, which is why
            for name in result.files:
                (partial / name).unlink(missing_ok=True)
            partial.rmdir()
    for mistake in own:
        if not isinstance(mistake, FAILURES):
            raise mistake
    return size, errors


@dataclass(frozen=True)
class SaveResult:
    """The result of a save of so many steps of training.

    ``pause_s``: for how long this rank did not train; a wait for the save before is part of it. ``seconds``: from the
    call until it was complete or given up. ``bytes``: of all ranks' files; 0 where it was given up, with an ``error``.
    """

    step: int
    pause_s: float
    seconds: float
    bytes: int
    error: str | None


class Saver:
    """Write a run's checkpoints in a thread; every rank has a saver.

    A save that the disk or any rank cannot do is given up by all: what was written of it is removed, the checkpoints
    before stay, and training goes on. So is one of weights that are not finite: no training can go on from those, and
    the good ones before them would be pruned.

    Args:
        root: the folder for checkpoints, seen by all ranks.
        keep: how many of the newest to keep; None keeps all.
        exchange: with the other ranks, for this saver's threads alone; rank 0 decides.
        first: called on rank 0, in the thread, before a checkpoint gets its name; it does not raise.

    Attributes:
        results: of the saves so far, in order; complete after :meth:`wait`.
        spare: chooses one of the checkpoints to keep beside the newest.
    """

    def __init__(self, root: Path, keep: int | None, exchange: Exchange,
                 first: Callable[[], None] = lambda: None) -> None:
        self._folder, self._keep, self._exchange = Checkpoints(root), keep, exchange
        self._first, self._buffer = first, HostBuffer()
        self._thread: Thread | None = None
        self._warnings: list[str] = []
        self._failure: BaseException | None = None
        self.results: list[SaveResult] = []
        self.spare: Callable[[Sequence[Path]], Path | None] = lambda found: None

    def reserve(self, sizes: Iterable[int], pinned: bool = False) -> None:
        """Allocate the memory for copies of tensors with so many bytes each, in a thread; pinned for those of a GPU.

        Else the first pause would be many times as long as the others: a system hands out memory slower than it is
        filled.
        """
        def allocate(own: Sequence[int]) -> None:
            with suppress(*FAILURES):  # too little memory: the save reports it
                self._buffer.reserve(own, pinned)

        self.wait()
        self._start(allocate, list(sizes))

    def save(self, about: Manifest, tensors: Mapping[str, Tensor], began: float | None = None) -> None:
        """Copy the tensors and return; a thread writes them. All ranks call it after the same step.

        Args:
            about: the same on all ranks; rank 0's is written, with the tensors and files.
            tensors: of this rank; their names are unique among all ranks.
            began: when training paused, by ``perf_counter``; None for now.

        Raises:
            UserError: a tensor is of a dtype that files cannot hold.
            RunError: see :meth:`wait`.
        """
        began = perf_counter() if began is None else began
        check_dtypes(tensors)
        self.wait()
        try:
            copies: Mapping[str, Tensor] | OSError = self._buffer.copy(tensors)
        except FAILURES as error:
            copies = OSError(error_text(error))  # too little memory on the host: given up as if the disk were full
        self._start(self._save, about, copies, began, perf_counter() - began)

    def wait(self) -> None:
        """Wait until the last save is complete or given up. Raises RunError when a rank is gone, so none can agree."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def warnings(self) -> list[str]:
        """Return and forget the warnings for the user: saves that were given up, old checkpoints that are left."""
        taken, self._warnings = self._warnings, []
        return taken

    def close(self, seconds: float | None = None) -> None:
        """Wait for the last save; on a rank that fails up to ``seconds``: the others still write."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        # A daemon: a disk that hangs must not keep a process that failed.
        self._thread = Thread(target=work, args=arguments, name="vpipe-saver", daemon=True)
        self._thread.start()

    def _save(self, about: Manifest, copies: Mapping[str, Tensor] | OSError, began: float, pause_s: float) -> None:
        step, size, errors = about.step, 0, "a rank is gone"
        try:
            size, errors = write_together(self._folder.partial(step), about, lambda: finite(copies), self._exchange,
                                          lambda: self._place(step))
            if errors and self._exchange.rank == 0:
                self._warnings.append(f"could not save step {step}: {errors}; training goes on, {self._rest()}")
        except Exception as error:  # that of a rank which is gone, or a mistake of ours
            if isinstance(error, RunError):
                error.what += f"; step {step} could not be saved"
            self._failure = error
        self.results.append(SaveResult(step, pause_s, perf_counter() - began, size, errors or None))

    def _place(self, step: int) -> None:
        """Give the checkpoint its name, and remove what it makes superfluous."""
        self._first()
        self._folder.commit(step)
        for what, task in (("write the file 'latest'", self._folder.update_latest), (  # even if that failed
                "remove older checkpoints", lambda: self._folder.prune(self._keep, self.spare))):
            try:
                task()
            except OSError as error:
                self._warnings.append(f"saved step {step}, but could not {what}: {error_text(error)}")

    def _rest(self) -> str:
        try:
            newest = self._folder.newest()
        except OSError as error:
            return f"and the folder of checkpoints cannot be read: {error_text(error)}"
        return "there is no checkpoint yet" if newest is None else (
            f"the latest checkpoint is step {Checkpoints.step_of(newest)}")


def write_manifest(about: Manifest, results: Sequence[WriteResult], folder: Path) -> Manifest:
    """Write the manifest of all ranks' files, and remove others. Raises OSError, also when rank 0 misses a file."""
    tensors = {name: entry for result in results for name, entry in result.tensors.items()}
    files = {name: entry for result in results for name, entry in result.files.items()}
    assert len(tensors) == sum(len(result.tensors) for result in results), "two ranks saved a tensor of one name"
    for name, entry in files.items():
        size = (folder / name).stat().st_size
        if size != entry.bytes:
            raise OSError(f"{name} has {size} bytes for rank 0 instead of {entry.bytes}")
    for path in folder.iterdir():
        if path.name not in files:  # of a save that was cut short
            path.unlink()
    manifest = replace(about, tensors=tensors, files=files)
    manifest.save(folder)
    return manifest


def finite(tensors: Mapping[str, Tensor] | OSError) -> Mapping[str, Tensor]:
    """Return tensors from which training can go on. Raises OSError for others, or the one that stands for them.

    Of the weights none may be a NaN, and none that is trained an infinity. A buffer may hold infinities, such as a
    mask.
    """
    if isinstance(tensors, OSError):
        raise tensors
    stepped = {name.removeprefix("optim.").rpartition(".")[0] for name in tensors if name.startswith("optim.")}
    for name, tensor in tensors.items():
        if not name.startswith("model.") or not tensor.numel():
            continue
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if not values.is_floating_point():
            continue
        least, most = torch.aminmax(values if values.dtype.itemsize > 1 else values.float())
        if least.isnan():
            raise OSError(f"'{name}' has values that are not numbers")
        if name.removeprefix("model.") in stepped and (least.isinf() or most.isinf()):
            raise OSError(f"'{name}' has values that are infinite")
    return tensors


def error_text(error: Exception) -> str:
    """Return ``No space left on device``."""
    if isinstance(error, OSError):
        return str(error.strerror or error)
    if isinstance(error, MemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _obstacle(folder: Path, partial: Path) -> str:
    """Return what a save would destroy though it is no checkpoint, or nothing."""
    for path in (folder, partial):
        if not path.exists():
            continue
        if not path.is_dir():
            return f"'{path}' is a file"
        names = {each.name for each in path.iterdir()}
        foreign = sorted(name for name in names if name != MANIFEST and not _SHARD.fullmatch(name))
        if foreign:
            return f"'{path}' holds '{foreign[0]}', which is no part of a checkpoint"
        if path == folder and names and MANIFEST not in names:
            return f"'{path}' holds '{min(names)}', but no {MANIFEST}"
    old = Path(f"{folder}.old")
    if os.path.lexists(old) and folder.exists():
        return f"'{old}' exists, which is what '{folder}' would be called while another takes its place"
    return ""
