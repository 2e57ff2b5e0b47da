"""The bytes per parameter of docs/precision.md, counted on a layer that is nearly all weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from measured import ADAMW
from torch import nn

from vpipe import Layer, Model
from vpipe.plan.profile import Identity, LayerProfile, LinkProfile, Profile, Seconds
from vpipe.plan.stage_costs import stage_memory
from vpipe.profiling.bench import Bench, Given
from vpipe.profiling.counts import count
from vpipe.runtime.precision import Precision

WIDTH = 64
PARAMETERS = WIDTH * WIDTH


def profile_of(precision: str) -> Profile:
    """Of one linear layer, with AdamW; its times are 0."""
    model = Model([Layer("words", lambda: nn.Embedding(2, WIDTH), ("ids",)),
                   Layer("it", lambda: nn.Linear(WIDTH, WIDTH, bias=False)),
                   Layer("end", nn.Identity, outputs=("loss",))], batch=("ids",))
    computed = Precision.of(precision)
    hidden = torch.randn(1, WIDTH, dtype=computed.dtype, requires_grad=True)
    counts = count(Bench(model, 1, torch.device("cpu"), 0, computed),
                   Given({"h": hidden}, {}, {"h": torch.ones(1, WIDTH, dtype=computed.dtype)}), ADAMW)
    none = Seconds(0.0)
    layer = LayerProfile("it", none, none, none, none, none, none, counts.parameter_bytes, counts.optimizer_bytes,
                         (), (), counts.saved_bytes, (), 0, counts.working_bytes, {}, 0, 0)
    identity = Identity("", "linear", 1, 1, "adamw", "", 1, 1, "gloo", "", precision=precision)
    return Profile(identity, (layer,), {}, LinkProfile(0.0, 1.0))


@pytest.mark.parametrize(("precision", "weights", "gradients", "optimizer", "version", "in_flight", "step"), [
    ("fp32", 4, 4, 8, 4, 0, 0), ("bf16", 4, 4, 8, 4, 2, 0), ("fp16", 4, 4, 8, 4, 2, 0),
    ("bf16_pure", 2, 2, 12, 2, 0, 2)])
def test_bytes_per_parameter(precision: str, weights: int, gradients: int, optimizer: int, version: int,
                             in_flight: int, step: int) -> None:
    profile = profile_of(precision)
    alone = stage_memory(profile, range(1), (), in_flight=0, versions=1)
    assert (alone.weights, alone.gradients) == (weights * PARAMETERS, gradients * PARAMETERS)
    assert alone.optimizer == optimizer * PARAMETERS + 4  # a counter of steps
    assert weights + gradients + optimizer == 16
    assert stage_memory(profile, range(1), (), in_flight=3, versions=3) == replace(
        alone, stashed=2 * version * PARAMETERS, activations=3 * in_flight * PARAMETERS)
    assert alone.working >= step * PARAMETERS
