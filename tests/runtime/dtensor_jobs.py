"""Models with DTensors, and jobs for a test world that compute with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any

import pytest
import torch
from jobs import fingerprint
from pipelines import parts
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vpipe import Execution, Layer, Model, Pipeline
from vpipe.app.train.optimizers import OptimizerSettings, hidden_matrices
from vpipe.errors import UserError
from vpipe.runtime.sharded_tensors import completed, local, norms_of, parted, whole
from vpipe.testing import assert_equals_oracle


class Block(nn.Module):
    def __init__(self, width: int = 6, inner: int = 10) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)  # four ranks have 3, 3, 3 and 1 of 10

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(h)))


class Loss(nn.Module):
    def __init__(self, width: int = 6, targets: int = 2) -> None:
        super().__init__()
        self.out = nn.Linear(width, targets)

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.out(h), y)


def parallel(mesh: DeviceMesh) -> Callable[[nn.Module], nn.Module]:
    return lambda block: parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def model(wrap: Callable[[nn.Module], nn.Module], ties: Mapping[str, str] = {}) -> Model:
    """Three blocks and a loss; ``ties`` are of the last block."""
    blocks = [Layer(f"b{i}", lambda: wrap(Block()), inputs=("x" if i == 0 else "h",), ties=ties if i == 2 else {})
              for i in range(3)]
    return Model([*blocks, Layer("loss", Loss, inputs=("h", "y"), outputs=("loss",))], batch=("x", "y"))


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [{"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 2, generator=generator)}
            for _ in range(count)]


def on_a_mesh() -> dict[str, Any]:
    """What ranks of a 2 x 2 mesh tell of shards, beside what one process computes."""
    mesh = init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(5, 3, generator=generator) for _ in range(6)]
    kinds: list[list[Placement]] = [[Shard(0), Replicate()], [Shard(0), Shard(1)], [Replicate(), Replicate()],
                                    [Replicate(), Shard(1)]]
    sharded = [distribute_tensor(t, mesh, kind) for t, kind in zip(tensors, kinds, strict=False)] + tensors[4:]
    return {"norms": norms_of(sharded).tolist(), "expected": [t.norm().item() for t in tensors],
            "whole": all(torch.equal(whole(t), full) for t, full in zip(sharded, tensors, strict=True)),
            "parted": all(torch.equal(local(parted(full, t)), local(t))
                          for t, full in zip(sharded, tensors, strict=True)),
            "sums": _partial_sums(mesh)}


def _partial_sums(mesh: DeviceMesh) -> list[list[float]]:
    """Gradients of parameters placed in several ways, of which ranks have parts: rank r's are 10^-7 + r."""
    kinds = {"whole": ([Partial(), Partial()], [Replicate(), Replicate()]),
             "rows": ([Partial(), Replicate()], [Shard(0), Replicate()]),
             "gathered": ([Shard(0), Partial()], [Replicate(), Replicate()])}
    parameters, gradients = [], []
    for places, own in kinds.values():
        parameter = distribute_tensor(torch.zeros(4, 2), mesh, own)
        mine = 2 if isinstance(places[0], Shard) else 4
        column = mesh.get_coordinate()[0] if places[1].is_replicate() else mesh.get_rank()  # equal where replicated
        gradients.append(DTensor.from_local(torch.full((mine, 2), 1e-7 + column), mesh, places, run_check=False))
        parameters.append(parameter)
    done = completed([*gradients, None], [*parameters, parameters[0]], ["w"] * 4)
    assert done.pop() is None
    assert [g.placements for g in done] == [p.placements for p in parameters]
    return [whole(gradient)[:, 0].tolist() for gradient in done]


def refused_over_one_pipeline() -> str:
    """Why ranks of one pipeline cannot share a layer's parameters out among themselves."""
    mesh = init_device_mesh("cpu", (4,))

    def shared_out(block: nn.Module) -> nn.Module:
        block.up.bias = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Shard(0)]))
        return block

    with pytest.raises(UserError) as error:
        Pipeline(model(shared_out), lambda p: torch.optim.SGD(p, lr=0.1), stages=4)
    return str(error.value)


def refused_before_it_is_built() -> str:
    """Why a plan cannot be for the pipeline's own dimension. To share its tensors out, stages of two blocks and of one
    would wait for one another: of none a layer has been built with values."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))

    def shared_out(block: nn.Module) -> nn.Module:
        assert block.up.weight.is_meta
        return parallel(mesh["pp"])(block)

    with pytest.raises(UserError) as error:
        Pipeline(model(shared_out), lambda p: torch.optim.SGD(p, lr=0.1), stages=[2, 2], execution=Execution(mesh=mesh))
    return str(error.value)


SETTINGS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "grad_clip": 0.1},
    "zb_h1": {"schedule": "zb_h1", "grad_clip": 0.1, "recompute": 1.0, "skip_not_finite": True},
    "pipedream": {"schedule": "pipedream", "grad_clip": 0.1, "delay_correction": 0.5, "precision": "bf16_pure"},
    "muon": {"schedule": "1f1b", "optimizer": "muon"}}


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """For both kinds of parameters, which torch steps in no list that mixes them."""
    return torch.optim.AdamW(params, lr=1e-2)


def trained(mesh: DeviceMesh, **words: Any) -> dict[str, Any]:
    """Losses and the state that two stages reach, whose blocks are shared out over a mesh's ``tp``."""
    if isinstance(wanted := words.get("optimizer"), str):
        words["optimizer"] = OptimizerSettings(wanted, 0.01, 0.1, matrices=hidden_matrices(model(lambda m: m)))
    pipe = Pipeline(model(parallel(mesh["tp"])), **parts(**{
        "stages": 2, "optimizer": adamw, "microbatches": 4, "mesh": mesh} | words))
    losses = [step.loss for step in pipe.train(batches(2))]
    return {"losses": losses, "state": fingerprint(pipe.state_dict())}


def pipelines_of_two_lanes() -> dict[str, list[dict[str, Any]]]:
    """What the settings reach in two lanes of two ranks, and without a pipeline, in lanes of one."""
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=names) for shape, names in (
        ((2, 2), ("pp", "tp")), ((2, 1, 2), ("dp", "pp", "tp")))]
    return {name: [trained(mesh, **words) for mesh in meshes] for name, words in SETTINGS.items()}


def carried(*, folder: str) -> None:
    """Save in two lanes with two ranks each, load in four with one, and save there."""
    words = {"schedule": "pipedream", "delay_correction": 0.5, "microbatches": 4, "seed": 2}
    for shape, call in (((2, 2), "train"), ((1, 4), "load")):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "tp"))
        pipe = Pipeline(model(parallel(mesh["tp"])), **parts(stages=2, optimizer=adamw, mesh=mesh, **words))
        if call == "train":
            list(pipe.train(batches(2)))
        else:
            pipe.load(f"{folder}/train")
        pipe.save(f"{folder}/{call}")


class Exact(nn.Module):
    """A block without roundings: its weights and inputs are small integers, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.up, self.down = Scale(), nn.Linear(4, 8), nn.Linear(8, 4)
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape).double()

    def forward(self, h: Tensor) -> Tensor:
        return h + checkpoint(self.mlp, h, use_reentrant=False)

    def mlp(self, h: Tensor) -> Tensor:
        return self.down(F.dropout(F.relu(self.up(self.scale(h)))))  # which doubles what is left


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.weight


class ExactLoss(nn.Module):
    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return (h * y).mean()


def exact_model(wrap: Callable[[nn.Module], nn.Module], tied: bool) -> Model:
    """Two blocks, which scale alike where they are tied."""
    ties = {"scale.weight": "b0.scale.weight"} if tied else {}
    return Model([Layer("b0", lambda: wrap(Exact()), inputs=("x",)),
                  Layer("b1", lambda: wrap(Exact()), ties=ties),
                  Layer("loss", ExactLoss, inputs=("h", "y"), outputs=("loss",))], batch=("x", "y"))


def sequence_parallel(mesh: DeviceMesh) -> Callable[[nn.Module], nn.Module]:
    """Share a block out: each rank scales a part of the sequence, and has a part of the gradient of ``scale``."""
    def wrap(block: nn.Module) -> nn.Module:
        plan = {"scale": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
                "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False), "down": RowwiseParallel()}
        return parallelize_module(parallelize_module(block, mesh, plan), mesh,
                                  {"scale": SequenceParallel(use_local_output=False)})
    return wrap


def exact_pipeline(wrap: Callable[[nn.Module], nn.Module], tied: bool = True, **words: Any) -> Pipeline:
    return Pipeline(exact_model(wrap, tied), **parts(**{
        "stages": 2, "microbatches": 4, "optimizer": lambda p: torch.optim.SGD(p, lr=0.25)} | words))


def exact_batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{name: torch.randint(-2, 3, (8, 4, 4), generator=generator).double() for name in "xy"}
            for _ in range(count)]


def exactly_trained(wrap: Callable[[nn.Module], nn.Module], **words: Any) -> dict[str, Any]:
    """The norm of the gradients of the first step, and the weights after it."""
    pipe = exact_pipeline(wrap, **words)
    [step] = pipe.train(exact_batches(1))
    return {"norm": step.gradient_norm, "state": fingerprint(pipe.state_dict())}


def exactly_trained_in_lanes() -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    runs: list[dict[str, Any]] = [
        {"schedule": "1f1b"}, {"schedule": "1f1b", "grad_clip": 1e30}, {"schedule": "zb_h1", "grad_clip": 1e30},
        {"schedule": "1f1b", "grad_clip": 1e30, "stages": 1, "replicas": 2},
        {"schedule": "1f1b", "grad_clip": 1e30, "stages": 1, "replicas": 2, "zero1": True}]
    return [exactly_trained(sequence_parallel(mesh["tp"]), mesh=mesh, **words) for words in runs]


class Poison(torch.autograd.Function):
    """The identity, whose gradient may be infinite."""

    @staticmethod
    def forward(context: Any, h: Tensor, poisoned: bool) -> Tensor:
        context.poisoned = poisoned
        return h.view_as(h)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * torch.inf if context.poisoned else gradient, None


def one_lane_overflows(**words: Any) -> dict[str, Any]:
    """The skipped steps, and the state, where lane 1 alone once gets an infinite gradient of its shard of a weight."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    calls = count()

    def taken() -> bool:
        return next(calls) == 0 and mesh.get_local_rank("tp") == 1

    def wrap(block: nn.Module) -> nn.Module:
        block = parallel(mesh["tp"])(block)
        block.up.register_forward_hook(lambda *given: Poison.apply(given[-1], taken()))
        return block

    pipe = Pipeline(model(wrap), **parts(**{"stages": 2, "optimizer": adamw, "microbatches": 4, "mesh": mesh} | words))
    skipped = [step.skipped for step in pipe.train(batches(2))]
    return {"skipped": skipped, "state": fingerprint(pipe.state_dict())}


def lanes_that_begin_apart() -> list[str]:
    """Why lanes may not hold different weights, unless they are shards of a DTensor."""
    mesh, texts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")), []
    for sharded in (False, True):
        def wrap(block: nn.Module, sharded: bool = sharded) -> nn.Module:
            own = block.up.bias.detach() + (0 if sharded else mesh.get_local_rank("tp"))
            block.up.bias = nn.Parameter(own)
            if not sharded:
                return block
            block = parallel(mesh["tp"])(block)
            if mesh.get_rank() == 3:
                with torch.no_grad():
                    local(block.down.bias).add_(1)
            return block

        pipe = Pipeline(model(wrap), **parts(stages=2, optimizer=adamw, microbatches=4, mesh=mesh))
        with pytest.raises(UserError) as error:
            list(pipe.train(batches(1)))
        texts.append(str(error.value).splitlines()[0])
    return texts


def oracles_in_lanes() -> None:
    """In lanes of one rank the oracle's layers are shared out, too, and torch sums its gradients; those of tied weights
    before, not after those of a stage, so none are tied here."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "tp"))
    for schedule in ("zb_h1", "pipedream"):
        pipe = exact_pipeline(sequence_parallel(mesh["tp"]), tied=False, mesh=mesh, schedule=schedule, grad_clip=0.1)
        assert_equals_oracle(pipe, exact_batches(2))
