"""What each rank writes of a checkpoint, and how rank 0 makes one of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from vpipe.checkpoint import storage
from vpipe.checkpoint.manifest import ITEM_BYTES, About, FileFacts, Manifest, Stored, stored_of
from vpipe.errors import UserError


@dataclass(frozen=True)
class Part:
    """What one rank wrote, or why it could not."""

    tensors: Mapping[str, Stored]
    files: Mapping[str, FileFacts]
    error: str = ""

    @classmethod
    def write(cls, folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> Part:
        """Write a rank's tensors into ``folder``, which is made, and wait until the disk has them.

        Raises:
            OSError: they could not be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        return cls(*storage.write(folder, rank, tensors))

    def text(self) -> str:
        """What :meth:`of` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Part:
        """The inverse of :meth:`text`."""
        content = json.loads(text)
        return cls({name: stored_of(stored) for name, stored in content["tensors"].items()},
                   {name: FileFacts(**facts) for name, facts in content["files"].items()}, content["error"])


def merge(about: About, parts: list[Part], folder: Path) -> Manifest:
    """Write the manifest of the parts that ranks wrote into ``folder``, where nothing else stays.

    Raises:
        OSError: it could not be written, or this rank does not see what another wrote.
    """
    tensors = {name: stored for part in parts for name, stored in part.tensors.items()}
    files = {name: facts for part in parts for name, facts in part.files.items()}
    assert len(tensors) == sum(len(part.tensors) for part in parts), "two ranks saved a tensor of one name"
    for name, facts in files.items():
        size = (folder / name).stat().st_size
        if size != facts.bytes:
            raise OSError(f"{name} has {size} bytes for rank 0 instead of {facts.bytes}")
    for path in folder.iterdir():
        if path.name not in files:  # of a save that was cut short
            path.unlink()
    manifest = Manifest.of(about, tensors, files)
    manifest.save(folder)
    return manifest


def check_kinds(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that files cannot hold.

    Raises:
        UserError: there is one.
    """
    for name, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") not in ITEM_BYTES:
            raise UserError(f"'{name}' is of {tensor.dtype}, which a checkpoint cannot hold",
                            hint=f"kinds of numbers it can hold: {', '.join(ITEM_BYTES)}")
        if tensor.is_sparse:
            raise UserError(f"'{name}' is sparse, which a checkpoint cannot hold", hint="make it dense: .to_dense()")


def not_finite(tensors: Mapping[str, Tensor]) -> str:
    """What is wrong with the first weight from which no training can go on, or nothing.

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


def words_of(error: Exception) -> str:
    """``No space left on device``."""
    if isinstance(error, OSError):
        return str(error.strerror or error)
    if isinstance(error, MemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {error}".splitlines()[0]
