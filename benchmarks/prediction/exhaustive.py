"""Whether the planned partition is the best one: all are tried. See README.md.

python benchmarks/prediction/exhaustive.py [--ranks N] [--rounds N] [--batches N]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from cases import adamw, description
from torch import Tensor, nn
from torch.nn import functional as F
from world import run_world

from vpipe import Cut, Execution, Layer, Model, Order, Pipeline, Plan
from vpipe.plan.prediction import predict
from vpipe.plan.solver.request import PlanRequest
from vpipe.plan.solver.solve import solve
from vpipe.profiling import RankGroup, measure

WIDTH, SAMPLES, MICROBATCHES = 256, 128, 8
FACTORS = (4, 1, 12, 2, 1, 8, 3)
"""How wide the layers are inside, in multiples of ``WIDTH``: very different ones."""
AIM = 0.03


class Wide(nn.Module):
    """``h [B, WIDTH] -> h [B, WIDTH]``, through so many times as many features."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, factor * WIDTH), nn.Linear(factor * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(h)))


class Last(Wide):
    """The same, and the distance to ``wanted [B, WIDTH]``: a scalar."""

    def forward(self, h: Tensor, wanted: Tensor | None = None) -> Tensor:
        assert wanted is not None
        return F.mse_loss(super().forward(h), wanted)


def uneven() -> Model:
    """Seven layers."""
    *front, last = FACTORS
    layers = [Layer(f"layer{i}", partial(Wide, factor), ("h" if i else "x",)) for i, factor in enumerate(front)]
    return Model([*layers, Layer("last", partial(Last, last), ("h", "wanted"), ("loss",))], batch=("x", "wanted"))


def batch(samples: int) -> dict[str, Tensor]:
    """Random numbers."""
    x, wanted = torch.randn(2, samples, WIDTH, generator=torch.Generator().manual_seed(1))
    return {"x": x, "wanted": wanted}


def partitions(layers: int, stages: int) -> list[tuple[int, ...]]:
    """All there are."""
    return [tuple(end - start for start, end in pairwise((0, *cuts, layers)))
            for cuts in combinations(range(1, layers), stages - 1)]


def work(rounds: int, batches: int, out: Path) -> None:
    """One rank: a profile and a plan, then every partition in turn, round after round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, ranks, model, parent = dist.get_rank(), dist.get_world_size(), uneven(), os.getppid()
    microbatch = batch(SAMPLES)
    identities = RankGroup("cpu").identify(model, [microbatch], model_name="uneven", optimizer="adamw")
    profile, = measure(model, [microbatch], lambda named: adamw(list(named.values())), identities=identities)
    planned = solve(PlanRequest(profiles={MICROBATCHES: profile}, ranks=ranks, schedules=("1f1b",), recompute=0.0,
                                placement=tuple((r,) for r in range(ranks)))).plan
    every = partitions(len(model), ranks)
    seconds: dict[tuple[int, ...], list[float]] = {cut: [] for cut in every}
    whole = batch(SAMPLES * MICROBATCHES)
    for number in range(rounds):
        for cut in every if number % 2 == 0 else reversed(every):
            if os.getppid() != parent:
                raise SystemExit(f"rank {rank}: the program that started it is gone")
            seconds[cut] += step_seconds(model, cut, whole, batches)
        if rank == 0:
            print(f"  round {number + 1} of {rounds}: {len(every)} partitions", flush=True)
    dist.barrier()
    if rank == 0:
        expected = {cut: predict(profile, Plan(Cut(cut), Order("1f1b"), microbatches=MICROBATCHES)).prediction.step_s
                    for cut in every}
        out.write_text(json.dumps([{"planned": planned.partition, "partitions": [
            [cut, expected[cut], median(seconds[cut])] for cut in every]}]))
    os._exit(0)


def step_seconds(model: Model, cut: Sequence[int], whole: dict[str, Tensor], batches: int) -> list[float]:
    """Of so many updates, after one to warm up."""
    pipe = Pipeline(model, adamw, stages=cut, schedule="1f1b", microbatches=MICROBATCHES,
                    execution=Execution(device="cpu"))
    stream = pipe.train(whole for _ in range(batches + 1))
    next(stream)
    dist.barrier()
    found = []
    for _ in range(batches):
        started = perf_counter()
        next(stream)
        found.append(perf_counter() - started)
    return found


def main() -> None:
    """As the parent: start the ranks and print what they found. As a rank: work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6, help="of all partitions")
    parser.add_argument("--batches", type=int, default=5, help="of a partition, per round")
    options = parser.parse_args()
    if "PREDICTION_OUT" in os.environ:
        work(options.rounds, options.batches, Path(os.environ["PREDICTION_OUT"]))
    print(description(), flush=True)
    found, = run_world(sys.argv, "uneven", options.ranks, timeout_s=120.0 * options.rounds)
    print("\n| partition | predicted | measured | error | against the best |\n|---|---:|---:|---:|---:|")
    ordered = sorted(found["partitions"], key=lambda one: float(one[2]))
    best_s = ordered[0][2]
    for cut, expected_s, measured_s in ordered:
        mark = " (planned)" if cut == found["planned"] else ""
        print(f"| {'-'.join(map(str, cut))}{mark} | {1e3 * expected_s:.1f} ms | {1e3 * measured_s:.1f} ms | "
              f"{expected_s / measured_s - 1:+.1%} | {measured_s / best_s - 1:+.1%} |")
    planned_s = next(measured_s for cut, _, measured_s in found["partitions"] if cut == found["planned"])
    print(f"\nThe planned partition takes {planned_s / best_s - 1:.1%} more than the best of {len(ordered)} "
          f"(aim: at most {AIM:.0%}).\n{description()}\n{' '.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
