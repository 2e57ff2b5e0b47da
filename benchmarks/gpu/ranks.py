"""Train over several processes: 2 and 4 that share a device over gloo; one, and one per device, over its own backend.

Every run is compared with the same schedule in one process on the same device. A world of processes trains all of its
settings one after the other, each in a pipeline of its own. The backend is nccl, or that of another kind of device.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from findings import Part
from models import SMALL, small_batches, small_model

from vpipe import Cut, Execution, Order, Pipeline, Transfers, Update, accelerator

WORLD = "VPIPE_GPU_WORLD"
"""The environment variable that tells a process of a world what to do, as JSON."""
MICROBATCHES, LIMIT_S = 4 if SMALL else 8, 45.0  # a rehearsal may take four times as long
SETTINGS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"}, "1f1b": {"schedule": "1f1b", "grad_clip": 0.5},
    "1f1b, recompute": {"schedule": "1f1b", "recompute": 1.0}, "zb_h1": {"schedule": "zb_h1"},
    "zb_v": {"schedule": "zb_v", "chunks": 2}, "interleaved": {"schedule": "interleaved", "chunks": 2},
    "pipedream": {"schedule": "pipedream"}, "2bw": {"schedule": "2bw"},
    "1f1b, 2 replicas": {"schedule": "1f1b", "replicas": 2}}
"""Schedules, with fields of :class:`vpipe.Order`, :class:`vpipe.Cut` and :class:`vpipe.Update`."""


def stages_of(setting: dict[str, Any], ranks: int) -> int:
    return ranks // setting.get("replicas", 1) * setting.get("chunks", 1)


def losses(setting: dict[str, Any], ranks: int, device: str, backend: str | None = None) -> list[float]:
    """Train a setting made for ``ranks`` ranks; in this process, or as a rank of them."""
    cut = Cut(stages_of(setting, ranks), recompute=setting.get("recompute", 0.0), ranks=setting.get("replicas", 1))
    model = small_model(6 if SMALL else 14)
    pipe = Pipeline(model, Update(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
                                  grad_clip=setting.get("grad_clip")),
                    stages=cut, schedule=Order(setting["schedule"], chunks=setting.get("chunks")),
                    microbatches=MICROBATCHES, transfers=Transfers(backend, timeout_s=30),
                    execution=Execution(device), seed=1)
    return [step.loss for step in pipe.train(small_batches(16))]


@cache
def losses_alone(name: str, ranks: int, device: str) -> list[float]:
    """Return what a setting must give: the losses of one process."""
    return losses(SETTINGS[name], ranks, device)


def work(world: dict[str, Any]) -> None:
    """Be a rank of a world."""
    rank, device = int(os.environ["RANK"]), world["device"]
    accelerator.add_in_fixed_order(torch.device(device))
    if device != "cpu":
        device = f"{device}:{rank % accelerator.count()}"
    if world["own_group"]:  # as a script makes it
        accelerator.make_current(torch.device(device))
        dist.init_process_group(world["backend"])
    for name in world["settings"]:
        found = losses(SETTINGS[name], world["ranks"], device, world["backend"])
        if rank == 0:
            with Path(world["out"]).open("a") as out:
                out.write(json.dumps([name, found]) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


def run_world(part: Part, title: str, ranks: int, backend: str, names: list[str], own_group: bool = False) -> None:
    """Start the processes of a world, wait for them, and compare each setting with one process."""
    started, limit_s = time.monotonic(), LIMIT_S * (4 if part.small else 1)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        out = Path(folder) / "losses"
        world = {"device": part.device.type, "backend": backend, "ranks": ranks, "settings": names, "out": str(out),
                 "own_group": own_group}
        environment = os.environ | {WORLD: json.dumps(world), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                                    "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen([sys.executable, *sys.argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True)
                     for rank in range(ranks)]
        said = []
        try:
            for process in processes:
                said.append(process.communicate(timeout=max(1.0, started + limit_s - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            said.append(f"not finished after {limit_s:.0f} s")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = dict(map(json.loads, out.read_text().splitlines())) if out.exists() else {}
    for name in names:
        if name not in found:
            part.add(f"{title}: {name}", "did not end: " + " / ".join("; ".join(one.strip().splitlines()[-3:])
                                                                      for one in said if one.strip()), False)
            break
        alone = losses_alone(name, ranks, part.device.type)
        off = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found[name], alone, strict=True))
        part.add(f"{title}: {name}", "losses equal those of one process to the last bit" if off == 0 else
                 f"losses differ from those of one process by {off:.1e}", off <= 1e-5)
    part.add(f"{title}: time", f"{time.monotonic() - started:.0f} s with starting {ranks} processes")


def main() -> None:
    if WORLD in os.environ:
        work(json.loads(os.environ[WORLD]))
        return
    part = Part(__doc__)
    accelerator.add_in_fixed_order(part.device)
    own = "gloo" if part.on_processor or not accelerator.has_collectives() else accelerator.collectives()
    devices = 2 if part.on_processor else accelerator.count()
    if own == "gloo":
        part.add("a backend between devices", f"none for {part.device.type}: gloo takes its place")
    plain = [name for name, setting in SETTINGS.items() if "replicas" not in setting]
    run_world(part, "2 ranks share a device, gloo", 2, "gloo", [*plain, "1f1b, 2 replicas"])
    run_world(part, "4 ranks share a device, gloo", 4, "gloo", ["1f1b", "zb_v", "pipedream", "1f1b, 2 replicas"])
    run_world(part, f"1 rank, {own}, a group that the script made", 1, own, ["1f1b", "pipedream"], True)
    if devices > 1:
        ranks = 4 if devices >= 4 else 2
        run_world(part, f"{ranks} ranks, a device each, {own}", ranks, own, list(SETTINGS))
    else:
        part.add(f"{own} between devices", "left out: one is visible")


if __name__ == "__main__":
    main()
