"""The model that a config describes, without its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vpipe.errors import UserError
from vpipe.model.registry import ModelSettings, family_named
from vpipe.train.sections import ModelSection
from vpipe.train.yaml_file import read_json

_ONLY_TRAINING = ("dropout", "initializer_range")
"""Parts of the keys that change how a model is trained, and not what its weights mean."""


def model_file(section: ModelSection) -> Mapping[str, Any]:
    """The Hugging Face config that gives the model's sizes, when one is named."""
    path = section.config_file
    if path is None:
        return {}
    if not path.is_file():
        raise UserError(f"model.config_file names '{path}', but there is no such file",
                        hint="it is a JSON file such as bert_config.json, from the current folder")
    content = read_json(path)
    if content.problems:
        raise UserError.all_of(content.problems)
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
