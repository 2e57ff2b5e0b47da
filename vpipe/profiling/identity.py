"""What a profile is of, and whether it is the one that is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

import torch
from torch import Tensor

from vpipe.distributed.device import device_name
from vpipe.errors import UserError
from vpipe.model.layer import Model
from vpipe.plan.profile import Identity, Profile
from vpipe.profiling.device import shared_bytes, usable_cores
from vpipe.profiling.kinds import code, digest, structure

_MUST_AGREE = {"model_name": "the model", "layers": "the number of layers", "model": "the digest of the layers",
               "microbatch_size": "the microbatch size", "optimizer": "the optimizer", "device": "the device",
               "threads": "the threads per rank", "precision": "the precision"}


def identify(model: Model, microbatch: Mapping[str, Tensor], *, model_name: str, optimizer: str,
             device: torch.device | str, ranks_per_host: int, backend: str, threads: int | None = None,
             ranks: int | None = None, hosts: int = 1, cores: int | None = None,
             precision: str = "fp32") -> Identity:
    """The identity of a profile that would be measured here and now.

    Args:
        microbatch: its fields; dimension 0 counts samples.
        model_name: family and size, for people.
        optimizer: its name, and what else of it costs.
        threads: per rank; those of this process when left out.
        ranks: of all hosts; those of one when left out.
        cores: how many ranks of a host can compute at once; on a processor what this process may use when left out.
        precision: of the numbers.
    """
    device, structures = torch.device(device), [structure(layer) for layer in model.layers]
    threads = threads or torch.get_num_threads()
    if cores is None and device.type != "cuda":
        cores = max(1, len(usable_cores()) // threads)
    return Identity(
        model=digest(model, structures, microbatch), model_name=model_name,
        layers=len(model), microbatch_size=len(microbatch[model.batch[0]]) if model.batch else 0, optimizer=optimizer,
        device=device_name(device), threads=threads, ranks_per_host=ranks_per_host, backend=backend,
        torch=str(torch.__version__), ranks=ranks or ranks_per_host, hosts=hosts, cores=cores,
        device_bytes=shared_bytes(device, cores), vpipe=version("vpipe"), code=code(model, structures),
        precision=precision)


def require(profile: Profile, wanted: Identity, where: str | None = None) -> None:
    """Refuse a profile of something else.

    How many ranks shared the host, what carried the transfers, and torch's version may differ: the figures still say
    most of what is wanted.

    Args:
        where: the file that it comes from, for messages.

    Raises:
        UserError: it is of another model, microbatch size, optimizer, precision or device; the text has both.
    """
    for name, what in _MUST_AGREE.items():
        found, needed = getattr(profile.identity, name), getattr(wanted, name)
        if found != needed:
            raise UserError(f"the profile is of another run: {what} is {found} there, and {needed} here", where=where,
                            hint="measure this one: vpipe profile CONFIG -o profile.json")
