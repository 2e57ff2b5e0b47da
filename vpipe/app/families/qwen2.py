"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115): a LLaMA whose queries, keys and values have biases."""

from __future__ import annotations

from typing import Any, ClassVar

from vpipe import Model
from vpipe.app.families.llama import SILENT, LlamaConfig, kind_from_settings, kind_of_llama
from vpipe.app.families.registry import ModelSettings, register_model
from vpipe.app.families.transformer import ConfigKeys


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


@register_model("qwen2", **kind_of_llama(Qwen2Config))
def qwen2_from_settings(settings: ModelSettings) -> Model:
    """Return Qwen2 from a config file's ``model`` section."""
    return kind_from_settings(Qwen2Config, settings)
