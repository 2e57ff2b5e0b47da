"""Models by name: :mod:`vpipe.app.families.registry`."""

LARGEST_SIZE = 1 << 24
"""Limit of a layer's width, a vocabulary and a sequence: products of two of them stay countable in 64 bits."""

MOST_EXPERTS = 1024
"""Limit of the experts of a layer: each is an object of some parameters."""

MOST_BLOCKS = 1024
"""Limit of a model's blocks: each is an object or two, and counted when a model is cut."""
