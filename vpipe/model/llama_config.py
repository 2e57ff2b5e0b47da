"""What a LLaMA's config may say: Hugging Face's ``LlamaConfig``, and a config file's ``model`` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vpipe.errors import UserError
from vpipe.model.keys import Blocks, Keys, Positive
from vpipe.model.registry import ModelSettings
from vpipe.model.rotary import RopeScaling

KEYS = Keys(
    "LLaMA",
    # 15m and 110m: llama2.c; 135m and 360m: SmolLM2 (arXiv:2502.02737); 1b: TinyLlama (arXiv:2401.02385); 7b, 13b:
    # LLaMA 2. Sizes alone; the small ones share the weights of the word embeddings.
    presets={name: {"num_hidden_layers": blocks, "hidden_size": hidden, "num_attention_heads": heads,
                    "num_key_value_heads": groups, "tie_word_embeddings": hidden < 2048}
             for name, blocks, hidden, heads, groups in (
                 ("15m", 6, 288, 6, 6), ("110m", 12, 768, 12, 12), ("135m", 30, 576, 9, 3), ("360m", 32, 960, 15, 5),
                 ("1b", 22, 2048, 32, 4), ("7b", 32, 4096, 32, 32), ("13b", 40, 5120, 40, 40))},
    fixed={"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
           "is_encoder_decoder": False, "add_cross_attention": False, "pruned_heads": {}, "rope_interleaved": False,
           "partial_rotary_factor": 1.0},
    silent={"architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "_name_or_path",
            "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "is_llama_config", "is_decoder",
            "task_specific_params", "id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict",
            "problem_type", "chunk_size_feed_forward", "gradient_checkpointing"},
    choices={})


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a LLaMA under the key names, and with the defaults, of Hugging Face's ``LlamaConfig``.

    ``intermediate_size`` is 8/3 ``hidden_size``, rounded up to a multiple of 256, where it is None, which gives the
    published sizes; ``num_key_value_heads`` is ``num_attention_heads``. Raises UserError for values out of range.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int | None = None
    num_hidden_layers: Blocks = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        KEYS.check(self, "hidden_size num_attention_heads")
        if self.num_attention_heads % self.groups:
            raise UserError(f"LLaMA's {self.groups} heads of keys and values do not divide its "
                            f"{self.num_attention_heads} attention heads",
                            hint="choose a num_kv_heads (num_key_value_heads) that does")
        if self.head_size % 2:
            raise UserError(f"LLaMA's head size is {self.head_size} (hidden_size {self.hidden_size} / "
                            f"{self.num_attention_heads} heads), but rotary positions turn pairs of features",
                            hint="choose a number of heads that makes it even")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def inner(self) -> int:
        """Width of the MLP."""
        return -(-8 * self.hidden_size // 3 // 256) * 256 if self.intermediate_size is None else self.intermediate_size


def config_of(settings: ModelSettings) -> LlamaConfig:
    """The preset, if any, then ``overrides`` (the contents of a ``config.json``), then the settings' own fields; the
    later wins. ``num_heads`` without ``num_kv_heads`` gives every head keys of its own. Where no config says for how
    many tokens there are positions, it is for as many as a sample has, and for 2,048 at least.

    Raises UserError for a key of ``overrides`` that is unknown or asks for what this LLaMA does not compute.
    """
    overrides: dict[str, Any] = dict(settings.overrides)
    found = overrides.pop("rope_parameters", None) or overrides.pop("rope_scaling", None) or {}
    if not isinstance(found, Mapping):
        raise UserError(f"rope_scaling is {found!r}", hint="it must be null, or say the rope_type and its numbers")
    rope = dict(found)
    theta, size = rope.pop("rope_theta", None), overrides.pop("head_dim", None)
    overrides |= {"rope_scaling": RopeScaling.of(rope), **({} if theta is None else {"rope_theta": theta})}
    values = KEYS.values(LlamaConfig, settings.preset, overrides, {
        "vocab_size": settings.vocab_size, "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers, "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads or settings.num_heads, "attention_dropout": settings.dropout,
        "tie_word_embeddings": settings.tie_weights})
    positions = max(settings.sequence_length or 1, LlamaConfig.max_position_embeddings)
    config = LlamaConfig(**{"max_position_embeddings": positions, **values})
    if size not in (None, config.head_size):
        raise UserError(f"'head_dim' is {size!r}, but this LLaMA computes {config.hidden_size} / "
                        f"{config.num_attention_heads} = {config.head_size} only",
                        hint="set it to that or leave it out")
    return config


def from_huggingface(found: Mapping[str, object]) -> ModelSettings:
    """What it leaves out is what Hugging Face's ``LlamaConfig`` takes."""
    values: dict[str, Any] = {**vars(LlamaConfig()), "intermediate_size": 11008, **found}
    config = config_of(ModelSettings(values["vocab_size"], overrides=values))
    return ModelSettings(config.vocab_size, tie_weights=config.tie_word_embeddings, overrides=values)


def huggingface_config(settings: ModelSettings) -> dict[str, object]:
    """Every field; and no tokens to begin and end with, for ``transformers`` would take those of LLaMA's vocabulary."""
    config = config_of(settings)
    return {**vars(config), "intermediate_size": config.inner, "num_key_value_heads": config.groups,
            "rope_scaling": None if config.rope_scaling is None else config.rope_scaling.spelled(),
            "hidden_act": KEYS.fixed["hidden_act"], "bos_token_id": None, "eos_token_id": None}
