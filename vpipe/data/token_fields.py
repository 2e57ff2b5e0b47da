"""The fields of a language model's sample: S tokens, and for each the token that follows it."""

from __future__ import annotations

from collections.abc import Collection

from vpipe.data.dataset import Field
from vpipe.errors import UserError

INPUT_IDS, LABELS = NAMES = ("input_ids", "labels")


def for_language_model(fields: Collection[str]) -> bool:
    """Whether a model that reads these fields predicts the next token; one that reads none, or BERT's, does not."""
    return LABELS in fields


def token_fields(sequence_length: int) -> dict[str, Field]:
    """Field by name, both [S] and int64: ``labels[t]`` is the token after ``input_ids[t]``."""
    import torch

    return {name: Field((sequence_length,), torch.int64) for name in NAMES}


def check_length(sequence_length: int) -> None:
    """Raises :class:`UserError` for a length that no sample can have."""
    if sequence_length < 1:
        raise UserError(f"sequence_length is {sequence_length}", hint="a sample has at least 1 token")
