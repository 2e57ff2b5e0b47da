"""Draw random numbers for DTensors as one device would: dropout does not depend on how many ranks share a tensor.

A rank draws the numbers of the whole tensor, from the generator that the stage has seeded alike on all of them, and
takes those of its shard. Torch's own way has a state of its own, and on processors draws the same for every shard.

A layer that computes with local shards (``use_local_output=True``, the default of ColwiseParallel and of ``to_local``)
hands over plain tensors, of which nobody knows that they are parts: there every rank draws the same numbers for its own
part. Where dropout comes after a sharded operation, keep its output a DTensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from vpipe.errors import UserError
from vpipe.runtime.sharded_tensors import is_sharded, local, parted, whole


class DrawnAsOnOneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, operations that draw random numbers for DTensors draw those of the whole tensor.

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
