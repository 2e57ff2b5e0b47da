"""Find a layer that PyTorch divides over ranks, or whose gradients it adds there, at moments of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vpipe.errors import Problem, UserError

_REPLICAS = "stages=Cut(2, ranks=2) has every stage on two ranks, and adds their gradients"


@contextmanager
def none_made(name: str) -> Iterator[None]:
    """Refuse wrappers as they are made, for the layer called ``name``: they begin by waiting for all ranks, of which
    some build other layers."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # what nobody has imported is not in use
    kinds = [DistributedDataParallel, *([] if fsdp is None else [fsdp.FullyShardedDataParallel])]
    before = [kind.__init__ for kind in kinds]

    def refuse(wrapper: nn.Module, *arguments: object, **options: object) -> NoReturn:
        problem = _wrapped(f"layer '{name}'", wrapper, divided=True)
        assert problem is not None, "it is one of these kinds"
        raise UserError.all_of([problem])

    try:
        for kind in kinds:
            setattr(kind, "__init__", refuse)  # noqa: B010 - of a class, which mypy would not let be assigned
        yield
    finally:
        for kind, made in zip(kinds, before, strict=True):
            setattr(kind, "__init__", made)  # noqa: B010


def find_wrapper(name: str, module: nn.Module, divided: bool) -> Problem | None:
    """Return why a layer, called ``name``, cannot be in a stage: it is sharded or wrapped.

    Args:
        divided: whether the schedule gathers the weights that ``fully_shard`` divides.
    """
    for path, part in module.named_modules():
        where = f"layer '{name}'" + (f" ('{path}' in it)" if path else "")
        if (problem := _wrapped(where, part, divided)) is not None:
            return problem
    return None


def _wrapped(where: str, part: nn.Module, divided: bool) -> Problem | None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded: tuple[type, ...] = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    if isinstance(part, DistributedDataParallel):
        return Problem(f"{where} is wrapped in DistributedDataParallel, which adds gradients when no schedule says "
                       "so: its ranks may wait for one another for ever", f"give the module itself: {_REPLICAS}")
    if isinstance(part, sharded) and not (divided and isinstance(part, sharded[:1])):
        how = "fully_shard" if isinstance(part, sharded[:1]) else "FullyShardedDataParallel"
        return Problem(f"{where} is sharded by {how}, which gathers weights and adds gradients when no schedule "
                       f"says so: some would be lost", f"give the module without {how}: {_REPLICAS}; or the "
                       "pipeline one dimension of a mesh, and fully_shard another: Execution(mesh=mesh, data='dp')")
    return None
