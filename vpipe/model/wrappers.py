"""Find a layer that PyTorch divides over ranks, or whose gradients it adds there, at moments of its own."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vpipe.errors import Problem

_REPLICAS = "stages=Cut(2, ranks=2) has every stage on two ranks, and adds their gradients"


def find_wrapper(name: str, module: nn.Module, divided: bool) -> Problem | None:
    """Return why a layer, called ``name``, cannot be in a stage: it is sharded or wrapped.

    Args:
        divided: whether the schedule gathers the weights that ``fully_shard`` divides.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # what nobody has imported is not in use
    sharded: tuple[type, ...] = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    for path, part in module.named_modules():
        where = f"layer '{name}'" + (f" ('{path}' in it)" if path else "")
        if isinstance(part, DistributedDataParallel):
            return Problem(f"{where} is wrapped in DistributedDataParallel, which adds gradients when no schedule says "
                           "so: its ranks may wait for one another for ever", f"give the module itself: {_REPLICAS}")
        if isinstance(part, sharded) and not (divided and isinstance(part, sharded[:1])):
            how = "fully_shard" if isinstance(part, sharded[:1]) else "FullyShardedDataParallel"
            return Problem(f"{where} is sharded by {how}, which gathers weights and adds gradients when no schedule "
                           f"says so: some would be lost", f"give the module without {how}: {_REPLICAS}; or the "
                           "pipeline one dimension of a mesh, and fully_shard another: Execution(mesh=mesh, data='dp')")
    return None
