"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): a Mistral whose MLPs are 8 experts, 2 for a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vpipe import Model
from vpipe.app.families.llama import SILENT, LlamaConfig, kind_from_settings, kind_of_llama
from vpipe.app.families.registry import ModelSettings, register_model
from vpipe.app.families.transformer import ConfigKeys


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


@register_model("mixtral", **kind_of_llama(MixtralConfig))
def mixtral_from_settings(settings: ModelSettings) -> Model:
    """Return Mixtral from a config file's ``model`` section."""
    return kind_from_settings(MixtralConfig, settings)
