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

from vpipe.app.families.registry import HuggingFace, ModelSettings
from vpipe.app.weights.import_weights import CONFIG, WEIGHTS
from vpipe.checkpoint.directory import check_free, sync_folder
from vpipe.checkpoint.integrity import Progress, sha256_of
from vpipe.checkpoint.load import check_compatible, load_tensors, tensor_kinds
from vpipe.checkpoint.manifest import CheckpointInfo, FileEntry, Manifest, TensorEntry, factor_of, last_change_of
from vpipe.checkpoint.shards import dtype_name, write_shards
from vpipe.errors import UserError, counted
from vpipe.model.layer import Model
from vpipe.model.split import resolve_tie

PREFIX = "model."
"""Of the names of parameters and buffers in a checkpoint."""


def weights_of(folder: Path, manifest: Manifest, progress: Progress | None = None,
               corrected: bool = True, checked: bool = False) -> dict[str, Tensor]:
    """Return the parameters and buffers of the model: ``<layer>.<parameter>``, tied ones under their owner's name.

    Args:
        corrected: False: without what the correction of late gradients has added.
        checked: whether the files need not be hashed, so that only the weights are read of them.

    Raises:
        UserError: a file is damaged; or nothing was corrected, but ``corrected`` is False.
    """
    names = [name.removeprefix(PREFIX) for name in manifest.tensors if name.startswith(PREFIX)]
    added = [] if corrected else [name for name in names if last_change_of(name) in manifest.tensors]
    if not corrected and not added:
        raise UserError(f"the checkpoint '{folder}' has no last changes of its weights: no late gradients were "
                        "corrected", hint="leave out --uncorrected: the weights are what the optimizer made")
    if unknown := [name for name in added if factor_of(name) not in manifest.tensors]:
        raise UserError(f"the checkpoint '{folder}' does not say by which factor {counted(len(unknown), 'parameter')}, "
                        f"such as '{unknown[0]}', look ahead", hint="leave out --uncorrected: the weights are what the "
                        "run trained with")
    found = load_tensors(folder, manifest, [*(PREFIX + name for name in names),
                                            *(of(name) for name in added for of in (last_change_of, factor_of))],
                         progress=progress, checked=checked)
    for name in added:
        found[PREFIX + name].sub_(found[last_change_of(name)], alpha=found[factor_of(name)].item())
    return {name: found[PREFIX + name] for name in names}


def export_safetensors(weights: Mapping[str, Tensor], step: int, out: Path) -> None:
    """Write one safetensors file, tied weights once. Raises UserError when it exists or cannot be written."""
    with _written(out) as partial:
        save_file(dict(weights), partial, metadata={"format": "pt", "step": str(step)})


def export_torch(weights: Mapping[str, Tensor], model: Model | None, out: Path) -> None:
    """Write a state dict by ``torch.save``, with the names of ``Model.materialize().state_dict()``.

    ``model`` states the ties: a tied weight has all of its names, and lies in the file once. Raises UserError as
    :func:`export_safetensors` does.
    """
    ties = {} if model is None else {f"{layer.name}.{own}": resolve_tie(model, target)
                                     for layer in model.layers for own, target in layer.ties.items()}
    with _written(out) as partial:
        torch.save({**weights, **{name: weights[target] for name, target in ties.items()}}, partial)


def export_huggingface(weights: Mapping[str, Tensor], huggingface: HuggingFace, settings: ModelSettings, out: Path,
                       tokenizer: Path | None = None, end: tuple[str, int] | None = None) -> None:
    """Write a folder for ``from_pretrained``. Raises UserError as :func:`export_safetensors` does.

    ``tokenizer``: a ``tokenizer.json`` to go with it; that of a model that translates then ends texts by itself.
    ``end``: its token between texts and the id; texts begin with it.
    """
    sizes = huggingface.config(settings)
    kinds = {dtype_name(tensor.dtype) for tensor in weights.values() if tensor.is_floating_point()}
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


def make_checkpoint(out: Path, info: CheckpointInfo, model: Model, weights: Mapping[str, Tensor],
                    config: Path | None = None) -> Manifest:
    """Make a checkpoint of weights alone, ``<layer>.<parameter>``, tied ones once, from which a run can begin.

    They are cast to the dtypes of training. ``config``: a file to go with it as ``config.json``. Raises UserError when
    they are not the model's, and as :func:`export_safetensors` does.
    """
    kinds = tensor_kinds(model)
    tensors = {PREFIX + name: tensor.to(getattr(torch, kinds[name].dtype)) if name in kinds else tensor
               for name, tensor in weights.items()}
    entries = {name: TensorEntry(tuple(tensor.shape), dtype_name(tensor.dtype), "") for name, tensor in tensors.items()}
    try:
        check_compatible(Manifest.build(info, entries, {}), model)
    except UserError as error:
        raise UserError(error.problems[0].what.replace("the checkpoint of step 0 is", "the weights are"),
                        hint="give the config of the model that the weights are of") from None
    with _written(out) as partial:
        result = write_shards(partial, 0, tensors)
        files = dict(result.files)
        if config is not None:
            shutil.copyfile(config, partial / CONFIG)
            files[CONFIG] = FileEntry((partial / CONFIG).stat().st_size, sha256_of(partial / CONFIG))
        manifest = Manifest.build(info, result.tensors, files)
        manifest.save(partial)
    return manifest


@contextmanager
def _written(out: Path) -> Iterator[Path]:
    """Yield a name to write under, which becomes ``out`` once the disk has all of it, and is gone if that fails."""
    check_free(out)
    partial = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        yield partial
        for path in partial.iterdir() if partial.is_dir() else (partial,):
            path.chmod(path.parent.stat().st_mode & 0o664)  # safetensors' writer lets only the owner read
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if partial.is_dir():
            sync_folder(partial)
        partial.rename(out)
        sync_folder(out.absolute().parent)
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
