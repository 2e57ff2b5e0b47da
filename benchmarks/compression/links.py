"""Time and bytes of an update between two hosts whose cables are limited.

Hosts are network namespaces (tests/system/hosts.py), which needs root. All ways live in the same two processes and take
turns.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch.distributed as dist
from task import WAYS, batches, pipeline

from vpipe.distributed import join_world

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "system"))

from hosts import Hosts, missing

RATES = ("25mbit", "100mbit", "1gbit")
STEPS = 3
PORT = "29500"
PATIENCE_S = 900.0


def work(rounds: int, out: Path) -> None:
    """One of the two ranks: round 0 warms up, then every way has a turn per round. Writes what it measured as JSON."""
    join_world(timeout_s=300.0)
    running = {way: pipeline(way, seed=0) for way in WAYS}
    steps = {way: pipe.train(batches(0)) for way, pipe in running.items()}
    seconds: dict[str, list[float]] = {way.name: [] for way in WAYS}
    sent: dict[str, float] = {}
    for number in range(rounds + 1):
        for way in WAYS:
            [worker] = running[way].engine.workers.values()
            dist.barrier()
            next(steps[way])
            before, started = worker.transport.bytes_sent, perf_counter()
            list(islice(steps[way], STEPS))
            if number:
                seconds[way.name].append((perf_counter() - started) / STEPS)
            sent[way.name] = (worker.transport.bytes_sent - before) / STEPS
    out.write_text(json.dumps({"seconds": seconds, "sent": sent}))
    dist.barrier()
    os._exit(0)


def measure(rounds: int, arguments: list[str]) -> str:
    """A Markdown table for every rate of the cables."""
    reason = missing()
    if reason is not None:
        raise SystemExit(reason)
    return "\n\n".join(f"cables: {rate}\n\n{_table(*_at(rate, arguments))}" for rate in RATES)


def _at(rate: str, arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the two ranks measured."""
    with tempfile.TemporaryDirectory() as folder, Hosts(2, Path(folder) / "hosts") as hosts:
        files = [Path(folder) / f"rank{rank}.json" for rank in range(2)]
        for host in hosts:
            hosts.limit(host, rate)
        command = [sys.executable, Path(arguments[0]).resolve(), *arguments[1:]]  # they start in another folder
        ranks = [host.popen(command, env={
            **host.environment(), "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
            "COMPRESSION_OUT": str(files[rank])}) for rank, host in enumerate(hosts)]
        statuses = [process.wait(PATIENCE_S) for process in ranks]
        if any(statuses):
            raise SystemExit(f"the ranks ended with {statuses}: see above")
        first, second = (json.loads(file.read_text()) for file in files)
        return first, second


def _table(first: dict[str, Any], second: dict[str, Any]) -> str:
    lines = ["| way | KB per update, both ways | of none | ms per update | min | speed, none = 1 |",
             "|---|---:|---:|---:|---:|---:|"]
    base = WAYS[0].name
    for way in WAYS:
        own, plain = first["seconds"][way.name], first["seconds"][base]
        sent, whole = (first["sent"][name] + second["sent"][name] for name in (way.name, base))
        ratio = median(without / coded for without, coded in zip(plain, own, strict=True))
        lines.append(f"| {way.name} | {sent / 1e3:,.0f} | {sent / whole:.3f} | {median(own) * 1e3:.0f} | "
                     f"{min(own) * 1e3:.0f} | {ratio:.2f} |")
    return "\n".join(lines)
