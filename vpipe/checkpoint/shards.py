"""Write and read the tensors of a checkpoint: safetensors files, described by the manifest; no pickle."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vpipe.checkpoint.directory import resume_command
from vpipe.checkpoint.integrity import Progress, check_intact, older_intact_hint, sha256_of
from vpipe.checkpoint.manifest import ITEM_BYTES, FileEntry, Manifest, TensorEntry
from vpipe.errors import UserError

FILE_BYTES = 2 << 30
"""A file gets no further tensor beyond this, so that who resumes with other ranks need not read all of a rank's."""

_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
          "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
          "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64"}
"""The dtypes as safetensors calls them."""


@dataclass(frozen=True)
class WriteResult:
    """The manifest's entries for the tensors and files of one rank, or the error that kept it from writing."""

    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    error: str = ""

    def as_json(self) -> str:
        """Return the text that :meth:`from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WriteResult:
        """Return the result that :meth:`as_json` wrote."""
        content = json.loads(text)
        return cls({name: TensorEntry(tuple(entry.pop("shape")), **entry)
                    for name, entry in content["tensors"].items()},
                   {name: FileEntry(**entry) for name, entry in content["files"].items()}, content["error"])


def write_shards(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> WriteResult:
    """Write one rank's tensors into ``folder``, which is made, and wait until the disk has them.

    They go to ``rank<K>.safetensors``, to ``rank<K>.<n>.safetensors`` when they are many.

    Args:
        tensors: contiguous; no two share memory.

    Raises:
        OSError: they could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries, files = {}, {}
    groups = list(_groups(tensors))
    for number, group in enumerate(groups):
        file = f"rank{rank}.safetensors" if len(groups) == 1 else f"rank{rank}.{number}.safetensors"
        files[file] = _write_file(folder / file, group)
        for name, tensor in group.items():
            entries[name] = TensorEntry(tuple(tensor.shape), dtype_name(tensor.dtype), file)
    return WriteResult(entries, files)


def load_tensors(folder: Path, manifest: Manifest, names: Iterable[str], device: torch.device | str = "cpu",
                 progress: Progress | None = None, resume_hint: Callable[[Path], str] = resume_command, *,
                 checked: bool = False) -> dict[str, Tensor]:
    """Return the tensors of those names on ``device``; the files that hold them are hashed first, in full.

    Args:
        manifest: of ``folder``.
        progress: called with the bytes that were hashed and with all there are.
        resume_hint: see :func:`~vpipe.checkpoint.directory.find_checkpoint`.
        checked: the files were hashed already, so they are not now.

    Raises:
        UserError: a name is not in the checkpoint, a file is missing or not what was written, or holds another shape
            or dtype than the manifest says.
    """
    wanted = list(names)
    missing = [name for name in wanted if name not in manifest.tensors]
    if missing:
        raise UserError(f"the checkpoint '{folder}' has no '{missing[0]}'"
                        + (f", nor {len(missing) - 1} more that are asked for" if len(missing) > 1 else ""),
                        hint=f"it has {len(manifest.tensors)} tensors: vpipe checkpoint show {folder} lists them")
    by_file: dict[str, list[str]] = {}
    for name in wanted:
        by_file.setdefault(manifest.tensors[name].file, []).append(name)
    if not checked:
        check_intact(folder, progress, manifest=manifest, only=by_file, resume_hint=resume_hint)
    found: dict[str, Tensor] = {}
    try:
        for file, own in by_file.items():
            with _system_errors(), safe_open(folder / file, framework="pt") as opened:
                for name in own:
                    part = opened.get_slice(name)
                    _check_entry(folder, name, manifest.tensors[name], tuple(part.get_shape()), part.get_dtype())
                    found[name] = opened.get_tensor(name).to(device, copy=True)
    except OSError as error:
        raise UserError(f"cannot read the checkpoint '{folder}': {error.strerror or error}",
                        hint=older_intact_hint(folder, progress, resume_hint)) from None
    return {name: found[name] for name in wanted}


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that files cannot hold.

    Raises:
        UserError: there is one.
    """
    for name, tensor in tensors.items():
        if dtype_name(tensor.dtype) not in ITEM_BYTES:
            raise UserError(f"'{name}' is of {tensor.dtype}, which a checkpoint cannot hold",
                            hint=f"kinds of numbers it can hold: {', '.join(ITEM_BYTES)}")
        if tensor.is_sparse:
            raise UserError(f"'{name}' is sparse, which a checkpoint cannot hold", hint="make it dense: .to_dense()")


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32``."""
    return str(dtype).removeprefix("torch.")


def _check_entry(folder: Path, name: str, entry: TensorEntry, shape: tuple[int, ...], code: str) -> None:
    if (shape, code) != (entry.shape, _CODES[entry.dtype]):
        raise UserError(f"{entry.file} holds '{name}' as {list(shape)} {code}, but the manifest says "
                        f"{list(entry.shape)} {_CODES[entry.dtype]}", where=str(folder),
                        hint="bring the folder back from a copy, or resume from an older checkpoint: vpipe checkpoint "
                        "ls RUN lists them")


@contextmanager
def _system_errors() -> Iterator[None]:
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
    with _system_errors():
        save_file(tensors, path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library lets nobody else read it
    with path.open("rb") as file:
        os.fsync(file.fileno())
    # Read again and not hashed on the way: so the sum is of what the file has, and nothing holds up other threads.
    return FileEntry(path.stat().st_size, sha256_of(path))
