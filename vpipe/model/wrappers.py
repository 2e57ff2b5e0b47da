"""Find a layer that PyTorch divides over ranks, or whose gradients it adds there, at moments of its own."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vpipe.errors import Problem

_REPLICAS = "replicas=2 has every stage on two ranks, and adds their gradients"


def find_wrapper(name: str, module: nn.Module) -> Problem | None:
    """Return why a layer, called ``name``, cannot be in a stage: it has DTensors, or is sharded or wrapped."""
    # What nobody has imported is not in use, and torch.distributed.tensor takes as long to import as all of vpipe.
    fsdp, tensor = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch.distributed.tensor")
    sharded: tuple[type, ...] = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    divided: Any = () if tensor is None else tensor.DTensor
    for path, part in module.named_modules():
        where = f"layer '{name}'" + (f" ('{path}' in it)" if path else "")
        if isinstance(part, DistributedDataParallel):
            return Problem(f"{where} is wrapped in DistributedDataParallel, which adds gradients when no schedule says "
                           "so: its ranks may wait for one another for ever", f"give the module itself: {_REPLICAS}")
        if isinstance(part, sharded):
            how = "fully_shard" if isinstance(part, sharded[:1]) else "FullyShardedDataParallel"
            return Problem(f"{where} is sharded by {how}, which gathers weights and adds gradients when no schedule "
                           f"says so: some would be lost", f"give the module without {how}: {_REPLICAS}, and more "
                           "stages leave less of the model on each rank")
        for own, value in (*part._parameters.items(), *part._buffers.items()) if divided else ():
            if isinstance(value, divided):
                full = ".".join(filter(None, (name, path, own)))
                return Problem(f"'{full}' is a DTensor ({', '.join(map(str, value.placements))} over "
                               f"{value.device_mesh.size()} ranks), but stages compute with plain tensors",
                               f"build layer '{name}' without parallelize_module, distribute_module, distribute_tensor "
                               "and fully_shard; more stages leave less of the model on each rank")
    return None
