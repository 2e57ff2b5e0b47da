"""A BERT data set whose samples lie in arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vpipe.data.arrays import Arrays
from vpipe.data.bert_fields import bert_fields
from vpipe.data.dataset import Split


class BertArrays(Arrays):
    """BERT's six fields, of at most ``max_predictions`` masked tokens per sample, from arrays.

    The other arguments are those of :class:`~vpipe.data.arrays.Arrays`.
    """

    def __init__(self, vocab_size: int, sequence_length: int, max_predictions: int, counts: Mapping[Split, int],
                 load: Callable[[Split, str], NDArray[np.generic]], tokenizer_path: Path | None = None) -> None:
        super().__init__(vocab_size, sequence_length, partial(bert_fields, sequence_length, max_predictions), counts,
                         load, tokenizer_path)
        self.max_predictions = max_predictions
