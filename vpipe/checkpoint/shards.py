"""Write one rank's tensors of a checkpoint, copied into host memory, as safetensors files, and read them; no pickle."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vpipe import accelerator
from vpipe.checkpoint.manifest import ITEM_BYTES, FileEntry, TensorEntry, TensorKind
from vpipe.errors import UserError

FILE_BYTES = 2 << 30
"""Size after which a file gets no further tensor, so that a resume with other ranks need not read all of a rank's."""

_ALIGN = 64
"""Alignment of tensors, in bytes: more than any kind of number needs, and a line of a processor's cache."""


class HostBuffer:
    """One block of host memory with a place for each tensor, used again by every save; pinned for a GPU's tensors.

    So a save neither waits for pages of memory, which the system hands out slower than they are filled, nor copies
    through a GPU driver's own buffers.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._places: dict[str, Tensor] = {}

    def reserve(self, sizes: Iterable[int], pinned: bool) -> None:
        """Allocate memory for tensors of so many bytes each, and have the system hand out its pages now."""
        self._places = {}
        self._allocate(sum(map(_aligned, sizes)), pinned)
        self._memory.zero_()

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return contiguous copies of ``tensors``, complete on return; they overwrite the copies made before."""
        gpus = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        if self._places.keys() != tensors.keys() or any(
                place.shape != tensors[name].shape or place.dtype != tensors[name].dtype
                for name, place in self._places.items()):
            self._places, end = {}, 0
            self._allocate(sum(_aligned(tensor.nbytes) for tensor in tensors.values()), pinned=bool(gpus))
            for name, tensor in tensors.items():
                self._places[name] = self._memory[end:end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                end += _aligned(tensor.nbytes)
        for name, tensor in tensors.items():
            self._places[name].copy_(tensor.detach(), non_blocking=True)
        for device in gpus:
            accelerator.synchronize(device)
        return self._places

    def _allocate(self, count: int, pinned: bool) -> None:
        if count <= len(self._memory) and not (pinned and not self._memory.is_pinned()):
            return
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # freed before more is allocated
        if pinned:
            self._memory = accelerator.pinned_bytes(count)
            return
        memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)  # large pages: the system hands out 512 times fewer
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class WriteResult:
    """The manifest's entries for the tensors and files of one rank, or the error that kept it from writing."""

    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    error: str = ""


def write_shards(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> WriteResult:
    """Write one rank's tensors into ``folder``, which is made, and wait until the disk has them.

    They go to ``rank<K>.safetensors``, to ``rank<K>.<n>.safetensors`` when they are many. Raises OSError.

    Args:
        tensors: contiguous; no two share memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries, files = {}, {}
    groups = list(_groups(tensors))
    for number, group in enumerate(groups):
        file = f"rank{rank}.safetensors" if len(groups) == 1 else f"rank{rank}.{number}.safetensors"
        files[file] = _write_file(folder / file, group)
        for name, tensor in group.items():
            entries[name] = TensorEntry(*TensorKind.of(tensor), file)
    return WriteResult(entries, files)


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError for tensors that files cannot hold."""
    for name, tensor in tensors.items():
        if TensorKind.of(tensor).dtype not in ITEM_BYTES:
            raise UserError(f"'{name}' is of {tensor.dtype}, which a checkpoint cannot hold",
                            hint=f"kinds of numbers it can hold: {', '.join(ITEM_BYTES)}")
        if tensor.is_sparse:
            raise UserError(f"'{name}' is sparse, which a checkpoint cannot hold", hint="make it dense: .to_dense()")


def read_file(path: Path, entries: Mapping[str, TensorEntry]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a file, on the host.

    Raises:
        UserError: one has another shape or dtype than its entry in the manifest.
        OSError: the file cannot be read.
    """
    with _safetensors_errors(), safe_open(path, framework="pt") as opened:
        for name, entry in entries.items():
            tensor = opened.get_tensor(name)
            if (kind := TensorKind.of(tensor)) != (stated := TensorKind.of(entry)):
                raise UserError(f"{path.name} holds '{name}' as {kind}, but the manifest says {stated}",
                                where=str(path.parent), hint="bring the folder back from a copy, or resume from an "
                                "older checkpoint: vpipe checkpoint ls RUN lists them")
            yield name, tensor


@contextmanager
def _safetensors_errors() -> Iterator[None]:
    """Raise the errors of safetensors' library as OSErrors, with the system's number where they have one."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else None
        raise (OSError(number, os.strerror(number)) if number else OSError(str(error))) from None


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file, in order."""
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if group and size + tensor.nbytes > FILE_BYTES:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.nbytes
    yield group


def _write_file(path: Path, tensors: dict[str, Tensor]) -> FileEntry:
    with _safetensors_errors():
        save_file(tensors, path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library lets only the owner read it
    with path.open("rb") as file:
        os.fsync(file.fileno())
    # Hashed from the disk and not before: so the sum is of the file's content, and other threads can work meanwhile.
    return FileEntry.of(path)
