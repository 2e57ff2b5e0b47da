"""What launch.keep_memory gains: two worlds of two ranks, one with it and one without, take turns. See README.md.

python benchmarks/allocation/run.py [--rounds N] [--steps N] [--only REGEX]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "throughput"))

RANK = "ALLOCATION_KEEPS"
"""Environment variable of a rank: 1 in the world that keeps its memory, else 0."""

ENTRANTS = {f"{schedule} m{m}": (schedule, m) for schedule in ("1f1b", "pipedream") for m in (8, 4, 1)}
Took = dict[tuple[str, bool], list[list[list[float]]]]
"""By system, and whether memory was kept: for every turn and rank what :meth:`World.turn` says."""

HEAD, TAIL = 1, 1
"""Updates of a turn before and after those that count: a pipeline that stays full must be full at both ends."""


def work(keeps: bool) -> None:
    """Be a rank: for every line of the input, a turn of that system, and a line with what it took."""
    import torch
    from batches import batches
    from model import SEED, adamw, gpt

    from vpipe import Asynchronous, Execution, Pipeline
    from vpipe.app.launch.rank_env import keep_memory

    said = keep_memory() if keeps else "malloc as it comes"
    torch.set_num_threads(1)
    running: dict[str, Iterator[Any]] = {}
    print(json.dumps(said), flush=True)
    for line in sys.stdin:
        name, steps = json.loads(line)
        schedule, m = ENTRANTS[name]
        if name not in running:
            pipe = Pipeline(gpt(), adamw, stages=[12, 6],
                            schedule=Asynchronous(schedule, update_every=m if schedule == "pipedream" else None),
                            microbatches=m, execution=Execution(device="cpu"), seed=SEED)
            running[name] = pipe.train(batches())
        for _ in range(HEAD):
            next(running[name])
        before = perf_counter(), process_time(), faults()
        for _ in range(steps):
            next(running[name])
        after = perf_counter(), process_time(), faults()
        for _ in range(TAIL):
            next(running[name])
        print(json.dumps([(end - begin) / steps for begin, end in zip(before, after, strict=True)]
                         + [of_status("VmRSS"), of_status("VmHWM")]), flush=True)
    os._exit(0)  # streams still hold microbatches


def faults() -> int:
    """Page faults of this process so far that read nothing from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def of_status(key: str) -> int:
    """A size in /proc/self/status, in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


class World:
    """Two ranks that wait for their turn."""

    def __init__(self, keeps: bool) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        clean = {name: text for name, text in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
        self._ranks = [subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**clean, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                 "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", RANK: str(int(keeps))}) for rank in range(2)]
        self.said = self._heard()[0]

    def turn(self, name: str, steps: int) -> list[list[float]]:
        """What it took each rank: seconds, processor seconds, page faults, each per update; memory now, and at most."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps([name, steps]) + "\n")
            rank.stdin.flush()
        return self._heard()

    def _heard(self) -> list[Any]:
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(lines):
            raise SystemExit("a rank failed: see above")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Whatever they are in."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def main() -> None:
    """Let both worlds make the same updates, turn by turn, and print the table."""
    if RANK in os.environ:
        work(os.environ[RANK] == "1")
    from machine import description

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="turns of every system, after one to warm up")
    parser.add_argument("--steps", type=int, default=3, help="updates per turn that count")
    parser.add_argument("--only", default="", metavar="REGEX", help="only the systems whose names match")
    options = parser.parse_args()
    names = [name for name in ENTRANTS if re.search(options.only, name)]
    took: Took = {(name, keeps): [] for name in names for keeps in (False, True)}
    worlds = {keeps: World(keeps) for keeps in (False, True)}
    try:
        print("; ".join(world.said for world in worlds.values()), flush=True)
        started = perf_counter()
        for number in range(options.rounds + 1):
            for name in names:
                for keeps in ((False, True), (True, False))[number % 2]:
                    took[name, keeps].append(worlds[keeps].turn(name, options.steps))
            print(f"  round {number} of {options.rounds}, {perf_counter() - started:.0f} s", flush=True)
    finally:
        for world in worlds.values():
            world.end()
    print(f"\n{table(names, took)}\n\n{memory(names, took)}\n\n{description()}\n{' '.join(['python', *sys.argv])}")


def table(names: list[str], took: Took) -> str:
    """A row per system: medians over the turns but the first."""
    lines = ["| system | ms per update | kept | gain | CPU ms of both ranks | kept | gain | page faults | kept |",
             "|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for name in names:
        cells: list[list[float]] = []
        for keeps in (False, True):
            turns = took[name, keeps][1:]
            cells.append([1e3 * median(turn[0][0] for turn in turns),
                          1e3 * median(sum(rank[1] for rank in turn) for turn in turns),
                          median(sum(rank[2] for rank in turn) for turn in turns)])
        (wall, cpu, many), (wall_kept, cpu_kept, few) = cells
        lines.append(f"| {name} | {wall:.0f} | {wall_kept:.0f} | {wall / wall_kept - 1:+.1%} | {cpu:.0f} | "
                     f"{cpu_kept:.0f} | {cpu / cpu_kept - 1:+.1%} | {many:,.0f} | {few:,.0f} |")
    return "\n".join(lines)


def memory(names: list[str], took: Took) -> str:
    """What the ranks hold with all systems in them, after a third of the rounds and at the end, and held at most."""
    lines = ["| MB resident, rank 0 + rank 1 | after a third | at the end | at most |", "|---|---:|---:|---:|"]
    for keeps, what in ((False, "malloc as it comes"), (True, "kept")):
        turns = took[names[-1], keeps]
        cells = [" + ".join(f"{rank[kind] / 1e6:.0f}" for rank in turn)
                 for turn, kind in ((turns[len(turns) // 3], 3), (turns[-1], 3), (turns[-1], 4))]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
