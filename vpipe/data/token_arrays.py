"""Samples of a language model, cut from one long row of tokens.

    tokens      t0 t1 t2 t3 t4 t5 t6 t7 t8 t9        S = 4
    sample 0    t0 t1 t2 t3 -> t1 t2 t3 t4
    sample 1                   t4 t5 t6 t7 -> t5 t6 t7 t8

A sample takes S + 1 tokens and shares the last with the next, so every token but the first of all is predicted once.
What is left at the end is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vpipe.data.arrays import Arrays
from vpipe.data.dataset import Split
from vpipe.data.token_fields import LABELS, check_length, token_fields
from vpipe.errors import UserError

Tokens = NDArray[np.generic]


class TokenArrays(Arrays):
    """``input_ids`` and ``labels`` [S] from the tokens of each split.

    Args:
        counts: samples of each split, at most as many as its tokens have (:func:`samples_in`).
        tokens: split -> its tokens [T], of any type of integers; a map of a file is read where samples are asked for.

    A batch with a token out of the vocabulary raises :class:`UserError`.
    """

    def __init__(self, vocab_size: int, sequence_length: int, counts: Mapping[Split, int],
                 tokens: Callable[[Split], Tokens], tokenizer_path: Path | None = None) -> None:
        check_length(sequence_length)

        def load(split: Split, field: str) -> Tokens:
            row = tokens(split)
            first, samples = int(field == LABELS), samples_in(len(row), sequence_length)
            return row[first:first + samples * sequence_length].reshape(samples, sequence_length)

        super().__init__(vocab_size, sequence_length, partial(token_fields, sequence_length), counts, load,
                         tokenizer_path)

    def _check(self, split: Split, taken: Mapping[str, Tokens]) -> None:
        largest = max((int(np.max(values)) for values in taken.values()), default=0)
        if largest >= self.vocab_size:
            kept = None if self.tokenizer_path is None else str(self.tokenizer_path.parent)
            raise UserError(f"the {split} split has the token {largest}, but the vocabulary ends at "
                            f"{self.vocab_size - 1}: the prepared data is damaged",
                            hint="remove its folder, and it is made anew", where=kept)


def samples_in(tokens: int, sequence_length: int) -> int:
    """How many samples so many tokens give."""
    check_length(sequence_length)
    return max(0, tokens - 1) // sequence_length
