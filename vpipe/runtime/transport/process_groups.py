"""Make the process groups of vpipe, and choose the group of each transfer.

What the host reads (losses, gradient norms, stop flags, shapes, votes) always goes over gloo in host memory. Tensors
between stages go there too, unless their device has a backend of its own. Such a backend is taken to keep nccl's
rules: it knows no tags, and carries out what a group has for a pair of ranks in the order in which it was issued.
Tensors then have three groups, so that activations, gradients, and what belongs to parameters do not wait for each
other. nccl makes one communicator for each group and pair of ranks at their first transfer (with ``device_id`` in
``init_process_group`` one for all ranks of a group), which blocks the first rank until the second one comes. Since
transfers have an order, so have these (:mod:`vpipe.schedules.transfer_order`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.errors import UserError

GROUP_OF_KIND = {"F": "activations", "B": "gradients", "W": "parameters", "G": "parameters", "D": "parameters",
                 "S": "parameters"}
"""The group of a transfer of tensors between stages, by the kind of its key; the other kinds are read by the host."""

_control: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def backend_of(device: torch.device) -> str | None:
    """Return the backend that the default process group has for tensors on a device; None when it has none."""
    for entry in dist.get_backend_config().split(","):
        kind, _, name = entry.partition(":")
        if kind == device.type:
            return name
    return None


def is_ordered(device: torch.device) -> bool:
    """Return whether tensors on a device go over a backend with nccl's rules."""
    return backend_of(device) not in (None, "gloo")


def control_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return the group over which the host talks: gloo, tensors in host memory.

    It is the default group where that has gloo for the CPU; else one is made, once, by the first call, which all ranks
    must make together.
    """
    default = dist.group.WORLD
    assert default is not None, "torch.distributed is initialised"
    if backend_of(torch.device("cpu")) == "gloo":
        return default
    if default not in _control:
        _control[default] = dist.new_group(backend="gloo", timeout=timeout)
    return _control[default]


@dataclass
class TensorGroups:
    """The groups for tensors over a backend with nccl's rules, which the pipelines of a process share.

    Attributes:
        groups: by name, see :data:`GROUP_OF_KIND`.
        idle: whether all that was issued in them has ended.
    """

    groups: Mapping[str, dist.ProcessGroup]
    idle: bool = True


_tensor_groups: WeakKeyDictionary[dist.ProcessGroup, TensorGroups] = WeakKeyDictionary()


def tensor_groups(device: torch.device, timeout: timedelta) -> TensorGroups:
    """Return the groups for tensors on a device. The first call makes them, and all ranks must make it together.

    Raises:
        UserError: another pipeline has transfers under way: those of a new one could not be told from them.
    """
    default = dist.group.WORLD
    assert default is not None, "torch.distributed is initialised"
    if default not in _tensor_groups:
        backend = backend_of(device)
        _tensor_groups[default] = TensorGroups({name: dist.new_group(backend=backend, timeout=timeout)
                                                for name in dict.fromkeys(GROUP_OF_KIND.values())})
    if not _tensor_groups[default].idle:
        raise UserError("another pipeline of this process has transfers under way",
                        hint="let its training come to its end, or call its state_dict(), before you build the next "
                             "one; after a failure start the processes anew")
    return _tensor_groups[default]


_NCCL_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
                          torch.int32, torch.int64, torch.bool})


def as_sent(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as a backend with nccl's rules takes it: other dtypes than its own as their bytes."""
    return tensor if tensor.dtype in _NCCL_DTYPES else tensor.reshape(-1).view(torch.uint8)
