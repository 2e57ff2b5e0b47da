"""BERT's masked language model: which tokens are hidden, and behind what."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vpipe.data.bert_fields import MASKED_SHARE, STORAGE, Samples

Ids = NDArray[np.int32]
_ROWS_AT_ONCE = 4096  # bounds the memory of the random numbers


def mask_tokens(samples: Samples, max_predictions: int, *, special: NDArray[np.int32], mask_id: int,
                words: NDArray[np.int32], rng: np.random.Generator) -> None:
    """Hide 15 % of the tokens of each row of ``input_ids`` [N, S], in place; add the two fields of predictions [N, P].

    A row of n tokens has ``min(max_predictions, max(1, round(0.15 n)))`` hidden, none of them ``special``, in the
    order of their positions. A hidden token is replaced by ``mask_id`` in 80 % of cases and by one of ``words`` in
    10 %, and stays as it is in 10 %.
    """
    count, _ = samples["input_ids"].shape
    for name in ("masked_lm_positions", "masked_lm_ids"):
        samples[name] = np.zeros((count, max_predictions), dtype=STORAGE[name])
    for start in range(0, count, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        ids, length = samples["input_ids"][rows], samples["input_mask"][rows].sum(axis=1)
        candidate = (samples["input_mask"][rows] == 1) & ~np.isin(ids, special)
        positions, used = _choose(candidate, length, max_predictions, rng)
        originals = np.take_along_axis(ids, positions, axis=1)
        samples["masked_lm_positions"][rows] = np.where(used, positions, 0)
        samples["masked_lm_ids"][rows] = np.where(used, originals, 0)

        dice = rng.random(positions.shape)
        drawn = words[rng.integers(len(words), size=positions.shape)]
        shown = np.where(dice < 0.8, mask_id, np.where(dice < 0.9, drawn, originals))
        row, slot = np.nonzero(used)
        ids[row, positions[row, slot]] = shown[row, slot]


def _choose(candidate: NDArray[np.bool_], length: NDArray[np.int64], most: int,
            rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Positions [n, P] of random candidates, ascending in each row, and which slots are used; the rest hold 0."""
    rows, width = candidate.shape
    wanted = np.clip(np.rint(MASKED_SHARE * length), 1, most)
    wanted = np.minimum(wanted, candidate.sum(axis=1)).astype(np.int64)
    lottery = np.where(candidate, rng.random((rows, width), dtype=np.float32), np.float32(2))
    positions = np.argsort(lottery, axis=1, kind="stable")[:, :most]
    used = np.arange(most) < wanted[:, None]
    positions = np.sort(np.where(used, positions, width), axis=1)
    return np.where(used, positions, 0), used
