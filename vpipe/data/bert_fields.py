"""The fields of a BERT pre-training sample, under the names NVIDIA's shards made common.

S = sequence length, P = most masked tokens per sample. Ids are 0 where there is no token; in
``masked_lm_ids`` a 0 says that the prediction slot is unused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from vpipe.data.dataset import Field
from vpipe.errors import UserError

Samples = dict[str, NDArray[np.generic]]  # name -> [N, *shape]

SHAPES: Mapping[str, tuple[str, ...]] = {
    "input_ids": ("S",),
    "input_mask": ("S",),              # 1 where there is a token
    "segment_ids": ("S",),             # 1 in segment B
    "masked_lm_positions": ("P",),
    "masked_lm_ids": ("P",),           # the original tokens at those positions
    "next_sentence_labels": (),        # 0: B follows A; 1: B is from elsewhere
}
STORAGE: Mapping[str, type[np.signedinteger]] = {
    "input_ids": np.int32, "input_mask": np.int8, "segment_ids": np.int8,
    "masked_lm_positions": np.int32, "masked_lm_ids": np.int32, "next_sentence_labels": np.int8,
}
MASKED_SHARE = 0.15
LONGEST = 8192
SHORTEST = 8  # [CLS] a [SEP] b [SEP] and a few words to learn from


def default_max_predictions(sequence_length: int) -> int:
    """P for S: 15 % rounded up (20 for 128, 77 for 512)."""
    return int(np.ceil(MASKED_SHARE * sequence_length))


def shape_of(name: str, sequence_length: int, max_predictions: int) -> tuple[int, ...]:
    """The shape of one sample of a field."""
    sizes = {"S": sequence_length, "P": max_predictions}
    return tuple(sizes[axis] for axis in SHAPES[name])


def bert_fields(sequence_length: int, max_predictions: int) -> dict[str, Field]:
    """Field by name, all int64 as tensors."""
    import torch

    return {name: Field(shape_of(name, sequence_length, max_predictions), torch.int64) for name in SHAPES}


def check_lengths(sequence_length: int, max_predictions: int) -> None:
    """Raises :class:`UserError` for lengths that no sample can have."""
    if not SHORTEST <= sequence_length <= LONGEST:
        raise UserError(f"sequence_length is {sequence_length}",
                        hint=f"BERT samples need at least {SHORTEST} tokens" if sequence_length < SHORTEST else
                        f"BERT samples have at most {LONGEST:,} tokens: all of them are padded to it, and in memory")
    if not 1 <= max_predictions <= sequence_length:
        raise UserError(f"max_predictions is {max_predictions} in sequences of {sequence_length} tokens",
                        hint=f"the usual value is 15 %: {default_max_predictions(sequence_length)}")
