"""Measuring a small model, as quickly as can be."""

from __future__ import annotations

from torch import Tensor

from vpipe import Model
from vpipe.app.train.optimizers import OptimizerSettings
from vpipe.plan.profile import Profile
from vpipe.profiling.fingerprint import identify
from vpipe.profiling.measurement import measure

ADAMW = OptimizerSettings("adamw", 1e-3).from_named


def measured(model: Model, *batches: dict[str, Tensor]) -> list[Profile]:
    """A profile for each microbatch, of this process alone."""
    identities = [identify(model, batch, model_name="small", optimizer="adamw", device="cpu", ranks_per_host=1,
                           backend="gloo") for batch in batches]
    return measure(model, batches, ADAMW, identities=identities, budget_s=0.0)
