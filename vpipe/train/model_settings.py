"""The model that a config describes, without its data."""

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
"""Parts of the keys that change how a model is trained, and not what its weights mean."""


def model_file(section: ModelSection) -> Mapping[str, Any]:
    """The Hugging Face config that gives the model's sizes, when one is named."""
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
    """What a ``model`` section tells a family, once the size of the vocabulary is known.

    Args:
        overrides: the contents of its ``config_file``.
    """
    return ModelSettings(
        vocab_size=vocab_size, preset=section.preset, hidden_size=section.hidden_size, num_layers=section.num_layers,
        num_heads=section.num_heads, num_kv_heads=section.num_kv_heads, sequence_length=section.sequence_length,
        dropout=section.dropout, tie_weights=section.tie_weights, overrides=overrides)


def model_flops(section: ModelSection, layers: int) -> list[int] | None:
    """What the family says of the operations of a token's forward, per layer; None where it says nothing.

    Args:
        section: with the size of the vocabulary.
        layers: of the model.

    Raises:
        UserError: they are those of other layers than the model has, are no numbers, or cannot be told at all.
    """
    flops = family_named(section.name).flops
    if flops is None:
        return None
    settings = model_settings(section, section.vocab_size, model_file(section))
    hint = "let the flops of its register_model give a number for every layer, in order, or leave them out"
    try:
        told = list(flops(settings))
    except UserError:
        raise
    except Exception as error:  # of a package
        raise UserError(f"the family of the model '{section.name}' cannot tell the operations of its layers: "
                        f"{type(error).__name__}: {error}", hint=hint) from error
    if len(told) != layers:
        raise UserError(f"the model '{section.name}' has {counted(layers, 'layer')}, but its family says the "
                        f"operations of {len(told)}", hint=hint)
    for number, count in enumerate(told):
        if not isinstance(count, Real) or not isfinite(count) or count < 0:
            raise UserError(f"the family of the model '{section.name}' says that layer {number} has {count!r} "
                            "operations per token", hint=hint)
    return told


def model_differences(name: str, here: ModelSettings, there: ModelSettings) -> list[str]:
    """Where two models of one family compute differently, which names and shapes of weights do not always show.

    Such as ``num_attention_heads is 4, not 2``, ``here``'s value first. Dropout may differ. Empty for a family that
    has no config of its own to compare.
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
    """What a checkpoint is one of.

    Attributes:
        name: of the family.
        settings: of the model.
    """

    name: str
    settings: ModelSettings

    @classmethod
    def of(cls, manifest: Manifest, folder: Path) -> CheckpointModel:
        """Read the ``model`` section of the config in the manifest of the checkpoint in ``folder``.

        Raises:
            UserError: it has none, or one that is wrong.
        """
        section = validated(ModelSection, parse(model_text(manifest, folder), "", WHERE).at(("model",)))
        if section.config_file is not None and not section.config_file.is_file() and (folder / _COPY).is_file():
            section = section.model_copy(update={"config_file": folder / _COPY})
        return cls(section.name, model_settings(section, section.vocab_size, model_file(section)))

    @property
    def family(self) -> Family:
        return family_named(self.name)

    def model(self) -> Model:
        """Its layers, none of them built."""
        return self.family.factory(self.settings)


_COPY = "config.json"
"""The config that an import leaves in a checkpoint."""


def says_model(manifest: Manifest) -> bool:
    """Whether a checkpoint says what model it is of: one that ``Pipeline.save`` wrote does not."""
    return bool(manifest.config) and isinstance(parse(manifest.config, "", WHERE).get(("model",)), dict)


def model_text(manifest: Manifest, folder: Path) -> str:
    """The config of a checkpoint that says what model it is of.

    Raises:
        UserError: it does not.
    """
    if not says_model(manifest):
        raise UserError(f"the checkpoint '{folder}' does not say what model it is of: Pipeline.save wrote it",
                        hint="export it as safetensors or torch; only a run of 'vpipe train' knows the family's names")
    return manifest.config


def config_text(found: str, settings: ModelSettings, config_file: Path) -> str:
    """A config of nothing but the model, for a checkpoint that no run made."""
    return write({"model": {"name": found, "vocab_size": settings.vocab_size, "tie_weights": settings.tie_weights,
                            "config_file": str(config_file)}})


def config_of(manifest: Manifest) -> Config | None:
    """The whole config of the run that made a checkpoint; None where no run did."""
    content = parse(manifest.config, "", WHERE)
    drop_removed(content)
    return validated(Config, content) if content.get(("training",)) is not None else None
