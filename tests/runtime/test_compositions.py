"""Every two settings together, among models, schedules, placements, precisions and more: bit for bit as the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
import torch
from jobs import MuonAndAdamW
from models import (
    checkpointed_model,
    cut,
    frozen_front,
    norm_model,
    recurrent_model,
    rich_batches,
    rich_model,
    thrice_tied_model,
    untied_model,
)
from oracles import AdamW, Momentum, decay, equals_its_oracle
from torch import Tensor, nn

from vpipe import Model
from vpipe.app.train.optimizers import OptimizerSettings, hidden_matrices
from vpipe.schedules.registry import RegisteredSchedule


@dataclass(frozen=True)
class Matrices:
    """Train matrices alone: other parameters, all of some stages, have no optimizer."""

    def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        kept = [p for name, p in named.items() if p.dim() == 2 and not name.startswith("mix2")]
        return torch.optim.AdamW(kept, lr=3e-3, fused=True) if kept else None


MODELS = {made.__name__: made for made in (
    rich_model, untied_model, thrice_tied_model, norm_model, checkpointed_model, recurrent_model, frozen_front)}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: AdamW(), "momentum": lambda model: Momentum(), "list": lambda model: MuonAndAdamW(),
    "matrices": lambda model: Matrices(), "nadam": lambda model: OptimizerSettings("nadam", 0.01, weight_decay=0.1),
    "muon": lambda model: OptimizerSettings("muon", 0.01, weight_decay=0.1, matrices=hidden_matrices(model))}
CHOICES: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "schedule": ("1f1b", "gpipe", "zb_h1", "zb_v", "chimera", "pipedream", "2bw", "pipedream_vertical_sync"),
    "widths": ((1, 1), (2, 1), (1, 3), (2, 2), (2, 1, 2)),
    "optimizer": tuple(OPTIMIZERS),
    "precision": ("fp32", "bf16", "bf16_pure", "fp16"),
    "compress": ("none", "bf16", "int8", "int8_stochastic"),
    "executor": ("overlapped", "naive", "async_threaded"),
    "recompute": (0.0, 0.5, 1.0),
    "delay_correction": (0.0, 1.0),
    "per_token_loss": (False, True),
    "zero1": (False, True),
    "skip_not_finite": (False, True),
    "grad_clip": (None, 0.5),
    "buckets": (False, True)}
Row = dict[str, Any]


def goes_together(row: Row) -> bool:
    """Return whether a pipeline takes these settings; sums of three in another order are not bit for bit."""
    recipe = RegisteredSchedule.named(row["schedule"])
    return not (
        (row["executor"] == "async_threaded" and (row["schedule"] != "gpipe" or row["recompute"] == 0.5))
        or (row["precision"] != "fp32" and row["compress"] == "bf16")
        or (recipe.flush and row["delay_correction"])
        or (row["model"] == "thrice_tied_model" and row["recompute"] == 0.5)
        or (row["schedule"] == "pipedream_vertical_sync" and len(set(row["widths"])) > 1)
        or (recipe.layout is not RegisteredSchedule.named("1f1b").layout and len(set(row["widths"])) > 1))


def pairs(row: Row) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def covering() -> Iterator[Row]:
    """Yield rows in which every two settings that go together stand beside each other."""
    dice = Random(1)
    missing = sorted((((a, one), (b, other)) for a, b in combinations(CHOICES, 2)
                      for one, other in product(CHOICES[a], CHOICES[b])), key=str)
    dice.shuffle(missing)
    seen: set[frozenset[tuple[str, Any]]] = set()
    for pair in missing:
        if frozenset(pair) in seen:
            continue
        drawn = [{name: dice.choice(values) for name, values in CHOICES.items()} | dict(pair) for _ in range(200)]
        if fitting := [row for row in drawn if goes_together(row)]:
            best = max(fitting, key=lambda row: len(pairs(row) - seen))
            seen |= pairs(best)
            yield best


def uneven(batches: int, samples: int) -> list[dict[str, Tensor]]:
    """Batches whose samples have unequal numbers of labels: the first two none, nor any of the second batch."""
    made = rich_batches(batches, samples)
    for number, batch in enumerate(made):
        batch["labels"][:2] = Model.NO_LABEL
        for sample in range(2, samples):
            batch["labels"][sample, 1 + (sample + number) % 6:] = Model.NO_LABEL
    made[1]["labels"][:] = Model.NO_LABEL
    return made


@pytest.mark.parametrize("row", [pytest.param(row, marks=[pytest.mark.extras("async_threaded")] * (
    row["executor"] == "async_threaded"), id="-".join(map(str, row.values()))) for row in covering()])
def test_every_two_settings_equal_their_oracle(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of microbatches that no width divides, streams that end with incomplete rounds, an evaluation between."""
    words = {name: value for name, value in row.items() if name not in ("model", "widths", "buckets")}
    recipe, widths = RegisteredSchedule.named(row["schedule"]), row["widths"]
    made = MODELS[row["model"]]()
    model = Model(made.layers, made.batch, labels="labels")
    if row["buckets"]:
        monkeypatch.setattr("vpipe.runtime.reducer.BUCKET_BYTES", 1)
    if recipe.layout is RegisteredSchedule.named("1f1b").layout:
        ranks = iter(range(sum(widths)))
        words |= {"partition": cut(len(model), len(widths)), "microbatches": 7,
                  "placement": [[next(ranks) for _ in range(width)] for width in widths]}
    else:
        words |= {"partition": cut(len(model), 2 * recipe.chunks), "replicas": widths[0], "microbatches": 8}
    if not recipe.flush:
        least = recipe.update_every(sum(widths) if row["schedule"] == "2bw" else len(widths))
        words |= {"microbatches": 6, "update_every": next(n for n in (1, 2, 3, 6) if n >= least + row["zero1"]),
                  "loss_scale": 1024 if row["precision"] == "fp16" else None}
    samples = words["microbatches"]
    batches = uneven(3, 2 * samples) if row["per_token_loss"] else rich_batches(3, samples)
    equals_its_oracle(model, batches[:2], batches[2:], **{
        **words, "optimizer": OPTIMIZERS[row["optimizer"]](model), "learning_rate_factor": decay})
