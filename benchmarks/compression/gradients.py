"""How far the gradient of an update is from the one without compression, at the same weights.

The first stage's: only that comes from gradients that crossed the cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from statistics import mean

import torch
from task import WAYS, Way, batches, pipeline
from torch import Tensor

BEFORE, UPDATES = 60, 16


class Watcher:
    """Keeps the gradients of every update."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def gradients(self, update: int, named: Mapping[str, Tensor | None]) -> None:
        self.seen.append({name: gradient.clone() for name, gradient in named.items() if gradient is not None})

    def weights(self, update: int, named: Mapping[str, Tensor]) -> None:
        """The same after every update."""


def gradients(way: Way, weights: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Those of the first stage in updates that change nothing."""
    pipe, watcher = pipeline(way, seed=0, learning_rate=0.0), Watcher()
    for worker in pipe.engine.workers.values():
        for stage in worker.stages.values():
            for name, parameter in stage.weights.masters.items():
                parameter.data.copy_(weights[name])
    pipe.engine.workers[0].optimizer_steps.observer = watcher
    list(pipe.train(islice(batches(1), UPDATES)))
    return watcher.seen


def off(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], ending: str = "") -> float:
    """Norm of the difference over the norm."""
    names = [name for name in theirs if name.endswith(ending)]
    apart = torch.stack([(ours[name] - theirs[name]).norm() for name in names]).norm()
    return float(apart / torch.stack([theirs[name].norm() for name in names]).norm())


def summed(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in gradients]).sum(0) for name in gradients[0]}


def measure() -> str:
    """A Markdown table: relative errors, of an update on average and of the sum over all of them."""
    trained = pipeline(WAYS[0], seed=0)
    list(trained.train(islice(batches(0), BEFORE)))
    weights = trained.state_dict()
    exact = gradients(WAYS[0], weights)
    lines = [f"first stage, after {BEFORE} updates, {UPDATES} updates\n",
             f"| way | error of an update, % | its biases | error of the sum of {UPDATES}, % | its biases |",
             "|---|---:|---:|---:|---:|"]
    for way in WAYS[1:]:
        ours = gradients(way, weights)
        figures = [mean(off(one, other, ending) for one, other in zip(ours, exact, strict=True))
                   for ending in ("", "bias")]
        figures += [off(summed(ours), summed(exact), ending) for ending in ("", "bias")]
        lines.append(f"| {way.name} | {' | '.join(f'{100 * figure:.3f}' for figure in figures)} |")
    return "\n".join(lines)
