"""Export the model of a checkpoint to files that other programs read; make a checkpoint of their weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from vpipe import Model, files
from vpipe.app.families.lora import LoraSettings, to_peft
from vpipe.app.families.registry import HuggingFace, ModelSettings
from vpipe.app.weights import check_free
from vpipe.app.weights.import_weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, WEIGHTS
from vpipe.checkpoint import Checkpoint, Manifest
from vpipe.errors import UserError


def export_safetensors(weights: Mapping[str, Tensor], step: int, out: Path) -> None:
    """Write one safetensors file, tied weights once. Raises UserError when it exists or cannot be written."""
    with _written(out) as partial:
        save_file(dict(weights), partial, metadata={"format": "pt", "step": str(step)})


def export_torch(weights: Mapping[str, Tensor], model: Model | None, out: Path) -> None:
    """Write a state dict by ``torch.save``, with the names of ``Model.materialize().state_dict()``.

    ``model`` states the ties: a tied weight has all of its names, and lies in the file once. Raises UserError as
    :func:`export_safetensors` does.
    """
    ties = {} if model is None else model.ties
    with _written(out) as partial:
        torch.save({**weights, **{name: weights[target] for name, target in ties.items()}}, partial)


def export_huggingface(weights: Mapping[str, Tensor], huggingface: HuggingFace, settings: ModelSettings, out: Path,
                       tokenizer: Path | None = None, end: tuple[str, int] | None = None) -> None:
    """Write a folder for ``from_pretrained``. Raises UserError as :func:`export_safetensors` does.

    ``tokenizer``: a ``tokenizer.json`` to go with it; that of a model that translates then ends texts by itself.
    ``end``: its token between texts and the id; texts begin with it.
    """
    sizes = huggingface.config(settings)
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values() if tensor.is_floating_point()}
    config = {"architectures": [huggingface.architecture], "model_type": huggingface.model_type, **sizes,
              "dtype": kinds.pop() if len(kinds) == 1 else "float32"}
    tensors: dict[str, Tensor] = {}
    written: set[str] = set()
    for theirs, ours in huggingface.names(sizes).items():
        tensor = weights[ours].clone() if ours in written else weights[ours]  # tensors of a file share nothing
        tensors[theirs] = tensor.t().contiguous() if theirs.endswith(huggingface.transposed) else tensor
        written.add(ours)
    special = {} if end is None else {"bos_token": end[0], "eos_token": end[0]}
    if end is not None:
        config |= {"bos_token_id": end[1], "eos_token_id": end[1]}
    ending = None
    if tokenizer is not None and huggingface.special:
        ending = Tokenizer.from_file(str(tokenizer))
        special = {kind: token for kind, (token, *_) in huggingface.special.items()}
        ids = {kind: ending.token_to_id(token) for kind, token in special.items()}
        config |= {key: ids[kind] for kind, (_, *keys) in huggingface.special.items() for key in keys}
        eos = special["eos_token"]
        ending.post_processor = TemplateProcessing(single=f"$A {eos}", special_tokens=[(eos, ids["eos_token"])])
    with _written(out) as partial:
        partial.mkdir()
        _write_json(partial / CONFIG, config)
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        if tokenizer is not None:
            if ending is None:
                shutil.copyfile(tokenizer, partial / "tokenizer.json")
            else:
                ending.save(str(partial / "tokenizer.json"))
            _write_json(partial / "tokenizer_config.json", {"tokenizer_class": huggingface.tokenizer, **special})


def export_peft(weights: Mapping[str, Tensor], lora: LoraSettings, huggingface: HuggingFace, settings: ModelSettings,
                out: Path) -> None:
    """Write a folder for ``PeftModel.from_pretrained``. Raises UserError as :func:`export_safetensors` does."""
    config, tensors = to_peft(weights, lora, huggingface.names(huggingface.config(settings)), huggingface.transposed,
                              huggingface.architecture.endswith(("ForCausalLM", "LMHeadModel")))
    with _written(out) as partial:
        partial.mkdir()
        _write_json(partial / ADAPTER_CONFIG, config)
        save_file(tensors, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def make_checkpoint(out: Path, about: Manifest, model: Model, weights: Mapping[str, Tensor],
                    config: Path | None = None) -> Manifest:
    """Make a checkpoint of weights alone, from which a run can begin.

    Args:
        weights: ``<layer>.<parameter>``, tied ones once.
        config: a file to go with it as ``config.json``.

    Raises:
        UserError: they are not the model's; and as :func:`export_safetensors` does.
    """
    with _written(out) as partial:
        partial.mkdir()
        more = [] if config is None else [Path(shutil.copyfile(config, partial / CONFIG))]
        return Checkpoint.of_weights(partial, about, model, weights, more).manifest


@contextmanager
def _written(out: Path) -> Iterator[Path]:
    """Yield a name to write under, which becomes ``out`` once the disk has all of it, and is gone if that fails."""
    check_free(out)
    partial = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        yield partial
        for path in partial.iterdir() if partial.is_dir() else (partial,):
            path.chmod(path.parent.stat().st_mode & 0o664)  # safetensors' writer lets only the owner read
            files.sync(path)
        if partial.is_dir():
            files.sync(partial)
        partial.rename(out)
        files.sync(out.absolute().parent)
    except (OSError, SafetensorError, RuntimeError) as error:  # the last two: of safetensors' and torch's writers
        why = (isinstance(error, OSError) and error.strerror) or str(error).splitlines()[0]
        raise UserError(f"cannot write '{out}': {why}",
                        hint="name a place with room that you may write to as -o") from None
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
