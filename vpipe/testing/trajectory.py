"""Record the trajectory of a run: losses, gradient norms and weights of every update, to compare runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vpipe.runtime.sharded_tensors import is_sharded, local

ParameterUpdate = tuple[int, str]
"""The number of an update, counted per stage, and the name of a parameter."""


def norm_of(gradient: Tensor) -> float:
    """Return the norm of a gradient, in double precision: in fp32 that of 8 million numbers is off by 2e-4."""
    values = gradient.detach()
    return float(torch.linalg.vector_norm(values if is_sharded(values) else values.cpu(), dtype=torch.float64))


@dataclass(frozen=True)
class ReplicaMismatch:
    """The first update of a parameter after which the replica on ``rank`` differs from the one on ``other``."""

    update: int
    parameter: str
    rank: int
    other: int


@dataclass
class Trajectory:
    """Recorded while training: by an engine stage by stage, by an oracle for all stages.

    Attributes:
        losses: of every step.
        norms: per update, the norm of each parameter's gradient before clipping; 0 without a gradient.
        values: per update, the weights after it.
        step_updates: the updates of every step. Without a flush a narrow stage makes more of them in a step than a wide
            one. Recorded by oracles only.
        mismatches: differences between replicas of a stage; filled by :meth:`join`.
    """

    losses: list[float] = field(default_factory=list)
    norms: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    values: dict[int, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    step_updates: list[list[ParameterUpdate]] = field(default_factory=list)
    mismatches: list[ReplicaMismatch] = field(default_factory=list)
    _since: list[ParameterUpdate] = field(default_factory=list)  # the last step

    def gradients(self, update: int, named: Mapping[str, Tensor | None]) -> None:
        """Record the gradients that an update of a stage is about to apply."""
        for name, gradient in named.items():
            self.norms[update][name] = 0.0 if gradient is None else norm_of(gradient)

    def weights(self, update: int, named: Mapping[str, Tensor]) -> None:
        """Record the weights that an update of a stage made; of those that are sharded, this process's shards."""
        self.values[update].update({name: local(value.detach()).cpu().clone() for name, value in named.items()})
        self._since += [(update, name) for name in named]

    def end_step(self, loss: float) -> None:
        """End a step: record its loss, and the updates since the last step as its own."""
        self.losses.append(loss)
        self.step_updates.append(self._since)
        self._since = []

    def extend(self, other: Trajectory) -> None:
        """Append another trajectory with an update per step, whose numbers begin at 0, to one of this kind."""
        done = len(self.losses)
        self.losses += other.losses
        self.norms.update({done + update: norms for update, norms in other.norms.items()})
        self.values.update({done + update: values for update, values in other.values.items()})
        self.step_updates += [[(done + update, name) for update, name in step] for step in other.step_updates]

    def norm(self, updates: Iterable[ParameterUpdate]) -> float:
        """Return the norm of the gradients of several updates together."""
        return math.sqrt(math.fsum(self.norms[update][name]**2 for update, name in updates))

    def updates(self) -> set[ParameterUpdate]:
        """Return the updates of all parameters."""
        return {(update, name) for update, named in self.values.items() for name in named}

    def save(self, folder: Path, rank: int) -> None:
        """Write the trajectory of a rank into a folder, for :meth:`load`."""
        torch.save((self.losses, dict(self.norms), dict(self.values), self.step_updates), folder / f"rank{rank}.pt")

    @classmethod
    def load(cls, folder: Path, rank: int) -> Trajectory:
        """Read the trajectory of a rank."""
        losses, norms, values, steps = torch.load(folder / f"rank{rank}.pt", weights_only=True)
        trajectory = cls(losses, step_updates=steps)
        trajectory.norms.update(norms)
        trajectory.values.update(values)
        return trajectory

    @classmethod
    def join(cls, ranks: Mapping[int, Trajectory]) -> Trajectory:
        """Join the trajectories of the ranks of a run; every rank knows all losses.

        Of the replicas of a stage the lowest rank counts. If another one has other gradients, weights or updates, its
        first difference of each parameter goes into :attr:`mismatches`.
        """
        joined = cls()
        replica_of: dict[str, int] = {}
        for rank, trajectory in sorted(ranks.items()):
            joined.losses = trajectory.losses
            own: dict[str, set[int]] = defaultdict(set)
            for update, name in trajectory.updates():
                own[name].add(update)
            for name, updates in sorted(own.items()):
                other = replica_of.setdefault(name, rank)
                if other == rank:
                    for update in updates:
                        joined.norms[update][name] = trajectory.norms[update][name]
                        joined.values[update][name] = trajectory.values[update][name]
                else:
                    differing = ranks[other].differing_updates(trajectory, name)
                    joined.mismatches += [ReplicaMismatch(update, name, rank, other) for update in differing[:1]]
        return joined

    def differing_updates(self, other: Trajectory, name: str) -> list[int]:
        """Return the updates of a parameter in which two trajectories differ, in order."""
        mine, theirs = ({update for update, named in each.values.items() if name in named} for each in (self, other))
        return sorted(mine ^ theirs | {
            update for update in mine & theirs if self.norms[update][name] != other.norms[update][name]
            or not torch.equal(self.values[update][name], other.values[update][name])})
