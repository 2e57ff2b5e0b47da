"""What a GPT's config may say: Hugging Face's ``GPT2Config``, and a config file's ``model`` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vpipe.model.keys import Blocks, Keys, check_no_groups
from vpipe.model.registry import ModelSettings

KEYS = Keys(
    "GPT",
    # Radford et al., table 2; the names are those the weights were published under.
    presets={name: {"n_layer": blocks, "n_embd": hidden, "n_head": heads} for name, blocks, hidden, heads in (
        ("small", 12, 768, 12), ("medium", 24, 1024, 16), ("large", 36, 1280, 20), ("xl", 48, 1600, 25))},
    fixed={"model_type": "gpt2", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
           "reorder_and_upcast_attn": False, "add_cross_attention": False, "is_encoder_decoder": False,
           "pruned_heads": {}},
    silent={"architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "gradient_checkpointing",
            "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "n_ctx", "task_specific_params",
            "id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict", "problem_type",
            "is_decoder", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
            "summary_use_proj"},
    choices={"activation_function": ("gelu", "gelu_new", "gelu_pytorch_tanh")})


@dataclass(frozen=True)
class GptConfig:
    """The sizes of a GPT under the key names of Hugging Face's ``GPT2Config``, and with its defaults but for one.

    The dropouts (``resid`` after a sublayer, ``embd`` after the embeddings, ``attn`` of attention) are probabilities in
    [0, 1). ``n_inner`` is 4 ``n_embd`` where it is None. ``activation_function`` is the exact GELU, ``gelu``, which is
    the fastest, unless a published model says ``gelu_new`` or ``gelu_pytorch_tanh``, its approximation by tanh.
    Raises one UserError naming every value out of range.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: Blocks = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        KEYS.check(self, "n_embd n_head")

    @property
    def inner(self) -> int:
        """Width of the MLP."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner


def config_of(settings: ModelSettings) -> GptConfig:
    """The preset, if any, then ``overrides`` (the contents of a ``config.json``), then the settings' own fields; the
    later wins. A ``config.json`` without an ``activation_function`` means ``gelu_new``. Where nothing says for how many
    tokens there are positions, it is for as many as a sample has, and for 1,024 at least.

    Raises UserError for a key of ``overrides`` that is unknown or asks for what this GPT does not compute.
    """
    check_no_groups("GPT", settings)
    overrides = {"activation_function": "gelu_new", **settings.overrides} if settings.overrides else {}
    values = KEYS.values(GptConfig, settings.preset, overrides, {
        "vocab_size": settings.vocab_size, "n_embd": settings.hidden_size, "n_layer": settings.num_layers,
        "n_head": settings.num_heads, "resid_pdrop": settings.dropout, "embd_pdrop": settings.dropout,
        "attn_pdrop": settings.dropout, "tie_word_embeddings": settings.tie_weights})
    positions = max(settings.sequence_length or 1, GptConfig.n_positions)
    return GptConfig(**{"n_positions": positions, **values})


def from_huggingface(found: Mapping[str, object]) -> ModelSettings:
    """What it leaves out is what ``GPT2Config`` takes."""
    values: dict[str, Any] = {**vars(GptConfig()), "activation_function": "gelu_new", **found}
    config = config_of(ModelSettings(values["vocab_size"], overrides=values))
    return ModelSettings(config.vocab_size, tie_weights=config.tie_word_embeddings, overrides=values)


def huggingface_config(settings: ModelSettings) -> dict[str, object]:
    """Every field; and no tokens to begin and end with, for ``transformers`` would take those of GPT-2's vocabulary."""
    return {**vars(config_of(settings)), "bos_token_id": None, "eos_token_id": None}
