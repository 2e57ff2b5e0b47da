"""Layers that PyTorch divides over ranks, or whose gradients it adds there, are refused by name: built so, or later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from jobs import AdamW, WithoutGroup, refusal_of_a_wrapped_layer
from models import rich_batches, rich_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from world import World

from vpipe import Layer, Model, Pipeline
from vpipe.errors import UserError


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()



def model(wrap: Callable[[nn.Module], nn.Module]) -> Model:
    layers = list(rich_model(tied=False).layers)
    build = layers[3].build
    layers[3] = Layer("raw1", lambda: wrap(build()))
    return Model(layers, rich_model().batch)


def refusal(wrap: Callable[[nn.Module], nn.Module]) -> str:
    with pytest.raises(UserError) as error:
        Pipeline(model(wrap), AdamW(), stages=2)
    return str(error.value)


def test_a_layer_in_distributed_data_parallel() -> None:
    assert refusal(WithoutGroup) == (
        "error: layer 'raw1' is wrapped in DistributedDataParallel, which adds gradients when no schedule says so: its "
        "ranks may wait for one another for ever\n"
        "hint: give the module itself: stages=Cut(2, ranks=2) has every stage on two ranks, and adds their gradients")
    assert "layer 'raw1' ('1' in it) is wrapped" in refusal(
        lambda module: nn.Sequential(module, WithoutGroup(nn.ReLU())))


def test_a_wrapper_that_a_layer_is_built_with_is_not_made() -> None:
    """Its constructor would wait for all ranks, of which some build other layers; here it would want a group."""
    before = DistributedDataParallel.__init__, FullyShardedDataParallel.__init__
    assert "layer 'raw1' is wrapped in DistributedDataParallel" in refusal(
        lambda module: nn.Sequential(DistributedDataParallel(module)))
    assert "layer 'raw1' is sharded by FullyShardedDataParallel" in refusal(FullyShardedDataParallel)
    assert (DistributedDataParallel.__init__, FullyShardedDataParallel.__init__) == before


@pytest.mark.usefixtures("group")
def test_a_sharded_layer() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))

    assert refusal(lambda module: fully_shard(module, mesh=mesh)) == (
        "error: layer 'raw1' is sharded by fully_shard, which gathers weights and adds gradients when no schedule says "
        "so: some would be lost\n"
        "hint: give the module without fully_shard: stages=Cut(2, ranks=2) has every stage on two ranks, and adds "
        "their gradients; "
        "or the pipeline one dimension of a mesh, and fully_shard another: Execution(mesh=mesh, data='dp')")
    pipe = Pipeline(model(lambda module: module), AdamW(), stages=2, microbatches=2)
    steps = pipe.train(rich_batches(2, 4))
    next(steps)
    fully_shard(pipe.engine.local_stages[0].modules[3], mesh=mesh)
    with pytest.raises(UserError, match=r"layer 'raw1' is sharded by fully_shard, .*; it was not when the pipeline"):
        next(steps)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_layer_that_is_wrapped_later(schedule: str, tmp_path: Path) -> None:
    later: list[nn.Sequential] = []

    def keep(module: nn.Module) -> nn.Module:
        later.append(nn.Sequential(module, nn.Identity()))
        return later[-1]

    pipe = Pipeline(model(keep), AdamW(), stages=2, schedule=schedule, microbatches=2)
    steps = pipe.train(rich_batches(3, 4))
    next(steps)
    later[-1][1] = WithoutGroup(nn.Identity())
    with pytest.raises(UserError, match=r"in DistributedDataParallel.*; it was not when the pipeline was built"):
        next(steps)
    for act in (lambda: pipe.evaluate(rich_batches(1, 4)), pipe.state_dict, lambda: pipe.save(tmp_path / "saved"),
                lambda: pipe.train(rich_batches(1, 4))):
        with pytest.raises(UserError, match=r"layer 'raw1' \('1' in it\) is wrapped"):
            act()


def test_all_ranks_refuse_what_one_has(world: World) -> None:
    (refused,) = set(world.run(refusal_of_a_wrapped_layer))
    assert refused.startswith("error: layer 'raw1' is wrapped in DistributedDataParallel")
