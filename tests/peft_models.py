"""Adapters of ``peft`` in the layers of a model family: the checks of every family."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers_models import batch, names_of, our_logits, quiet_transformers, their_logits, weights_of

from vpipe import Model, Pipeline
from vpipe.app.families.lora import LoraSettings, base_names, is_adapter
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.app.weights.export import export_huggingface, export_peft
from vpipe.app.weights.import_weights import import_adapter
from vpipe.hugging_face import with_adapters

MICROBATCHES, RATE = 4, 1e-2


def check_training(base: Model, targets: Sequence[str], batches: Sequence[Mapping[str, Tensor]]) -> None:
    """The same layers in one module, into which peft puts the adapters at once, and a loop of plain PyTorch."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets))
    pipe = Pipeline(with_adapters(base, config), stages=4, microbatches=MICROBATCHES,
                    optimizer=partial(torch.optim.AdamW, lr=RATE))
    before = pipe.state_dict()
    names = [layer.name for layer in base.layers]
    modules = base.materialize()
    plain = nn.ModuleDict({name.replace(".", "_"): modules[name] for name in names})
    peft.inject_adapter_in_model(config, plain)
    own = {f"{name}.{weight}": parameter for name in names
           for weight, parameter in plain[name.replace(".", "_")].named_parameters() if parameter.requires_grad}
    assert {name for name in before if is_adapter(name)} == own.keys()
    for name, parameter in own.items():
        parameter.data.copy_(before[name])
    optimizer = torch.optim.AdamW(own.values(), lr=RATE)
    expected = []
    for fields in batches:
        losses = []
        for part in range(MICROBATCHES):
            tensors: dict[str, Any] = {name: field.chunk(MICROBATCHES)[part] for name, field in fields.items()}
            for layer in base.layers:
                tensors[layer.outputs[0]] = plain[layer.name.replace(".", "_")](*(tensors[n] for n in layer.inputs))
            (tensors["loss"] / MICROBATCHES).backward()
            losses.append(tensors["loss"].detach())
        optimizer.step()
        optimizer.zero_grad()
        expected.append(torch.stack(losses).mean().item())
    assert [step.loss for step in pipe.train(batches)] == pytest.approx(expected, rel=1e-6)
    after = pipe.state_dict()
    assert all(torch.equal(after[name], parameter) for name, parameter in own.items())
    assert all(torch.equal(after[name], value) == (name not in own) for name, value in before.items())
    state = {name.split(".lora_")[0] for name in pipe.local_state() if name.startswith("optim.")}
    assert state == {f"optim.{name.split('.lora_')[0]}" for name in own}, "an optimizer has the adapters alone"


def check_files(family: str, sizes: Mapping[str, Any], lora: LoraSettings, folder: Path) -> None:
    """peft has the logits of a model here from the files of its adapters, bit for bit; and they are read back."""
    peft, transformers, names = pytest.importorskip("peft"), quiet_transformers(), names_of(family)
    settings = ModelSettings(50, tie_weights=True, overrides=dict(sizes), lora=lora)
    model = family_named(family).model(settings)
    modules = model.materialize().eval()
    for parameter in modules.parameters():  # norms and B's, too
        nn.init.normal_(parameter, std=0.3)
    weights = weights_of(model, modules)
    export_huggingface({theirs: weights[name] for name, theirs in base_names(weights).items()}, names, settings,
                       folder / "base", None)
    export_peft(weights, lora, names, settings, folder / "adapter")
    base = getattr(transformers, names.architecture).from_pretrained(folder / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about a name that peft reads
        theirs, fields = peft.PeftModel.from_pretrained(base, folder / "adapter").eval(), batch()
    assert all(map(torch.equal, their_logits(theirs, fields), our_logits(model, modules, fields)))
    found, adapters = import_adapter(folder / "adapter", names, settings)
    assert (found.rank, found.alpha) == (lora.rank, lora.alpha)
    assert adapters.keys() == {name for name in weights if is_adapter(name)}
    assert all(torch.equal(adapter, weights[name]) for name, adapter in adapters.items())
