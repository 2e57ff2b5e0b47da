"""Know the device of every rank, and choose the backend between them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from vpipe import accelerator
from vpipe.accelerator import Visible
from vpipe.distributed.environment import RankEnvironment, read_number
from vpipe.distributed.lanes import Lanes
from vpipe.errors import UserError, counted


def visible_here() -> Visible:
    """Return what this process sees, by its environment and its process group; starts no context on devices."""
    if (number := RankEnvironment.local_rank()) is not None:
        there = Visible.here(number)
    else:
        rank = read_number(os.environ, "RANK", "the environment") if "RANK" in os.environ else 0
        there = Visible.here(dist.get_rank() if dist.is_initialized() else rank, is_rank=True)
    bound = dist.group.WORLD.bound_device_id if dist.is_initialized() and dist.group.WORLD is not None else None
    return replace(there, current=bound.index) if bound is not None and bound.type == accelerator.kind() else there


@dataclass(frozen=True)
class RankDevice:
    """The device of one rank, as the others know it.

    Attributes:
        host: its name.
        device: ``cpu`` or ``cuda:1``, as the rank itself calls it.
        gpu: see :func:`vpipe.accelerator.uuid_of`; None of a processor.
        direct: whether the rank's torch has the backend that sends from device to device.
    """

    host: str
    device: str
    gpu: str | None = None
    direct: bool = True

    @classmethod
    def here(cls, host: str, device: torch.device) -> RankDevice:
        """Describe the device of this process."""
        return cls(host, str(device), accelerator.uuid_of(device) if device.type != "cpu" else None,
                   accelerator.has_collectives())


@dataclass(frozen=True)
class DeviceMap:
    """The device of every rank, and the backend between them.

    Attributes:
        rank: of this process.
        devices: by rank.
        backend: ``gloo``, ``nccl``, or another one of a process group that the user made.
        lanes: of the pipelines of the job; one of all ranks without a mesh.
    """

    rank: int
    devices: tuple[RankDevice, ...]
    backend: str
    lanes: Lanes = field(default=None)  # type: ignore[assignment] # set below

    def __post_init__(self) -> None:
        if self.lanes is None:
            object.__setattr__(self, "lanes", Lanes((tuple(range(self.ranks)),)))

    @property
    def ranks(self) -> int:
        return len(self.devices)

    @property
    def own(self) -> torch.device:
        """The device of this rank."""
        return torch.device(self.devices[self.rank].device)

    @property
    def hosts(self) -> int:
        return len({one.host for one in self.devices})

    def line(self, shared_memory: bool = False) -> str:
        """Return a line: ``computing on cuda:0, cuda:1 (NVIDIA H100), nccl between ranks``.

        Args:
            shared_memory: whether ranks of one host may use it, where they compute on processors.
        """
        gpus = len({one.gpu for one in self.devices} - {None})
        names = list(dict.fromkeys(one.device for one in self.devices))
        if not gpus:
            where = "cpu" if accelerator.count() else "cpu (no GPU is visible)"
        elif self.hosts > 1:
            where = f"{counted(gpus, 'GPU')} of {self.hosts} hosts" + (" and cpu" if "cpu" in names else "")
        else:
            where = ", ".join(names)
        if self.own.type != "cpu":
            where += f" ({accelerator.name_of(self.own)})"
        if self.ranks == 1:
            return f"computing on {where}"
        shared = shared_memory and self.own.type == "cpu" and self.hosts < self.ranks
        return f"computing on {where}, {'shared memory and ' * shared}{self.backend} between ranks"

    __str__ = line


def choose_backend(wanted: str | None, devices: Sequence[RankDevice]) -> tuple[str, str]:
    """Return the backend, such as nccl for ranks with a GPU each, and why it is gloo although there are GPUs.

    Raises:
        UserError: such a backend was asked for, and a rank has no GPU of its own.
    """
    obstacle, own = no_gpu_each(devices), accelerator.collectives()
    if obstacle is None and (without := [rank for rank, one in enumerate(devices) if not one.direct]):
        obstacle = f"the torch of {_named(without)} has no {own}"
    if wanted in accelerator.DIRECT and obstacle is not None:
        raise UserError(f"backend {wanted} needs a GPU per rank, but {obstacle}",
                        hint="use backend: gloo, under which ranks may share a GPU, start fewer ranks, or give each "
                        f"rank a GPU of its own (LOCAL_RANK, {accelerator.visibility()}, or the list machines)")
    if wanted is not None:
        return wanted, ""
    if obstacle is None:
        return own, ""
    return "gloo", obstacle if any(one.gpu for one in devices) else ""


def no_gpu_each(devices: Sequence[RankDevice]) -> str | None:
    """Return which ranks have no GPU of their own, in words; None where each has one."""
    for first in devices:
        sharing = [rank for rank, one in enumerate(devices) if one.gpu == first.gpu and one.host == first.host]
        if first.gpu is None:
            return f"{_named(sharing)} on {first.host} compute{'s' * (len(sharing) == 1)} on cpu"
        sharing = [rank for rank, one in enumerate(devices) if one.gpu == first.gpu]
        if len(sharing) > 1:
            return f"{_named(sharing)} on {first.host} share {first.device}"
    return None


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def check_backend(wanted: str | None, carriers: str, devices: Sequence[RankDevice]) -> str:
    """Return the backend of a process group that exists already.

    Args:
        wanted: the backend that the user named, if any.
        carriers: of the group, as ``torch.distributed.get_backend_config`` names them: ``cpu:gloo,cuda:nccl``.

    Raises:
        UserError: it is another than the one named, or nccl, and a rank has no GPU of its own.
    """
    by_kind = dict(one.split(":", 1) for one in carriers.split(",") if ":" in one)
    backend = by_kind.get(accelerator.kind() if any(one.gpu for one in devices) else "cpu", "gloo")
    if wanted is not None and wanted != backend:
        raise UserError(f"backend is {wanted}, but the process group, which is there already, carries these tensors by "
                        f"{backend} (its backends are {carriers})", hint="leave backend out, or make the group with "
                        + f'init_process_group("{accelerator.carriers(wanted)}")')
    if backend in accelerator.DIRECT and (obstacle := no_gpu_each(devices)) is not None:
        raise UserError(f"the process group carries tensors of GPUs by {backend}, which needs a GPU per rank, but "
                        f"{obstacle}", hint="give each rank a GPU of its own (LOCAL_RANK, "
                        f"torch.{accelerator.kind()}.set_device(...), device=...), start fewer ranks, or make the "
                        "group, or the first Pipeline, with gloo, under which ranks may share a GPU")
    return backend
