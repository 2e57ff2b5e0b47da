"""What it costs per step to compare the batches that ranks read: see README.md beside this file.

    torchrun --nproc-per-node 4 benchmarks/batches/run.py
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from time import perf_counter, process_time, thread_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vpipe import Asynchronous, Layer, Model, Pipeline
from vpipe.distributed import join_world
from vpipe.runtime.batch_comparison import BatchComparison
from vpipe.runtime.microbatches import Batch

STEPS, ROUNDS = 40, 6
"""Of a turn of either pipeline, the first quarter of which does not count; and how many turns each has."""

BATCHES = {"16 x 128 int64": lambda: torch.randint(30_000, (16, 128)),
           "64 x 3 x 224 x 224 fp32": lambda: torch.randn(64, 3, 224, 224)}


class Front(nn.Module):
    """Computes next to nothing, so that the rest of a step shows."""

    def forward(self, field: Tensor) -> Tensor:
        return field.flatten(1)[:, :8].float() / 30_000


class Loss(nn.Module):
    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(hidden, target)


def pipeline(schedule: str, compared: bool) -> Pipeline:
    layers = [Layer("front", Front, ("input",), ("h",)),
              *(Layer(f"linear{i}", lambda: nn.Linear(8, 8)) for i in range(dist.get_world_size())),
              Layer("loss", Loss, ("h", "target"), ("loss",))]
    pipe = Pipeline(Model(layers, ("input", "target")), lambda parameters: torch.optim.SGD(parameters, lr=0.01),
                    stages=dist.get_world_size(),
                    schedule=Asynchronous(schedule, update_every=None if schedule == "1f1b" else 4), microbatches=4)
    if not compared:
        for worker in pipe.engine.workers.values():
            worker.comparison = None
    return pipe


class Timed:
    """Adds up the processor time that the main thread of this rank spends in the comparison."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(("checksums", "post", "compare"), 0.0)
        for name in self.spent:
            setattr(BatchComparison, name, self._timed(name, getattr(BatchComparison, name)))

    def _timed(self, name: str, plain: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            started = thread_time()
            try:
                return plain(*arguments)
            finally:
                self.spent[name] += thread_time() - started

        return timed


def steps(pipe: Pipeline, batch: Batch) -> list[tuple[float, float]]:
    """Of every step of a turn the seconds, and those of the processor, all threads of this rank together."""

    def batches() -> Iterator[Batch]:
        for _ in range(STEPS):
            yield batch

    ends = [(perf_counter(), process_time())]
    for _ in pipe.train(batches()):
        ends.append((perf_counter(), process_time()))
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(ends)][STEPS // 4:]


def main() -> None:
    torch.set_num_threads(1)
    join_world()
    timed = Timed()
    for schedule in ("1f1b", "pipedream"):
        for name, make in BATCHES.items():
            torch.manual_seed(0)
            batch = {"input": make(), "target": torch.randint(8, (make().shape[0],))}
            pipes = {compared: pipeline(schedule, compared) for compared in (True, False)}
            took: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            timed.spent = dict.fromkeys(timed.spent, 0.0)
            for turn in range(ROUNDS):
                for compared in (True, False) if turn % 2 else (False, True):
                    took[compared] += steps(pipes[compared], batch)
            mine = {part: 1e6 * seconds / (ROUNDS * STEPS) for part, seconds in timed.spent.items()}
            mine |= {f"{what} {'with' if compared else 'without'}": 1e6 * median(step[i] for step in took[compared])
                     for i, what in enumerate(("step", "processor")) for compared in (True, False)}
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, mine)
            if dist.get_rank() == 0:
                print(f"{schedule}, {name}, us per step:")
                for rank, own in enumerate(every):
                    print(f"  rank {rank}: " + ", ".join(f"{part} {us:.0f}" for part, us in own.items()), flush=True)


if __name__ == "__main__":
    main()
