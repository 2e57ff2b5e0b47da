"""What a run leaves behind for a comparison: losses, gradient norms and weights, update by update."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Trail:
    """Filled by whoever trains: an engine stage by stage, an oracle all at once.

    Attributes:
        losses: of every update.
        norms: per update, the norm of each parameter's gradient before clipping; 0 where there is none.
        values: per update, the weights it made.
    """

    losses: list[float] = field(default_factory=list)
    norms: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    values: dict[int, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))

    def gradients(self, update: int, named: Mapping[str, Tensor | None]) -> None:
        """Note the gradients that an update is about to apply."""
        for name, gradient in named.items():
            norm = 0.0 if gradient is None else float(torch.linalg.vector_norm(gradient.detach()))
            self.norms[update][name] = norm

    def weights(self, update: int, named: Mapping[str, Tensor]) -> None:
        """Note the weights that an update made."""
        self.values[update].update({name: value.detach().cpu().clone() for name, value in named.items()})

    def norm(self, update: int) -> float:
        """The norm of all gradients of an update."""
        return math.sqrt(math.fsum(norm * norm for norm in self.norms[update].values()))

    def save(self, folder: Path, rank: int) -> None:
        """Write what a rank saw, for :meth:`load`."""
        arrays: dict[str, Any] = {f"{update}/{name}": value.numpy()
                                  for update, named in self.values.items() for name, value in named.items()}
        np.savez(_weights_path(folder, rank), **arrays)
        _numbers_path(folder, rank).write_text(json.dumps({"losses": self.losses, "norms": self.norms}))

    @classmethod
    def load(cls, folder: Path, ranks: Iterable[int]) -> Trail:
        """What the ranks of a run saw together; every rank knows all losses."""
        trail = cls()
        for rank in ranks:
            numbers = json.loads(_numbers_path(folder, rank).read_text())
            trail.losses = numbers["losses"]
            for update, norms in numbers["norms"].items():
                trail.norms[int(update)].update(norms)
            with np.load(_weights_path(folder, rank), allow_pickle=False) as arrays:
                for key in arrays.files:
                    update, _, name = key.partition("/")
                    trail.values[int(update)][name] = torch.from_numpy(arrays[key])
        return trail


def _weights_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.weights.npz"


def _numbers_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.numbers.json"
