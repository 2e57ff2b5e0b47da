"""Save one checkpoint to a folder of any name while the caller waits; and what every save has in common."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from vpipe.checkpoint.agreement import Agreement, LocalAgreement
from vpipe.checkpoint.directory import recover, replace_folder
from vpipe.checkpoint.host_buffer import HostBuffer
from vpipe.checkpoint.manifest import MANIFEST, CheckpointInfo, Manifest
from vpipe.checkpoint.shards import WriteResult, check_dtypes, write_shards
from vpipe.errors import RunError, UserError

_SHARD = re.compile(r"rank\d+(\.\d+)?\.safetensors", re.ASCII)


def save_checkpoint(folder: Path, info: CheckpointInfo, tensors: Mapping[str, Tensor], rank: int = 0,
                    agreement: Agreement | None = None) -> None:
    """Write a checkpoint at exactly ``folder``, all at once or not at all; one that is there makes way.

    All ranks call it. Nothing but a checkpoint makes way: neither in ``folder``, nor in ``<folder>.tmp``, where it is
    written, nor ``<folder>.old``, which is what the one that makes way is called for a moment.

    Args:
        info: the same on all ranks; rank 0's is written.
        tensors: of this rank, on any device; their names are unique among all ranks.
        agreement: of the ranks; may be left out in one process.

    Raises:
        UserError: a tensor is of a dtype that files cannot hold, or something that is no checkpoint is in the way.
        RunError: some rank could not write; what there was before is still there.
    """
    check_dtypes(tensors)
    folder = Path(os.path.realpath(folder))
    agreement = agreement or LocalAgreement()
    partial = Path(f"{folder}.tmp")

    def begin(_: list[str]) -> str:
        try:
            if found := _in_the_way(folder, partial):
                return found
            if _was_cut_short(folder, partial):
                recover(folder)
            if partial.exists():
                shutil.rmtree(partial)
        except OSError as error:
            return f"cannot write to '{folder.parent}': {error_text(error)}"
        return ""

    def decide(votes: list[str]) -> str:
        results = list(map(WriteResult.from_json, votes))
        errors = write_errors(results)
        if not errors:
            try:
                write_manifest(info, results, partial)
                replace_folder(partial, folder)
            except Exception as error:
                errors = [error_text(error)]
        if errors:
            shutil.rmtree(partial, ignore_errors=True)
        return ", ".join(errors)

    if found := agreement.agree("", begin):
        raise UserError(f"nothing was saved: {found}", hint="give a folder that does not exist yet, or move that away")
    try:
        result = write_shards(partial, rank, HostBuffer().copy(tensors))
    except Exception as error:  # whatever it is, the others wait for this rank's vote
        result = WriteResult(error=error_text(error))
    if failed := agreement.agree(result.as_json(), decide):
        with suppress(OSError):  # on a host that does not see rank 0's folder, which is why
            for name in result.files:
                (partial / name).unlink(missing_ok=True)
            partial.rmdir()
        raise RunError(f"could not save a checkpoint to '{folder}': {failed}",
                       hint="what was there before is still there; make room, or give another folder")


def write_manifest(info: CheckpointInfo, results: Sequence[WriteResult], folder: Path) -> Manifest:
    """Write the manifest of what the ranks wrote into ``folder``, and remove what else is there.

    Raises:
        OSError: it could not be written, or this rank does not see what another wrote.
    """
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
    manifest = Manifest.build(info, tensors, files)
    manifest.save(folder)
    return manifest


def write_errors(results: Sequence[WriteResult]) -> list[str]:
    """Return the errors of the ranks, each with its rank."""
    return [f"{result.error} (rank {rank})" for rank, result in enumerate(results) if result.error]


def find_not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return what is wrong with the first weight from which no training can go on, or nothing.

    That is one with a NaN, and one that an optimizer steps with an infinity: a buffer may well hold infinities, such as
    a mask. One pass over the model's tensors.
    """
    stepped = {name.removeprefix("optim.").rpartition(".")[0] for name in tensors if name.startswith("optim.")}
    for name, tensor in tensors.items():
        if not name.startswith("model.") or not tensor.numel():
            continue
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if not values.is_floating_point():
            continue
        least, most = torch.aminmax(values if values.dtype.itemsize > 1 else values.float())
        if least.isnan():
            return f"'{name}' has values that are not numbers"
        if name.removeprefix("model.") in stepped and (least.isinf() or most.isinf()):
            return f"'{name}' has values that are infinite"
    return ""


def error_text(error: Exception) -> str:
    """Return ``No space left on device``."""
    if isinstance(error, OSError):
        return str(error.strerror or error)
    if isinstance(error, MemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _in_the_way(folder: Path, partial: Path) -> str:
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
    if os.path.lexists(old) and not _was_cut_short(folder, partial) and folder.exists():
        return f"'{old}' exists, which is what '{folder}' would be called while another takes its place"
    return ""


def _was_cut_short(folder: Path, partial: Path) -> bool:
    """Return whether a save died after the one before had made way, and before the new one had the name."""
    return not folder.exists() and (partial / MANIFEST).is_file()
