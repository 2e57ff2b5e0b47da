"""Measuring a small model, as quickly as can be."""

from __future__ import annotations

from torch import Tensor

from vpipe import Model
from vpipe.app.train.optimizers import OptimizerSettings
from vpipe.plan.profile import Profile
from vpipe.profiling import RankGroup, measure

ADAMW = OptimizerSettings("adamw", 1e-3).from_named


def measured(model: Model, *batches: dict[str, Tensor]) -> list[Profile]:
    """A profile for each microbatch, of this process alone."""
    identities = RankGroup("cpu").identify(model, batches, model_name="small", optimizer="adamw")
    return measure(model, batches, ADAMW, identities=identities, budget_s=0.0)
