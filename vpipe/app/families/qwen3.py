"""Qwen3 (arXiv:2505.09388), dense: a LLaMA that norms queries and keys, with heads of a size of their own."""

from __future__ import annotations

from typing import Any, ClassVar

from vpipe import Model
from vpipe.app.families.llama import SILENT, LlamaConfig, kind_from_settings, kind_of_llama
from vpipe.app.families.registry import ModelSettings, register_model
from vpipe.app.families.transformer import ConfigKeys


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


@register_model("qwen3", **kind_of_llama(Qwen3Config))
def qwen3_from_settings(settings: ModelSettings) -> Model:
    """Return Qwen3 from a config file's ``model`` section."""
    return kind_from_settings(Qwen3Config, settings)
