"""In which numbers the systems compute."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

FP32, BF16 = "fp32", "bf16"


def autocast(precision: str) -> AbstractContextManager[object]:
    """What those who are not vpipe put around their forward."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == BF16)
