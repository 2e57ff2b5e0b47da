"""The oracles in reduced precision, held to PyTorch written out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Layer, Model
from vpipe.testing import ReferencePrecision, TrainingRecipe, flush_oracle
from vpipe.testing.reference_optimizer import GROWS_AFTER, LEAST, MOST, ReferenceLossScale

WIDTH, MICROBATCHES = 6, 2


def adam(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
    return torch.optim.Adam(named.values(), lr=0.01) if named else None


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(h))


class Loss(Linear):
    """Its gradients are ``push`` times as large as they would be."""

    def forward(self, h: Tensor, y: Tensor, push: Tensor) -> Tensor:
        return F.mse_loss(self.linear(h).float(), y.float()) * push.float().mean()


MODEL = Model([Layer("a", Linear, ("x",)), Layer("b", Linear), Layer("c", Loss, ("h", "y", "push"), ("loss",))],
              batch=("x", "y", "push"))


def batches(pushes: list[float]) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(8, WIDTH, generator=random), "y": torch.randn(8, WIDTH, generator=random),
             "push": torch.full((8, 1), push)} for push in pushes]


def forward(layers: nn.ModuleDict, fields: Mapping[str, Tensor]) -> Tensor:
    return layers["c"](layers["b"](layers["a"](fields["x"])), fields["y"], fields["push"])


def parts(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: tensor.chunk(MICROBATCHES)[m] for name, tensor in batch.items()} for m in range(MICROBATCHES)]


def recipe(precision: str, loss_scale: float | None = None) -> TrainingRecipe:
    return TrainingRecipe(adam, MICROBATCHES, 5, clip=0.7, precision=ReferencePrecision(precision, loss_scale))


def assert_weights(ours: Mapping[str, Tensor], theirs: nn.Module) -> None:
    for name, value in theirs.state_dict().items():
        assert ours[name].dtype == torch.float32
        assert torch.equal(ours[name], value)


def test_bf16_is_one_autocast_around_a_model_whose_layers_hand_on_bf16() -> None:
    layers, losses = MODEL.materialize(5), []
    optimizer = adam(dict(layers.named_parameters()))
    for batch in batches([1.0] * 3):
        for fields in parts(batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = forward(layers, fields)
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(layers.parameters(), 0.7)
        optimizer.step()
        optimizer.zero_grad()
    run = flush_oracle(MODEL, batches([1.0] * 3), recipe("bf16"))
    assert run.losses == [sum(losses[i:i + 2]) / 2 for i in (0, 2, 4)]
    assert_weights(run.state, layers)


def test_bf16_pure_steps_masters_and_rounds_them() -> None:
    masters = MODEL.materialize(5)
    layers, losses = MODEL.materialize(5).to(torch.bfloat16), []
    optimizer = adam(dict(masters.named_parameters()))
    for batch in batches([1.0] * 3):
        for fields in parts(batch):
            loss = forward(layers, {name: value.bfloat16() for name, value in fields.items()})
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
        for master, rounded in zip(masters.parameters(), layers.parameters(), strict=True):
            master.grad, rounded.grad = rounded.grad.float(), None
        nn.utils.clip_grad_norm_(masters.parameters(), 0.7)
        optimizer.step()
        layers.load_state_dict(masters.state_dict())
    run = flush_oracle(MODEL, batches([1.0] * 3), recipe("bf16_pure"))
    assert run.losses == [sum(losses[i:i + 2]) / 2 for i in (0, 2, 4)]
    assert_weights(run.state, masters)


@pytest.mark.parametrize("loss_scale", [None, 256.0])
def test_fp16_is_what_torch_s_own_scaler_does(loss_scale: float | None) -> None:
    pushes = [1.0, 40.0, 1.0, 4e6, 1.0, 1.0]
    layers, losses, skipped = MODEL.materialize(5), [], set()
    optimizer = adam(dict(layers.named_parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale or 65536.0, backoff_factor=0.5 if not loss_scale else
                                  1 - 1e-16)
    for number, batch in enumerate(batches(pushes)):
        for fields in parts(batch):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = forward(layers, fields)
            scaler.scale(loss / MICROBATCHES).backward()
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layers.parameters(), 0.7)
        before = layers["a"].linear.weight.clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if torch.equal(before, layers["a"].linear.weight):
            skipped.add(number)
    run = flush_oracle(MODEL, batches(pushes), recipe("fp16", loss_scale))
    assert run.losses == pytest.approx([sum(losses[i:i + 2]) / 2 for i in range(0, 12, 2)], rel=1e-15)
    assert_weights(run.state, layers)
    assert run.skipped == skipped
    assert skipped == ({1, 3} if loss_scale is None else {3})
    if loss_scale is None:
        assert run.tensors["loss_scale.0.value"] == scaler.get_scale() == 65536.0 / 4
        assert run.tensors["loss_scale.0.good"] == 2


def test_a_scale_moves_between_its_ends() -> None:
    scale = ReferenceLossScale.create(ReferencePrecision("fp16"), {
        "loss_scale.0.value": torch.tensor(2.0), "loss_scale.0.good": torch.tensor(9)})
    assert scale is not None
    assert (scale.value, scale.good) == (2.0, 9)
    for _ in range(3):
        scale.update(overflow=True)
    assert (scale.value, scale.good) == (LEAST, 0)
    for _ in range(26 * GROWS_AFTER):
        scale.update(overflow=False)
    assert (scale.value, scale.good) == (MOST, 0)
    assert scale.checkpoint_tensors()["loss_scale.0.value"].dtype == torch.float64
    fixed = ReferenceLossScale.create(ReferencePrecision("fp16", 1000.0), {})
    assert fixed is not None
    fixed.update(overflow=True)
    assert (fixed.value, fixed.checkpoint_tensors()) == (1000.0, {})
