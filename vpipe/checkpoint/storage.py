"""Write and read the tensors of a checkpoint: safetensors files, described by the manifest; no pickle."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vpipe.checkpoint.integrity import sha256_of
from vpipe.checkpoint.manifest import FileFacts, Manifest, Stored
from vpipe.errors import UserError

FILE_BYTES = 2 << 30
"""A file gets no further tensor beyond this, so that who resumes with other ranks need not read all of a rank's."""

_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
          "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
          "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64"}
"""What safetensors calls the kinds of numbers."""


def write(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Stored], dict[str, FileFacts]]:
    """Write one rank's tensors and wait until the disk has them.

    They go to ``rank<K>.safetensors``, to ``rank<K>.<n>.safetensors`` when they are many.

    Args:
        folder: exists.
        tensors: contiguous; no two share memory.

    Returns:
        The entries of the manifest for the tensors and for the files.

    Raises:
        OSError: they could not be written.
    """
    stored, files = {}, {}
    groups = list(_groups(tensors))
    for number, names in enumerate(groups):
        file = f"rank{rank}.safetensors" if len(groups) == 1 else f"rank{rank}.{number}.safetensors"
        files[file] = _write_file(folder / file, {name: tensors[name] for name in names})
        for name in names:
            stored[name] = Stored(tuple(tensors[name].shape), dtype_name(tensors[name].dtype), file)
    return stored, files


def load(folder: Path, manifest: Manifest, names: Sequence[str], device: torch.device | str) -> dict[str, Tensor]:
    """Return copies of the tensors of those names on ``device``.

    Raises:
        UserError: a tensor has another shape or kind of numbers in its file than in the manifest.
        OSError: a file cannot be read.
    """
    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault(manifest.tensors[name].file, []).append(name)
    found = {}
    for file, own in by_file.items():
        with _system_errors(), safe_open(folder / file, framework="pt") as opened:
            for name in own:
                said, part = manifest.tensors[name], opened.get_slice(name)
                shape, code = tuple(part.get_shape()), part.get_dtype()
                if (shape, code) != (said.shape, _CODES[said.dtype]):
                    raise UserError(f"{file} holds '{name}' as {list(shape)} {code}, but the manifest says "
                                    f"{list(said.shape)} {_CODES[said.dtype]}", where=str(folder),
                                    hint="bring the folder back from a copy, or resume from an older checkpoint: "
                                    "vpipe checkpoint ls RUN lists them")
                found[name] = opened.get_tensor(name).to(device, copy=True)
    return {name: found[name] for name in names}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def _system_errors() -> Iterator[None]:
    """Raise the errors of safetensors' library as OSErrors, with the system's number where they have one."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else None
        raise (OSError(number, os.strerror(number)) if number else OSError(str(error))) from None


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The names of the tensors of each file, in order."""
    group: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if group and size + tensor.nbytes > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += tensor.nbytes
    yield group


def _write_file(path: Path, tensors: dict[str, Tensor]) -> FileFacts:
    with _system_errors():
        save_file(tensors, path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library lets nobody else read it
    with path.open("rb") as file:
        os.fsync(file.fileno())
    # Read again and not hashed on the way: so the sum is of what the file has, and nothing holds up other threads.
    return FileFacts(path.stat().st_size, sha256_of(path))
