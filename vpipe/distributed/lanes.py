"""Know the lanes of a job: pipelines side by side, each on the ranks along one dimension of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vpipe.errors import UserError, counted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PIPELINE = "pp"
"""The name of the mesh dimension on which a pipeline lives, as in torchtitan."""


@dataclass(frozen=True)
class Lanes:
    """The lanes of a job. A pipeline counts the ranks of its lane from 0; the job has other numbers for them.

    Attributes:
        ranks: of the job, per lane in the pipeline's order: ``((0, 2), (1, 3))`` are two pipelines of two ranks.
        number: of the lane of this process.
        alike: the numbers of the lanes that train on the same batches as this one.
        averaged: the numbers of the lanes whose gradients are averaged with those of this one, which train on others.
    """

    ranks: tuple[tuple[int, ...], ...]
    number: int = 0
    alike: tuple[int, ...] = (0,)
    averaged: tuple[int, ...] = (0,)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, rank: int, ranks: int, data: str | None) -> Lanes:
        """Return the lanes along the dimension ``pp`` of a mesh, in the order of its other dimensions.

        Args:
            rank, ranks: of this process in the job, and of the job.
            data: the dimension along which lanes train on batches of their own.

        Raises:
            UserError: the mesh has no such dimension, or not every rank of the job.
        """
        names, shape = mesh.mesh_dim_names or (), tuple(mesh.mesh.shape)
        if PIPELINE not in names:
            named = f"the dimensions {', '.join(names)}" if names else "dimensions without names"
            raise UserError(f"the mesh has {named}, and no '{PIPELINE}' on which the pipeline lives",
                            hint=f'name it: init_device_mesh(kind, {shape}, mesh_dim_names=("{PIPELINE}", ...)); parts '
                                 "of it, such as mesh['tp'], are for the layers")
        if sorted(mesh.mesh.flatten().tolist()) != list(range(ranks)):
            raise UserError(f"the mesh {shape} has {counted(mesh.mesh.numel(), 'rank')}, the job {ranks}",
                            hint="give a mesh in which every rank of the job has one place")
        if data is not None and (data == PIPELINE or data not in names):
            others = ", ".join(name for name in names if name != PIPELINE) or "none"
            raise UserError(f"data is '{data}', but the mesh's dimensions beside '{PIPELINE}' are: {others}",
                            hint="name the dimension along which lanes train on batches of their own")
        along = mesh.mesh.movedim(names.index(PIPELINE), -1)
        lanes = tuple(map(tuple, along.reshape(-1, along.shape[-1]).tolist()))
        own = next(number for number, lane in enumerate(lanes) if rank in lane)
        if data is None:
            return cls(lanes, own, tuple(range(len(lanes))), (own,))
        places = [names.index(data), *(i for i, name in enumerate(names) if name not in (PIPELINE, data))]
        at = [[(mesh.mesh == lane[0]).nonzero()[0].tolist()[i] for i in places] for lane in lanes]
        return cls(lanes, own, tuple(i for i, place in enumerate(at) if place[0] == at[own][0]),
                   tuple(i for i, place in enumerate(at) if place[1:] == at[own][1:]))

    @property
    def own(self) -> tuple[int, ...]:
        """The job's ranks of this process's lane, in the pipeline's order."""
        return self.ranks[self.number]

    @cached_property
    def count(self) -> int:
        return len(self.ranks)

    def across(self, rank: int) -> tuple[int, ...]:
        """Return the job's ranks that have the same place in their lanes as one of the pipeline has in this one."""
        return tuple(own[rank] for own in self.ranks)

    def __str__(self) -> str:
        return "; ".join(f"lane {number}: ranks {', '.join(map(str, own))}" for number, own in enumerate(self.ranks))
