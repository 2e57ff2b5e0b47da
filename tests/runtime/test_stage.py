"""One stage: what it keeps between forward and backward, what recompute may and may not do, what it refuses."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from golden import refusal
from models import Head, RawMatmul, Words, between, rich_batches, rich_model
from stages import stage_of
from torch import Tensor, nn

from vpipe import Layer, Model, Pipeline
from vpipe.accelerator import generators_of
from vpipe.errors import UserError
from vpipe.runtime.microbatches import ForwardKey
from vpipe.runtime.stage import Stage

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])

FIRST = ForwardKey(0, 0)


def trained(stage: Stage, received: Sequence[Tensor], fields: Mapping[str, Tensor],
            key: ForwardKey = FIRST) -> tuple[list[Tensor], list[Tensor]]:
    """Forward as a worker does it, gradients of one for the outputs, backward; outputs and gradients of the inputs."""
    outputs, record = stage.forward(received, fields, key, stage.pin({}))
    gradients = {name: torch.ones_like(t) for name, t in zip(stage.spec.outputs, outputs, strict=True)
                 if t.requires_grad}
    stage.prepare_backward(record.pins)
    returned = stage.backward(record, gradients)
    stage.unpin(record.pins)
    return outputs, returned


def hidden(grad: bool = True) -> Tensor:
    return torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(3)).requires_grad_(grad)


# -- random numbers ------------------------------------------------------------------------------------


class DropOnGpu(nn.Module):
    """Draws a mask from the generator of its GPU, as dropout does there."""

    def __init__(self, gpu: int) -> None:
        super().__init__()
        self.gpu = gpu

    def forward(self, h: Tensor) -> Tensor:
        mask = torch.rand(h.shape, generator=torch.cuda.default_generators[self.gpu])
        return h * mask


def masked(gpu: int, recompute: float, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What a stage on a GPU makes of three microbatches, and the gradients of its input."""
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator().manual_seed(seed) for seed in (5, 6)])
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(nn.Module, "to", lambda module, device: module)
    model = between(Layer("drop", partial(DropOnGpu, gpu)), Layer("linear", partial(nn.Linear, 12, 12)))
    stage = stage_of(model, [1, 2, 1], 1, recompute, device=torch.device("cuda", gpu))
    before = [generator.get_state() for generator in torch.cuda.default_generators]
    made = [t for m in range(3) for part in trained(stage, [hidden()], {}, ForwardKey(0, m)) for t in part]
    for generator, state in zip(torch.cuda.default_generators, before, strict=True):
        assert torch.equal(generator.get_state(), state), "training leaves the program's generators alone"
    return made


@pytest.mark.parametrize("recompute", [0.0, 1.0])
def test_a_mask_does_not_depend_on_the_gpu_and_differs_by_microbatch(recompute: float,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, plain = (masked(*how, monkeypatch) for how in ((0, recompute), (1, recompute), (1, 0.0)))
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, plain))
    assert not torch.equal(first[0], first[2])


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_no_layer_draws_from_a_generator_that_nobody_seeds(device: str) -> None:
    with pytest.raises(AssertionError):
        generators_of(torch.device(device))


def test_a_layer_that_builds_itself_on_a_gpu_is_seeded_there(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: generators[device].get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: generators[device].set_state(state))
    drawn: list[float] = []

    def build() -> nn.Module:
        drawn.append(torch.rand(1, generator=generators[1]).item())
        return nn.Identity()

    before = generators[1].get_state()
    for index in (3, 3, 4):
        Layer("built", build).materialize(index, seed=2)
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(generators[1].get_state(), before)


# -- recompute -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "how", "recomputed"), [
    (4, {"recompute": 0.0}, []), (4, {"recompute": 0.24}, []), (4, {"recompute": 0.25}, [3]),
    (4, {"recompute": 0.74}, [2, 3]), (4, {"recompute": 1.0}, [0, 1, 2, 3]), (3, {"recompute": 0.5}, [2]),
    (1, {"recompute": 0.99}, []), (4, {"recomputed": {1}}, [0]), (4, {"recomputed": {2}}, [1]),
    (4, {"recomputed": {1, 3}}, [0, 2]), (4, {"recomputed": {1, 2, 4}}, [0, 1, 3])])
def test_the_layers_that_are_named_are_recomputed_or_the_last_ones_by_their_share(
        layers: int, how: dict[str, Any], recomputed: list[int]) -> None:
    runs: Counter[int] = Counter()

    def counting(i: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            module = RawMatmul()
            module.register_forward_hook(lambda *_: runs.update([i]))
            return module

        return build

    stage = stage_of(between(*(Layer(f"raw{i}", counting(i)) for i in range(layers))), [1, layers, 1], 1, **how)
    trained(stage, [hidden()], {})
    assert [runs[i] for i in range(layers)] == [1 + (i in recomputed) for i in range(layers)]


# -- what is refused -----------------------------------------------------------------------------------


def calls(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    class Calls(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return function(h)

    return Calls


def test_changing_a_batch_field_in_place_is_refused() -> None:
    class Spoils(Words):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids.clamp_(max=3))

    model = Model([Layer("first", Spoils, ("ids",), ("h",)), Layer("head", Head, ("h", "ids"), ("loss",))], ("ids",))
    stage = stage_of(model, [1, 1])
    with pytest.raises(UserError, match="stage 0, which starts at layer 'first', changes its input in place"):
        stage.forward([], {"ids": IDS.clone()}, FIRST, stage.pin({}))


@pytest.mark.parametrize(("result", "text"), [
    (lambda h: (h, h), "returned 2 value(s) (Tensor, Tensor) for its 1 outputs ['h']"),
    (lambda h: (), "returned 0 value(s) () for its 1 outputs ['h']"),
    (lambda h: None, "returned 1 value(s) (NoneType) for its 1 outputs ['h']"),
    (lambda h: [h], "returned 1 value(s) (list) for its 1 outputs ['h']"),
    (lambda h: {"h": h}, "returned 1 value(s) (dict) for its 1 outputs ['h']")])
def test_a_layer_must_return_its_outputs(result: Callable[[Tensor], Any], text: str) -> None:
    stage = stage_of(between(Layer("odd", calls(result))), [1, 1, 1], 1)
    assert refusal(stage.forward, [hidden()], {}, FIRST, stage.pin({})) == (
        f"error: layer 'odd' {text}\nhint: forward must return one tensor per name in outputs, "
        "as a tuple if there are several")


# -- what goes in and out ------------------------------------------------------------------------------


class Doubles(nn.Module):
    """Returns its input as it is under one name and as a lazy view of it under another."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, h.transpose(1, 2)


@pytest.mark.parametrize("recompute", [0.0, 1.0])
def test_an_input_may_leave_as_it_came_and_under_two_names(recompute: float) -> None:
    model = between(Layer("twice", Doubles, ("h",), ("h", "turned")),
                    Layer("sum", calls(lambda h: h), ("h",), ("h",)),
                    Layer("both", type("Both", (nn.Module,), {"forward": lambda _, h, t: h + t.transpose(1, 2)}),
                          ("h", "turned"), ("h",)))
    stage = stage_of(model, [1, 1, 3], 1, recompute)
    x = hidden()
    outputs, record = stage.forward([x], {}, FIRST, stage.pin({}))
    assert stage.spec.outputs == ("h", "turned")
    assert all(t.is_contiguous() and t.requires_grad and t.is_leaf for t in outputs)
    assert torch.equal(outputs[1], x.transpose(1, 2))
    returned = stage.backward(record, {"h": torch.full((2, 4, 12), 2.0), "turned": torch.full((2, 12, 4), 3.0)})
    assert torch.equal(returned[0], torch.full((2, 4, 12), 5.0))


def test_an_input_that_nobody_used_gets_a_gradient_of_zero() -> None:
    stage = stage_of(between(Layer("fresh", calls(lambda h: torch.ones_like(h)))), [1, 1, 1], 1)
    outputs, returned = trained(stage, [hidden()], {})
    assert not outputs[0].requires_grad
    assert torch.equal(returned[0], torch.zeros(2, 4, 12))


def test_evaluation_keeps_nothing_and_restores_every_mode() -> None:
    stage = stage_of(rich_model(), [3, 5])
    stage.modules[1].eval()
    fields = {"ids": IDS}
    with stage.evaluating():
        first, second = (stage.evaluate([], fields, FIRST) for _ in range(2))
        other_seed = stage.evaluate([], fields, ForwardKey(5, 5))
    assert not any(t.requires_grad for t in first)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, other_seed)), "no dropout"
    assert [module.training for module in stage.modules.values()] == [True, False, True]
    assert stage.weights.pinned == 0


def test_state_leaves_out_what_another_layer_owns() -> None:
    assert list(stage_of(rich_model(), [7, 1], 1).state()) == ["head.decoder.bias"]
    whole = stage_of(rich_model(), [8])
    assert "head.decoder.weight" not in whole.state()
    assert whole.modules[7].decoder.weight is whole.modules[0].word.weight


# -- activations are let go ----------------------------------------------------------------------------


class Watched(torch.autograd.Function):
    """The identity; its node holds a token as long as autograd would hold activations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, tokens: Tokens) -> Tensor:
        ctx.save_for_backward(tokens.new(name))
        ctx.name, ctx.tokens = name, tokens
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        assert len(ctx.saved_tensors) == 1
        ctx.tokens.during_backward.append((ctx.name, sorted(ctx.tokens.alive.elements())))
        return gradient, None, None


class Tokens:
    """How many saved tensors are alive, by layer."""

    def __init__(self) -> None:
        self.alive: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.during_backward: list[tuple[str, list[str]]] = []

    def new(self, name: str) -> Tensor:
        token = torch.zeros(1)
        self.alive[name] += 1
        self.peak[name] = max(self.peak[name], self.alive[name])
        weakref.finalize(token.untyped_storage(), self._gone, name)
        return token

    def _gone(self, name: str) -> None:
        self.alive[name] -= 1

    def layer(self, name: str) -> Layer:
        tokens = self

        class Watching(RawMatmul):
            def forward(self, h: Tensor) -> Tensor:
                return Watched.apply(super().forward(h), name, tokens)

        return Layer(name, Watching)


@pytest.mark.usefixtures("no_gc")
def test_activations_live_from_forward_to_backward_and_dropped_ones_not_even_that_long() -> None:
    tokens = Tokens()
    model = between(*(tokens.layer(name) for name in ("kept0", "kept1", "dropped0", "dropped1")))
    stage = stage_of(model, [1, 4, 1], 1, recompute=0.5)
    received = hidden()
    outputs, record = stage.forward([received], {}, FIRST, stage.pin({}))
    inputs = [weakref.ref(t) for saved in record.spans for t in saved.inputs.values()]
    del received
    assert sorted(tokens.alive.elements()) == ["kept0", "kept1"]
    assert tokens.peak["dropped0"] == 1
    assert all(ref() is not None for ref in inputs)
    stage.backward(record, {"h": torch.ones_like(outputs[0])})
    assert [ref() for ref in inputs] == [None, None], "though the record itself is still here"
    assert sorted(tokens.alive.elements()) == []
    kept = ["kept0", "kept1"]
    assert tokens.during_backward[0] == ("dropped1", ["dropped0", "dropped1", *kept]), "recomputed for the backward"
    assert tokens.during_backward[2] == ("kept1", kept), "the later segment is gone before the earlier one starts"
    assert tokens.during_backward[3][0] == "kept0"


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize(("schedule", "peaks"), [("gpipe", [6, 6, 6]), ("1f1b", [3, 2, 1]), ("pipedream", [3, 2, 1])])
def test_a_pipeline_holds_no_more_activations_than_its_schedule_says(schedule: str, peaks: list[int]) -> None:
    tokens = Tokens()
    model = between(*(tokens.layer(name) for name in "abc"))
    pipe = Pipeline(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), stages=[2, 1, 2], schedule=schedule,
                    microbatches=6)
    list(pipe.train(rich_batches(2, 12)))
    assert [tokens.peak[name] for name in "abc"] == peaks
    assert sorted(tokens.alive.elements()) == []
    assert len(tokens.during_backward) == 2 * 6 * 3


@pytest.mark.usefixtures("no_gc")
def test_evaluation_holds_no_activations() -> None:
    tokens = Tokens()
    pipe = Pipeline(between(tokens.layer("a")), lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                    stages=[1, 1, 1], schedule="1f1b", microbatches=2)
    pipe.evaluate(rich_batches(4, 4))
    assert (tokens.peak["a"], tokens.alive["a"]) == (1, 0)
