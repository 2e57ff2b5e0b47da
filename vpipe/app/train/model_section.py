"""Read the ``model`` section of a config: the sizes of its model, and the operations of each layer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import isfinite
from numbers import Real
from typing import Any

from vpipe.app.config.config import ModelSection
from vpipe.app.config.options import make_options
from vpipe.app.config.yaml_tree import read_yaml
from vpipe.app.families.lora import LoraSettings
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.errors import UserError, counted


def model_file(section: ModelSection) -> Mapping[str, Any]:
    """Read the Hugging Face config that gives the model's sizes; empty if the section names none."""
    path = section.config_file
    if path is None:
        return {}
    if not os.path.isfile(path):
        raise UserError(f"model.config_file names '{path}', but there is no such file",
                        hint="it is a JSON file such as bert_config.json, from the current folder")
    content = read_yaml(path, language="JSON")
    if content.problems:
        raise UserError.all_of(content.problems)
    family, kind = family_named(section.name).huggingface, content.value.get("model_type")
    if family is not None and isinstance(kind, str) and kind != family.model_type:
        raise UserError(f"model.config_file names '{path}', which is of a {kind}, but model.name is {section.name}",
                        hint="set model.name to the family of that file, or name a file of this one")
    return dict(content.value)


def model_settings(section: ModelSection, vocab_size: int | None = None) -> ModelSettings:
    """Return the settings of a ``model`` section; ``vocab_size`` is its own when None."""
    return ModelSettings(
        **section.model_dump(exclude={"name", "config_file", "options", "vocab_size", "lora"}),
        overrides=model_file(section), vocab_size=section.vocab_size if vocab_size is None else vocab_size,
        options=make_options(family_named(section.name).options, section.options, section.name),
        lora=None if section.lora is None else LoraSettings(**section.lora.model_dump()))


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
    settings = model_settings(section)
    hint = "let the flops of its register_model give a number for every layer, in order, or leave them out"
    try:
        found = list(flops(settings))
    except UserError:
        raise
    except Exception as error:  # of a package
        raise UserError(f"the family of the model '{section.name}' failed to count the operations of its layers: "
                        f"{type(error).__name__}: {error}", hint=hint) from error
    if len(found) != layers:
        raise UserError(f"the model '{section.name}' has {counted(layers, 'layer')}, but its family says the "
                        f"operations of {len(found)}", hint=hint)
    for number, operations in enumerate(found):
        if not isinstance(operations, Real) or not isfinite(operations) or operations < 0:
            raise UserError(f"the family of the model '{section.name}' says that layer {number} has {operations!r} "
                            "operations per token", hint=hint)
    return found
