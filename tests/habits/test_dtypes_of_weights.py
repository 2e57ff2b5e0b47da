"""Weights that come in 16 bits, buffers, and fields of a batch: in which numbers each precision computes and steps."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import fingerprint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from world import World

from vpipe import Cut, Layer, Model, Pipeline, Update
from vpipe.errors import RunError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Fp32LayerNorm(nn.LayerNorm):
    def forward(self, h: Tensor) -> Tensor:
        return F.layer_norm(h.float(), self.normalized_shape, self.weight.float(), self.bias.float()).to(h.dtype)


def network(kind: str = "bf16") -> nn.Sequential:
    """As a checkpoint in 16 bits gives it; ``mixed``: with a norm in fp32."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 16), Fp32LayerNorm(16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 4))
    made.to(FP16 if kind == "fp16" else BF16)
    if kind == "mixed":
        made[1].float()
    return made


def batches(dtype: torch.dtype = FP32) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [{"input": torch.randn(12, 8, generator=random).to(dtype),
             "target": torch.randint(4, (12,), generator=random)} for _ in range(4)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), target)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With steps that are lost in 16 bits."""
    return torch.optim.AdamW(parameters, lr=1e-4, eps=1e-3, weight_decay=0)


def pipeline(precision: str, layers: nn.Sequential, **update: Any) -> Pipeline:
    return Pipeline(Model.sequential(layers, loss_of), Update(adamw, **update), 2, microbatches=2, precision=precision)


def trained(kind: str, precision: str, clip: float | None) -> Any:
    """The state after some updates, and what was said before."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pipe = pipeline(precision, layers := network(kind), grad_clip=clip)
    list(pipe.train(batches(layers[0].weight.dtype if precision == "fp32" else FP32)))
    return [fingerprint(pipe.state_dict()), [str(warning.message) for warning in said]]


def plain(kind: str, precision: str, clip: float | None) -> dict[str, str]:
    """Layers as they came; under autocast in fp32; or in bf16 with fp32 masters, BatchNorm in fp32."""
    layers, dtype = network(kind), {"fp32": None, "fp16": FP16}.get(precision, BF16)
    masters, scale = list(layers.parameters()), 65536.0 if precision == "fp16" else 1.0
    if precision == "bf16_pure":
        masters = [nn.Parameter(p.detach().float()) for p in masters]
        for layer in layers:
            layer.to(FP32 if isinstance(layer, nn.BatchNorm1d) else BF16)
    elif dtype is not None:
        layers.float()
    optimizer = adamw(masters)
    for batch in batches(layers[0].weight.dtype):
        for h, target in zip(batch["input"].chunk(2), batch["target"].chunk(2), strict=True):
            for layer in layers:
                with torch.autocast("cpu", dtype, enabled=precision in ("bf16", "fp16")):
                    h = layer(h)
                h = h if dtype is None else h.to(dtype)
            (loss_of(h, target) * scale / 2).backward()
        for p, master in zip(layers.parameters(), masters, strict=True):
            gradient, p.grad = p.grad.to(master.dtype) / scale, None
            master.grad = gradient
        if clip is not None:
            nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        for p, master in zip(layers.parameters(), masters, strict=True):
            p.data.copy_(master.data)
            p.grad = master.grad = None
    return fingerprint(layers.state_dict() | dict(zip(dict(layers.named_parameters()), masters, strict=True)))


@pytest.mark.parametrize(("kind", "precision", "clip"), [
    ("bf16", "fp32", 0.1), ("mixed", "fp32", 0.1), ("bf16", "bf16", 0.1), ("mixed", "bf16_pure", 0.1),
    ("fp16", "bf16_pure", None), ("fp16", "fp16", None)])
def test_small_steps_add_up_in_all_but_fp32_which_says_so(kind: str, precision: str, clip: float | None,
                                                          two: World) -> None:
    state, said = trained(kind, precision, clip)
    assert state == plain(kind, precision, clip)
    assert [line[:50] for line in said] == ["trained parameters have 16 bits, such as '0.weight'"[:50]] * (
        precision == "fp32")
    found = two.run(trained, kind=kind, precision=precision, clip=clip)
    assert [(each, len(lines)) for each, lines in found] == [(state, len(said))] * 2  # each rank says it of its stage


@pytest.mark.filterwarnings("ignore:trained parameters have 16 bits")
@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16_pure"), ("bf16", "fp32")])
def test_a_run_goes_on_where_weights_have_another_dtype(before: str, after: str, tmp_path: Path) -> None:
    first, second = (pipeline(precision, network(), average=0.99) for precision in (before, after))
    list(first.train(batches(BF16 if before == "fp32" else FP32)))
    first.save(str(tmp_path))
    second.load(str(tmp_path))
    state, dtype = first.state_dict(), BF16 if after == "fp32" else FP32
    assert all(torch.equal(state[name].to(value.dtype), value) for name, value in second.state_dict().items())
    list(second.train(batches(dtype)))
    found = {(name.split(".")[-1], value.dtype) for name, value in second.engine.checkpoint_state().items()}
    assert found >= {("weight", dtype), ("exp_avg", dtype), ("exp_avg_sq", dtype), ("step", FP32)}


@pytest.mark.filterwarnings("ignore:trained parameters have 16 bits")
def test_an_average_of_16_bits_moves() -> None:
    pipe, layers = pipeline("fp32", network(), average=0.999), network().float()
    average = AveragedModel(layers, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    average.update_parameters(layers)  # begins with them
    for _ in pipe.train(batches(BF16)):
        layers.load_state_dict(pipe.state_dict())
        average.update_parameters(layers)
    assert all(torch.equal(pipe.state_dict(averaged=True)[name], p) for name, p in average.module.named_parameters())


class Positions(nn.Module):
    """Rotary angles of a buffer: ``x [B, 8]``, ``at [B]`` -> ``[B, 8]``."""

    def __init__(self, cast: bool = True) -> None:
        super().__init__()
        self.linear, self.cast = nn.Linear(8, 8), cast
        self.register_buffer("frequency", 10000 ** -(torch.arange(8) / 8), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        angles = (at[:, None] * self.frequency).cos()
        if self.training:
            self.mean.lerp_(angles.float().mean(0), 1e-3)  # in bf16 it would stay 1
        return self.linear(x + angles.to(x.dtype) if self.cast else x + angles) * 0 + angles


class End(nn.Module):
    def forward(self, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (h.float() - y).square().mean(), h


def positions(cast: bool = True) -> tuple[Pipeline, dict[str, Tensor]]:
    model = Model([Layer("at", lambda: Positions(cast), ("x", "at"), ("h",)),
                   Layer("end", End, ("h", "y"), ("loss", "out"))], ("x", "at", "y"))
    batch = {"x": torch.ones(4, 8), "at": torch.arange(4001, 4005), "y": torch.zeros(4, 8)}
    return Pipeline(model, adamw, Cut(2, 1.0), microbatches=2, precision="bf16_pure"), batch


def test_buffers_are_as_their_layers_make_them() -> None:
    (pipe, batch), layer = positions(), Positions()
    list(pipe.train([batch] * 3))
    for part in batch["at"].chunk(2) * 3:
        layer(torch.ones(2, 8), part)
    out, state = pipe.evaluate([batch], ["out"])[1]["out"], pipe.state_dict()
    assert torch.equal(out.float(), (batch["at"][:, None] * layer.frequency).cos().bfloat16().float())
    assert all(torch.equal(state[f"at.{name}"], getattr(layer, name)) for name in ("turns", "mean"))


def test_a_field_that_rounding_spoils_is_said_once() -> None:
    pipe, batch = positions()
    with pytest.warns(UserWarning, match="rounds the field 'at' by more than 0.5: give what must stay") as said:
        list(pipe.train([batch | {"at": batch["at"].float()}] * 2))
    assert len(said) == 1


def test_a_buffer_that_meets_a_rounded_weight_is_refused_with_the_cast() -> None:
    pipe, batch = positions(cast=False)
    with pytest.raises(RunError, match=r"hint: buffers are not rounded: cast what meets a weight"):
        list(pipe.train([batch]))


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_a_frozen_base_of_16_bits_is_widened_neither_in_memory_nor_in_the_state(precision: str) -> None:
    base = network()
    base[0].requires_grad_(False)
    pipe = pipeline(precision, base)
    list(pipe.train(batches()))
    found = [pipe.engine.local_stages[0].modules[0].weight, pipe.state_dict()["0.weight"]]
    assert all(each.dtype is BF16 and torch.equal(each, base[0].weight) for each in found)


def test_a_target_that_only_a_loss_in_fp32_reads_is_not_rounded() -> None:
    pipe = Pipeline(Model.sequential(nn.Sequential(nn.Linear(8, 1)), nn.MSELoss()), adamw, 1, precision="bf16_pure")
    given = {"input": torch.zeros(4, 8), "target": torch.full((4, 1), 50_001.0)}
    loss, out = pipe.evaluate([given], ["output"])
    assert loss == F.mse_loss(out["output"].float(), given["target"]).item()
