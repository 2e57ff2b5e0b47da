"""torch.distributed.checkpoint saves a pipeline in shards, and loads it under another mesh, and from plain FSDP2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dtensor_jobs import Block, Loss
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from world import World

from vpipe import Layer, Model, Pipeline
from vpipe.errors import UserError

pytestmark = [pytest.mark.jobs, pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")]

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class AdamW:
    """Element by element, and so the same of a shard as of the whole."""

    def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        return torch.optim.AdamW(named.values(), lr=1e-2, foreach=False) if named else None


def model(wrap: Any = lambda module: module) -> Model:
    return Model([Layer("b0", lambda: wrap(Block(8, 16)), inputs=("x",)), *(
        Layer(f"b{i}", lambda: wrap(Block(8, 16))) for i in (1, 2)),
        Layer("loss", lambda: wrap(Loss(8, 4)), inputs=("h", "y"), outputs=("loss",))], batch=("x", "y"))


def batches(first: int, count: int) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(7)
    every = [{"x": torch.randn(8, 8, generator=drawn), "y": torch.randn(8, 4, generator=drawn)} for _ in range(6)]
    return every[first:first + count]


def losses(pipe: Pipeline, of: list[dict[str, Tensor]]) -> list[float]:
    return [step.loss for step in pipe.train(of)]


def pipeline(wrap: Any = lambda module: module, **words: Any) -> Pipeline:
    return jobs.pipeline(model(wrap), AdamW(), learning_rate_factor=lambda step: 1.0, **{
        "schedule": "1f1b", "partition": [2, 2], "microbatches": 2, **words})


def in_lanes(how: str) -> tuple[Any, dict[str, Any], Any]:
    """What makes a layer of a mesh of two lanes, the words of the pipeline, and this lane's share of a batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", how))
    if how == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return (lambda module: parallelize_module(module, mesh["tp"], plan) if isinstance(module, Block) else module,
                {"mesh": mesh}, lambda batch: batch)
    place = mesh["dp"].get_local_rank()
    return (lambda module: fully_shard(module, mesh=mesh["dp"]), {"mesh": mesh, "data": "dp"},
            lambda batch: {name: field.view(2, 4, -1)[place] for name, field in batch.items()})


def saved_in_lanes(*, how: str, folder: str, steps: int) -> list[float]:
    """Train, save in shards, train on."""
    wrap, words, own = in_lanes(how)
    pipe = pipeline(wrap, **words)
    made = losses(pipe, list(map(own, batches(0, steps))))
    dcp.save({"pipe": pipe.sharded}, checkpoint_id=folder)
    return made + losses(pipe, list(map(own, batches(steps, 2))))


def loaded_in_lanes(*, how: str, folder: str, steps: int) -> list[float]:
    wrap, words, own = in_lanes(how)
    pipe = pipeline(wrap, **words)
    dcp.load({"pipe": pipe.sharded}, checkpoint_id=folder)
    assert pipe.position.steps == steps
    return losses(pipe, list(map(own, batches(steps, 2))))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("how", ["dp", "tp"])
def test_lanes_save_and_one_process_and_lanes_load(world: World, tmp_path: Path, how: str, steps: int) -> None:
    """Before the first step optimizers have no state, and so have those that load."""
    expected = {tuple(run[steps:]) for run in world.run(saved_in_lanes, how=how, folder=str(tmp_path), steps=steps)}
    assert {tuple(run) for run in world.run(loaded_in_lanes, how=how, folder=str(tmp_path), steps=steps)} == expected
    pipe = pipeline(partition=[1, 1, 2], microbatches=4 if how == "dp" else 2)
    dcp.load({"pipe": pipe.sharded}, checkpoint_id=tmp_path, no_dist=True)
    assert pipe.position.steps == steps
    assert losses(pipe, batches(steps, 2)) == pytest.approx(list(*expected), rel=1e-6)


def one_process(*, folder: str) -> list[float]:
    """Save in one process; the losses that come after."""
    pipe = pipeline(schedule="pipedream", microbatches=4, update_every=4)
    list(pipe.train(batches(0, 2)))
    dcp.save({"pipe": pipe.sharded}, checkpoint_id=folder, no_dist=True)
    return losses(pipe, batches(2, 2))


def test_one_process_saves_and_lanes_load(world: World, tmp_path: Path) -> None:
    expected = one_process(folder=str(tmp_path))
    for run in world.run(loaded_in_lanes, how="tp", folder=str(tmp_path), steps=2):
        assert run[0] == pytest.approx(expected[0], rel=1e-6)  # of the next microbatches nobody has newer weights


def plain(folder: str | None) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    """A plain model on FSDP2, with the names of the pipeline's layers; loaded, if there is something to load."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(3)
    whole = nn.ModuleDict({"b0": Block(8, 16), "b1": Block(8, 16), "b2": Block(8, 16), "loss": Loss(8, 4)})
    for part in whole.values():
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, foreach=False)
    if folder is not None:
        mine, its = get_state_dict(whole, optimizer, options=FLAT)
        dcp.load({"pipe": {"model": mine, "optimizer": its}}, checkpoint_id=folder)
        set_state_dict(whole, optimizer, model_state_dict=mine, optim_state_dict=its, options=FLAT)
    return whole, optimizer


def step(whole: nn.ModuleDict, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    """One update with the same batch on every rank, so that the mean over ranks is that of one."""
    h = whole["b2"](whole["b1"](whole["b0"](batch["x"])))
    loss = whole["loss"](h, batch["y"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def saved_by_fsdp(*, folder: str) -> list[float]:
    whole, optimizer = plain(None)
    for batch in batches(0, 2):
        step(whole, optimizer, batch)
    model_state, optimizer_state = get_state_dict(whole, optimizer, options=FLAT)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return [step(whole, optimizer, batch) for batch in batches(2, 2)]


def loaded_by_fsdp(*, folder: str) -> list[float]:
    whole, optimizer = plain(folder)
    return [step(whole, optimizer, batch) for batch in batches(2, 2)]


def test_what_plain_fsdp2_saved_loads_into_a_pipeline(world: World, tmp_path: Path) -> None:
    expected = world.run(saved_by_fsdp, folder=str(tmp_path))[0]
    pipe = pipeline(microbatches=1)
    state = pipe.state_dict(sharded=True)
    del state["vpipe"]  # a plain model says nothing of it
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    pipe.load_state_dict(state)
    assert losses(pipe, batches(2, 2)) == pytest.approx(expected, rel=1e-6)


def test_state_that_was_loaded_is_saved_before_the_first_step() -> None:
    """A plain model says nothing of steps, but has an optimizer's state."""
    first = pipeline()
    list(first.train(batches(0, 2)))
    state = first.state_dict(sharded=True)
    del state["vpipe"]
    second, third = pipeline(), pipeline()
    second.load_state_dict(state)
    third.load_state_dict(second.state_dict(sharded=True))
    assert losses(third, batches(2, 2)) == losses(first, batches(2, 2))


def test_what_a_pipeline_saved_loads_into_plain_fsdp2(world: World, tmp_path: Path) -> None:
    pipe = pipeline(microbatches=1)
    list(pipe.train(batches(0, 2)))
    dcp.save({"pipe": pipe.sharded}, checkpoint_id=tmp_path, no_dist=True)
    expected = losses(pipe, batches(2, 2))
    for run in world.run(loaded_by_fsdp, folder=str(tmp_path)):
        assert run == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("page", ["mesh.md", "mesh.zh.md"])
def test_the_recipes_of_the_page_load_both_ways(page: str, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    to_pipeline, to_plain = re.findall(r"^```\n(state = .*?|model_state, .*?)^```$", text, re.MULTILINE | re.DOTALL)
    first, batch = pipeline(microbatches=1), batches(2, 1)
    list(first.train(batches(0, 2)))
    dcp.save({"pipe": first.sharded}, checkpoint_id=tmp_path / "pipeline")
    whole = nn.ModuleDict({"b0": Block(8, 16), "b1": Block(8, 16), "b2": Block(8, 16), "loss": Loss(8, 4)})
    names = {**globals(), "flat": FLAT, "model": whole,
             "optimizers": (made := torch.optim.AdamW(whole.parameters(), lr=0.5)), "folder": tmp_path / "pipeline"}
    exec(to_plain, names)
    assert made.param_groups[0]["lr"] == 1e-2
    state = get_state_dict(whole, made, options=FLAT)
    dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=tmp_path / "plain")
    names |= {"pipe": (second := pipeline(microbatches=1, seed=9)), "folder": tmp_path / "plain"}
    exec(to_pipeline, names)
    [expected] = losses(first, batch)
    assert losses(second, batch) == [expected]
    assert step(whole, made, batch[0]) == expected


def test_a_whole_model_loads_and_what_is_none_is_refused() -> None:
    first, second = pipeline(), pipeline(seed=9)
    second.load_state_dict(first.state_dict())
    assert losses(second, batches(0, 2)) == losses(first, batches(0, 2))
    with pytest.raises(UserError, match="the model missing"):
        pipeline().load_state_dict({"model": {}})
    with pytest.raises(UserError, match="the state has the parts optimizer, but not 'model'"):
        pipeline().sharded.load_state_dict({"optimizer": {}})
