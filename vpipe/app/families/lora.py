"""LoRA of a family: its settings, names of its weights with adapters, and the files of ``peft``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vpipe import Model
from vpipe.errors import UserError
from vpipe.hugging_face import with_adapters

_BASE, _A, _B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
"""Parts of the names that ``peft`` gives to the weights of a module with an adapter."""


@dataclass(frozen=True)
class LoraSettings:
    """The adapters of a config file: ``alpha / rank`` times B A is added to each weight of a target.

    ``targets`` are names of linear modules of the family; None for all in front of the head.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None
    dropout: float = 0.0

    def added_to(self, model: Model) -> Model:
        """Return a family's model with the adapters. Raises UserError as ``with_adapters`` does."""
        try:
            from peft import LoraConfig
        except ImportError:
            raise UserError("model.lora is given, but the package 'peft' is not installed",
                            hint="pip install 'vpipe[lora]', or leave out model.lora") from None
        targets = self.targets or sorted({path.rpartition(".")[2] for number, layer in enumerate(model.layers[:-1])
                                          for path, part in layer.outline(number).named_modules()
                                          if isinstance(part, nn.Linear)})
        return with_adapters(model, LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=list(targets),
                                               lora_dropout=self.dropout))

    @classmethod
    def from_peft(cls, config: Mapping[str, Any], names: Mapping[str, str]) -> LoraSettings:
        """Return the settings for an ``adapter_config.json``; ``names`` are those of the weights there -> here.

        Raises:
            UserError: it is another kind of adapter.
        """
        plain = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "modules_to_save": None,
                 "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None, "layer_replication": None,
                 "lora_bias": False, "trainable_token_indices": None, "target_parameters": None}
        other = [f"{key} is {config[key]!r}" for key, value in plain.items() if (config.get(key) or value) != value]
        targets = config.get("target_modules")
        if other or not isinstance(targets, list):
            raise UserError(f"the adapter is of another kind than model.lora: {', '.join(other)}" if other else
                            f"the adapter's target_modules are {targets!r}, not a list of names",
                            hint="merge it into the weights with peft (merge_and_unload), and import the result")
        here = {ours.split(".")[-2] for theirs, ours in names.items()
                if any(f".{theirs.rpartition('.')[0]}".endswith(f".{target}") for target in targets)}
        return cls(config["r"], config["lora_alpha"], tuple(sorted(here)), config.get("lora_dropout", 0.0))


def is_adapter(name: str) -> bool:
    """Return whether a weight is an adapter's."""
    return name.endswith((_A, _B))


def adapter_names(tensors: Iterable[str]) -> list[str]:
    """Return the names of adapters among those of a checkpoint's tensors, without ``model.``."""
    return [name.removeprefix("model.") for name in tensors if name.startswith("model.") and is_adapter(name)]


def base_names(names: Iterable[str]) -> dict[str, str]:
    """Map the names of the frozen weights among ``names`` to those in the model without adapters."""
    return {name: name.replace(_BASE, ".") for name in names if not is_adapter(name)}


def merged(weights: Mapping[str, Tensor], lora: LoraSettings) -> dict[str, Tensor]:
    """Return weights under the names of the model without adapters, with these added as ``merge_and_unload`` does."""
    found = {}
    for name, weight in weights.items():
        if is_adapter(name):
            continue
        module, base, parameter = name.rpartition(_BASE)
        if base and parameter == "weight":
            weight = weight + (weights[module + _B] @ weights[module + _A]) * (lora.alpha / lora.rank)
        found[name.replace(_BASE, ".")] = weight
    return found


def to_peft(weights: Mapping[str, Tensor], lora: LoraSettings, names: Mapping[str, str],
            transposed: tuple[str, ...], causal: bool) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return ``adapter_config.json`` and the tensors of ``adapter_model.safetensors``.

    Args:
        names: of the weights of the model without adapters, in Hugging Face's model -> here.
        transposed: ends of the names of matrices that are stored there as [inputs, outputs].
        causal: whether the model there predicts the next token.
    """
    adapters = {name: name.rpartition(".lora_") for name in weights if is_adapter(name)}
    if any(".experts." in name or ".router." in name for name in adapters):
        raise UserError("adapters of experts and their router have no modules of their own in transformers",
                        hint="choose model.lora.targets in attention, or export --format huggingface, which adds the "
                             "adapters to the weights")
    modules = {ours.rpartition(".")[0]: theirs.rpartition(".")[0] for theirs, ours in names.items()}
    tensors = {f"base_model.model.{modules[module]}.lora_{kind.replace('.default', '')}": weights[name]
               for name, (module, _, kind) in adapters.items()}
    adapted = {modules[module] for module, *_ in adapters.values()}
    turned = {f"{module}.weight".endswith(transposed) for module in adapted} if transposed else {False}
    if len(turned) > 1:
        raise UserError("the adapters are of matrices that Hugging Face stores as [inputs, outputs] and of others, for "
                        "which peft has one setting", hint="choose other model.lora.targets")
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM" if causal else None, "r": lora.rank,
            "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
            "lora_dropout": lora.dropout, "bias": "none", "fan_in_fan_out": turned.pop(),
            "target_modules": _shortest(adapted, modules.values()), "inference_mode": True,
            "base_model_name_or_path": None}, tensors


def _shortest(adapted: Collection[str], modules: Iterable[str]) -> list[str]:
    """Return the last words of the modules' names, or all of them where other modules end with these, too."""
    words = {module.rpartition(".")[2] for module in adapted}
    alone = all(module in adapted or module.rpartition(".")[2] not in words for module in modules)
    return sorted(words if alone else adapted)


def from_peft(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the adapters of an ``adapter_model.safetensors`` under our names.

    Raises:
        UserError: one is of a module that the model does not have.
    """
    modules = {theirs.rpartition(".")[0]: ours.rpartition(".")[0] for theirs, ours in names.items()}
    found = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        if match is None or match[1] not in modules:
            raise UserError(f"the adapter has '{name}', which is no adapter of a module of this model",
                            hint="give the base model that it was trained on")
        found[f"{modules[match[1]]}.lora_{match[2]}.default.weight"] = tensor
    return found
