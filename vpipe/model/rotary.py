"""Compute rotary position embeddings (Su et al. 2021, arXiv:2104.09864) as Hugging Face's LLaMA has them.

Feature j of a head and feature j + d/2 make a pair, which is turned by (position * theta^(-2j/d)). Shapes, as names
end: b batch, a heads, s sequence, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from vpipe.errors import UserError

LLAMA3 = "llama3"


@dataclass(frozen=True)
class RopeScaling:
    """LLaMA 3.1's scaling of the rotation for longer contexts: pairs whose wavelength is above
    ``original_max_position_embeddings / low_freq_factor`` positions are ``factor`` times slower, those below
    ``.. / high_freq_factor`` as before, those between in between.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @classmethod
    def parse(cls, found: Mapping[str, object] | None) -> RopeScaling | None:
        """Parse ``rope_scaling`` of a ``config.json``; None for no scaling.

        Raises:
            UserError: it is of another kind, or incomplete.
        """
        given: dict[str, Any] = dict(found or {})
        kind = given.pop("rope_type", given.pop("type", "default"))
        given.pop("type", None)
        if kind == "default":
            return None
        if kind != LLAMA3:
            raise UserError(f"the rope_type is {kind!r}, but this LLaMA computes 'default' and '{LLAMA3}' only",
                            hint="other kinds change with the length of a sample, or attention too: train without it")
        names = [field.name for field in fields(cls)]
        scaling = cls(**given) if given.keys() == set(names) and all(_above_0(given[name]) for name in names) else None
        if scaling is None or scaling.high_freq_factor <= scaling.low_freq_factor:
            raise UserError(f"the rope_scaling of type '{LLAMA3}' is {given}",
                            hint=f"it must give {', '.join(names)}: numbers above 0, the second below the third")
        return scaling

    def as_config(self) -> dict[str, object]:
        """Return the value for a ``config.json``."""
        return {"rope_type": LLAMA3, **vars(self)}


def _above_0(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


def rotary_tables(length: int, head_size: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position and pair: two fp32 [S, D/2].

    They are made on the CPU: the same for all devices, and on the meta device torch would import a compiler to compute
    anything, for seconds.
    """
    device = torch.get_default_device()
    pairs = torch.arange(0, head_size, 2, dtype=torch.float, device="cpu")
    turns = 1.0 / theta ** (pairs / head_size)  # radians per position
    if scaling is not None:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        wavelengths = scaling.original_max_position_embeddings / (2 * math.pi / turns)
        kept = ((wavelengths - low) / (high - low)).clamp(0, 1)
        turns = (1 - kept) * turns / scaling.factor + kept * turns
    angles = torch.arange(length, dtype=torch.float, device="cpu")[:, None] * turns
    return angles.cos().to(device), angles.sin().to(device)


def rotate(x_basd: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> Tensor:
    """Turn queries or keys by their positions; the tables are [S, D/2] and take the dtype of ``x``."""
    cos_sd, sin_sd = cos_sd.to(x_basd.dtype), sin_sd.to(x_basd.dtype)
    first, second = x_basd.chunk(2, dim=-1)
    return torch.cat((first * cos_sd - second * sin_sd, second * cos_sd + first * sin_sd), dim=-1)
