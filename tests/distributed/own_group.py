"""What a rank of the tests of process groups runs: a program that makes its group itself, or is started by srun.

Its arguments are its rank, a folder that the ranks share, the port of a store and what it does, below.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vpipe import Model, Pipeline, Transfers, accelerator
from vpipe.distributed.init import join_world
from vpipe.distributed.watchdog import watch
from vpipe.errors import UserError


def losses() -> list[float]:
    """Train two stages for three steps."""
    torch.manual_seed(0)
    model = Model.sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), loss=nn.CrossEntropyLoss())
    pipe = Pipeline(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), stages=2, microbatches=2,
                    transfers=Transfers(timeout_s=10))
    batches = [{"input": torch.arange(16.0).reshape(4, 4) / 16, "target": torch.tensor([0, 1, 1, 0])}] * 3
    return [step.loss for step in pipe.train(batches)]


def groups(rank: int, folder: Path, port: int) -> None:
    """Make one group after the other; each is watched, and each is the program's to destroy."""
    dist.Backend.register_backend(
        "mine", lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout), devices=["cpu"])
    tcp = f"tcp://127.0.0.1:{port}"
    watches = []
    for number, (backend, where) in enumerate([
            ("gloo", tcp), (None, f"file://{folder}/store"), ("cpu:gloo", f"file://{folder}/other"),
            ("mine", f"file://{folder}/third")]):
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        if backend != "mine":
            print(number, *losses(), flush=True)
        else:
            print(number, join_world(timeout_s=6), flush=True)
        watchdog = watch.watchdog
        assert watchdog is not None
        assert watchdog not in watches
        watches.append(watchdog)
        if number < 3:
            dist.destroy_process_group()
    if rank == 1:
        os._exit(7)  # without a word
    time.sleep(30)


def again(rank: int, folder: Path, port: int) -> None:
    """Destroy the group that vpipe made, and have it make another."""
    print(*losses(), flush=True)
    dist.destroy_process_group()
    print(*losses(), flush=True)


def srun(rank: int, folder: Path, port: int) -> None:
    """Join by what srun says in the environment."""
    print(*losses(), os.environ["LOCAL_RANK"], dist.get_backend_config(), flush=True)


def gpus(rank: int, folder: Path, port: int) -> None:
    """Join as if there were GPUs and nccl; in a folder called shared, both ranks are shown the same one."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"})
    made: list[object] = []
    make, uuids = dist.init_process_group, ["same", "same"] if folder.name == "shared" else ["x", "y"]

    def init(backend: str, **settings: Any) -> None:
        made.append([backend, settings["timeout"].total_seconds(), "device_id" in settings])
        make("gloo", **settings)

    for module, name, value in ((torch.cuda, "device_count", lambda: 2), (torch.cuda, "set_device", made.append),
                                (accelerator, "uuid_of", lambda device: uuids[rank]),
                                (accelerator, "name_of", lambda device: "made up"),
                                (dist, "is_nccl_available", lambda: True), (dist, "init_process_group", init)):
        setattr(module, name, value)
    for backend, at in (("nccl", port), (None, int(os.environ["SECOND_PORT"]))):
        os.environ["MASTER_PORT"] = str(at)
        try:
            print(join_world(backend, timeout_s=10), flush=True)
        except UserError as error:
            print(error, flush=True)
        print(*made, flush=True)
        made.clear()
        if dist.is_initialized():
            return


if __name__ == "__main__":
    faulthandler.dump_traceback_later(50, exit=True)
    torch.set_num_threads(1)
    job = {"groups": groups, "again": again, "srun": srun, "gpus": gpus}[sys.argv[4]]
    job(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
