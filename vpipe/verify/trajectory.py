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

Made = tuple[int, str]
"""An update of a parameter: its number, counted over the updates of the parameter's stage, and the name."""


@dataclass(frozen=True)
class Torn:
    """The first update after which a replica of a stage differs from another one, which it must not by a bit.

    Attributes:
        update, parameter: which update of which parameter.
        rank: of the replica that differs.
        other: rank of the replica that it differs from.
    """

    update: int
    parameter: str
    rank: int
    other: int


@dataclass
class Trail:
    """Filled by whoever trains: an engine stage by stage, an oracle all at once.

    Attributes:
        losses: of every step.
        norms: per update, the norm of each parameter's gradient before clipping; 0 where there is none.
        values: per update, the weights it made.
        made: of every step, the updates that lie in it: without a flush a narrow stage makes more of them than a wide
            one. Only an oracle notes it.
        torn: replicas of a stage that differ; known where the trails of several ranks were joined.
    """

    losses: list[float] = field(default_factory=list)
    norms: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    values: dict[int, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    made: list[list[Made]] = field(default_factory=list)
    torn: list[Torn] = field(default_factory=list)
    _since: list[Made] = field(default_factory=list)  # the last step

    def gradients(self, update: int, named: Mapping[str, Tensor | None]) -> None:
        """Note the gradients that an update of a stage is about to apply."""
        for name, gradient in named.items():
            norm = 0.0 if gradient is None else float(torch.linalg.vector_norm(gradient.detach()))
            self.norms[update][name] = norm

    def weights(self, update: int, named: Mapping[str, Tensor]) -> None:
        """Note the weights that an update of a stage made."""
        self.values[update].update({name: value.detach().cpu().clone() for name, value in named.items()})
        self._since += [(update, name) for name in named]

    def ends_step(self, loss: float) -> None:
        """Note that all updates since the last step lie in one step, with its loss."""
        self.losses.append(loss)
        self.made.append(self._since)
        self._since = []

    def norm(self, made: Iterable[Made]) -> float:
        """The norm of the gradients of some updates together."""
        return math.sqrt(math.fsum(self.norms[update][name]**2 for update, name in made))

    def updates(self) -> set[Made]:
        """The updates of every parameter."""
        return {(update, name) for update, named in self.values.items() for name in named}

    def save(self, folder: Path, rank: int) -> None:
        """Write what a rank saw, for :meth:`load`."""
        arrays: dict[str, Any] = {f"{update}/{name}": value.numpy()
                                  for update, named in self.values.items() for name, value in named.items()}
        np.savez(_weights_path(folder, rank), **arrays)
        _numbers_path(folder, rank).write_text(json.dumps({"losses": self.losses, "norms": self.norms}))

    @classmethod
    def load(cls, folder: Path, rank: int) -> Trail:
        """What a rank saw and saved."""
        numbers = json.loads(_numbers_path(folder, rank).read_text())
        trail = cls(numbers["losses"])
        trail.norms.update({int(update): norms for update, norms in numbers["norms"].items()})
        with np.load(_weights_path(folder, rank), allow_pickle=False) as arrays:
            for key in arrays.files:
                update, _, name = key.partition("/")
                trail.values[int(update)][name] = torch.from_numpy(arrays[key])
        return trail

    @classmethod
    def joined(cls, ranks: Mapping[int, Trail]) -> Trail:
        """What the ranks of a run saw together; every rank knows all losses.

        Of a stage's replicas the lowest rank is believed; where another one saw other gradients or weights, or other
        updates, that is noted in :attr:`torn`, once for each rank and parameter.
        """
        whole = cls()
        home: dict[str, int] = {}
        for rank, trail in sorted(ranks.items()):
            whole.losses = trail.losses
            own: dict[str, set[int]] = defaultdict(set)
            for update, name in trail.updates():
                own[name].add(update)
            for name, updates in sorted(own.items()):
                other = home.setdefault(name, rank)
                if other == rank:
                    for update in updates:
                        whole.norms[update][name] = trail.norms[update][name]
                        whole.values[update][name] = trail.values[update][name]
                else:
                    differing = ranks[other].differing(trail, name)
                    whole.torn += [Torn(update, name, rank, other) for update in differing[:1]]
        return whole

    def differing(self, other: Trail, name: str) -> list[int]:
        """The updates of a parameter in which two trails differ, in order."""
        mine, theirs = ({update for update, named in trail.values.items() if name in named} for trail in (self, other))
        return sorted(mine ^ theirs | {
            update for update in mine & theirs if self.norms[update][name] != other.norms[update][name]
            or not torch.equal(self.values[update][name], other.values[update][name])})


def _weights_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.weights.npz"


def _numbers_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.numbers.json"
