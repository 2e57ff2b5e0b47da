"""The memory that a layer is counted to keep, compared with what the runtime holds and with docs/precision.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from measured import ADAMW
from models import WIDTH, WORDS, checkpointed_model, frozen_front, rich_batches, rich_model, thrice_tied_model
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Layer, Model
from vpipe.app.train.optimizers import OptimizerSettings
from vpipe.description.cut import StageSpec
from vpipe.description.precision import Precision
from vpipe.plan.profile import Identity, LayerProfile, LinkProfile, Profile, Seconds
from vpipe.plan.stage_costs import stage_memory
from vpipe.profiling.layer_runner import LayerCounts, LayerInputs, LayerRunner, count_layer, gradients_for
from vpipe.runtime.microbatches import ForwardKey
from vpipe.runtime.stage import Stage

CPU = torch.device("cpu")
H = 4 * 6 * WIDTH * 4
"""Bytes of a hidden tensor ``[4, 6, WIDTH]`` in single precision."""


def counted(build: Any, ties: bool = False) -> LayerCounts:
    """Of the middle layer of three."""
    model = Model([Layer("words", lambda: nn.Embedding(WORDS, WIDTH), ("ids",)),
                   Layer("it", build, ties={"decoder": "words.weight"} if ties else {}),
                   Layer("end", nn.Identity, outputs=("loss",))], batch=("ids",))
    runner = LayerRunner(model, 1, CPU, 0)
    hidden = torch.randn(4, 6, WIDTH, requires_grad=True)
    given = LayerInputs({"h": hidden}, {}, {"h": torch.ones(4, 6, WIDTH)})
    return count_layer(runner, given, ADAMW)


def test_a_linear_layer_keeps_its_input_alone() -> None:
    counts = counted(lambda: nn.Linear(WIDTH, WIDTH))
    assert (counts.saved_bytes, counts.saves) == (0, (("in", 0),))
    assert counts.parameter_bytes == 4 * (WIDTH * WIDTH + WIDTH)
    assert counts.optimizer_bytes == 2 * counts.parameter_bytes + 2 * 4  # and a counter of steps for each
    assert counts.weight_half_bytes == 2 * H, "its input and its output's gradient"
    assert counts.working_bytes == 2 * H + counts.parameter_bytes, "gradients that came and go, and the weights'"
    assert counts.forward_flops == 2 * 4 * 6 * WIDTH * WIDTH


def test_what_slices_hand_on_is_counted_of_the_whole_sequence() -> None:
    class Running(nn.Module):
        """Adds the sum of all tokens so far, and hands on the sum and all tokens."""

        def forward(self, h: Tensor, carried: tuple[Tensor, ...] | None = None) -> Any:
            seen = torch.cat([*(carried or ())[1:], h], 1)
            total = seen.cumsum(1)[:, -h.shape[1]:]
            return total if carried is None else (total, total[:, -1:].clone(), seen)

    model = Model([Layer("words", lambda: nn.Embedding(WORDS, WIDTH), ("ids",)),
                   Layer("it", Running, carried=("total", "seen")),
                   Layer("end", nn.Identity, outputs=("loss",))], batch=("ids",))
    given = LayerInputs({"h": torch.randn(4, 6, WIDTH, requires_grad=True)}, {}, {"h": torch.ones(4, 6, WIDTH)})
    assert count_layer(LayerRunner(model, 1, CPU, 0), given, ADAMW, tokens=6).carried_bytes == H // 6 + H
    assert counted(lambda: nn.Linear(WIDTH, WIDTH)).carried_bytes == 0


def test_an_mlp_with_a_residual_keeps_each_storage_once() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            return h + self.down(F.gelu(self.up(h))) * h  # h is saved three times, and is the input

    counts = counted(Mlp)
    assert counts.saves == (("in", 0),)
    assert counts.saved_bytes == 4 * H + 4 * H + H, "before gelu, after it, and the factor of h"


def test_a_dropout_keeps_its_mask_and_a_tanh_its_output() -> None:
    assert counted(lambda: nn.Dropout(0.5)).saved_bytes == H, "on a processor the mask is as wide as the tensor"
    counts = counted(nn.Tanh)
    assert (counts.saved_bytes, counts.saves, counts.weight_half_bytes) == (0, (("out", 0),), 0)


class Keeps(torch.autograd.Function):
    """Saves its input, a tensor of 500 bytes, and a part of that; its backward takes 8,000 bytes for a while."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        extra = torch.zeros(125)
        ctx.save_for_backward(h, extra, extra[:10])
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        torch.zeros(2000)
        return gradients[0].clone()


class Function(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return Keeps.apply(h)


def test_a_function_by_hand() -> None:
    counts = counted(Function)
    assert (counts.saved_bytes, counts.saves) == (500, (("in", 0),))
    assert counts.working_bytes == H + 8000, "the gradient that came, and the most beside it"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Parameter(torch.zeros(WORDS, WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.fixed = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        return (h * self.scale * self.fixed) @ self.decoder.t() @ self.decoder


def test_tied_frozen_and_buffered_weights_are_told_apart() -> None:
    still = counted(lambda: Tied().requires_grad_(False), ties=True)
    assert (still.tied_bytes, still.frozen_tied_bytes, still.frozen_bytes) == (
        {}, {"decoder": 4 * WORDS * WIDTH}, 2 * 4 * WIDTH)
    counts = counted(Tied, ties=True)
    assert (counts.tied_bytes, counts.frozen_tied_bytes) == ({"decoder": 4 * WORDS * WIDTH}, {})
    assert (counts.parameter_bytes, counts.optimizer_bytes, counts.frozen_bytes) == (0, 0, 2 * 4 * WIDTH)
    assert counts.saved_bytes == H + 4 * 6 * WORDS * 4, "the scaled input and the words, no weight"


@pytest.mark.parametrize("model", [rich_model(), frozen_front(), checkpointed_model(), thrice_tied_model()],
                         ids=["rich", "frozen", "checkpointed", "tied"])
def test_measured_bytes_until_the_weight_half_are_those_of_the_runtime(model: Model) -> None:
    batch, tensors = rich_batches(1, 4)[0], {}
    for number, layer in enumerate(model.layers):
        runner = LayerRunner(model, number, CPU, 0)
        given = LayerInputs({name: tensors[name] for name in runner.reads},
                            {name: batch[name] for name in runner.fields}, {})
        outputs, _ = runner.forward(given)
        gradients = gradients_for(outputs, [name for name in model.layer_specs[number].outputs if name in outputs])
        counts = count_layer(runner, LayerInputs(given.inputs, given.fields, gradients), ADAMW)
        copies = LayerInputs({n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in given.inputs.items()},
                       {n: t.clone() for n, t in given.fields.items()}, gradients)
        record = runner.forward(copies, split=True, counted=True)[1]
        del copies
        runner.backward(record, gradients, split=True)
        assert counts.weight_half_bytes == sum(record.storages().values()), layer.name
        tensors |= outputs


def test_counts_add_up_to_what_a_stage_holds(rich: list[Profile]) -> None:
    """Every cut of a model with skips, a mask and a tie, against a real stage under the runtime's own counter."""
    model, batch = rich_model(), rich_batches(1, 4)[0]
    held = rich[0].activations
    tensors = flowing(model, batch)
    for start in range(len(model)):
        for stop in range(start + 1, len(model) + 1):
            for dropped in ((), (start,), tuple(range(start, stop)), tuple(range(start + 1, stop, 2))):
                layers = range(start, stop)
                kept, *_ = held.held(layers, dropped)
                assert kept == really_kept(model, layers, dropped, tensors[start], batch), \
                    f"layers {start} to {stop - 1}, of which {dropped} are recomputed"


def flowing(model: Model, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Before every layer, the tensors that are alive."""
    now: dict[str, Tensor] = {}
    found = [now]
    for spec in model.split([1] * len(model)):
        stage = Stage(model, spec, seed=0, device=CPU, recomputed=())
        outputs, _ = stage.forward([now[name] for name in spec.inputs], batch, ForwardKey(0, 0), {})
        now = dict(zip(spec.outputs, outputs, strict=True))
        found.append(now)
    return found


def really_kept(model: Model, layers: range, dropped: tuple[int, ...], tensors: dict[str, Tensor],
                batch: dict[str, Tensor]) -> int:
    last = layers.stop == len(model)
    inputs = model.crossing(layers.start)
    spec = StageSpec(0, layers, inputs, ("loss",) if last else model.crossing(layers.stop),
                     tuple(f for f in model.batch if any(f in model.layers[i].inputs for i in layers)), {})
    stage = Stage(model, spec, seed=0, device=CPU, recomputed=dropped)
    stage.counted = True
    _, record = stage.forward([tensors[name].detach().clone().requires_grad_(tensors[name].requires_grad)
                               for name in inputs], {n: batch[n].clone() for n in spec.fields}, ForwardKey(0, 0), {})
    return sum(record.storages().values())


WIDE = 64
PARAMETERS = WIDE * WIDE


def profile_of(precision: str, optimizer: str = "adamw") -> Profile:
    """Of one linear layer; its times are 0."""
    model = Model([Layer("words", lambda: nn.Embedding(2, WIDE), ("ids",)),
                   Layer("it", lambda: nn.Linear(WIDE, WIDE, bias=False)),
                   Layer("end", nn.Identity, outputs=("loss",))], batch=("ids",))
    computed = Precision(precision)
    hidden = torch.randn(1, WIDE, dtype=computed.dtype, requires_grad=True)
    counts = count_layer(LayerRunner(model, 1, torch.device("cpu"), 0, computed),
                   LayerInputs({"h": hidden}, {}, {"h": torch.ones(1, WIDE, dtype=computed.dtype)}),
                   OptimizerSettings(optimizer, 1e-3, matrices={"it.weight"}).from_named)
    none = Seconds(0.0)
    layer = LayerProfile("it", none, none, none, none, none, none, counts.parameter_bytes, counts.optimizer_bytes,
                         (), (), counts.saved_bytes, (), 0, counts.working_bytes, {}, 0, 0)
    identity = Identity("", "linear", 1, 1, "adamw", "", 1, 1, "gloo", "", precision=precision)
    return Profile(identity, (layer,), {}, LinkProfile(0.0, 1.0))


@pytest.mark.parametrize(("precision", "weights", "gradients", "optimizer", "version", "in_flight", "step"), [
    ("fp32", 4, 4, 8, 4, 0, 0), ("bf16", 4, 4, 8, 4, 2, 0), ("fp16", 4, 4, 8, 4, 2, 0),
    ("bf16_pure", 2, 2, 12, 2, 0, 2)])
def test_bytes_per_parameter(precision: str, weights: int, gradients: int, optimizer: int, version: int,
                             in_flight: int, step: int) -> None:
    profile = profile_of(precision)
    alone = stage_memory(profile, range(1), (), in_flight=0, versions=1)
    assert (alone.weights, alone.gradients) == (weights * PARAMETERS, gradients * PARAMETERS)
    assert alone.optimizer == optimizer * PARAMETERS + 4  # a counter of steps
    assert weights + gradients + optimizer == 16
    assert stage_memory(profile, range(1), (), in_flight=3, versions=3) == replace(
        alone, stashed=2 * version * PARAMETERS, activations=3 * in_flight * PARAMETERS)
    assert alone.working >= step * PARAMETERS


@pytest.mark.parametrize(("optimizer", "each", "once"), [
    ("sgd", 4, 0), ("nadam", 8, 2 * 4), ("lamb", 8, 4), ("muon", 4, 0)])
def test_bytes_that_optimizers_keep_per_parameter(optimizer: str, each: int, once: int) -> None:
    """Muon its momentum, LAMB the moments of Adam and one counter, NAdam two."""
    memory = stage_memory(profile_of("fp32", optimizer), range(1), (), in_flight=0, versions=1)
    assert memory.optimizer == each * PARAMETERS + once
