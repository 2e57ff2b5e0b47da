"""The batches that every system trains on: random tokens, the same sequence for all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from model import TOKENS, VOCABULARY
from torch import Tensor

SAMPLES = 16
DIFFERENT = 8


def batches() -> Iterator[dict[str, Tensor]]:
    """``ids`` and ``labels``, both ``[16, 128]``: eight batches, over and over."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(VOCABULARY, (2, SAMPLES, TOKENS), generator=generator) for _ in range(DIFFERENT)]
    for i in count():
        ids, labels = made[i % DIFFERENT]
        yield {"ids": ids, "labels": labels}
