"""Return the settings of the model that a config, or the config in a checkpoint, describes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any

from vpipe.checkpoint.manifest import Manifest
from vpipe.config.config import Config, drop_removed
from vpipe.config.sections import ModelSection
from vpipe.config.validation import validated
from vpipe.config.yaml_tree import parse, read_json, write
from vpipe.errors import UserError, counted
from vpipe.model.layer import Model
from vpipe.model.registry import Family, ModelSettings, family_named

_ONLY_TRAINING = ("dropout", "initializer_range")
"""Parts of keys that change how a model is trained, but not what its weights mean."""


def model_file(section: ModelSection) -> Mapping[str, Any]:
    """Read the Hugging Face config that gives the model's sizes; empty if the section names none."""
    path = section.config_file
    if path is None:
        return {}
    if not os.path.isfile(path):
        raise UserError(f"model.config_file names '{path}', but there is no such file",
                        hint="it is a JSON file such as bert_config.json, from the current folder")
    content = read_json(path)
    if content.problems:
        raise UserError.all_of(content.problems)
    family, kind = family_named(section.name).huggingface, content.value.get("model_type")
    if family is not None and isinstance(kind, str) and kind != family.model_type:
        raise UserError(f"model.config_file names '{path}', which is of a {kind}, but model.name is {section.name}",
                        hint="set model.name to the family of that file, or name a file of this one")
    return dict(content.value)


def model_settings(section: ModelSection, vocab_size: int, overrides: Mapping[str, Any]) -> ModelSettings:
    """Return the settings of a ``model`` section with the size of the vocabulary.

    Args:
        overrides: content of its ``config_file``.
    """
    return ModelSettings(
        vocab_size=vocab_size, preset=section.preset, hidden_size=section.hidden_size, num_layers=section.num_layers,
        num_heads=section.num_heads, num_kv_heads=section.num_kv_heads, sequence_length=section.sequence_length,
        dropout=section.dropout, tie_weights=section.tie_weights, overrides=overrides)


def model_flops(section: ModelSection, layers: int) -> list[int] | None:
    """Return the FLOPs of a token's forward, per layer; None for a family that does not give them.

    Args:
        section: with the size of the vocabulary.
        layers: of the model.

    Raises:
        UserError: the family gives another number of layers, values that are no numbers, or fails.
    """
    flops = family_named(section.name).flops
    if flops is None:
        return None
    settings = model_settings(section, section.vocab_size, model_file(section))
    hint = "let the flops of its register_model give a number for every layer, in order, or leave them out"
    try:
        counts = list(flops(settings))
    except UserError:
        raise
    except Exception as error:  # of a package
        raise UserError(f"the family of the model '{section.name}' cannot tell the operations of its layers: "
                        f"{type(error).__name__}: {error}", hint=hint) from error
    if len(counts) != layers:
        raise UserError(f"the model '{section.name}' has {counted(layers, 'layer')}, but its family says the "
                        f"operations of {len(counts)}", hint=hint)
    for number, count in enumerate(counts):
        if not isinstance(count, Real) or not isfinite(count) or count < 0:
            raise UserError(f"the family of the model '{section.name}' says that layer {number} has {count!r} "
                            "operations per token", hint=hint)
    return counts


def model_differences(name: str, here: ModelSettings, there: ModelSettings) -> list[str]:
    """Return differences between two models of a family that names and shapes of weights may not show.

    Such as ``num_attention_heads is 4, not 2``, ``here``'s value first. Dropout may differ. Empty for a family without
    a Hugging Face config.
    """
    huggingface = family_named(name).huggingface
    if huggingface is None:
        return []
    ours, theirs = huggingface.config(here), huggingface.config(there)
    return [f"{key} is {ours.get(key)}, not {theirs.get(key)}" for key in {**ours, **theirs}
            if ours.get(key) != theirs.get(key) and not any(part in key for part in _ONLY_TRAINING)]


WHERE = "the checkpoint's config"


@dataclass(frozen=True)
class CheckpointModel:
    """The model family and settings of a checkpoint.

    Attributes:
        name: of the family.
        settings: of the model.
    """

    name: str
    settings: ModelSettings

    @classmethod
    def from_manifest(cls, manifest: Manifest, folder: Path) -> CheckpointModel:
        """Read the ``model`` section of the config in the manifest of the checkpoint in ``folder``.

        Raises:
            UserError: the section is missing or wrong.
        """
        section = validated(ModelSection, parse(model_text(manifest, folder), "", WHERE).at(("model",)))
        if section.config_file is not None and not section.config_file.is_file() and (folder / _COPY).is_file():
            section = section.model_copy(update={"config_file": folder / _COPY})
        return cls(section.name, model_settings(section, section.vocab_size, model_file(section)))

    @property
    def family(self) -> Family:
        return family_named(self.name)

    def model(self) -> Model:
        """Return the layers of the model, not materialized."""
        return self.family.factory(self.settings)


_COPY = "config.json"
"""Name of the Hugging Face config that an import leaves in a checkpoint."""


def has_model(manifest: Manifest) -> bool:
    """Return whether a checkpoint describes its model: one that ``Pipeline.save`` wrote does not."""
    return bool(manifest.config) and isinstance(parse(manifest.config, "", WHERE).get(("model",)), dict)


def model_text(manifest: Manifest, folder: Path) -> str:
    """Return the config in a checkpoint that describes its model.

    Raises:
        UserError: the checkpoint does not describe its model.
    """
    if not has_model(manifest):
        raise UserError(f"the checkpoint '{folder}' does not say what model it is of: Pipeline.save wrote it",
                        hint="export it as safetensors or torch; only a run of 'vpipe train' knows the family's names")
    return manifest.config


def config_text(found: str, settings: ModelSettings, config_file: Path) -> str:
    """Return a config with only a model section, for an imported checkpoint."""
    return write({"model": {"name": found, "vocab_size": settings.vocab_size, "tie_weights": settings.tie_weights,
                            "config_file": str(config_file)}})


def checkpoint_config(manifest: Manifest) -> Config | None:
    """Return the config of the run that wrote a checkpoint; None if no run did."""
    content = parse(manifest.config, "", WHERE)
    drop_removed(content)
    return validated(Config, content) if content.get(("training",)) is not None else None
