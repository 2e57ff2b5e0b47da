"""Qwen3-MoE (arXiv:2505.09388): a Qwen3 whose MLPs are 128 small experts, 8 for a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from vpipe import Model
from vpipe.app.families.llama import SILENT, LlamaConfig, kind_from_settings, kind_of_llama
from vpipe.app.families.registry import ModelSettings, register_model
from vpipe.app.families.transformer import ConfigKeys


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

    @property
    def weights_sum_to_one(self) -> bool:
        return self.norm_topk_prob

    def written(self) -> dict[str, Any]:
        """Return all fields; the number of experts also as published files have it."""
        return {**super().written(), "moe_intermediate_size": self.inner, "num_experts": self.num_local_experts}


@register_model("qwen3_moe", **kind_of_llama(Qwen3MoeConfig))
def qwen3_moe_from_settings(settings: ModelSettings) -> Model:
    """Return Qwen3-MoE from a config file's ``model`` section."""
    return kind_from_settings(Qwen3MoeConfig, settings)
