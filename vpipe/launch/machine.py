"""Whether this machine can run what a config asks for."""

from __future__ import annotations

from vpipe.errors import UserError
from vpipe.train.config import Config


def check_machine(config: Config) -> None:
    """Refuse a backend that this machine has no devices for.

    Raises:
        UserError: nccl without a GPU per rank.
    """
    if config.parallel.backend != "nccl":
        return
    import torch

    ranks, gpus = config.parallel.model_parallel_size, torch.cuda.device_count()
    if gpus < ranks:
        raise UserError(f"backend nccl needs a GPU per rank: {ranks} ranks, {gpus} GPUs",
                        hint="set parallel.backend to gloo (in VPipe's form, 'distributed_backend': 'gloo')")
