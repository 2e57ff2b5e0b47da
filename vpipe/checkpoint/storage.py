"""How torch.distributed.checkpoint writes and reads our files: safetensors, described by our manifest; no pickle."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from vpipe.checkpoint.integrity import sha256_of
from vpipe.checkpoint.manifest import FileFacts, Manifest, Stored
from vpipe.errors import UserError

FILE_BYTES = 2 << 30
"""A file gets no further tensor beyond this, so that who resumes with other ranks need not read all of a rank's."""


_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
          "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
          "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64"}
"""What safetensors calls the kinds of numbers."""


class Writer(StorageWriter):
    """Writes the tensors of one rank to ``rank<K>.safetensors``; to ``rank<K>.<n>.safetensors`` when they are many.

    Args:
        folder: exists.

    Attributes:
        tensors, files: what was written, for the manifest; on the disk when :func:`write` returns.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self.tensors: dict[str, Stored] = {}
        self.files: dict[str, FileFacts] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors of the plan, each file in full before the next."""
        tensors = {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor), f"{item.index.fqn} is no tensor"
            tensors[item.index] = tensor
        groups = list(_groups(tensors))
        results = []
        for number, group in enumerate(groups):
            name = f"rank{self._rank}.safetensors" if len(groups) == 1 else f"rank{self._rank}.{number}.safetensors"
            self.files[name] = _write_file(self._folder / name, {index.fqn: tensors[index] for index in group})
            for index in group:
                tensor = tensors[index]
                self.tensors[index.fqn] = Stored(tuple(tensor.shape), dtype_name(tensor.dtype), name)
                results.append(WriteResult(index, tensor.nbytes, name))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: rank 0 writes the manifest when all ranks are done."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: every rank writes alike."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are: names are unique, so no rank writes what another does."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No: it needs more than a path."""
        return False


class Reader(StorageReader):
    """Reads tensors of a checkpoint from whichever files hold them."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest, as torch words it."""
        return Metadata({name: _metadata(stored) for name, stored in self._manifest.tensors.items()})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for to where it is wanted, file by file."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self._manifest.tensors[item.storage_index.fqn].file, []).append(item)
        for name, items in by_file.items():
            with safe_open(self._folder / name, framework="pt") as file:
                for item in items:
                    source = file.get_tensor(item.storage_index.fqn)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_part(source, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader reads once."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: every rank reads alike."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No: it needs more than a path."""
        return False


def write(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Stored], dict[str, FileFacts]]:
    """Write one rank's tensors and wait until the disk has them; what to say of them in the manifest.

    Raises:
        OSError: they could not be written.
    """
    writer = Writer(folder, rank)
    with _Plainly():
        dcp_save(dict(tensors), storage_writer=writer, no_dist=True)
    return writer.tensors, writer.files


def check_kinds(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Refuse a manifest that says other shapes and kinds of numbers than the files have.

    Raises:
        UserError: of some tensor.
        OSError: a file cannot be read.
    """
    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault(manifest.tensors[name].file, []).append(name)
    for each, own in by_file.items():
        with _Plainly(), safe_open(folder / each, framework="pt") as file:
            for name in own:
                said, part = manifest.tensors[name], file.get_slice(name)
                found = (tuple(part.get_shape()), part.get_dtype())
                if found != (said.shape, _CODES[said.dtype]):
                    raise UserError(f"{each} holds '{name}' as {list(found[0])} {found[1]}, but the manifest says "
                                    f"{list(said.shape)} {_CODES[said.dtype]}", where=str(folder),
                                    hint="bring the folder back from a copy, or resume from an older checkpoint: "
                                    "vpipe checkpoint ls RUN lists them")


def load(folder: Path, manifest: Manifest, into: dict[str, Tensor]) -> None:
    """Fill tensors of a checkpoint's names and shapes, see :func:`check_kinds`.

    Raises:
        OSError: a file cannot be read.
    """
    with _Plainly():
        dcp_load(into, storage_reader=Reader(folder, manifest), no_dist=True)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


class _Plainly:
    """Around a call of torch.distributed.checkpoint: its errors as they arose, and not a word on one process."""

    def __enter__(self) -> None:
        # Not catch_warnings: it would undo what other threads change meanwhile. The filter is put in once.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CheckpointException):
            error, _ = next(iter(error.failures.values()))
        if isinstance(error, SafetensorError):
            found = re.search(r"os error (\d+)", str(error))
            number = int(found[1]) if found else None
            raise (OSError(number, os.strerror(number)) if number else OSError(str(error))) from None
        if error is not None:
            raise error from None


def _groups(tensors: Mapping[MetadataIndex, Tensor]) -> Iterator[list[MetadataIndex]]:
    """The tensors of each file, in order."""
    group: list[MetadataIndex] = []
    size = 0
    for index, tensor in tensors.items():
        if group and size + tensor.nbytes > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(index)
        size += tensor.nbytes
    yield group


def _write_file(path: Path, tensors: dict[str, Tensor]) -> FileFacts:
    save_file(tensors, path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library lets nobody else read it
    with path.open("rb") as file:
        os.fsync(file.fileno())
    # Read again and not hashed on the way: so the sum is of what the file has, and nothing holds up other threads.
    return FileFacts(path.stat().st_size, sha256_of(path))


def _metadata(stored: Stored) -> TensorStorageMetadata:
    shape = torch.Size(stored.shape)
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, stored.dtype)), shape,
                                 [ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)])


def _part(tensor: Tensor, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    return tensor[tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))]
