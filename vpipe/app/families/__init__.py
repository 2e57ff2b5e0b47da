"""Models by name: :mod:`vpipe.app.families.registry`."""

LARGEST_SIZE = 1 << 24
"""Limit of a layer's width, a vocabulary and a sequence: products of two of them stay countable in 64 bits."""

MOST_EXPERTS = 1024
"""Limit of the experts of a layer: each is an object of some parameters."""

MOST_BLOCKS = 1024
"""Limit of a model's blocks: each is an object or two, and counted when a model is cut."""

KEYS = ("num_kv_heads", "packed", "experts", "experts_per_token", "balance_weight")
"""Keys of a config's ``model`` that a family reads if it says so; the others, sizes above all, every family reads."""

WITHOUT_EXPERTS = ("gpt", "llama", "mistral", "qwen2", "qwen3")
"""Families that have experts only where their number is given."""

READS = {"bert": (), **dict.fromkeys((*WITHOUT_EXPERTS, "mixtral", "qwen3_moe"), KEYS), "gpt": KEYS[1:]}
"""The keys of them that vpipe's own families read: known here, for a config is checked without torch."""
