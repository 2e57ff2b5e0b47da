"""Models by name: :mod:`vpipe.app.families.registry`. What a config is checked by is here, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vpipe.app.families.lora import LoraSettings

LARGEST_SIZE = 1 << 24
"""Limit of a layer's width, a vocabulary and a sequence: products of two of them stay countable in 64 bits."""

MOST_EXPERTS = 1024
"""Limit of the experts of a layer: each is an object of some parameters."""

MOST_BLOCKS = 1024
"""Limit of a model's blocks: each is an object or two, and counted when a model is cut."""

WITHOUT_EXPERTS = ("gpt", "llama", "mistral", "qwen2", "qwen3")
"""Families that have experts only where their number is given."""


@dataclass(frozen=True)
class ModelSettings:
    """The model of a config file, for the factory of any family; None = the family's own default.

    A field means what the key of its name in a config's ``model`` means; ``vocab_size`` is known by now. ``dropout``
    replaces every dropout of the family. With ``packed`` the model reads the place of each token in its text,
    ``positions``. ``lora`` concerns :class:`~vpipe.app.families.registry.Family`. ``overrides``: the content of a
    ``config_file``. ``options``: an instance of the family's class of options; None for a family without.
    """

    vocab_size: int
    preset: str | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    sequence_length: int | None = None
    dropout: float | None = None
    tie_weights: bool | None = None
    packed: bool = False
    experts: int | None = None
    experts_per_token: int | None = None
    balance_weight: float | None = None
    lora: LoraSettings | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)
    options: Any = None


KEYS = ("num_kv_heads", "packed", "experts", "experts_per_token", "balance_weight")
"""Keys of a config's ``model`` that a family reads if it says so; the others, sizes above all, every family reads."""

READS = {"bert": (), **dict.fromkeys((*WITHOUT_EXPERTS, "mixtral", "qwen3_moe"), KEYS), "gpt": KEYS[1:]}
"""The keys of them that vpipe's own families read: known here, for a config is checked without torch."""
