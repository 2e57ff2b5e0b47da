"""Pipelines side by side on a mesh of four ranks, whose layers compute together, do what one process does."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch.distributed as dist
from models import rich_batches, rich_model
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from world import World

from vpipe import Model
from vpipe.description import Executor
from vpipe.errors import RunError, UserError

pytestmark = pytest.mark.jobs

TWO_BY_TWO = {"schedule": "1f1b", "partition": [4, 4], "microbatches": 4}


class Mean(Function):
    """The mean over lanes that hold the same, forward and backward: with 2 or 4 of them exactly what they hold."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        return mean(x, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return mean(gradient, context.group), None


def mean(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def averaged(layer: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """A layer whose result the lanes compute together."""
    layer.register_forward_hook(lambda module, inputs, output: Mean.apply(output, group))
    return layer


def together(mesh: DeviceMesh) -> Model:
    """The rich model; lanes compute ``raw1`` and ``raw2`` together."""
    model = rich_model()
    return Model([replace(layer, build=lambda build=layer.build: averaged(build(), mesh.get_group("tp")))
                  if layer.name in ("raw1", "raw2") else layer for layer in model.layers], batch=model.batch)


def made(shape: Sequence[int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=("pp", "tp"))


def in_lanes(*, shape: Sequence[int], **arguments: Any) -> dict[str, Any]:
    """What :func:`jobs.train` returns on a mesh of this shape."""
    mesh = made(shape)
    jobs.MODELS["together"] = lambda: together(mesh)
    return jobs.train(model="together", mesh=mesh, **arguments)


@pytest.mark.parametrize("arguments", [
    {"schedule": "1f1b"}, {"schedule": "zb_h1"}, {"schedule": "1f1b", "recompute": 1.0, "grad_clip": 0.5},
    {"schedule": "zb_v", "partition": [2, 2, 2, 2]}, {"schedule": "pipedream", "grad_clip": 0.5},
    {"schedule": "2bw", "update_every": 4}, {"schedule": "1f1b", "placement": [[0, 1]], "partition": [8]},
    {"schedule": "1f1b", "shared_memory": False}], ids=str)
def test_lanes_of_two_ranks(world: World, arguments: dict[str, Any]) -> None:
    given = {**TWO_BY_TWO, "evaluate_after": [0], "samples": 8, "batches": 3, "lengths": [6, 9], **arguments}
    expected = jobs.train_here(model="rich", **given)
    for result in world.run(in_lanes, shape=[2, 2], **given):
        assert result == expected


@pytest.mark.parametrize("shape", [[1, 4], [4, 1]], ids=str)
def test_lanes_of_one_rank_and_one_lane_of_all(world: World, shape: Sequence[int]) -> None:
    """In a lane of one rank a process runs all stages in turn, as it does without a job."""
    given = {**TWO_BY_TWO, "partition": [2, 2, 2, 2], "samples": 8}
    assert world.run(in_lanes, shape=shape, **given) == [jobs.train_here(model="rich", **given)] * 4


def two_pipelines() -> list[list[float]]:
    """Losses of two pipelines of a process in turn, on meshes of other lanes."""
    losses: list[list[float]] = [[], []]
    meshes = made((2, 2)), made((4, 1))
    pipes = [jobs.pipeline(together(mesh), mesh=mesh, schedule="1f1b", partition=partition, microbatches=2)
             for mesh, partition in zip(meshes, ([4, 4], [2, 2, 2, 2]), strict=True)]
    for batch in rich_batches(3, 4):
        for own, pipe in zip(losses, pipes, strict=True):
            own += [step.loss for step in pipe.train([batch])]
    return losses


def test_two_pipelines_of_a_process_have_lanes_of_their_own(world: World) -> None:
    alone = jobs.pipeline(rich_model(), schedule="1f1b", partition=[4, 4], microbatches=2)
    losses = [step.loss for step in alone.train(rich_batches(3, 4))]
    assert world.run(two_pipelines) == [[losses] * 2] * 4


def saved_and_loaded(*, folder: str) -> list[float]:
    """Train a step in two lanes, save; load in four lanes, and train the next."""
    mesh = made((2, 2))
    pipe = jobs.pipeline(together(mesh), mesh=mesh, **TWO_BY_TWO)
    first, second = rich_batches(2, 8)
    losses = [step.loss for step in pipe.train([first])]
    pipe.save(folder)
    mesh = made((1, 4))
    pipe = jobs.pipeline(together(mesh), mesh=mesh, **TWO_BY_TWO)
    pipe.load(folder)
    return losses + [step.loss for step in pipe.train([second])]


def test_a_checkpoint_holds_what_lanes_share_once(world: World, tmp_path: Path) -> None:
    pipe = jobs.pipeline(rich_model(), **TWO_BY_TWO)
    losses = [step.loss for step in pipe.train(rich_batches(2, 8))]
    assert world.run(saved_and_loaded, folder=str(tmp_path / "saved")) == [losses] * 4
    resumed = jobs.pipeline(rich_model(), **TWO_BY_TWO)
    resumed.load(tmp_path / "saved")
    assert [step.loss for step in resumed.train(rich_batches(2, 8)[1:])] == losses[1:]


def other_batches() -> list[Any]:
    """The losses and the error of lanes of which one reads another second batch."""
    mesh = made((2, 2))
    batches = rich_batches(3, 8)
    if mesh.get_local_rank("tp") == 1:
        batches[1] = rich_batches(1, 8, seed=9)[0]
    losses: list[Any] = []
    try:
        for step in jobs.pipeline(together(mesh), mesh=mesh, **TWO_BY_TWO).train(batches):
            losses.append(step.loss)
    except RunError as error:
        losses.append(str(error))
    return losses


def test_lanes_with_other_batches_are_found_before_an_update_uses_them(world: World) -> None:
    for losses in world.run(other_batches):
        assert len(losses) == 2
        found = re.search(r"batches differ between ranks: field 'ids' of batch 1 on rank (\d) and rank (\d)", losses[1])
        assert found is not None, losses
        assert {int(rank) % 2 for rank in found.groups()} == {0, 1}, "they are of both lanes"


def endless_in_lanes() -> None:
    """Train in two lanes until something happens."""
    mesh = made((2, 2))
    jobs.MODELS["together"] = lambda: together(mesh)
    jobs.endless(model="together", mesh=mesh, schedule="1f1b", stages=2, timeout_s=8)


@pytest.fixture
def four(tmp_path: Path) -> Iterator[World]:
    some = World(4, tmp_path, gloo_timeout_s=8)
    yield some
    some.kill()


def test_a_rank_that_dies_ends_all_lanes_and_is_named_with_its_lane(four: World) -> None:
    """Rank 2 waits for it in a layer, rank 0 in no way at all."""
    four.begin(endless_in_lanes)
    for rank in range(4):
        four.progress(rank, lambda index: index >= 3, within_s=60)
    four.signal(3, signal.SIGKILL)
    for rank, place in ((0, "lane 0, stage 0"), (1, "lane 1, stage 0"), (2, "lane 0, stage 1")):
        kind, error = four.outcome(rank, 12)
        assert kind == "error"
        assert re.match(rf"error: rank 3 \(lane 1, stage 1\) died without a message; rank {rank} \({place}\) was ",
                        error["text"]), error["text"]


THREADED = [name for name in Executor.names() if Executor.named(name).threaded]


def refused() -> list[str]:
    """The first lines of the errors of meshes, and of what does not go with lanes."""
    meshes = made((2, 2)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    given: list[dict[str, Any]] = [
        {"mesh": init_device_mesh("cpu", (2, 2))}, {"mesh": init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))},
        {"mesh": meshes[1]["pp"]}, {"mesh": meshes[dist.get_rank() == 1]},
        {"mesh": meshes[1], "compile": "aot_eager"}, {"mesh": meshes[1], "compress": "bf16"},
        *[{"mesh": meshes[1], "schedule": "gpipe", "executor": name} for name in THREADED],
        {"mesh": meshes[1], "schedule": "gpipe" if dist.get_rank() > 1 else "1f1b"},
        {"mesh": meshes[1], "recompute": float(dist.get_rank() > 1)}]
    errors = []
    for words in given:
        with pytest.raises(UserError) as caught:
            jobs.pipeline(rich_model(), **{**TWO_BY_TWO, **words})
        errors.append(str(caught.value).splitlines()[0])
    return errors


def test_meshes_and_what_lanes_cannot_do_are_refused_with_numbers(world: World) -> None:
    for errors in world.run(refused):
        assert errors == [
            "error: the mesh has dimensions without names, and no 'pp' on which the pipeline lives",
            "error: the mesh has the dimensions tp, and no 'pp' on which the pipeline lives",
            "error: the mesh (2,) has 2 ranks, the job 4",
            "error: the mesh is lane 0: ranks 0, 2; lane 1: ranks 1, 3 on rank 0 and lane 0: ranks 0, 1; lane 1: ranks "
            "2, 3 on rank 1",
            "error: compile is aot_eager beside a mesh whose layers compute over several lanes",
            "error: compress is bf16 beside a mesh whose layers compute over several lanes",
            *[f"error: the executor is {name} beside a mesh whose layers compute over several lanes"
              for name in THREADED],
            "error: order is Order(schedule='1f1b', chunks=None, slices=1) on rank 0 and Order(schedule='gpipe', "
            "chunks=None, slices=1) on rank 2",
            "error: cut is Cut(stages=(4, 4), recompute=0.0, ranks=1) on rank 0 and Cut(stages=(4, 4), "
            "recompute=1.0, ranks=1) on rank 2"]
