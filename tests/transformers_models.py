"""Models there and back between a family here and its class in ``transformers``: the checks of every family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vpipe.app.cli import main
from vpipe.app.families.experts import BALANCE
from vpipe.app.families.registry import HuggingFace, ModelSettings, family_named
from vpipe.app.weights.export import export_huggingface
from vpipe.app.weights.import_weights import import_weights, read_model_config
from vpipe.model.model import Model


def quiet_transformers() -> Any:
    """Imported by who tests with it alone, for it takes seconds; it shows bars, and its warnings are looked at."""
    found = pytest.importorskip("transformers")
    found.utils.logging.disable_progress_bar()
    return found


def names_of(family: str) -> HuggingFace:
    found = family_named(family).huggingface
    assert found is not None
    return found


def weights_of(model: Model, modules: nn.ModuleDict) -> dict[str, Tensor]:
    """As a checkpoint has them: tied ones under their owner's name."""
    tied = {f"{layer.name}.{own}" for layer in model.layers for own in layer.ties}
    return {name: tensor for name, tensor in modules.state_dict().items() if name not in tied}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(4, 11, dtype=torch.int64)
    mask[1:, -3:] = 0
    return {"source_ids": torch.randint(1, 50, (4, 11), generator=generator) * mask, "source_mask": mask,
            "target_ids": torch.randint(1, 50, (4, 7), generator=generator),
            "input_ids": torch.randint(1, 50, (4, 11), generator=generator) * mask,
            "segment_ids": torch.randint(0, 3, (4, 11), generator=generator), "input_mask": mask,
            "masked_lm_positions": torch.arange(11).expand(4, 11)}


@torch.no_grad()
def our_logits(model: Model, modules: nn.ModuleDict, fields: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Of every word [B, S, V]; and BERT's of the next sentence [B, 2]."""
    tensors = dict(fields)
    for layer in model.layers[:-1]:
        written = modules[layer.name](*(tensors[name] for name in layer.inputs))
        tensors.update(zip(layer.outputs, written if isinstance(written, tuple) else (written,), strict=True))
    inputs = [tensors[name] for name in model.layers[-1].inputs if name in tensors and name != BALANCE]
    found = modules["head"].scores(*inputs)
    return found if isinstance(found, tuple) else (found,)


@torch.no_grad()
def their_logits(theirs: Any, fields: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    if theirs.config.model_type in ("mixtral", "qwen3_moe"):  # one expert after the other, not all in one product
        theirs.set_experts_implementation("eager")
    if theirs.config.model_type == "marian":
        return (theirs.eval()(fields["source_ids"], fields["source_mask"], fields["target_ids"]).logits,)
    if theirs.config.model_type != "bert":
        return (theirs.eval()(fields["input_ids"]).logits,)
    found = theirs.eval()(fields["input_ids"], fields["input_mask"], fields["segment_ids"])
    return found.prediction_logits, found.seq_relationship_logits


def check_export(family: str, sizes: dict[str, Any], tied: bool, folder: Path, tokenizer: Path | None = None) -> Any:
    """An exported model gives the same logits there, bit for bit; return it."""
    transformers = quiet_transformers()
    settings = ModelSettings(50, tie_weights=tied, overrides=sizes)
    model = family_named(family).factory(settings)
    torch.manual_seed(1)
    modules = model.materialize().eval()
    for parameter in (*modules.parameters(), *modules["head"].buffers()):  # norms, too, so that a swap of two is seen
        nn.init.normal_(parameter, std=0.3)
    export_huggingface(weights_of(model, modules), names_of(family), settings, folder, tokenizer)
    theirs, report = getattr(transformers, names_of(family).architecture).from_pretrained(
        folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    fields = batch()
    assert all(map(torch.equal, their_logits(theirs, fields), our_logits(model, modules, fields)))
    assert theirs.config.tie_word_embeddings == tied
    return theirs


def check_import(family: str, sizes: dict[str, Any], tied: bool, folder: Path) -> None:
    """A checkpoint of ``transformers`` gives the same logits here, bit for bit."""
    torch.manual_seed(2)
    kind = getattr(quiet_transformers(), names_of(family).architecture)
    theirs = kind(kind.config_class(vocab_size=50, tie_word_embeddings=tied, **sizes)).eval()
    theirs.save_pretrained(folder, max_shard_size="10KB")
    assert (folder / "model.safetensors.index.json").exists(), "several files, as large models come in"

    found = read_model_config(folder)
    assert (found.family, found.settings.tie_weights) == (family, tied)
    model = family_named(family).factory(found.settings)
    weights = import_weights(folder, names_of(family), found.settings, note=pytest.fail)
    modules = model.materialize().eval()
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        name: tuple(tensor.shape) for name, tensor in weights_of(model, modules).items()}
    modules.load_state_dict(weights, strict=False)
    fields = batch()
    assert all(map(torch.equal, their_logits(theirs, fields), our_logits(model, modules, fields)))


def check_command(family: str, sizes: dict[str, Any]) -> None:
    """``vpipe checkpoint import`` and ``export`` give the same files, in the current folder; no transformers in it."""
    settings = ModelSettings(50, tie_weights=True, overrides=sizes)
    model = family_named(family).factory(settings)
    export_huggingface(weights_of(model, model.materialize(3)), names_of(family), settings, Path("hf"))
    assert main(["checkpoint", "import", "hf", "-o", "own"]) == 0
    assert main(["checkpoint", "export", "own", "--format", "huggingface", "-o", "again"]) == 0
    for file in ("model.safetensors", "config.json"):
        assert Path("again", file).read_bytes() == Path("hf", file).read_bytes(), file
