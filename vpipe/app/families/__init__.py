"""Models by name: :mod:`vpipe.app.families.registry`. What a config is checked by is here, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

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

Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]


@dataclass(frozen=True, kw_only=True)
class ModelKeys:
    """Keys of a config's ``model`` that the factories of families read, with meaning and bounds; None = the family's
    own default. Those of which a config says more, the section declares anew."""

    hidden_size: Annotated[Size | None, Field(description="hidden size: features of a layer's output")] = None
    num_layers: Annotated[int | None, Field(ge=1, le=MOST_BLOCKS, description=(
        "number of transformer blocks, for translation of the encoder and of the decoder; each block is two layers, a "
        "block of a decoder with an encoder three"))] = None
    num_heads: Annotated[Size | None, Field(description="attention heads per block; must divide hidden_size")] = None
    num_kv_heads: Annotated[Size | None, Field(description=(
        "heads of keys and values per block, for llama and its kin: groups of num_heads share one; null gives every "
        "head its own"))] = None
    sequence_length: int | None = None
    vocab_size: int
    dropout: Annotated[float | None, Field(ge=0, lt=1, description=(
        "dropout probability; null takes the family's default"))] = None
    packed: Annotated[bool, Field(description=(
        "whether each text of a sample is computed alone, for gpt, llama and its kin: attention stays inside the text, "
        "and its positions begin at 0"))] = False
    experts: Annotated[int | None, Field(ge=1, le=MOST_EXPERTS, description=(
        "experts in place of each MLP, for gpt, llama and its kin; a stage keeps all experts of its layers, and "
        "parallel.tensor splits each expert; null: an MLP, for mixtral 8, for qwen3_moe 128"))] = None
    experts_per_token: Annotated[int | None, Field(ge=1, le=MOST_EXPERTS, description=(
        "experts that compute a token; null: 2, for qwen3_moe 8"))] = None
    balance_weight: Annotated[float | None, Field(ge=0, lt=1, description=(
        "weight of the loss that lets experts compute equally many tokens, added to the training loss; "
        "null: 0.01"))] = None
    tie_weights: Annotated[bool | None, Field(description=(
        "share the weights of the word embeddings with the output layer; null takes config_file's value, else the "
        "family's default"))] = None


@dataclass(frozen=True)
class ModelSettings(ModelKeys):
    """The model of a config file, for the factory of any family.

    ``vocab_size`` is known by now. ``dropout`` replaces every dropout of the family. With ``packed`` the model reads
    the place of each token in its text, ``positions``. :class:`~vpipe.app.families.registry.Family` reads ``lora``.
    ``overrides``: the content of a ``config_file``. ``options``: of the family's class; None for a family without.
    """

    vocab_size: int
    preset: str | None = None
    lora: LoraSettings | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)
    options: Any = None


KEYS = ("num_kv_heads", "packed", "experts", "experts_per_token", "balance_weight")
"""Keys of a config's ``model`` that a family reads if it says so; the others, sizes above all, every family reads."""

READS = {"bert": (), **dict.fromkeys((*WITHOUT_EXPERTS, "mixtral", "qwen3_moe"), KEYS), "gpt": KEYS[1:]}
"""The keys of them that vpipe's own families read: known here, for a config is checked without torch."""
