"""Four ranks over gloo, some of them replicas of a stage, compute what one process does, bit for bit."""

from __future__ import annotations

from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from world import World

from vpipe import Cut, Model, Pipeline
from vpipe.errors import RunError, UserError

TWO_ONE_ONE, ONE_THREE, TWO_TWO, FOUR = [[0, 1], [2], [3]], [[2], [0, 3, 1]], [[0, 1], [2, 3]], [[3, 2, 1, 0]]

DOWN_AND_UP, DOWN_AND_UP_TWICE = [[0, 3], [1, 2], [2, 1], [3, 0]], [[0, 1, 2, 3], [2, 3, 0, 1]]


def same_everywhere(world: World, *, placement: list[list[int]], **arguments: Any) -> dict[str, Any]:
    """Run the job here and on every rank; all tell the same but for the learning rate, which is a stage's own."""
    arguments |= {"placement": placement, "stages": len(placement)}
    expected = jobs.train_here(**arguments)
    results = world.run(jobs.train, **arguments)
    for rank, result in enumerate(results):
        assert without_rates(result) == without_rates(expected), f"rank {rank}"
    if arguments["schedule"] == "pipedream":
        for rank, result in enumerate(results):
            [width] = [len(ranks) for ranks in placement if rank in ranks]
            rates = [3e-3 * (jobs.decay(step) * (width / len(placement[0]))) for step, *_ in result["steps"]]
            assert [step[2] for step in result["steps"]] in (rates, [None] * len(rates))
    return expected


def without_rates(run: dict[str, Any]) -> dict[str, Any]:
    return run | {"steps": [[index, loss, norm, stop] for index, loss, _, norm, stop in run["steps"]]}


@pytest.mark.parametrize("model", ["rich", "norm"])
@pytest.mark.parametrize(("schedule", "placement"), [
    ("1f1b", TWO_ONE_ONE), ("zb_h1", ONE_THREE), ("gpipe", FOUR), ("zb_v", [*TWO_TWO, *reversed(TWO_TWO)])])
def test_with_a_flush(world: World, schedule: str, placement: list[list[int]], model: str) -> None:
    """Seven microbatches, shapes that change, an evaluation between two batches."""
    run = same_everywhere(world, model=model, schedule=schedule, placement=placement, microbatches=7, samples=14,
                          batches=2, recompute=0.5, grad_clip=0.5, evaluate_after=[0], lengths=(6, 9))
    assert len(run["steps"]) == 2


@pytest.mark.parametrize("arguments", [
    {}, {"shared_memory": False}, {"executor": "naive"}, {"model": "norm", "samples": 16}, {"compress": "int8"},
    {"precision": "fp16", "skip_not_finite": True}, {"precision": "bf16_pure"}, {"placement": DOWN_AND_UP_TWICE}],
    ids=lambda arguments: "-".join(map(str, arguments)) or "plain")
@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
def test_both_directions(world: World, schedule: str, arguments: dict[str, Any]) -> None:
    """Two copies of every stage, alone and beside two more; an evaluation between batches, shapes that change."""
    run = same_everywhere(world, **{"model": "rich", "schedule": schedule, "placement": DOWN_AND_UP, "microbatches": 8,
                                    "samples": 8, "batches": 3, "recompute": 0.5, "grad_clip": 0.5,
                                    "evaluate_after": [0], "lengths": (6, 9, 6), **arguments})
    assert len(run["steps"]) == 3


@pytest.mark.parametrize(("schedule", "placement", "every", "microbatches"), [
    ("pipedream", TWO_ONE_ONE, 1, 5), ("pipedream", ONE_THREE, 2, 4), ("pipedream", FOUR, 1, 3),
    ("2bw", TWO_TWO, 2, 4), ("pipedream_vertical_sync", TWO_TWO, 1, 3)])
def test_without_a_flush(world: World, schedule: str, placement: list[list[int]], every: int,
                         microbatches: int) -> None:
    """Streams that end with incomplete rounds, an evaluation that drains in the middle, a second call of train."""
    run = same_everywhere(world, model="rich", schedule=schedule, placement=placement, update_every=every,
                          microbatches=microbatches, samples=microbatches, batches=9, more=2, recompute=0.5,
                          grad_clip=0.5, evaluate_after=[1])
    assert run["middle"] != run["state"]


def test_leaving_the_loop_early_then_training_on(world: World) -> None:
    """Steps 0 and 1 were seen; the pipeline had taken in microbatches of others, which were made, too."""
    run = same_everywhere(world, model="rich", schedule="pipedream", placement=[[0], [1, 2], [3]], microbatches=4,
                          samples=4, batches=14, leave_after=1, more=2)
    assert run["steps"][2][0] > 2


def test_a_replica_without_a_microbatch_takes_part(world: World) -> None:
    """Three replicas, streams of one microbatch; the only stage before them has nothing to train."""
    run = same_everywhere(world, model="frozen", schedule="pipedream", placement=[[0], [1, 2, 3]], microbatches=1,
                          samples=1, batches=1, more=1, partition=[1, 3])
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
    pipe.engine.restore(seeded.engine.position, shared(seeded))
    return texts, [step.loss for step in pipe.train(batches)]


def shared(pipe: Pipeline) -> dict[str, Tensor]:
    """What the pipeline saves, of the whole model."""
    return {f"model.{name}": value for name, value in pipe.state_dict().items()}


def test_replicas_that_drift_apart_are_found_on_every_rank(world: World) -> None:
    for text in world.run(drifted):
        assert "stage 1: 'head.decoder.bias' on rank 3 is not what it is on rank 1" in text


def drifted() -> str:
    """The words of the error that every rank sees when one replica's weight was touched."""
    pipe = jobs.pipeline(jobs.rich_model(), schedule="1f1b", placement=[[0], [1, 2, 3]], stages=2, microbatches=3)
    list(pipe.train(jobs.rich_batches(1, 3)))
    if pipe.rank == 3:
        pipe.engine.workers[3].stages[1].weights.leaves()[-1].data[0] += 1e-7
    try:
        pipe.state_dict()
    except RunError as error:
        return str(error)
    return "no error"


def test_usage_of_every_replica_is_known_on_every_rank(world: World) -> None:
    assert world.run(used) == [[[4, 4], [1, 1], [1, 1], [1, 1]]] * 4 == [used()] * 4


def used() -> list[list[int]]:
    """Versions and activations of every replica, stage after stage."""
    pipe = jobs.pipeline(jobs.rich_model(), schedule="pipedream", placement=[[0], [1, 2, 3]], stages=2, microbatches=6)
    list(pipe.train(jobs.rich_batches(3, 6)))
    return [[u.versions, u.peak_activations] for u in pipe.engine.collectives.usage()]
