"""Compute with DTensors: parameters that layers share out over the ranks of a mesh beside the pipeline.

The rest of the runtime works on :func:`local` shards, which are plain tensors, and asks here for what needs the other
ranks: sums of partial gradients, norms, whole tensors. Those functions are collectives of the ranks that hold the
tensors; they run the same program, so all of them call it in the same order. What they add up they add in the order of
the ranks, so that all get the same bits.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from vpipe.errors import UserError
from vpipe.torch_private import TorchDispatchMode, tree_map_only

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor, sharded or replicated."""
    # What nobody has imported is not in use, and torch.distributed.tensor takes as long to import as all of vpipe.
    module = None if type(tensor) in (Tensor, Parameter) else sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, in the same memory; a plain tensor is its own."""
    if not is_sharded(tensor):
        return tensor
    part: Any = tensor._local_tensor  # to_local() would be recorded by autograd, which sees neither reads nor writes
    done: Tensor = part.wait() if hasattr(part, "wait") else part  # of a collective that may still be under way
    return done


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor other memory: ``tensor.data = data``, which leaves a DTensor its old shard and does not say so."""
    tensor.data = data
    if is_sharded(tensor) and is_sharded(data):
        tensor._local_tensor, tensor._spec = data._local_tensor, data._spec


def wrapped(part: Tensor, tensor: Tensor, placements: Sequence[Placement] | None = None) -> Tensor:
    """Return a part that this process has as the kind of tensor that another one is, without a copy.

    Args:
        placements: other ones than the tensor's.
    """
    if not is_sharded(tensor):
        return part
    kind, places = sys.modules["torch.distributed.tensor"].DTensor, placements or tensor.placements
    found: Tensor = kind.from_local(part, tensor.device_mesh, places, run_check=False, shape=tensor.shape,
                                    stride=tensor.stride())
    return found


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor as a plain one, on every rank of its mesh; a collective."""
    if not is_sharded(tensor):
        return tensor
    detached: Any = tensor.detach()
    placement = detached.placements[-1]
    if (blocks := getattr(placement, "split_factor", 1)) == 1 or detached.device_mesh.ndim > 1:
        full: Tensor = detached.full_tensor()
        return full
    # Each rank has a part of every block, which torch 2.11 cannot put together.
    kind, dim = type(detached), placement.dim
    part = local(detached)
    own = kind.from_local(part.reshape(*part.shape[:dim], blocks, -1, *part.shape[dim + 1:]), detached.device_mesh,
                          [sys.modules["torch.distributed.tensor"].Shard(dim + 1)], run_check=False)
    gathered: Tensor = own.full_tensor()
    return gathered.flatten(dim, dim + 1)


def parted(tensor: Tensor, model: Tensor) -> Tensor:
    """Return a whole tensor as the kind of tensor that ``model`` is: this process takes its part. No collective."""
    if not is_sharded(model) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import Replicate, distribute_tensor
    places = model.placements if tensor.shape == model.shape else [Replicate()] * model.device_mesh.ndim
    found: Tensor = distribute_tensor(tensor, model.device_mesh, places, src_data_rank=None)
    return found


def shard_of(tensor: Tensor) -> str:
    """Return which shard of a tensor this process holds: the same for ranks that must hold the same numbers."""
    if not is_sharded(tensor):
        return ""
    places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=False)
    return ",".join("" if place.is_replicate() else str(at) for at, place in places)


def check_meshes(named: Mapping[str, Tensor], rank: int, pipeline: Iterable[int]) -> None:
    """Refuse parameters that are shared out over several ranks of one pipeline, which have different stages.

    Args:
        named: parameters of a rank.
        rank, pipeline: that one and all of its pipeline, as the job counts them.
    """
    for name, tensor in named.items():
        if is_sharded(tensor) and (others := {*tensor.device_mesh.mesh.flatten().tolist()} & {*pipeline} - {rank}):
            names = tensor.device_mesh.mesh_dim_names
            over = "" if names is None else f" along '{', '.join(names)}'"
            raise UserError(f"'{name}' is a DTensor{over} over ranks {', '.join(map(str, sorted({rank, *others})))}, "
                            "which are one pipeline: each has stages of its own",
                            hint="shard over ranks beside the pipeline: give the pipeline one dimension of a mesh, "
                                 "and the layer another")


def completed(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], names: Sequence[str],
              ) -> list[Tensor | None]:
    """Return gradients that are placed as their parameters: of partial ones the parts of all ranks are added.

    A collective of one message per group of ranks and dtype; a gradient that is placed otherwise has its own.

    Raises:
        UserError: a gradient is a part of something else than a sum.
    """
    done = list(gradients)
    if not any(map(is_sharded, done)):
        return done
    from torch.distributed.tensor import Replicate
    partial: dict[tuple[DeviceMesh, int, torch.dtype], list[int]] = defaultdict(list)
    for i, gradient in enumerate(done):
        if not is_sharded(gradient):
            continue
        for dim, place in enumerate(gradient.placements):
            if place.is_partial():
                if not place.is_partial("sum"):
                    raise UserError(f"the gradient of '{names[i]}' is {place}, a part of something else than a sum",
                                    hint="let its layer give every rank a part of a sum, Partial()")
                partial[gradient.device_mesh, dim, gradient.dtype].append(i)
    for (mesh, dim, _), members in partial.items():
        parts = [local(gradient) for i in members if (gradient := done[i]) is not None]
        first, *others = _gathered(torch.cat([part.reshape(-1) for part in parts]), mesh, dim)
        total = added(first, others)
        for i, part, summed in zip(members, parts, torch.split(total, [p.numel() for p in parts]), strict=True):
            gradient = done[i]
            assert is_sharded(gradient)
            places = [Replicate() if at == dim else place for at, place in enumerate(gradient.placements)]
            done[i] = wrapped(summed.view(part.shape), gradient, places)
    return [gradient.redistribute(placements=parameter.placements)
            if is_sharded(gradient) and is_sharded(parameter) and gradient.placements != parameter.placements
            else gradient for gradient, parameter in zip(done, parameters, strict=True)]


def added(total: Tensor, others: Iterable[Tensor]) -> Tensor:
    """Add others to a tensor, in their order, so that all ranks get the same bits; return it."""
    for other in others:
        total += other
    return total


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each tensor, in double precision on the host: every shard counts once, a replica not again.

    A collective of one message per group of ranks.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    found = torch.stack([torch.linalg.vector_norm(t.coalesce().values() if t.is_sparse else t)
                         for t in map(local, tensors)]).double()
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors if is_sharded(tensor)):
        for dim in reversed(range(mesh.ndim)):
            divided = [is_sharded(tensor) and tensor.device_mesh == mesh and not tensor.placements[dim].is_replicate()
                       for tensor in tensors]
            if any(divided):
                squares = torch.zeros_like(found)
                for part in _gathered(found, mesh, dim):
                    squares += part.square()
                found = torch.where(torch.tensor(divided, device=found.device), squares.sqrt(), found)
    return found.cpu()


def _gathered(flat: Tensor, mesh: DeviceMesh, dim: int) -> Sequence[Tensor]:
    """Return the vectors of all ranks along a dimension of a mesh, in their order."""
    parts = [torch.empty_like(flat) for _ in range(mesh.size(dim))]
    dist.all_gather(parts, flat, group=mesh.get_group(dim))
    return parts


class DrawnAsOnOneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, operations that draw random numbers for DTensors draw those of the whole tensor.

    A rank draws the numbers of the whole tensor, from the generator that the stage has seeded alike on all of them, and
    takes those of its shard: dropout does not depend on how many ranks share a tensor. Torch's own way has a state of
    its own, and on processors draws the same for every shard.

    A layer that computes with local shards (``use_local_output=True``, the default of ColwiseParallel and of
    ``to_local``) hands over plain tensors, of which nobody knows that they are parts: there every rank draws the same
    numbers for its own part. Where dropout comes after a sharded operation, keep its output a DTensor.

    Attributes:
        drew: whether some did.
    """

    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not args or not is_sharded(tensor := args[0]):
            return func(*args, **kwargs)
        self.drew = True
        if func is torch.ops.aten.native_dropout.default:
            factors, mask = func(torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args[1:])
            return tensor * parted(factors, tensor), parted(mask, tensor)
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        if given.get("dropout_p"):
            raise UserError(f"attention drops {given['dropout_p']:g} of its weights within one operation on DTensors, "
                            "where nobody draws them as on one device",
                            hint="set its dropout to 0, or multiply and drop in operations of their own")
        others, named = tree_map_only(torch.Tensor, whole, (args[1:], kwargs))
        if func._schema.name.endswith("_"):
            drawn = func(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *others, **named)
            local(tensor).copy_(local(parted(drawn, tensor)))
            return tensor
        if len(func._schema.returns) > 1:  # attention without dropout, which draws nothing
            return func(*args, **kwargs)
        return parted(func(whole(tensor), *others, **named), tensor)
