"""In every precision four processes over gloo compute what one process does, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import test_gloo
import test_replicas_gloo
from world import World


@pytest.mark.parametrize("arguments", [
    {"precision": "bf16", "schedule": "zb_h1", "recompute": 0.5, "grad_clip": 0.5, "compress": "int8"},
    {"precision": "fp16", "schedule": "1f1b", "evaluate_after": [0]}], ids=lambda arguments: arguments["precision"])
def test_gloo_equals_one_process(world: World, arguments: dict[str, Any]) -> None:
    test_gloo.same_everywhere(world, model="rich", microbatches=4, batches=2, partition=test_gloo.EVEN, **arguments)


@pytest.mark.parametrize(("precision", "placement"), [
    ("bf16_pure", [[0, 1, 2], [3]]), ("fp16", test_replicas_gloo.TWO_ONE_ONE)])
def test_replicas_without_a_flush(world: World, precision: str, placement: list[list[int]]) -> None:
    """The last round is incomplete, a tied weight is borrowed; fp16's scales travel with the gradients."""
    test_replicas_gloo.same_everywhere(world, model="rich", schedule="pipedream", microbatches=5, samples=10,
                                       batches=2, recompute=0.5, precision=precision, placement=placement)
