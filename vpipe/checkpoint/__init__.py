"""Checkpoints: a folder per step, of tensors by global name, whatever arrangement of ranks wrote them."""
