"""Read files of weights that others wrote: as data, never as code."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vpipe.errors import UserError

_CODE = re.compile(r"[Uu]nsupported (global|class)|not an allowed global", re.ASCII)
"""Torch's error for a pickle that asks for more than tensors."""


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file.

    Raises:
        UserError: there is no such file, or it is damaged.
    """
    try:
        return load_file(path)
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror or error}", hint="look whether the file is there, "
                        "and may be read") from None
    except SafetensorError as error:
        raise _damaged(path, str(error)) from None


def read_torch(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a state dict that ``torch.save`` wrote; names of nested dicts are joined by dots.

    Raises:
        UserError: see :func:`load_torch`; or it is no state dict.
    """
    return tensors_of(load_torch(path), path)


def load_torch(path: Path) -> Any:
    """Return what ``torch.save`` wrote, as long as it is tensors and plain values: nothing else is unpickled.

    Raises:
        UserError: there is no such file, it is damaged, or it holds more.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror or error}", hint="look whether the file is there, "
                        "and may be read") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of a pickle's protocol: what cannot be read is an error
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files make all kinds
        if isinstance(error, pickle.UnpicklingError) and _CODE.search(str(error)):
            raise UserError(f"'{path}' holds more than weights and plain values, which could run code; it was not "
                            "loaded", hint="where it is trusted, load it with the program that wrote it, and save its "
                                           "'state_dict' alone") from None
        raise _damaged(path, "it was not written by torch.save, or is cut short") from None


def tensors_of(content: Any, path: Path, inside: str = "") -> dict[str, Tensor]:
    """Return the tensors of a state dict in the order in which they stand there.

    Raises:
        UserError: it is none, or holds something else as well.
    """
    if not isinstance(content, Mapping):
        raise UserError(f"{inside or 'the content'} of '{path}' is of kind {type(content).__name__}",
                        hint="a dict of names and tensors is needed, as state_dict() gives it")
    tensors: dict[str, Tensor] = {}
    for name, value in content.items():
        if isinstance(value, Tensor):
            tensors[str(name)] = value.detach()
        elif isinstance(value, Mapping):
            within = f"{inside}.{name}" if inside else str(name)
            tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in tensors_of(value, path, within).items()}
        else:
            raise UserError(f"'{name}' in {inside or 'the content'} of '{path}' is of kind {type(value).__name__}, "
                            "not a tensor", hint="save a state_dict of weights alone")
    return tensors


def plain_file(folder: Path, name: object) -> Path:
    """Return a file of a folder that another file names; it must lie in the folder itself.

    Raises:
        UserError: it does not.
    """
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise UserError(f"an index in '{folder}' names the file {name!r}", hint="it must name files beside it")
    return folder / name


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"'{path}' cannot be read as weights: {why}", hint="bring it back from a copy, or download it "
                                                                        "again")
