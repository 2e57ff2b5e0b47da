"""Mistral (Jiang et al. 2023, arXiv:2310.06825) without a sliding window, as from version 0.2 on: a kind of LLaMA."""

from __future__ import annotations

from typing import Any, ClassVar

from vpipe import Model
from vpipe.app.families.llama import SILENT, LlamaConfig, kind_from_settings, kind_of_llama
from vpipe.app.families.registry import ModelSettings, register_model
from vpipe.app.families.transformer import ConfigKeys


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


@register_model("mistral", **kind_of_llama(MistralConfig))
def mistral_from_settings(settings: ModelSettings) -> Model:
    """Return Mistral from a config file's ``model`` section."""
    return kind_from_settings(MistralConfig, settings)
