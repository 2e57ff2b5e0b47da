"""One epoch over arrays: which rows make which batch, and how rows become tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vpipe.data.dataset import Field, Split
from vpipe.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import Tensor

Rows = NDArray[np.int64]
SPLITS = ("train", "test")


def needed_fields(known: Mapping[str, Field], fields: Collection[str] | None) -> frozenset[str]:
    """The fields a rank needs, None meaning all. Raises :class:`UserError` for a name that no batch has."""
    for name in fields or ():
        if name not in known:
            raise UserError(f"a batch has no field '{name}'", hint=nearest(name, list(known)))
    return frozenset(known if fields is None else fields)


def check_split(split: str) -> None:
    """Raises :class:`UserError` unless ``split`` is ``train`` or ``test``."""
    if split not in SPLITS:
        raise UserError(f"no split is called '{split}'", hint=nearest(split, SPLITS))


def check_batch_size(split: Split, samples: int, batch_size: int) -> None:
    """Raises :class:`UserError` unless the split holds at least one whole batch."""
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}", hint="a batch holds at least 1 sample")
    if samples < batch_size:
        raise UserError(f"the {split} split holds {samples} samples, fewer than one batch of {batch_size}",
                        hint=f"use a batch size of at most {samples}, or more data" if samples else "add data")


def epoch_rows(samples: int, batch_size: int, *, seed: int | None) -> Iterator[Rows]:
    """The row numbers of each whole batch; shuffled by ``seed``, or in order when it is None."""
    order = np.arange(samples) if seed is None else generator(seed).permutation(samples)
    for start in range(0, samples - batch_size + 1, batch_size):
        yield order[start:start + batch_size]


def generator(*seeds: int) -> np.random.Generator:
    """A random generator of its own for every tuple of integers, negative ones included."""
    return np.random.default_rng([_positive(seed) for seed in seeds])


def tensors(fields: Mapping[str, Field], batch_size: int, rows: Mapping[str, NDArray[np.generic]]) -> dict[str, Tensor]:
    """A batch: fields that ``rows`` holds (``[batch_size, *shape]`` each) as data, the others on ``meta``."""
    import torch

    return {name: torch.from_numpy(rows[name]).to(field.dtype) if name in rows
            else torch.empty((batch_size, *field.shape), dtype=field.dtype, device="meta")
            for name, field in fields.items()}


def _positive(seed: int) -> int:
    """numpy takes no negative seeds; this keeps all of them apart."""
    return 2 * seed if seed >= 0 else -2 * seed - 1
