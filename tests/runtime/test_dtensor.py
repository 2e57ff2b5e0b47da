"""Parameters that are DTensors: on a mesh of one rank, pipelines compute what they do with plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dtensor_jobs
import pytest
import torch
import torch.distributed as dist
from oracles import pipeline_of
from safetensors.torch import load_file
from stages import stage_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from world import World

from vpipe import Pipeline
from vpipe.app.train.optimizers import OPTIMIZERS, OptimizerSettings, hidden_matrices
from vpipe.errors import UserError
from vpipe.runtime.microbatches import ForwardKey
from vpipe.runtime.sharded_tensors import DrawnAsOnOneDevice

pytestmark = pytest.mark.jobs

Wrap = Callable[[nn.Module], nn.Module]


@pytest.fixture
def sharded() -> Iterator[Wrap]:
    """Shard a block as tensor parallelism does, over one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dtensor_jobs.parallel(torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


@dataclass(frozen=True)
class Unfused:
    """The settings' optimizer by the operations that DTensors have: their SGD is not fused, which rounds otherwise."""

    settings: OptimizerSettings

    def from_named(self, named: Mapping[str, nn.Parameter]) -> Any:
        made = self.settings.from_named(named)
        for group in made.param_groups if isinstance(made, torch.optim.SGD) else ():
            group["fused"] = None
        return made


def plainly(module: nn.Module) -> nn.Module:
    return module


def pipeline(wrap: Wrap, ties: Mapping[str, str] = {}, **words: Any) -> Pipeline:
    return pipeline_of(dtensor_jobs.model(wrap, ties), **{"stages": 3, "optimizer": dtensor_jobs.adamw} | words)


def run(pipe: Pipeline) -> tuple[list[float], dict[str, Tensor]]:
    losses = [step.loss for step in pipe.train(dtensor_jobs.batches())]
    return losses, pipe.state_dict()


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return list(one) == list(other) and all(type(one[n]) is Tensor and torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("words", [
    {"schedule": "1f1b", "grad_clip": 0.1}, {"schedule": "zb_h1", "recompute": 0.5}, {"schedule": "2bw"},
    {"schedule": "pipedream", "update_every": 1, "grad_clip": 0.1},
    {"schedule": "pipedream", "update_every": 1, "delay_correction": 0.5, "stages": 2},
    {"schedule": "pipedream", "precision": "bf16_pure"}, {"schedule": "1f1b", "precision": "bf16"},
    {"schedule": "pipedream", "precision": "fp16", "loss_scale": 1024}, {"schedule": "pipedream", "replicas": 2},
    {"schedule": "2bw", "replicas": 2, "zero1": True, "precision": "bf16_pure", "grad_clip": 0.1},
    {"schedule": "1f1b", "ties": {"up.weight": "b0.up.weight"}, "grad_clip": 0.1},
    {"schedule": "pipedream", "ties": {"up.weight": "b0.up.weight"}, "replicas": 2, "stages": 2}],
    ids=lambda words: " ".join(map(str, words.values())))
def test_trains_as_with_plain_tensors(sharded: Wrap, words: dict[str, Any], tmp_path: Path) -> None:
    """And a checkpoint of either loads into the other."""
    plain, pipe = pipeline(plainly, **words), pipeline(sharded, **words)
    (expected, weights), (losses, found) = run(plain), run(pipe)
    assert losses == expected
    assert same(found, weights)
    pipe.save(tmp_path / "sharded")
    plain.save(tmp_path / "plain")
    later, _ = run(plain)
    for folder, wrap in (("sharded", plainly), ("plain", sharded)):
        resumed = pipeline(wrap, **words)
        resumed.load(tmp_path / folder)
        assert run(resumed)[0] == later


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_steps_as_with_plain_tensors(sharded: Wrap, name: str, tmp_path: Path) -> None:
    """Those of ``vpipe train``, whose groups hold one kind of parameters each."""
    settings = OptimizerSettings(name, 0.01, 0.1, matrices=hidden_matrices(dtensor_jobs.model(plainly)))
    plain, pipe = pipeline(plainly, optimizer=Unfused(settings)), pipeline(sharded, optimizer=settings)
    (expected, weights), (losses, found) = run(plain), run(pipe)
    assert losses == expected
    assert same(found, weights)
    plain.save(tmp_path / "plain")
    resumed = pipeline(sharded, optimizer=settings)
    resumed.load(tmp_path / "plain")
    assert run(resumed)[0] == run(plain)[0]


def test_both_kinds_of_parameters_are_in_no_list(sharded: Wrap) -> None:
    """Torch makes lists by itself on GPUs alone."""
    pipe = pipeline(sharded)
    optimizers = [made.optimizers[0] for worker in pipe.engine.workers.values()
                  for made in worker.optimizer_steps.optimizers.values()]
    kinds = [{isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"]} for optimizer in optimizers]
    assert [optimizer.param_groups[0]["foreach"] for optimizer in optimizers] == [
        False if len(kind) > 1 else None for kind in kinds]
    assert {len(kind) for kind in kinds} == {1, 2}


def test_shards_on_a_mesh(world: World) -> None:
    """Norms count every shard once. A norm of n numbers is within (n / 2 + 2) roundings of the exact one in any order
    of its sum: squares cost one each, their sum n - 1, and the root halves the relative error of both and adds one.

    Parts of a sum are added in the order of the ranks: in others 1e-7 would be lost elsewhere.
    """
    first, *others = world.run(dtensor_jobs.on_a_mesh)
    assert all(other == first for other in others)
    assert first["norms"] == pytest.approx(first["expected"], rel=2 * (15 / 2 + 2) * 2**-24)
    assert first["whole"]
    assert first["parted"]
    rank = [torch.tensor(1e-7 + number) for number in range(4)]
    both, column, *rows = (rank[0] + rank[2]) + (rank[1] + rank[3]), rank[0] + rank[1], *(
        rank[i] + rank[i + 1] for i in (0, 2))
    assert first["sums"] == [[both.item()] * 4, [column.item()] * 4, [row.item() for row in rows for _ in range(2)]]


def test_a_mesh_over_ranks_of_one_pipeline_is_refused(world: World) -> None:
    assert set(world.run(dtensor_jobs.refused_over_one_pipeline)) == {
        "error: 'b0.up.bias' is a DTensor over ranks 0, 1, 2, 3, which are one pipeline: each has stages of its own\n"
        "hint: shard over ranks beside the pipeline: give the pipeline one dimension of a mesh, and the layer another"}
    assert {text.partition(", which are")[0] for text in world.run(dtensor_jobs.refused_before_it_is_built)} == {
        "error: 'b0.up.weight' is a DTensor along 'pp' over ranks 0, 2"}


@torch.no_grad()
def add_one(weight: DTensor) -> None:
    weight.to_local().add_(1)


def refusal(wrap: Wrap, **words: Any) -> str:
    with pytest.raises(UserError) as error:
        list(pipeline(wrap, **words).train(dtensor_jobs.batches()))
    return str(error.value)


def test_weight_gradients_wait(sharded: Wrap) -> None:
    stage = stage_of(dtensor_jobs.model(sharded), [3, 1])
    [field] = dtensor_jobs.batches(1)
    outputs, record = stage.forward([], field, ForwardKey(0, 0), stage.pin({}), split=True)
    stage.prepare_backward(record.pins)
    stage.backward_input(record, {"h": torch.ones_like(outputs[0])})
    assert [len(half._later) for half in record.weight_grads] == [6], "of two matrices in each of three blocks"


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_dtensor_run(sharded: Wrap, register: str) -> None:
    """Torch's Module.to, by which a layer gets to its device, makes them unknown to autograd."""
    calls: list[Tensor] = []

    def hooked(block: nn.Module) -> nn.Module:
        getattr(sharded(block).up.weight, register)(lambda seen: calls.append(seen.detach()))
        return block

    list(pipeline(hooked).train(dtensor_jobs.batches(1)))
    assert len(calls) == 12, "of 4 microbatches in each of three blocks"


def test_what_is_refused(sharded: Wrap) -> None:
    def keeping_its_output(block: nn.Module) -> nn.Module:
        block = sharded(block)
        mesh = block.up.weight.device_mesh
        block.register_forward_hook(lambda *seen: DTensor.from_local(seen[-1], mesh, [Replicate()]))
        return block

    def used_beside(block: nn.Module) -> nn.Module:
        block, weight = sharded(block), block.up.weight
        block.register_forward_hook(lambda *seen: seen[-1] + weight.sum())
        return block

    def changed_through_the_shard(block: nn.Module) -> nn.Module:
        block = sharded(block)
        block.register_forward_pre_hook(lambda module, _: add_one(module.up.weight))
        return block

    for schedule in ("1f1b", "pipedream"):
        assert refusal(changed_through_the_shard, schedule=schedule, recompute=1.0).startswith(
            "error: 'b0.up.weight' was changed in place by a forward, which must find it unchanged")
    assert refusal(sharded, optimizer=lambda params: torch.optim.AdamW(params, fused=True)) == (
        "error: AdamW of stage 2 has 4 DTensors and 2 plain tensors in a parameter group with fused=True, by which "
        "torch steps lists of one kind\n"
        "hint: leave fused out, or give it two parameter groups: isinstance(p, DTensor) tells them apart")
    weights = DTensor.from_local(torch.ones(1, 1, 2, 4), sharded(dtensor_jobs.Block()).up.weight.device_mesh)
    with DrawnAsOnOneDevice(), pytest.raises(UserError, match=r"attention drops 0.5 of its weights within one"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(weights, weights, weights, 0.5)
    assert "layer 'b0' returned 'h' as a DTensor, but stages exchange plain tensors" in refusal(keeping_its_output)
    assert "up.weight' is used through a reference that its layer keeps" in refusal(used_beside, schedule="pipedream")


def test_lanes_of_a_pipeline_have_the_bits_of_lanes_without_one(world: World) -> None:
    first, *others = world.run(dtensor_jobs.pipelines_of_two_lanes)
    assert all(other == first for other in others)
    for name, (pipelined, alone) in first.items():
        assert pipelined == alone, name
    assert first["zb_h1"] == first["1f1b"]


def test_shards_make_the_gradients_of_the_whole(world: World) -> None:
    """Of numbers without roundings: a gradient that is counted twice, or of one rank alone, is another one, as is that
    with other dropout. A clip far above the norm changes none; the norm is of n = 144 numbers, see above, in double
    precision.
    """
    expected = dtensor_jobs.exactly_trained(plainly, schedule="1f1b", grad_clip=1e30)
    for runs in world.run(dtensor_jobs.exactly_trained_in_lanes):
        assert [run["state"] for run in runs] == [expected["state"]] * 5
        assert len({run["norm"] for run in runs[1:]}) == 1
        assert runs[1]["norm"] == pytest.approx(expected["norm"], rel=2 * (144 / 2 + 2) * 2**-53)


def test_a_checkpoint_of_one_mesh_is_that_of_another(world: World, tmp_path: Path) -> None:
    """And of none, in another cut; with the optimizer's state and the latest changes."""
    world.run(dtensor_jobs.carried, folder=str(tmp_path))
    alone = pipeline(plainly, schedule="pipedream", delay_correction=0.5, stages=2)
    alone.load(tmp_path / "train")
    alone.save(tmp_path / "alone")
    saved, *others = ({name: tensor for file in sorted((tmp_path / folder).glob("*.safetensors"))
                       for name, tensor in load_file(file).items()} for folder in ("train", "load", "alone"))
    assert sum(name.startswith("optim.b1.up.weight.exp_avg") for name in saved) == 2
    assert saved["delay_correction.b0.up.weight.last_change"].abs().sum() > 0
    for other in others:
        assert same(dict(sorted(other.items())), dict(sorted(saved.items())))


@pytest.mark.parametrize(("words", "skipped"), [
    ({"schedule": "1f1b", "skip_not_finite": True}, [True, False]),
    ({"schedule": "2bw", "skip_not_finite": True}, [True, False, False, False]),
    ({"schedule": "2bw", "precision": "fp16", "loss_scale": 1024}, [True, False, False, False])])
def test_an_overflow_in_one_lane_skips_the_update_in_all(world: World, words: dict[str, Any], skipped: list[bool]
                                                         ) -> None:
    """A rank tells of its own stage."""
    runs = world.run(dtensor_jobs.one_lane_overflows, **words)
    assert runs[0] == runs[1]
    assert runs[2] == runs[3] == {"skipped": skipped, "state": runs[0]["state"]}


def test_lanes_begin_alike(world: World) -> None:
    """Plain tensors are the same in all lanes, DTensors where they are replicated."""
    for texts in world.run(dtensor_jobs.lanes_that_begin_apart):
        assert texts == ["error: stage 0: 'b0.up.bias' begins with other values on rank 1 than on rank 0",
                         "error: stage 1: 'b2.down.bias' begins with other values on rank 3 than on rank 2"]


def test_lanes_have_oracles(world: World) -> None:
    """Of several steps, with dropout, clipped by norms of shards, of which some gradients are parts."""
    world.run(dtensor_jobs.oracles_in_lanes)
