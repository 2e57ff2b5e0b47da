"""Convert a model to a folder that ``transformers`` loads, and such a folder to our weights.

Each family gives the names: :class:`vpipe.model.registry.HuggingFace`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vpipe.checkpoint.weight_files import plain_file, read_safetensors, read_torch
from vpipe.errors import UserError, counted, nearest
from vpipe.files import read_json
from vpipe.model.registry import Family, HuggingFace, ModelSettings, family_named, model_names

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SHOWN = 3
"""Names that a message lists; of the others it says how many there are."""

MOST_BYTES = 16 << 20
"""Of a description of a model, and of the list of the files that hold its weights."""

_FILES = (WEIGHTS, f"{WEIGHTS}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class HuggingFaceModel:
    """The model in a folder of Hugging Face's.

    Attributes:
        family: the name of ours that it belongs to.
        settings: of the model.
        config: the contents of its ``config.json``.
    """

    family: str
    settings: ModelSettings
    config: Mapping[str, object]


def export_weights(huggingface: HuggingFace, settings: ModelSettings,
                   weights: Mapping[str, Tensor]) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return the contents of ``config.json`` and the tensors of ``model.safetensors``.

    Args:
        weights: all of the model, ``<layer>.<parameter>``, tied ones under their owner's name.
    """
    config = huggingface.config(settings)
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values() if tensor.is_floating_point()}
    content = {"architectures": [huggingface.architecture], "model_type": huggingface.model_type, **config,
               "dtype": kinds.pop() if len(kinds) == 1 else "float32"}
    tensors: dict[str, Tensor] = {}
    written: set[str] = set()
    for theirs, ours in huggingface.names(config).items():
        tensor = weights[ours].clone() if ours in written else weights[ours]  # tensors of a file share nothing
        tensors[theirs] = tensor.t().contiguous() if theirs.endswith(huggingface.transposed) else tensor
        written.add(ours)
    return content, tensors


def read_model_config(folder: Path) -> HuggingFaceModel:
    """Return which model is in a folder that ``save_pretrained`` wrote.

    Raises:
        UserError: it is none, or of a kind of model that is not known here.
    """
    path = folder / CONFIG
    config = read_json(path, MOST_BYTES, f"the model's {CONFIG}",
                       f"a folder of Hugging Face's holds {CONFIG} and {WEIGHTS}: download it again")
    kind = config.get("model_type") if isinstance(config, dict) else None
    families = {family.huggingface.model_type: name for name in model_names()
                if (family := _known(name)) is not None and family.huggingface is not None}
    if not isinstance(kind, str) or kind not in families:
        raise UserError(f"the model_type in '{path}' is {kind!r}, which is not known here",
                        hint=nearest(str(kind), sorted(families)))
    huggingface = family_named(families[kind]).huggingface
    assert huggingface is not None
    try:
        return HuggingFaceModel(families[kind], huggingface.settings(config), config)
    except UserError as error:
        first = error.problems[0]
        raise UserError(f"{first.what}, as '{path}' has it", hint=first.hint) from None


def _known(name: str) -> Family | None:
    """Return a family, unless the package that announces it cannot be imported."""
    try:
        return family_named(name)
    except (UserError, ImportError):
        return None


def import_weights(folder: Path, huggingface: HuggingFace, settings: ModelSettings,
                   note: Callable[[str], None] = lambda line: None) -> dict[str, Tensor]:
    """Return the weights in a folder of Hugging Face's under our names, ``<layer>.<parameter>``, tied ones once.

    Args:
        note: called with a sentence on what is left out.

    Raises:
        UserError: a weight is missing, or tied weights are not equal, or a file cannot be read.
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


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the folder, from one file or from those that an index names."""
    name = next((name for name in _FILES if (folder / name).is_file()), None)
    if name is None:
        raise UserError(f"there are no weights in '{folder}'", hint=f"looked for {', '.join(_FILES)}")
    read = read_safetensors if name.startswith(WEIGHTS) else read_torch
    if not name.endswith(".index.json"):
        return read(folder / name)
    index = read_json(folder / name, MOST_BYTES, "the list of the files that hold the weights",
                      "download the folder again")
    try:
        parts = dict.fromkeys(index["weight_map"].values())
    except (KeyError, AttributeError, TypeError):
        raise UserError(f"'{folder / name}' does not say which files hold the weights",
                        hint="download the folder again") from None
    tensors: dict[str, Tensor] = {}
    for part in parts:
        tensors |= read(plain_file(folder, part))
    return tensors


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
