"""Testing: what others need to test a schedule, a stage or a pipeline of their own against an oracle.

The oracle trains a model in one plain program, and shares no actions and no transfers with the engine. The strategies
are for hypothesis, which vpipe does not install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vpipe.lazy import lazy

if TYPE_CHECKING:
    from vpipe.testing.differences import (
        CutCompression,
        Difference,
        Reference,
        assert_equals_oracle,
        compare,
        microbatches_of_step,
        record,
        record_ranks,
        references,
    )
    from vpipe.testing.nccl import nccl_rules
    from vpipe.testing.reference import ReferenceRun, asynchronous_oracle, evaluate_oracle, flush_oracle
    from vpipe.testing.reference_model import ReferencePrecision
    from vpipe.testing.reference_optimizer import InitialState, TrainingRecipe, version_rule
    from vpipe.testing.strategies import orders, partitions, placements, plans, schedules, ties
    from vpipe.testing.trajectory import ReplicaMismatch, Trajectory

__all__ = ["CutCompression", "Difference", "InitialState", "Reference", "ReferencePrecision", "ReferenceRun",
           "ReplicaMismatch", "TrainingRecipe", "Trajectory", "assert_equals_oracle", "asynchronous_oracle", "compare",
           "evaluate_oracle", "flush_oracle", "microbatches_of_step", "nccl_rules", "orders", "partitions",
           "placements", "plans", "record", "record_ranks", "references", "schedules", "ties", "version_rule"]

# Loaded when first asked for: strategies of schedules need no torch, and oracles no hypothesis.
_FILES = {
    "differences": ("CutCompression", "Difference", "Reference", "assert_equals_oracle", "compare",
                    "microbatches_of_step", "record", "record_ranks", "references"),
    "nccl": ("nccl_rules",),
    "reference": ("ReferenceRun", "asynchronous_oracle", "evaluate_oracle", "flush_oracle"),
    "reference_model": ("ReferencePrecision",),
    "reference_optimizer": ("InitialState", "TrainingRecipe", "version_rule"),
    "strategies": ("orders", "partitions", "placements", "plans", "schedules", "ties"),
    "trajectory": ("ReplicaMismatch", "Trajectory"),
}
__getattr__ = lazy(__name__, {name: file for file, names in _FILES.items() for name in names})
