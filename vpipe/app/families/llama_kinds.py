"""The kinds of LLaMA that others publish, each by what it has beside LLaMA or otherwise.

Mistral (Jiang et al. 2023, arXiv:2310.06825), without a sliding window, as from version 0.2 on. Mixtral (Jiang et al.
2024, arXiv:2401.04088): a Mistral whose MLPs are 8 experts, 2 for a token. Qwen2 and Qwen2.5 (arXiv:2407.10671,
arXiv:2412.15115): queries, keys and values have biases. Qwen3 (arXiv:2505.09388), dense: queries and keys are normed,
heads have a size of their own. Qwen3-MoE (the same report): a Qwen3 whose MLPs are 128 small experts, 8 for a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from vpipe.app.families.llama import SILENT, LlamaConfig, register_kind
from vpipe.app.families.transformer import ConfigKeys


@register_kind
class MistralConfig(LlamaConfig):
    """The sizes of a Mistral under the key names of Hugging Face's ``MistralConfig``."""

    keys: ClassVar = ConfigKeys(
        "Mistral",
        presets={"7b": {"num_key_value_heads": 8, "intermediate_size": 14336, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
                 "nemo": {"num_hidden_layers": 40, "hidden_size": 5120, "head_dim": 128, "num_key_value_heads": 8,
                          "intermediate_size": 14336, "rope_theta": 1e6, "rms_norm_eps": 1e-5}},
        fixed={"model_type": "mistral", "hidden_act": "silu", "sliding_window": None}, silent=SILENT)
    architecture: ClassVar = "MistralForCausalLM"
    absent: ClassVar[dict[str, Any]] = {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096,
                                        "max_position_embeddings": 131072}


@register_kind
@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """The sizes of a Mixtral under the key names of Hugging Face's ``MixtralConfig``; of an expert by its
    ``intermediate_size``."""

    keys: ClassVar = ConfigKeys(
        "Mixtral",
        presets={"8x7b": {"num_key_value_heads": 8, "intermediate_size": 14336, "rope_theta": 1e6,
                          "rms_norm_eps": 1e-5}},
        fixed={"model_type": "mixtral", "hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0},
        silent=SILENT | {"output_router_logits"})
    architecture: ClassVar = "MixtralForCausalLM"
    absent: ClassVar[dict[str, Any]] = {"intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                                        "max_position_embeddings": 131072, "rope_theta": 1e6,
                                        "router_aux_loss_coef": 0.001}
    experts: ClassVar = ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3",
                         "block_sparse_moe.experts.{}.w2")

    num_local_experts: int = 8


@register_kind
class Qwen2Config(LlamaConfig):
    """The sizes of a Qwen2 under the key names of Hugging Face's ``Qwen2Config``."""

    keys: ClassVar = ConfigKeys(
        "Qwen2",
        # Qwen2.5, table 1
        presets={name: {"num_hidden_layers": blocks, "hidden_size": hidden, "num_attention_heads": heads,
                        "num_key_value_heads": groups, "intermediate_size": inner, "rope_theta": 1e6,
                        "tie_word_embeddings": hidden < 3000}
                 for name, blocks, hidden, heads, groups, inner in (
                     ("0.5b", 24, 896, 14, 2, 4864), ("1.5b", 28, 1536, 12, 2, 8960), ("3b", 36, 2048, 16, 2, 11008),
                     ("7b", 28, 3584, 28, 4, 18944), ("14b", 48, 5120, 40, 8, 13824), ("32b", 64, 5120, 40, 8, 27648),
                     ("72b", 80, 8192, 64, 8, 29568))},
        fixed={"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False},
        silent=SILENT | {"sliding_window", "max_window_layers"})
    architecture: ClassVar = "Qwen2ForCausalLM"
    absent: ClassVar[dict[str, Any]] = {"intermediate_size": 22016, "num_key_value_heads": 32,
                                        "max_position_embeddings": 32768}
    biased: ClassVar = True


@register_kind
class Qwen3Config(LlamaConfig):
    """The sizes of a Qwen3 under the key names of Hugging Face's ``Qwen3Config``."""

    keys: ClassVar = ConfigKeys(
        "Qwen3",
        # table 1
        presets={name: {"num_hidden_layers": blocks, "hidden_size": hidden, "num_attention_heads": heads,
                        "num_key_value_heads": 8, "intermediate_size": inner, "head_dim": 128, "rope_theta": 1e6,
                        "tie_word_embeddings": hidden < 3000}
                 for name, blocks, hidden, heads, inner in (
                     ("0.6b", 28, 1024, 16, 3072), ("1.7b", 28, 2048, 16, 6144), ("4b", 36, 2560, 32, 9728),
                     ("8b", 36, 4096, 32, 12288), ("14b", 40, 5120, 40, 17408), ("32b", 64, 5120, 64, 25600))},
        fixed={"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
        silent=SILENT | {"sliding_window", "max_window_layers"})
    architecture: ClassVar = "Qwen3ForCausalLM"
    absent: ClassVar[dict[str, Any]] = {"intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128,
                                        "max_position_embeddings": 32768}
    normed: ClassVar = True


@register_kind
@dataclass(frozen=True)
class Qwen3MoeConfig(LlamaConfig):
    """The sizes of a Qwen3-MoE under the key names of Hugging Face's ``Qwen3MoeConfig``.

    An expert is ``moe_intermediate_size`` wide; where that is None, 3/8 of ``hidden_size``, rounded up to a multiple of
    64, as published. Without ``norm_topk_prob`` the weights of a token's experts are their probabilities among all.
    ``intermediate_size`` is that of blocks without experts, of which there are none.
    """

    keys: ClassVar = ConfigKeys(
        "Qwen3-MoE",
        # table 2
        presets={name: {"num_hidden_layers": blocks, "hidden_size": hidden, "num_attention_heads": heads,
                        "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 1e6}
                 for name, blocks, hidden, heads in (("30b-a3b", 48, 2048, 32), ("235b-a22b", 94, 4096, 64))},
        fixed={"model_type": "qwen3_moe", "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False,
               "decoder_sparse_step": 1, "mlp_only_layers": []},
        silent=SILENT | {"sliding_window", "max_window_layers", "output_router_logits", "intermediate_size"})
    architecture: ClassVar = "Qwen3MoeForCausalLM"
    absent: ClassVar[dict[str, Any]] = {"num_key_value_heads": 4, "max_position_embeddings": 32768,
                                        "moe_intermediate_size": 768, "norm_topk_prob": False,
                                        "router_aux_loss_coef": 0.001}
    spelled: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    normed: ClassVar = True
    width: ClassVar = "moe_intermediate_size"
    experts: ClassVar = ("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")

    num_local_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True

    @property
    def inner(self) -> int:
        """Return the width of an expert."""
        return -(-3 * self.hidden_size // 8 // 64) * 64 if self.moe_intermediate_size is None else (
            self.moe_intermediate_size)

    def written(self) -> dict[str, Any]:
        """Return all fields; the number of experts also as published files have it."""
        return {**super().written(), "moe_intermediate_size": self.inner, "num_experts": self.num_local_experts}
