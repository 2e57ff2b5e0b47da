"""What each precision keeps and sends; loss scales; halves under autocast. Numbers: test_exact_in_every_precision."""

from __future__ import annotations

from typing import Any

import pytest
import test_weight_grad_store as halves
import torch
from models import between
from pipelines import parts
from stages import stage_of
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Layer, Model, Pipeline
from vpipe.checkpoint.manifest import Position
from vpipe.description.precision import Precision
from vpipe.runtime import optimizer_step as scaling
from vpipe.runtime.microbatches import ForwardKey
from vpipe.runtime.stage import Stage

WORDS, WIDTH, SAMPLES = 12, 8, 8
BF16 = torch.bfloat16


class Block(nn.Module):
    """A residual: ``h [B, S, W] -> [B, S, W]``; its buffer counts, and is no number of autocast's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("third", torch.full((WIDTH,), 1 / 3))

    def forward(self, h: Tensor) -> Tensor:
        return h + F.gelu(self.linear(self.norm(h))) * self.third


class End(nn.Module):
    """The loss; ``weight [B]``, fp32, is a field of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, h: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        losses = F.cross_entropy(self.scores(h).flatten(0, 1).float(), labels.flatten(), reduction="none")
        return (losses.view(labels.shape).mean(1) * weight).mean()


def model() -> Model:
    return Model([Layer("words", lambda: nn.Embedding(WORDS, WIDTH), ("ids",)), Layer("a", Block), Layer("b", Block),
                  Layer("end", End, ("h", "labels", "weight"), ("loss",))], batch=("ids", "labels", "weight"))


def batches(count: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(4)
    return [{"ids": torch.randint(WORDS, (SAMPLES, 3), generator=random),
             "labels": torch.randint(WORDS, (SAMPLES, 3), generator=random),
             "weight": torch.rand(SAMPLES, generator=random)} for _ in range(count)]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def pipeline(precision: str, built: Model | None = None, **arguments: Any) -> Pipeline:
    return Pipeline(built or model(),
                    **parts(precision=precision, **{"optimizer": sgd, "seed": 5, "microbatches": 4, **arguments}))


def test_pure_versions_take_half_the_bytes_and_masters_none_of_the_rounding() -> None:
    pipe = pipeline("bf16_pure", partition=[2, 2])
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    assert torch.equal(before["a.linear.weight"], model().layers[1].materialize(1, 5).get_parameter("linear.weight"))
    stage = pipe.engine.local_stages[0]
    assert all(master is not leaf and master.data_ptr() == leaf.data_ptr() for master, leaf in zip(
        stage.weights.masters.values(), stage.weights.leaves(), strict=True)), "a script sees what is stepped"
    stage.weights.take_back()
    assert {p.dtype for module in stage.modules.values() for p in module.parameters()} == {BF16}
    assert torch.equal(before["a.third"], torch.full((WIDTH,), 1 / 3)), "buffers are not rounded"
    assert all(v.dtype is torch.float32 for v in pipe.engine.checkpoint_state().values() if v.is_floating_point())
    pipe.engine.restore(Position(0, 0, 0), {name: value + (1e-4 if name == "model.a.norm.weight" else 0)
                                            for name, value in pipe.engine.checkpoint_state().items()})
    after = pipe.state_dict()
    assert torch.equal(after["a.norm.weight"], before["a.norm.weight"] + 1e-4), "bf16 would lose that"


def test_between_stages_go_half_the_bytes() -> None:
    sent = {}
    for precision in ("fp32", "bf16", "bf16_pure", "fp16"):
        scale = 1024 if precision == "fp16" else None
        pipe = pipeline(precision, partition=[2, 2], schedule="pipedream", loss_scale=scale)
        list(pipe.train(batches(1)))
        sent[precision] = sum(worker.transport.bytes_sent for worker in pipe.engine.workers.values())
    assert sent["fp32"] == 2 * sent["bf16"] == 2 * sent["bf16_pure"] == 2 * sent["fp16"]


def test_other_numbers_stay() -> None:
    """A float64 tensor and an integer cross a cut, and a parameter in float64 is a master of its own."""

    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones((), dtype=torch.float64) / 3)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            return ids * self.w, ids + 1

    def loss(h: Tensor, n: Tensor) -> Tensor:
        assert (h.dtype, n.dtype) == (torch.float64, torch.int64)
        return (h * n).mean()

    class Last(nn.Module):
        def forward(self, h: Tensor, n: Tensor) -> Tensor:
            return loss(h, n)

    layers = [Layer("double", Double, ("ids",), ("h", "n")), Layer("last", Last, ("h", "n"), ("loss",))]
    runs = []
    for precision in ("fp32", "bf16", "bf16_pure"):
        pipe = pipeline(precision, Model(layers, ("ids",)), partition=[1, 1], schedule="pipedream")
        losses = [step.loss for step in pipe.train([{"ids": torch.arange(8)}] * 2)]
        runs.append((losses, pipe.state_dict()["double.w"].item()))
    assert runs[0] == runs[1] == runs[2]


# -- loss scales -------------------------------------------------------------------------------------------


def scales(pipe: Pipeline) -> list[float]:
    """Of every rank."""
    return [worker.optimizer_steps.scaler.value for worker in pipe.engine.workers.values()
            if worker.optimizer_steps.scaler is not None]


def test_an_overflow_anywhere_skips_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "INITIAL_SCALE", 2.0**24)
    pipe = pipeline("fp16", partition=[1, 2, 1])
    [data] = batches(1)
    steps = list(pipe.train([data] * 12))
    skipped = [step.skipped for step in steps]
    count = skipped.index(False)
    assert 2 < count < 10
    assert skipped == [True] * count + [False] * (12 - count)
    assert len({step.loss for step in steps[:count + 1]}) == 1, "weights and optimizers are as they were"
    assert steps[-1].loss < steps[0].loss
    assert scales(pipe) == [2.0**(24 - count)] * 3
    fixed = pipeline("fp16", partition=[4], loss_scale=2.0**24)
    assert all(step.skipped for step in fixed.train([data] * 2))
    assert scales(fixed) == [2.0**24]


def test_a_scale_grows_to_a_limit_and_falls_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "GROWTH_UPDATES", 2)
    scale = scaling.LossScaler(None)
    seen = []
    for number, applied in enumerate([True, True, True, False, True, True] + [True] * 40 + [False] * 30):
        for _ in range(2):  # of each stage of the rank
            scale.update(number, applied)
        seen.append(scale.value)
    assert seen[:6] == [65536.0, 131072.0, 131072.0, 65536.0, 65536.0, 131072.0]
    assert (max(seen), seen[-1], scale.good) == (2.0**24, 1.0, 0)


def test_a_scale_goes_with_a_checkpoint_into_another_partition() -> None:
    pipe = pipeline("fp16", partition=[1, 2, 1])
    for worker in pipe.engine.workers.values():
        assert worker.optimizer_steps.scaler is not None
        worker.optimizer_steps.scaler.value, worker.optimizer_steps.scaler.good = 4.0, 7
    saved = pipe.engine.checkpoint_state()
    found = {name: value.item() for name, value in saved.items() if name.startswith("loss_scale.")}
    assert found == {"loss_scale.0.value": 4.0, "loss_scale.0.good": 7}
    # Before, schedules without a flush saved one for each stage.
    per_stage = {"loss_scale.2.value": torch.tensor(2.0, dtype=torch.float64), "loss_scale.2.good": torch.tensor(9)}
    for other, expected in ((pipeline("fp16", partition=[3, 1], schedule="gpipe"), [4.0] * 2),
                            (pipeline("fp16", partition=[2, 2], schedule="pipedream", loss_scale=1024), [1024.0] * 2),
                            (pipeline("bf16", partition=[4]), [])):
        other.engine.restore(Position(0, 0, 0), saved | per_stage)
        assert scales(other) == expected
        left = {name: value.item() for name, value in other.engine.checkpoint_state().items() if "loss_scale" in name}
        assert left == (found if expected == [4.0] * 2 else {})


# -- halves ------------------------------------------------------------------------------------------------

UNDER_AUTOCAST = ["linear", "linear 2d", "linear not contiguous", "at", "matmul", "mm", "addmm", "einsum", "conv2d",
                  "embedding", "layer norm", "attention", "encoder", "used three times", "frozen bias", "lstm",
                  "used in ways that can wait and that cannot", "a bias that another operation uses",
                  "reentrant checkpoint", "custom autocast"]


@pytest.mark.parametrize("name", UNDER_AUTOCAST)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_two_halves_equal_the_whole_under_autocast(name: str, precision: str) -> None:
    """Parameters that a layer uses several times, too: autocast casts them once, and sums their gradients there."""
    build = halves.MODULES[{"custom autocast": "autocast"}.get(name, name)]
    built, dtype = between(Layer("a", build)), Precision(precision).dtype

    def stage() -> Stage:
        return stage_of(built, [1, 1, 1], 1, precision=Precision(precision))

    given = [([t.detach().to(dtype).requires_grad_() for t in received], fields)
             for received, fields in halves.hidden(3)]
    halves.assert_same(halves.run(stage(), given, True), halves.run(stage(), given, False))
    outputs, record = (one := stage()).forward(*given[0], ForwardKey(0, 0), one.pin({}), split=True)
    one.prepare_backward(record.pins)
    one.backward_input(record, {"h": torch.ones_like(outputs[0])})
    waiting = [len(half._later) for half in record.weight_grads]
    assert waiting == [halves.WAITING.get(name, waiting[0])]
