"""Refuse the checkpoint of another model before anything of it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from vpipe.checkpoint.manifest import Manifest
from vpipe.errors import UserError
from vpipe.model.layer import Layer, Model, without_values

SHOWN = 3
"""Differences that a message names; the others are counted."""


@dataclass(frozen=True)
class TensorKind:
    """The shape and dtype of a tensor: ``[30522, 256] float32``."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}] {self.dtype}"


def check_compatible(manifest: Manifest, model: Model, hint: str = "resume with the model section of the checkpoint's "
                     "own config: vpipe checkpoint show prints it") -> None:
    """Refuse the checkpoint of another model, with the first names and shapes that differ.

    Args:
        hint: the remedy.

    Raises:
        UserError: a parameter or buffer of the model is not in the checkpoint or is another there, or the checkpoint
            has one that the model has not.
    """
    ours = tensor_kinds(model)
    theirs = {name.removeprefix("model."): TensorKind(entry.shape, entry.dtype)
              for name, entry in manifest.tensors.items() if name.startswith("model.")}
    other = [f"'{name}' is {kind} in the model and {theirs[name]} in the checkpoint"
             for name, kind in ours.items() if name in theirs and theirs[name] != kind]
    missing = [f"'{name}' {kind} is not in the checkpoint" for name, kind in ours.items() if name not in theirs]
    more = [f"'{name}' {kind} of the checkpoint is not in the model"
            for name, kind in theirs.items() if name not in ours]
    if parts := [_first_of(differences) for differences in (other, missing, more) if differences]:
        raise UserError(f"the checkpoint of step {manifest.step} is of another model: {'; '.join(parts)}", hint=hint)


def tensor_kinds(model: Model) -> dict[str, TensorKind]:
    """Return what a checkpoint of the model must have, by ``<layer>.<parameter or buffer>``.

    A tied tensor is there once, under its owner. Nothing is computed and no weights are made, where the layers allow
    it.
    """
    found = {}
    for number, layer in enumerate(model.layers):
        state = _empty(layer, number).state_dict()
        found.update({f"{layer.name}.{name}": TensorKind(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                      for name, tensor in state.items() if name not in layer.ties})
    return found


def _empty(layer: Layer, number: int) -> nn.Module:
    """Build the module without values; with, where its constructor reads some, or fails in a way of its own."""
    try:
        with torch.random.fork_rng(devices=[]), without_values():
            module = layer.make()
    except Exception:
        return layer.materialize(number, seed=0)
    return module if isinstance(module, nn.Module) else layer.materialize(number, seed=0)


def _first_of(differences: list[str]) -> str:
    more = len(differences) - SHOWN
    return "; ".join(differences[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
