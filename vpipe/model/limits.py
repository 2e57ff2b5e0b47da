"""The largest model that a config may describe; torch is not imported for it."""

LARGEST_SIZE = 1 << 24
"""Of a layer, a vocabulary or a sequence: products of two of them stay countable in 64 bits."""

MOST_BLOCKS = 1024
"""Of a model: each is an object or two, and counted when a model is cut."""
