"""Whether a checkpoint is one of a given model, told before anything of it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from vpipe.checkpoint.manifest import Manifest
from vpipe.errors import UserError
from vpipe.model.layer import Layer, Model, without_values

SHOWN = 3
"""Differences that a message names; of the others it says how many there are."""


@dataclass(frozen=True)
class Kind:
    """The shape of a tensor and the kind of its numbers: ``[30522, 256] float32``."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}] {self.dtype}"


def check_fits(manifest: Manifest, model: Model, hint: str = "resume with the model section of the checkpoint's own "
               "config: vpipe checkpoint show prints it") -> None:
    """Refuse the checkpoint of another model, with the first names and shapes that differ.

    Args:
        hint: the remedy.

    Raises:
        UserError: a parameter or buffer of the model is not in the checkpoint or is another there, or the checkpoint
            has one that the model has not.
    """
    mine = kinds_of(model)
    theirs = {name.removeprefix("model."): Kind(stored.shape, stored.dtype)
              for name, stored in manifest.tensors.items() if name.startswith("model.")}
    other = [f"'{name}' is {kind} in the model and {theirs[name]} in the checkpoint"
             for name, kind in mine.items() if name in theirs and theirs[name] != kind]
    missing = [f"'{name}' {kind} is not in the checkpoint" for name, kind in mine.items() if name not in theirs]
    more = [f"'{name}' {kind} of the checkpoint is not in the model"
            for name, kind in theirs.items() if name not in mine]
    parts = [_some(differences) for differences in (other, missing, more) if differences]
    if parts:
        raise UserError(f"the checkpoint of step {manifest.step} is of another model: {'; '.join(parts)}",
                        hint=hint)


def kinds_of(model: Model) -> dict[str, Kind]:
    """What a checkpoint of the model must have, by ``<layer>.<parameter or buffer>``; tied ones where they are owned.

    Nothing is computed and no weights are made, where the layers allow it.
    """
    found = {}
    for number, layer in enumerate(model.layers):
        state = _empty(layer, number).state_dict()
        found.update({f"{layer.name}.{name}": Kind(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                      for name, tensor in state.items() if name not in layer.ties})
    return found


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """The shapes alone of :func:`kinds_of`."""
    return {name: kind.shape for name, kind in kinds_of(model).items()}


def _empty(layer: Layer, number: int) -> nn.Module:
    """The module without values; with, where its making reads some, or fails in a way of its own."""
    try:
        with torch.random.fork_rng(devices=[]), without_values():
            module = layer.make()
    except Exception:
        return layer.materialize(number, seed=0)
    return module if isinstance(module, nn.Module) else layer.materialize(number, seed=0)


def _some(differences: list[str]) -> str:
    more = len(differences) - SHOWN
    return "; ".join(differences[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
