"""Load tensors of a checkpoint by their global names, into any partition, schedule or number of ranks.

Before that: is it a checkpoint of this model? The names that a stage asks for: :mod:`vpipe.runtime.state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from vpipe.checkpoint.directory import resume_command
from vpipe.checkpoint.integrity import Progress, check_intact, older_intact_hint
from vpipe.checkpoint.manifest import Manifest, TensorEntry
from vpipe.checkpoint.shards import dtype_name, safetensors_errors
from vpipe.errors import UserError
from vpipe.model.layer import Model, build_outline

SHOWN = 3
"""Differences that a message names; the others are counted."""


def load_tensors(folder: Path, manifest: Manifest, names: Iterable[str], device: torch.device | str = "cpu",
                 progress: Progress | None = None, resume_hint: Callable[[Path], str] = resume_command, *,
                 checked: bool = False) -> dict[str, Tensor]:
    """Return the tensors of those names on ``device``; the files that hold them are hashed first, unless ``checked``.

    Raises UserError when a name is not in the checkpoint, or a file is missing or is not the one that was written.

    Args:
        manifest: of ``folder``.
        progress: called with the bytes that were hashed and with all there are.
        resume_hint: see :func:`~vpipe.checkpoint.directory.find_checkpoint`.
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
            with safetensors_errors(), safe_open(folder / file, framework="pt") as opened:
                for name in own:
                    tensor = opened.get_tensor(name)
                    kind, entry = TensorKind.of(tensor), TensorKind.of(manifest.tensors[name])
                    if kind != entry:
                        raise UserError(f"{file} holds '{name}' as {kind}, but the manifest says {entry}",
                                        where=str(folder), hint="bring the folder back from a copy, or resume from an "
                                        "older checkpoint: vpipe checkpoint ls RUN lists them")
                    found[name] = tensor.to(device, copy=True)
    except OSError as error:
        raise UserError(f"cannot read the checkpoint '{folder}': {error.strerror or error}",
                        hint=older_intact_hint(folder, progress, resume_hint)) from None
    return {name: found[name] for name in wanted}


class TensorKind(NamedTuple):
    """The shape and dtype of a tensor: ``[30522, 256] float32``."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor | TensorEntry) -> TensorKind:
        """Return those of a tensor, in memory or as a manifest has it."""
        return cls(tuple(tensor.shape), dtype_name(tensor.dtype))

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}] {self.dtype}"


def check_compatible(manifest: Manifest, model: Model, hint: str = "resume with the model section of the checkpoint's "
                     "own config: vpipe checkpoint show prints it") -> None:
    """Raise UserError for the checkpoint of another model, with the first names and shapes that differ."""
    ours = tensor_kinds(model)
    theirs = {name.removeprefix("model."): TensorKind.of(entry)
              for name, entry in manifest.tensors.items() if name.startswith("model.")}
    other = [f"'{name}' is {kind} in the model and {theirs[name]} in the checkpoint"
             for name, kind in ours.items() if name in theirs and theirs[name] != kind]
    missing = [f"'{name}' {kind} is not in the checkpoint" for name, kind in ours.items() if name not in theirs]
    more = [f"'{name}' {kind} of the checkpoint is not in the model"
            for name, kind in theirs.items() if name not in ours]
    parts = []
    for differences in filter(None, (other, missing, more)):
        rest = len(differences) - SHOWN
        parts.append("; ".join(differences[:SHOWN]) + (f"; and {rest} more" if rest > 0 else ""))
    if parts:
        raise UserError(f"the checkpoint of step {manifest.step} is of another model: {'; '.join(parts)}", hint=hint)


def tensor_kinds(model: Model) -> dict[str, TensorKind]:
    """Return the tensors of a checkpoint of the model, by ``<layer>.<parameter or buffer>``, tied ones once."""
    found = {}
    for number, layer in enumerate(model.layers):
        module = build_outline(layer, number)
        found.update({f"{layer.name}.{name}": TensorKind.of(tensor) for name, tensor in module.state_dict().items()
                      if name not in layer.ties})
    return found
