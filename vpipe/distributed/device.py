"""Choose the device of a rank, and the backend between ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vpipe import accelerator
from vpipe.distributed.environment import local_rank, read_number
from vpipe.errors import UserError, counted


@dataclass(frozen=True)
class Visible:
    """The GPUs that this process sees, and its number on its host.

    Attributes:
        gpus: how many.
        local_rank: number of this process on its host; of the rank if that is unknown.
        current: the GPU that the program chose, by ``torch.cuda.set_device`` or as the ``device_id`` of its process
            group; None where it did not. GPU 0, the current one of every process, counts as not chosen.
        is_rank: whether ``local_rank`` is the number of the rank.
    """

    gpus: int
    local_rank: int = 0
    current: int | None = None
    is_rank: bool = False

    @classmethod
    def here(cls) -> Visible:
        """Read this process and its environment; starts no context on them."""
        bound = dist.group.WORLD.bound_device_id if dist.is_initialized() and dist.group.WORLD is not None else None
        if bound is not None and bound.type == accelerator.kind():
            current: int | None = bound.index
        else:
            current = (accelerator.current_index() or None) if accelerator.is_started() else None
        if (number := local_rank()) is not None:
            return cls(accelerator.count(), number, current)
        rank = read_number(os.environ, "RANK", "the environment") if "RANK" in os.environ else 0
        return cls(accelerator.count(), dist.get_rank() if dist.is_initialized() else rank, current, True)


def choose_device(wanted: torch.device | str | None, backend: str | None,
                  there: Visible | int | None = None) -> torch.device:
    """Return the device of this rank, a GPU always with its index.

    None takes a GPU where there is one, else the processor. A GPU without an index is the one that the program chose,
    else that of the local rank; where ranks outnumber GPUs, they share them in turn.

    Args:
        wanted: ``cpu``, ``cuda``, ``cuda:1`` or None.
        backend: that the user named, if any; under nccl no GPU is shared.
        there: what the rank sees; of another rank of this host its number there; None for this process.

    Raises:
        UserError: there is no such device, or nccl is to carry what a processor computes.
    """
    if not isinstance(there, Visible):
        there = Visible.here() if there is None else Visible(accelerator.count(), there)
    device = _parsed(wanted)
    direct = backend in accelerator.DIRECT
    if direct and (device is None or device.type != "cpu") and not there.gpus:
        raise UserError(f"backend {backend}, but this machine has no GPU" + _why_none(), hint="use backend: gloo")
    if device is None and not there.gpus:
        return torch.device("cpu")
    if device is not None and device.type == "cpu":
        if direct:
            raise UserError(f"device is cpu, but {backend} carries tensors of GPUs only",
                            hint="use backend: gloo, or leave device out")
        return torch.device("cpu")
    if not there.gpus:
        raise UserError(f"device is {wanted}, but this process sees no GPU{_why_none()}",
                        hint="leave device out, or set it to cpu")
    index = there.current if device is None or device.index is None else device.index
    if index is None:
        if direct and there.local_rank >= there.gpus > 1 and not there.is_rank:
            raise UserError(f"backend {backend} needs a GPU per rank: GPU {there.local_rank} is wanted, but this "
                            f"host has {counted(there.gpus, 'GPU')}, counted from 0",
                            hint="use backend: gloo, under which ranks may share a GPU, or start fewer ranks here")
        index = there.local_rank % there.gpus
    if index >= there.gpus:
        kind = accelerator.kind()
        names = f"{kind}:0" if there.gpus == 1 else f"{kind}:0 to {kind}:{there.gpus - 1}"
        raise UserError(f"device is {wanted}, but this process sees {counted(there.gpus, 'GPU')}, {names}",
                        hint=f"write one of these, or {kind}, which takes the GPU of this rank; CUDA_VISIBLE_DEVICES "
                        "decides which a process sees")
    return torch.device(accelerator.kind(), index)


def _parsed(wanted: torch.device | str | None) -> torch.device | None:
    kind = accelerator.kind()
    hint = f"write cpu, {kind} (the GPU of this rank) or a GPU by its number, such as {kind}:1; or leave it out"
    if wanted is None:
        return None
    if not isinstance(wanted, (str, torch.device)):
        raise UserError(f"device is {wanted!r}, which names no device", hint=hint)
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UserError(f"device is '{wanted}', which names no device", hint=hint) from None
    if device.type not in ("cpu", kind):
        raise UserError(f"device is {wanted}: this torch computes on cpu and {kind} only", hint=hint)
    return device


def _why_none() -> str:
    return "" if torch.version.cuda or torch.version.hip else f" (torch {torch.__version__} is built without CUDA)"


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
    """

    rank: int
    devices: tuple[RankDevice, ...]
    backend: str

    @property
    def ranks(self) -> int:
        return len(self.devices)

    @property
    def own(self) -> torch.device:
        """The device of this rank."""
        return torch.device(self.devices[self.rank].device)

    @property
    def hosts(self) -> int:
        """Return the number of hosts."""
        return len({one.host for one in self.devices})

    def __str__(self) -> str:
        return self.line()

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


def choose_backend(wanted: str | None, devices: Sequence[RankDevice]) -> tuple[str, str]:
    """Return the backend, such as nccl for ranks with a GPU each, and why it is gloo although there are GPUs.

    Raises:
        UserError: such a backend was asked for, and a rank has no GPU of its own.
    """
    obstacle, own = no_gpu_each(devices), accelerator.collectives()
    if obstacle is None and (without := [rank for rank, one in enumerate(devices) if not one.direct]):
        obstacle = f"the torch of {_named(without)} has no {own}"
    if wanted in accelerator.DIRECT and obstacle is not None:
        raise UserError(f"backend {wanted} needs a GPU per rank, but {obstacle}", hint=_REMEDY)
    if wanted is not None:
        return wanted, ""
    if obstacle is None:
        return own, ""
    return "gloo", obstacle if any(one.gpu for one in devices) else ""


_REMEDY = ("use backend: gloo, under which ranks may share a GPU, start fewer ranks, or give each rank a GPU of its "
           "own (LOCAL_RANK, CUDA_VISIBLE_DEVICES, or the list machines)")


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
                        f"{obstacle}", hint="give each rank a GPU of its own (LOCAL_RANK, torch.cuda.set_device(...), "
                        "device=...), start fewer ranks, or make the group, or the first Pipeline, with gloo, under "
                        "which ranks may share a GPU")
    return backend
