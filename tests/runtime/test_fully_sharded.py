"""Stages that fully_shard divides over lanes have the bits of as many replicas, gathered once per update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from models import rich_batches, untied_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.profiler import ProfilerActivity, profile
from world import World

from vpipe import Model
from vpipe.errors import UserError

pytestmark = pytest.mark.jobs


class AdamW:
    """Element by element: torch's fused form rounds the last elements of a tensor otherwise than those before."""

    def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        return torch.optim.AdamW(named.values(), lr=3e-3, weight_decay=0.1, foreach=False) if named else None


MICROBATCHES = 4
"""Of a batch of all lanes together: it is cut into as many."""


def divided(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> Model:
    """The model without a tie, each layer with parameters divided by fully_shard."""
    def build(make: Any) -> nn.Module:
        layer = make().to(dtype)
        return fully_shard(layer, mesh=mesh["dp"]) if any(True for _ in layer.parameters()) else layer

    model = untied_model()
    return Model([replace(layer, build=lambda make=layer.build: build(make)) for layer in model.layers],
                 batch=model.batch, labels="labels")


def uneven(batches: int, samples: int) -> list[dict[str, Tensor]]:
    """Batches whose microbatches have different numbers of labels."""
    made = rich_batches(batches, samples)
    for batch in made:
        batch["labels"][:samples // 2, 2:] = Model.NO_LABEL
    return made


def share(batch: dict[str, Tensor], place: int, lanes: int, microbatches: int = MICROBATCHES) -> dict[str, Tensor]:
    """The samples of a lane: microbatches of all lanes go to them in turn, as to replicas."""
    return {name: field.view(microbatches, -1, *field.shape[1:])[place::lanes].flatten(0, 1)
            for name, field in batch.items()}


def told(loss: float, outputs: Mapping[str, Tensor]) -> list[Any]:
    """An evaluation, its outputs lane after lane."""
    return [loss, jobs.fingerprint(outputs)]


def in_lanes(*, shape: Sequence[int], samples: int = 8, batches: int = 3, microbatches: int = MICROBATCHES,
             **arguments: Any) -> dict[str, Any]:
    """What a run on lanes shows."""
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("pp", "dp"))
    place, lanes = mesh["dp"].get_local_rank(), mesh["dp"].size()
    pipe = jobs.pipeline(divided(mesh), AdamW(), mesh=mesh, data="dp", microbatches=microbatches // lanes, **arguments)
    steps = list(pipe.train(share(batch, place, lanes, microbatches) for batch in uneven(batches, samples)))
    held_out = [share(batch, place, lanes, microbatches) for batch in rich_batches(2, samples, seed=9)]
    return {"losses": [step.loss for step in steps], "norms": [step.gradient_norm for step in steps],
            "evaluated": told(*pipe.evaluate(held_out, "h")), "state": jobs.fingerprint(pipe.state_dict())}


def with_replicas(*, lanes: int, samples: int = 8, batches: int = 3, microbatches: int = MICROBATCHES,
                  **arguments: Any) -> dict[str, Any]:
    """What the same run of as many replicas of every stage shows, in one process."""
    model = Model(untied_model().layers, untied_model().batch, labels="labels")
    pipe = jobs.pipeline(model, AdamW(), microbatches=microbatches, ranks=lanes, **arguments)
    steps = list(pipe.train(uneven(batches, samples)))
    loss, outputs = pipe.evaluate(rich_batches(2, samples, seed=9), "h")
    batches_of_lanes = [share({"h": rows}, place, lanes, microbatches)["h"] for place in range(lanes)
                        for rows in outputs["h"].split(samples)]
    return {"losses": [step.loss for step in steps], "norms": [step.gradient_norm for step in steps],
            "evaluated": told(loss, {"h": torch.cat(batches_of_lanes)}),
            "state": jobs.fingerprint(pipe.state_dict())}


@pytest.mark.parametrize(("shape", "arguments"), [
    ([2, 2], {"schedule": "gpipe", "per_token_loss": True}), ([2, 2], {"schedule": "1f1b", "recompute": 1.0}),
    ([2, 2], {"schedule": "zb_h1"}),
    ([2, 2], {"schedule": "zb_v", "partition": [2, 2, 2, 2]}), ([2, 2], {"schedule": "1f1b", "precision": "bf16"}),
    ([2, 2], {"schedule": "1f1b", "precision": "fp16"}), ([1, 4], {"schedule": "interleaved", "partition": [4, 4]})],
    ids=str)
def test_lanes_have_the_bits_of_replicas(world: World, shape: Sequence[int], arguments: dict[str, Any]) -> None:
    """Losses, evaluations and weights; also with dropout, which draws for a lane what it draws for a replica."""
    given = {"partition": [4, 4], **arguments}
    expected = with_replicas(lanes=shape[1], **given)
    for result in world.run(in_lanes, shape=shape, **given):
        assert result == expected


def test_three_lanes_add_gradients_in_their_order(tmp_path: Path) -> None:
    """Of two the order does not matter, and of three most cut a weight into parts of different sizes."""
    world = World(3, tmp_path)
    try:
        given = {"schedule": "1f1b", "partition": [4, 4], "samples": 6, "microbatches": 3}
        expected = with_replicas(lanes=3, **given)
        assert world.run(in_lanes, shape=[1, 3], **given) == [expected] * 3
    finally:
        world.kill()


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_a_norm_over_lanes_is_that_of_the_whole_but_for_rounding(world: World, clip: float) -> None:
    """A norm of n numbers in fp32 is off by at most n / 2 + 1 roundings; so the norm of parts, which is put together
    in fp64, and the norm of the whole differ by at most n + 2 of them, and so does the factor by which they clip."""
    given = {"schedule": "1f1b", "partition": [4, 4], "grad_clip": clip, "batches": 1}
    expected = with_replicas(lanes=2, **given)
    most = (max(p.numel() for p in untied_model().layers[0].build().parameters()) + 2) * torch.finfo(torch.float32).eps
    for result in world.run(in_lanes, shape=[2, 2], **given):
        assert result["norms"] == pytest.approx(expected["norms"], rel=most, abs=0)
        assert (result["state"] == expected["state"]) or clip < 1  # a factor of 1 changes nothing


def counted(*, schedule: str, partition: Sequence[int]) -> dict[str, Any]:
    """How often weights are gathered and given back in two batches, and what stays of gathered ones after them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe = jobs.pipeline(divided(mesh), AdamW(), mesh=mesh, data="dp", microbatches=2, schedule=schedule,
                         partition=partition)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        list(pipe.train(share(batch, mesh["dp"].get_local_rank(), 2) for batch in rich_batches(2, 8)))
    calls = Counter(event.name.removeprefix("c10d::") for event in recorded.events() if event.name in (
        "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::alltoall_base_"))
    held = sum(p.untyped_storage().nbytes() for stage in pipe.engine.local_stages
               for p in stage.weights.leaves() if not hasattr(p, "placements"))
    modules = sum(isinstance(layer, FSDPModule) for stage in pipe.engine.local_stages
                  for layer in stage.modules.values())
    return {"calls": dict(calls), "modules": modules, "stages": len(pipe.stages), "held": held}


@pytest.mark.parametrize(("schedule", "partition"), [("1f1b", [4, 4]), ("zb_v", [2, 2, 2, 2])])
def test_weights_are_gathered_and_gradients_summed_once_per_update(world: World, schedule: str,
                                                                   partition: Sequence[int]) -> None:
    for found in world.run(counted, schedule=schedule, partition=partition):
        assert found["calls"] == {"_allgather_base_": 2 * found["modules"], "alltoall_base_": 2 * found["stages"]}
        assert found["held"] == 0


def refused() -> list[str]:
    """The first lines of the errors of what does not go together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    half = divided(mesh).layers[:4]
    given: list[tuple[Model, dict[str, Any]]] = [
        (divided(mesh), {}), (divided(mesh), {"data": "pp"}), (divided(mesh), {"data": "dp", "schedule": "pipedream"}),
        (Model([*half, *untied_model().layers[4:]], batch=("ids", "labels")), {"data": "dp"}),
        (divided(mesh), {"data": "dp", "precision": "bf16_pure"}),
        (divided(mesh, torch.bfloat16), {"data": "dp", "precision": "bf16"}),
        (divided(mesh), {"data": "dp", "schedule": "dualpipe", "microbatches": 4})]
    errors = []
    for model, words in given:
        with pytest.raises(UserError) as caught:
            jobs.pipeline(model, AdamW(), **{"mesh": mesh, "schedule": "1f1b", "partition": [4, 4], "microbatches": 2,
                                             **words})
        errors.append(str(caught.value).splitlines()[0])
    return errors


def test_what_does_not_go_with_fully_shard_is_refused(world: World) -> None:
    for errors in world.run(refused):
        assert errors == [
            "error: layer 'embed' is sharded by fully_shard, which gathers weights and adds gradients when no schedule "
            "says so: some would be lost",
            "error: data is 'pp', but the mesh's dimensions beside 'pp' are: dp",
            "error: 'pipedream' has no flush, but weights that fully_shard divides have one version",
            "error: 'mix1.linear.weight' is not divided by fully_shard, but lanes train on batches of their own: each "
            "would have its own gradient",
            "error: precision is bf16_pure, and data is 'dp'",
            "error: 'embed.word.weight' was torch.bfloat16 when fully_shard divided it, but precision 'bf16' trains "
            "torch.float32",
            "error: stages have 2 replicas, and data is 'dp'"]
