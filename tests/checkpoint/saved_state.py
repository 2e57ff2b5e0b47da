"""Tensors of every sort, and what a run says of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vpipe.checkpoint import Checkpoint
from vpipe.checkpoint.manifest import ITEM_BYTES, Manifest
from vpipe.checkpoint.shards import SafetensorError


def about(step: int) -> Manifest:
    return Manifest(step, 32 * step, seed=7, config="model:\n  name: bert\n")


def tensors(fill: float = 1.0) -> dict[str, Tensor]:
    """Shapes of 0, 1 and 3 dimensions, none, transposed, repeated, shared and required to have gradients."""
    weight = (fill * torch.arange(12.0)).view(3, 4)
    return {
        "model.a.weight": torch.nn.Parameter(weight),
        "model.a.transposed": weight.t(),
        "model.a.row": weight[1],
        "model.a.every_second": weight[:, ::2],
        "model.a.repeated": torch.tensor([fill]).expand(5),
        "model.a.none": torch.empty(0, 3),
        "model.b.mask": torch.tensor([True, False, True]),
        "optim.a.weight.step#int": torch.tensor(3),
        "optim.a.weight.exp_avg": torch.full((2, 1, 3), fill, dtype=torch.bfloat16),
        "buffers.1.b.running": torch.tensor(-0.0, dtype=torch.float64),
        "average.a.weight": torch.tensor([fill, float("inf"), float("nan")]),
    }


def of_every_kind() -> dict[str, Tensor]:
    """Three numbers of each kind that a checkpoint can hold."""
    return {f"model.a.{name}": torch.tensor([0, 1, 1]).to(getattr(torch, name)) for name in ITEM_BYTES}


def read_all(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    manifest = Manifest.load(folder)
    return Checkpoint(folder, manifest).tensors(manifest.tensors)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def full(*_: object) -> None:
    """Put in place of ``save_file``: a disk that takes nothing more."""
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Bit for bit, names, shapes and kinds of numbers too."""
    return left.keys() == right.keys() and all(
        value.shape == right[name].shape and value.dtype == right[name].dtype and bits(value) == bits(right[name])
        for name, value in left.items())


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
