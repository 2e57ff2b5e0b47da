"""What a backward in two halves costs over a whole one: vpipe's interception and torch's own graph split.

    OMP_NUM_THREADS=1 python benchmarks/halves/run.py

B samples, T tokens, D hidden, H heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from vpipe import Layer, Model
from vpipe.runtime.stage import Stage

sys.path.insert(0, str(Path(__file__).parent.parent / "throughput"))

from machine import description
from model import HIDDEN, MLP, TOKENS, Attention

BLOCKS, ROUNDS = 4, 60
MICROBATCHES = (1, 2, 4)


class System:
    """One way to run forward and backward over the same blocks; the seconds of each part, by round."""

    def __init__(self, name: str, run: Callable[[Tensor, Tensor], tuple[list[float], Tensor, list[Tensor]]]) -> None:
        self.name, self.run = name, run
        self.parts_s: list[list[float]] = []

    def median_s(self, *parts: int) -> float:
        return median(sum(seconds[i] for i in parts) for seconds in self.parts_s)

    def least_s(self, *parts: int) -> float:
        return min(sum(seconds[i] for i in parts) for seconds in self.parts_s)


def blocks() -> Stage:
    """The blocks as the middle stage of a model."""
    halves = [Layer(f"block{i}.{half.__name__.lower()}", half) for i in range(BLOCKS) for half in (Attention, MLP)]
    ends = (Layer("first", nn.Identity, ("x",)), Layer("last", Mean, outputs=("loss",)))
    model = Model([ends[0], *halves, ends[1]], batch=("x",))
    spec = model.split([1, len(halves), 1])[1]
    return Stage(model, spec, seed=0, device=torch.device("cpu"), recomputed=frozenset())


class Mean(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.mean()


def of_stage(halves: bool) -> Callable[[Tensor, Tensor], tuple[list[float], Tensor, list[Tensor]]]:
    """vpipe's stage: forward, then one backward, or its two halves."""
    stage = blocks()

    def run(x_btd: Tensor, gradient_btd: Tensor) -> tuple[list[float], Tensor, list[Tensor]]:
        started = perf_counter()
        _, record = stage.forward([x_btd], {}, (0, 0), stage.pin({}), split=halves)
        ran = perf_counter()
        stage.prepare_backward(record.pins)
        back = stage.backward_input if halves else stage.backward
        returned, = back(record, {"h": gradient_btd})
        returning = perf_counter()
        if halves:
            stage.backward_weight(record)
        stage.unpin(record.pins)
        ended = perf_counter()
        return ([ran - started, returning - ran, ended - returning], returned,
                [g for g in stage.weights.gradients if g is not None])

    return run


def of_torch() -> Callable[[Tensor, Tensor], tuple[list[float], Tensor, list[Tensor]]]:
    """torch.distributed.pipelining's split of the graph, over the same modules."""
    stage = blocks()
    module = nn.Sequential(*stage.modules.values())

    def run(x_btd: Tensor, gradient_btd: Tensor) -> tuple[list[float], Tensor, list[Tensor]]:
        started = perf_counter()
        output = module(x_btd)
        ran = perf_counter()
        returned, groups = stage_backward_input([output], [gradient_btd], [x_btd], module.parameters())
        returning = perf_counter()
        stage_backward_weight(module.parameters(), groups)
        ended = perf_counter()
        assert isinstance(returned[0], Tensor)
        return ([ran - started, returning - ran, ended - returning], returned[0],
                [p.grad for p in module.parameters() if p.grad is not None])

    return run


def measure(microbatch: int) -> list[System]:
    """All systems in turns, each round on the same tensors; their gradients must be equal bit for bit."""
    systems = [System("whole", of_stage(halves=False)), System("vpipe, two halves", of_stage(halves=True)),
                System("torch, graph split", of_torch())]
    random = torch.Generator().manual_seed(0)
    for i in range(ROUNDS + 5):
        x, gradient = (torch.randn(microbatch, TOKENS, HIDDEN, generator=random) for _ in range(2))
        results = []
        for system in systems[i % 3:] + systems[:i % 3]:
            parts, *result = system.run(x.clone().requires_grad_(), gradient)
            results.append([result[0], *result[1]])
            if i >= 5:
                system.parts_s.append(parts)
        for other in results[1:]:
            if not all(map(torch.equal, results[0], other)):
                raise SystemExit("the gradients differ")
    return systems


def main() -> None:
    torch.set_num_threads(1)
    print(description())
    print("\n| microbatch | system | F ms | I (or B) ms | W ms | I + W ms | min | over B: median | of F + B: median "
          "| I / B |\n|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for microbatch in MICROBATCHES:
        systems = measure(microbatch)
        whole = systems[0]
        for system in systems:
            paired = list(zip(system.parts_s, whole.parts_s, strict=True))
            of_backward = median(sum(one[1:]) / sum(base[1:]) for one, base in paired)
            of_all = median(sum(one) / sum(base) for one, base in paired)
            times = (system.median_s(0), system.median_s(1), system.median_s(2), system.median_s(1, 2),
                     system.least_s(1, 2))
            print(f"| {microbatch} | {system.name} | {' | '.join(f'{t * 1e3:.1f}' for t in times)} | "
                  f"{of_backward:.3f} | {of_all:.3f} | {system.median_s(1) / whole.median_s(1):.2f} |", flush=True)


if __name__ == "__main__":
    main()
