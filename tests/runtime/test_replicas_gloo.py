"""Four ranks, some of them replicas of a stage, compute what one process does, over gloo and under nccl's rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
from everywhere import over, same_everywhere
from torch import Tensor, nn
from world import World

from vpipe import Cut, Model, Pipeline
from vpipe.errors import RunError, UserError

TWO_ONE_ONE, ONE_THREE, TWO_TWO, FOUR = [[0, 1], [2], [3]], [[2], [0, 3, 1]], [[0, 1], [2, 3]], [[3, 2, 1, 0]]

DOWN_AND_UP, DOWN_AND_UP_TWICE = [[0, 3], [1, 2], [2, 1], [3, 0]], [[0, 1, 2, 3], [2, 3, 0, 1]]


MIDDLE, FOLDED = [[0], [1, 2], [3]], [*TWO_TWO, *reversed(TWO_TWO)]


def same(world: World, rules: Mapping[str, bool] | None, arguments: dict[str, Any]) -> dict[str, Any]:
    return same_everywhere(world, rules, stages=len(arguments["placement"]), **arguments)


@pytest.mark.jobs
@over(("gloo nccl", {"schedule": "1f1b", "placement": TWO_ONE_ONE}),
      ("nccl", {"schedule": "1f1b", "placement": MIDDLE}),
      ("gloo", {"schedule": "1f1b", "placement": TWO_ONE_ONE, "model": "norm"}),
      ("gloo nccl", {"schedule": "zb_h1", "placement": ONE_THREE}),
      ("gloo nccl", {"schedule": "gpipe", "placement": FOUR}), ("gloo nccl", {"schedule": "zb_v", "placement": FOLDED}),
      ("gloo nccl", {"schedule": "1f1b", "placement": ONE_THREE, "precision": "bf16_pure", "zero1": True}),
      ("gloo", {"schedule": "zb_v", "placement": FOLDED, "model": "norm"}))
def test_with_a_flush(world: World, rules: Mapping[str, bool] | None, arguments: dict[str, Any]) -> None:
    """Seven microbatches, shapes that change, an evaluation between two batches."""
    run = same(world, rules, {"model": "rich", "microbatches": 7, "samples": 14, "batches": 2, "recompute": 0.5,
                              "grad_clip": 0.5, "evaluate_after": [0], "lengths": [6, 9], **arguments})
    assert len(run["steps"]) == 2


@pytest.mark.jobs
@over(("gloo nccl", {"schedule": "chimera"}), ("gloo nccl", {"schedule": "chimera", "placement": DOWN_AND_UP_TWICE}),
      ("nccl", {"schedule": "chimera", "zero1": True}),
      *[("gloo", {"schedule": "chimera", **changes}) for changes in (
          {"shared_memory": False}, {"model": "norm", "samples": 16}, {"precision": "bf16_pure"})],
      *[("gloo", {"schedule": "dualpipe", **changes}) for changes in (
          {}, {"executor": "naive"}, {"compress": "int8"}, {"precision": "fp16", "skip_not_finite": True},
          {"placement": DOWN_AND_UP_TWICE})])
def test_both_directions(world: World, rules: Mapping[str, bool] | None, arguments: dict[str, Any]) -> None:
    """Two copies of every stage, alone and beside two more; an evaluation between batches, shapes that change."""
    run = same(world, rules, {"model": "rich", "placement": DOWN_AND_UP, "microbatches": 8, "samples": 8,
                              "batches": 2, "recompute": 0.5, "grad_clip": 0.5, "evaluate_after": [0],
                              "lengths": [6, 9], **arguments})
    assert len(run["steps"]) == 2


@pytest.mark.jobs
@over(("gloo nccl", {"schedule": "pipedream", "placement": TWO_ONE_ONE, "microbatches": 5}),
      ("nccl", {"schedule": "pipedream", "placement": MIDDLE, "microbatches": 5}),
      ("gloo nccl", {"schedule": "pipedream", "placement": ONE_THREE, "microbatches": 4, "update_every": 2,
                     "model": "labelled", "per_token_loss": True}),
      ("gloo", {"schedule": "pipedream", "placement": FOUR, "microbatches": 3}),
      ("gloo", {"schedule": "pipedream", "placement": FOUR, "microbatches": 3, "precision": "fp16", "loss_scale": 1024,
                "zero1": True}),
      ("gloo nccl", {"schedule": "pipedream", "placement": TWO_TWO, "microbatches": 5, "zero1": True}),
      ("gloo nccl", {"schedule": "2bw", "placement": TWO_TWO, "microbatches": 4, "update_every": 2}),
      ("gloo", {"schedule": "pipedream_vertical_sync", "placement": TWO_TWO, "microbatches": 3}),
      ("gloo", {"schedule": "pipedream", "placement": TWO_ONE_ONE, "microbatches": 5, "precision": "fp16",
                "loss_scale": 1024}),
      ("gloo", {"schedule": "pipedream", "placement": [[0, 1, 2], [3]], "microbatches": 5, "precision": "bf16_pure"}))
def test_without_a_flush(world: World, rules: Mapping[str, bool] | None, arguments: dict[str, Any]) -> None:
    """Streams that end with incomplete rounds, an evaluation that drains in the middle, a second call of train; a tied
    weight is borrowed, and with ZeRO-1 each replica steps a part."""
    run = same(world, rules, {"model": "rich", "update_every": 1, "samples": arguments["microbatches"], "batches": 6,
                              "more": 2, "recompute": 0.5, "grad_clip": 0.5, "evaluate_after": [1], **arguments})
    assert run["middle"] != run["state"]


def test_a_replica_without_a_microbatch_takes_part(world: World) -> None:
    """Three replicas, streams of one microbatch; the only stage before them has nothing to train."""
    run = same(world, None, {"model": "frozen", "schedule": "pipedream", "placement": [[0], [1, 2, 3]],
                             "microbatches": 1, "samples": 1, "batches": 1, "more": 1, "partition": [1, 3]})
    assert [step[0] for step in run["steps"]] == [0, 1]


def test_replicas_that_begin_with_other_weights_are_found_before_a_step(world: World) -> None:
    """An nn.Sequential built without a seed; a checkpoint that all of them load makes them alike."""
    for texts, losses in world.run(unseeded):
        assert texts == ["error: stage 0: '0.weight' begins with other values on rank 1 than on rank 0\nhint: replicas "
                         "must begin alike: call torch.manual_seed with the same number on every rank before an "
                         "nn.Sequential is built, and let layers draw from torch's generator alone"] * 2
        assert losses == unseeded()[1]


def unseeded() -> tuple[list[str], list[float]]:
    """The words of the errors that every rank sees, and the losses when they have loaded a checkpoint."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    batches = [{"input": torch.ones(4, 3), "target": torch.zeros(4, dtype=torch.int64)}]
    texts = []

    def pipeline() -> Pipeline:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        return Pipeline(Model.sequential(net, nn.CrossEntropyLoss()), jobs.AdamW(), stages=Cut(2, ranks=2),
                        microbatches=2)

    torch.manual_seed(0)
    seeded = pipeline()
    list(seeded.train(batches))
    torch.manual_seed(rank)
    pipe = pipeline()
    for use in (pipe.train, pipe.evaluate):
        try:
            use(batches)
        except UserError as error:
            texts.append(str(error))
    pipe.engine.restore(seeded.engine.training.position, shared(seeded))
    return texts, [step.loss for step in pipe.train(batches)]


def shared(pipe: Pipeline) -> dict[str, Tensor]:
    """What the pipeline saves, of the whole model."""
    return {f"model.{name}": value for name, value in pipe.state_dict().items()}


def test_replicas_that_drift_apart_are_found_on_every_rank(world: World) -> None:
    for text in [drifted(), *world.run(drifted)]:
        assert "stage 1: 'head.decoder.bias' on rank 3 is not what it is on rank 1" in text


def drifted() -> str:
    """The words of the error that every rank sees when one replica's weight was touched."""
    pipe = jobs.pipeline(jobs.rich_model(), schedule="1f1b", placement=[[0], [1, 2, 3]], stages=2, microbatches=3)
    list(pipe.train(jobs.rich_batches(1, 3)))
    if 3 in pipe.engine.workers:
        pipe.engine.workers[3].stages[1].weights.leaves()[-1].data[0] += 1e-7
    try:
        pipe.state_dict()
    except RunError as error:
        return str(error)
    return "no error"
