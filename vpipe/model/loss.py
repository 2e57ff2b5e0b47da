"""The loss of models that learn the next token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NO_LABEL = -100
"""Label of a token after which there is none to learn."""


def next_token_loss(logits_bsv: Tensor, labels_bs: Tensor) -> Tensor:
    """Return the mean cross entropy over the tokens with a label; without any it is 0, not nan.

    In fp32 at least: a sum over V exponentials loses too much in half precision.

    Args:
        logits_bsv: scores [B, S, V].
        labels_bs: int64 [B, S]: the next token, already shifted; :data:`NO_LABEL` where there is none.
    """
    precision = torch.promote_types(logits_bsv.dtype, torch.float32)
    total = F.cross_entropy(logits_bsv.to(precision).flatten(0, 1), labels_bs.flatten(), ignore_index=NO_LABEL,
                            reduction="sum")
    return total / (labels_bs != NO_LABEL).sum().clamp(min=1)
