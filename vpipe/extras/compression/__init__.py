"""Compress activations and gradients between stages: 16 bits or a byte per number."""
