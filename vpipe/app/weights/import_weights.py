"""Read weights that others wrote, as data and never as code: folders of Hugging Face's, files of ``torch.save``.

Each family gives the names: :class:`vpipe.app.families.registry.HuggingFace`.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vpipe import files
from vpipe.app.families.lora import LoraSettings, from_peft
from vpipe.app.families.registry import HuggingFace, ModelSettings, family_named, model_names
from vpipe.errors import UserError, counted, nearest

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SHOWN = 3
"""Names that a message lists; the others are counted."""

MOST_BYTES = 16 << 20
"""Of a description of a model, and of the list of the files that hold its weights."""

_FILES = (WEIGHTS, f"{WEIGHTS}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

_CODE = re.compile(r"[Uu]nsupported (global|class)|not an allowed global", re.ASCII)
"""Torch's error for a pickle that asks for more than tensors."""


class HuggingFaceModel(NamedTuple):
    """A model in a folder of Hugging Face's: the name of our family, and its settings."""

    family: str
    settings: ModelSettings


def read_model_config(folder: Path) -> HuggingFaceModel:
    """Return the model in a folder that ``save_pretrained`` wrote. Raises UserError for an unknown kind of model."""
    path = folder / CONFIG
    config = files.read_json(path, MOST_BYTES, f"the model's {CONFIG}",
                       f"a folder of Hugging Face's holds {CONFIG} and {WEIGHTS}: download it again")
    kind = config.get("model_type") if isinstance(config, dict) else None
    families: dict[str, tuple[str, HuggingFace]] = {}
    for name in model_names():
        with suppress(UserError, ImportError):  # of a package that cannot be imported
            if huggingface := family_named(name).huggingface:
                families[huggingface.model_type] = name, huggingface
    if not isinstance(kind, str) or kind not in families:
        raise UserError(f"the model_type in '{path}' is {kind!r}, which is not known here",
                        hint=nearest(str(kind), sorted(families)))
    name, huggingface = families[kind]
    try:
        return HuggingFaceModel(name, huggingface.settings(config))
    except UserError as error:
        first = error.problems[0]
        raise UserError(f"{first.what}, as '{path}' has it", hint=first.hint) from None


def import_weights(folder: Path, huggingface: HuggingFace, settings: ModelSettings,
                   note: Callable[[str], None] = lambda line: None) -> dict[str, Tensor]:
    """Return the weights in a folder of Hugging Face's under our names, ``<layer>.<parameter>``, tied ones once.

    Raises UserError when a weight is missing, or tied weights are not equal, or a file cannot be read. ``note`` is
    called with a sentence on what is left out.
    """
    config = huggingface.config(settings)
    names, copies = huggingface.names(config), huggingface.copies(config)
    found: dict[str, Tensor] = {}
    unused = []
    for name, tensor in _tensors(folder).items():
        spelled = huggingface.spelled(name)
        if spelled is not None and (spelled in names or spelled in copies):
            turned = tensor.dim() == 2 and spelled.endswith(huggingface.transposed)
            found[spelled] = tensor.t().contiguous() if turned else tensor
        else:
            unused.append(name)
    weights = {ours: found[theirs] for theirs, ours in names.items() if theirs in found}
    missing = [theirs for theirs, ours in names.items() if ours not in weights]
    if missing:
        others = f"; it has others instead: {_some(unused)}" if unused else ""
        raise UserError(f"'{folder}' lacks {counted(len(missing), 'weight')}: {_some(missing)}{others}",
                        hint=f"it must hold all of a {huggingface.architecture}: load it with that class of "
                             "transformers, and save it again")
    for theirs, ours in copies.items():
        if theirs in found and not torch.equal(found[theirs], weights[ours]):
            raise UserError(f"'{theirs}' in '{folder}' differs from the weight it is tied to",
                            hint='write "tie_word_embeddings": false into its config.json')
    if unused:
        note(f"left out, for this model does not compute with it: {_some(unused)}")
    return weights


def import_adapter(folder: Path, huggingface: HuggingFace, settings: ModelSettings) -> tuple[
        LoraSettings, dict[str, Tensor]]:
    """Return the settings and the weights of an adapter that ``peft`` saved, under our names.

    Raises UserError when it is of another kind or another model, or a file cannot be read.
    """
    names = huggingface.names(huggingface.config(settings))
    config = files.read_json(folder / ADAPTER_CONFIG, MOST_BYTES, f"the adapter's {ADAPTER_CONFIG}",
                             "give a folder that save_pretrained of peft wrote")
    lora = LoraSettings.from_peft(config if isinstance(config, dict) else {}, names)
    return lora, from_peft(read_safetensors(folder / ADAPTER_WEIGHTS), names)


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the folder, from one file or from those that an index names."""
    name = next((name for name in _FILES if (folder / name).is_file()), None)
    if name is None:
        raise UserError(f"there are no weights in '{folder}'", hint=f"looked for {', '.join(_FILES)}")
    read = read_safetensors if name.startswith(WEIGHTS) else lambda path: tensors_of(load_torch(path), path)
    if not name.endswith(".index.json"):
        return read(folder / name)
    index = files.read_json(folder / name, MOST_BYTES, "the list of the files that hold the weights",
                      "download the folder again")
    try:
        parts = dict.fromkeys(index["weight_map"].values())
    except (KeyError, AttributeError, TypeError):
        raise UserError(f"'{folder / name}' does not list the files that hold the weights",
                        hint="download the folder again") from None
    tensors: dict[str, Tensor] = {}
    for part in parts:
        if not isinstance(part, str) or not part or Path(part).name != part:
            raise UserError(f"an index in '{folder}' names the file {part!r}", hint="it must name files beside it")
        tensors |= read(folder / part)
    return tensors


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file. Raises UserError when there is no such file, or it is damaged."""
    try:
        return load_file(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    except SafetensorError as error:
        raise _damaged(path, str(error)) from None


def load_torch(path: Path) -> Any:
    """Return what ``torch.save`` wrote. Raises UserError for more than tensors and plain values: no code is run."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of a pickle's protocol
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files make all kinds
        if isinstance(error, pickle.UnpicklingError) and _CODE.search(str(error)):
            raise UserError(f"'{path}' holds more than weights and plain values, which could run code; it was not "
                            "loaded", hint="where it is trusted, load it with the program that wrote it, and save its "
                                           "'state_dict' alone") from None
        raise _damaged(path, "it was not written by torch.save, or is cut short") from None


def tensors_of(content: Any, path: Path, inside: str = "") -> dict[str, Tensor]:
    """Return the tensors of a state dict in its order; names of nested dicts are joined by dots.

    Raises UserError when it holds anything else.
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


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot read '{path}': {error.strerror or error}", hint="check that the file exists and may be "
                                                                              "read")


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"'{path}' cannot be read as weights: {why}", hint="bring it back from a copy, or download it "
                                                                        "again")
