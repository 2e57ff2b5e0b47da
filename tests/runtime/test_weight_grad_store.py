"""A backward in two halves: the same numbers as a whole one, and nothing kept that the weights do not need."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from models import WIDTH, WORDS, Head, RawMatmul, Words, between, norm_model, recurrent_model, rich_batches, rich_model
from stages import stage_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vpipe import Layer, Model
from vpipe.errors import RunError
from vpipe.runtime.activations import Record
from vpipe.runtime.microbatches import ForwardKey
from vpipe.runtime.split_backward import SplitBackwardMode
from vpipe.runtime.stage import Stage

IDS = torch.tensor([[1, 2, 3, 4], [5, 2, 7, 8]])


class Calls(nn.Module):
    """What a function makes of the input and this module, whose parameters it names."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, h: Tensor) -> Any:
        return self.function(self, h)


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape or (WIDTH, WIDTH)) / WIDTH**0.5)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Scaled(torch.autograd.Function):
    """``x * scale`` by hand; ``scale [WIDTH, WIDTH]`` is seen by nobody."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale[0] @ scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradients[0] @ scale.t(), (x.flatten(0, 1).t() @ gradients[0].flatten(0, 1))



def penalty(m: Any, h: Tensor) -> Tensor:
    """Reads its own gradient, as forces do in a model of energies: a gradient of a gradient."""
    x = h.detach().requires_grad_()
    force, = torch.autograd.grad(torch.tanh(m.a(torch.tanh(x @ m.w))).square().sum(), x, create_graph=True)
    return m.a(h) + force


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(linear(), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)),
    "linear in place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.Dropout(0.3, inplace=True)),
    "linear 2d": lambda: Calls(lambda m, h: m.a(h[:, 0]) + m.a(h[0, 0]), a=linear()),
    "linear not contiguous": lambda: Calls(lambda m, h: m.b(m.a(h.transpose(0, 1)).transpose(0, 1)), a=linear(),
                                           b=linear()),
    "linear by name": lambda: Calls(lambda m, h: F.linear(input=h, weight=m.w, bias=m.b), w=matrix(), b=matrix(WIDTH)),
    "at": RawMatmul,
    "matmul": lambda: Calls(lambda m, h: torch.matmul(m.w, h.matmul(m.v).transpose(1, 2)).transpose(1, 2), w=matrix(),
                            v=matrix()),
    "mm": lambda: Calls(lambda m, h: torch.mm(h.flatten(0, 1), m.w).mm(m.w).view(h.shape), w=matrix()),
    "addmm": lambda: Calls(lambda m, h: torch.addmm(m.b, h.flatten(0, 1), m.w, beta=0.5).view(h.shape), w=matrix(),
                           b=matrix(WIDTH)),
    "addmm whose addend is a matrix": lambda: Calls(lambda m, h: torch.addmm(m.b, h[0], m.w)[None] + h, w=matrix(),
                                                    b=matrix(4, WIDTH)),
    "bmm": lambda: Calls(lambda m, h: torch.bmm(h, m.w), w=matrix(2, WIDTH, WIDTH)),
    "baddbmm": lambda: Calls(lambda m, h: torch.baddbmm(m.b, h, m.w), w=matrix(2, WIDTH, WIDTH), b=matrix(2, 4, WIDTH)),
    "einsum": lambda: Calls(lambda m, h: torch.einsum("bsk,hk->bsh", h, m.w), w=matrix()),
    "einsum of a list": lambda: Calls(lambda m, h: torch.einsum("bsk,hk->bsh", [h, m.w]), w=matrix()),
    "conv1d": lambda: Calls(lambda m, h: m.c(h), c=nn.Conv1d(4, 4, 3, padding=1)),
    "conv2d": lambda: Calls(lambda m, h: m.d(m.c(h[:, None]).relu_())[:, 0], c=nn.Conv2d(1, 3, 3, padding=1),
                            d=nn.ConvTranspose2d(3, 1, 3, padding=1)),
    "conv2d channels last": lambda: Calls(lambda m, h: m.c(h[:, None]).mean(1), c=nn.Conv2d(1, 3, 3, padding=1)
                                          .to(memory_format=torch.channels_last)),  # type: ignore[call-overload]
    "embedding": lambda: Calls(lambda m, h: h + m.e(IDS), e=nn.Embedding(WORDS, WIDTH, padding_idx=2)),
    "sparse embedding": lambda: Calls(lambda m, h: h + m.e(IDS), e=nn.Embedding(WORDS, WIDTH, sparse=True)),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.LayerNorm(WIDTH)),
    "batch norm": lambda: Calls(lambda m, h: m.n(m.a(h)), n=nn.BatchNorm1d(4), a=linear()),
    "lstm": lambda: Calls(lambda m, h: m.r(h)[0], r=nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "attention": lambda: Calls(lambda m, h: m.a(h, h, h)[0], a=nn.MultiheadAttention(WIDTH, 3, dropout=0.1)),
    "attention over other widths": lambda: Calls(lambda m, h: m.a(h, h[..., :5], h[..., 5:])[0],
                                                 a=nn.MultiheadAttention(WIDTH, 3, kdim=5, vdim=7)),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 3, 20, batch_first=True),
    "evaluated encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 3, 20, batch_first=True).eval(),
    "decoder": lambda: Calls(lambda m, h: m.d(h, h * 2), d=nn.TransformerDecoderLayer(WIDTH, 3, 20, batch_first=True)),
    "used three times": lambda: Calls(lambda m, h: m.a(torch.tanh(m.a(torch.tanh(m.a(h))))), a=linear()),
    "used in ways that can wait and that cannot": lambda: Calls(
        lambda m, h: m.a(torch.tanh(m.a(h) @ m.a.weight.t() * m.a.weight[0])) + m.a.weight.sum() * m.a.bias.square(),
        a=linear()),
    "a bias that another operation uses": lambda: Calls(
        lambda m, h: m.a(torch.tanh(F.linear(torch.tanh(F.linear(h, m.a.weight)), m.a.weight))) * m.a.bias + m.a.bias,
        a=linear()),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), nn.Tanh(), linear()),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(linear()), nn.Tanh()),
    "frozen weight": lambda: Calls(lambda m, h: m.b(m.a(h)), a=linear().requires_grad_(False), b=linear()),
    "frozen bias": lambda: Calls(lambda m, h: F.linear(h, m.w, m.b), w=matrix(),
                                 b=nn.Parameter(torch.ones(WIDTH), requires_grad=False)),
    "all frozen": lambda: linear().requires_grad_(False),
    "unused": lambda: Calls(lambda m, h: m.a(h) + (m.b(h) * 0).detach(), a=linear(), b=linear()),
    "unused output": lambda: Calls(lambda m, h: (m.a(h), m.b(h))[0], a=linear(), b=linear()),
    "factors": lambda: Calls(lambda m, h: F.linear(h, m.a @ m.b), a=matrix(WIDTH, 2), b=matrix(2, WIDTH)),
    "custom function": lambda: Calls(lambda m, h: Scaled.apply(m.a(h), m.s) + Scaled.apply(h, m.s), a=linear(),
                                     s=matrix()),
    "custom function shares": lambda: Calls(lambda m, h: Scaled.apply(m.a(h), m.a.weight), a=linear()),
    "checkpoint": lambda: Calls(lambda m, h: m.b(checkpoint(m.a, h, use_reentrant=False)), b=linear(),
                                a=nn.Sequential(linear(), nn.Dropout(0.2), nn.Conv1d(4, 4, 1), linear())),
    "reentrant checkpoint": lambda: Calls(lambda m, h: m.b(checkpoint(m.a, h, use_reentrant=True)), b=linear(),
                                          a=nn.Sequential(linear(), nn.Dropout(0.2), linear())),
    "vmap": lambda: Calls(lambda m, h: torch.vmap(lambda x: torch.tanh(m.a(x)) @ m.w)(h), a=linear(), w=matrix()),
    "double precision": lambda: Calls(lambda m, h: m.a(h.double()).float(), a=linear().double()),
    "autocast": lambda: Calls(lambda m, h: _autocast(m, h), a=nn.Sequential(linear(), nn.Tanh(), linear()), w=matrix()),
}


def _autocast(m: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (m.a(h) @ m.w).float()


def run(stage: Stage, inputs: Sequence[tuple[list[Tensor], Mapping[str, Tensor]]], halves: bool | None,
        recompute_early: bool = False) -> list[Tensor | None]:
    """Microbatches forward and backward; in halves, the weight half runs two microbatches late. None: whole, split.

    Returns:
        Everything that must be equal: outputs, gradients that go back, gradients of weights, the stage's state.
    """
    forwards, returned, waiting = [], [], []
    for m, (received, fields) in enumerate(inputs):
        received = [t.detach().requires_grad_(t.requires_grad) for t in received]
        forwards.append(stage.forward(received, fields, ForwardKey(0, m), stage.pin({}), split=halves is not False))
    if recompute_early:
        for _, record in forwards:
            stage.recompute(record)
    random = torch.Generator().manual_seed(9)
    for outputs, record in forwards:
        gradients = {name: torch.randn(t.shape, generator=random, dtype=t.dtype)
                     for name, t in zip(stage.spec.outputs, outputs, strict=True) if t.requires_grad}
        stage.prepare_backward(record.pins)
        if halves:
            returned += stage.backward_input(record, gradients)
            waiting.append(record)
        else:
            returned += stage.backward(record, gradients)
            stage.unpin(record.pins)
        if len(waiting) == 3:
            finish(stage, waiting.pop(0))
    for record in waiting:
        finish(stage, record)
    assert stage.weights.pinned == 0
    return [*(t for outputs, _ in forwards for t in outputs), *returned, *stage.weights.gradients,
            *stage.state().values()]


def finish(stage: Stage, record: Record) -> None:
    stage.prepare_backward(record.pins)
    stage.backward_weight(record)
    stage.unpin(record.pins)


def assert_same(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert (one.layout, one.dtype) == (other.layout, other.dtype)
            assert torch.equal(one.to_dense(), other.to_dense())
            assert one.layout is not torch.strided or one.stride() == other.stride()


def hidden(microbatches: int = 4) -> list[tuple[list[Tensor], Mapping[str, Tensor]]]:
    random = torch.Generator().manual_seed(3)
    return [([torch.randn(2, 4, WIDTH, generator=random).requires_grad_()], {}) for _ in range(microbatches)]


@pytest.mark.parametrize("halves", [True, None])
@pytest.mark.parametrize("name", MODULES)
def test_two_halves_equal_the_whole(name: str, halves: bool | None) -> None:
    model = between(Layer("a", MODULES[name]), Layer("b", RawMatmul))
    assert_same(run(stage_of(model, [1, 2, 1], 1), hidden(), halves),
                run(stage_of(model, [1, 2, 1], 1), hidden(), False))


def test_a_gradient_of_a_gradient_is_equal_but_for_rounding() -> None:
    model = between(Layer("a", lambda: Calls(penalty, a=linear(), w=matrix())))
    ours, theirs = (run(stage_of(model, [1, 1, 1], 1), hidden(), halves) for halves in (True, False))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


WAITING = {  # operations; a decoder's packed projection of two different inputs is sliced, and does not wait
    "linear": 2, "linear in place": 2, "linear not contiguous": 2, "linear by name": 1, "at": 1, "matmul": 2, "mm": 2,
    "addmm": 1, "bmm": 1, "baddbmm": 1, "einsum": 1, "conv1d": 1, "conv2d": 2, "embedding": 1, "layer norm": 1,
    "batch norm": 1, "attention": 2, "attention over other widths": 4, "encoder": 4, "decoder": 5,
    "used three times": 3, "frozen weight": 1, "all frozen": 0, "unused output": 1, "factors": 1, "weight norm": 1,
    "lstm": 0, "used in ways that can wait and that cannot": 0, "checkpoint": 1, "autocast": 3}


@pytest.mark.parametrize("name", WAITING)
def test_the_weight_half_of_each_module_waits(name: str) -> None:
    stage = stage_of(between(Layer("a", MODULES[name])), [1, 1, 1], 1)
    outputs, record = stage.forward(*hidden(1)[0], ForwardKey(0, 0), stage.pin({}), split=True)
    stage.prepare_backward(record.pins)
    stage.backward_input(record, {"h": torch.ones_like(outputs[0])})
    assert [len(half._later) for half in record.weight_grads] == [WAITING[name]]
    assert not any(g is not None for g in stage.weights.gradients), "all gradients come with the weight half"


# -- stages ------------------------------------------------------------------------------------------------


def fields(microbatches: int = 4) -> list[tuple[list[Tensor], Mapping[str, Tensor]]]:
    return [([], batch) for batch in rich_batches(microbatches, 2)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("recompute", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("build", [rich_model, norm_model, recurrent_model])
def test_ties_dropout_buffers_and_recompute(build: Callable[[], Model], recompute: float, early: bool) -> None:
    """Embedding and head are tied within the stage, and in different spans where half is recomputed."""
    layers = len(build())
    assert_same(run(stage_of(build(), [layers], 0, recompute), fields(), True, early),
                run(stage_of(build(), [layers], 0, recompute), fields(), False))


@pytest.mark.parametrize("recompute", [0.0, 0.5])
def test_borrowed_weights_and_skips(recompute: float) -> None:
    results: list[list[Tensor | None]] = []
    for halves in (True, False):
        stage = stage_of(rich_model(), [3, 5], 1, recompute)
        borrowed = stage.borrowed[0]
        records = []
        made: list[Tensor | None] = []
        for m, batch in enumerate(rich_batches(3, 2)):
            random = torch.Generator().manual_seed(m)
            received = [torch.randn(2, 6, WIDTH, generator=random).requires_grad_() for _ in range(2)]
            read = {name: batch[name] for name in stage.spec.fields}
            received.append(batch["ids"] > 3)
            records.append(stage.forward(received, read, ForwardKey(0, m), stage.pin({0: 0}), split=halves)[1])
        for record in records:
            stage.prepare_backward(record.pins)
            back = stage.backward_input if halves else stage.backward
            made += back(record, {"loss": torch.tensor(0.5)})
        for record in records if halves else []:
            finish(stage, record)
        results.append([*made, *stage.weights.gradients, *borrowed.gradients])
        assert borrowed.gradients[0] is not None
    assert_same(*results)


def test_whole_backwards_and_halves_may_be_mixed() -> None:
    results = []
    for mixed in (True, False):
        stage = stage_of(rich_model(), [8], 0, 0.5)
        records = [stage.forward(*given, ForwardKey(0, m), stage.pin({}), split=mixed and m != 1)[1]
                   for m, given in enumerate(fields())]
        for m, record in enumerate(records):
            stage.prepare_backward(record.pins)
            if mixed and m in (0, 1):  # whether its forward knew or not
                stage.backward_input(record, {"loss": torch.tensor(1.0)})
                stage.backward_weight(record)
            else:
                stage.backward(record, {"loss": torch.tensor(1.0)})
        results.append(stage.weights.gradients)
    assert_same(*results)


def test_a_forward_that_is_not_split_is_not_intercepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SplitBackwardMode, "__torch_function__", None)
    run(stage_of(rich_model(), [8], 0, 0.5), fields(), False)
    with pytest.raises(RunError, match="TypeError"):
        run(stage_of(rich_model(), [8], 0, 0.5), fields(), True)


def test_a_layer_without_anything_to_train_is_not_intercepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SplitBackwardMode, "__torch_function__", None)
    stage = stage_of(between(Layer("a", MODULES["all frozen"])), [1, 1, 1], 1)
    run(stage, [([t.detach()], read) for [t], read in hidden()], True)


def test_the_input_half_touches_no_gradient_of_borrowed_weights() -> None:
    class Turned(Head):
        def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy((hidden @ self.decoder.weight.t()).flatten(0, 1), labels.flatten())

    model = Model([Layer("words", Words, ("ids",), ("h",)),
                   Layer("head", Turned, ("h", "labels"), ("loss",), ties={"decoder.weight": "words.word.weight"})],
                  ("ids", "labels"))
    stage = stage_of(model, [1, 1], 1)
    _, record = stage.forward(hidden(1)[0][0], {"labels": IDS}, ForwardKey(0, 0), stage.pin({0: 0}), split=True)
    stage.prepare_backward(record.pins)
    stage.backward_input(record, {"loss": torch.tensor(1.0)})
    assert stage.borrowed[0].gradients == [None]
    finish(stage, record)
    assert stage.borrowed[0].gradients[0] is not None


def test_recompute_does_nothing_where_nothing_is_dropped() -> None:
    stage = stage_of(rich_model(), [8], 0)
    _, record = stage.forward(*fields()[0], ForwardKey(0, 0), stage.pin({}))
    before = [saved.graph for saved in record.spans]
    stage.recompute(record)
    assert all(saved.graph is graph for saved, graph in zip(record.spans, before, strict=True))


# -- memory ------------------------------------------------------------------------------------------------


class Alive:
    """Which of the tensors given to it are still in memory, by name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def watch(self, name: str, tensor: Tensor) -> Tensor:
        self.names.append(name)
        weakref.finalize(tensor.untyped_storage(), self.names.remove, name)
        return tensor


class Hoards(torch.autograd.Function):
    """The identity; keeps its input for as long as its node exists, beyond what autograd frees by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("operation", ["linear", "matmul", "conv"])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("recompute", [0.0, 1.0])
def test_each_half_frees_what_the_next_does_not_need(operation: str, early: bool, recompute: float) -> None:
    alive = Alive()

    def calls(m: Any, h: Tensor) -> Tensor:
        multiplied = {"linear": m.a, "matmul": lambda x: x @ m.w, "conv": m.c}[operation]
        x = alive.watch("input", torch.tanh(Hoards.apply(alive.watch("early", h * 2))))
        return torch.sigmoid(alive.watch("late", multiplied(x)).square())

    model = between(Layer("a", lambda: Calls(calls, a=linear(), w=matrix(), c=nn.Conv1d(4, 4, 3, padding=1))))
    stage = stage_of(model, [1, 1, 1], 1, recompute)
    outputs, record = stage.forward(*hidden(1)[0], ForwardKey(0, 0), stage.pin({}), split=True)
    assert sorted(alive.names) == ([] if recompute else ["early", "input", "late"])
    if early:
        stage.recompute(record)
        assert sorted(alive.names) == ["early", "input", "late"]
    stage.prepare_backward(record.pins)
    stage.backward_input(record, {"h": torch.ones_like(outputs[0])})
    assert (alive.names, record.spans) == (["input"], [])
    stage.backward_weight(record)
    assert (alive.names, record.weight_grads) == ([], [])


def test_a_change_in_place_between_the_halves_is_noticed() -> None:
    stage = stage_of(between(Layer("a", linear)), [1, 1, 1], 1)
    _, record = stage.forward(*hidden(1)[0], ForwardKey(0, 0), stage.pin({}), split=True)
    stage.prepare_backward(record.pins)
    gradient = torch.ones(2, 4, WIDTH)
    stage.backward_input(record, {"h": gradient})
    gradient.mul_(2)
    with pytest.raises(RunError, match=r"gradients of layer 1 'a' raised RuntimeError: .*changed in place between"):
        stage.backward_weight(record)


def test_the_gradients_given_are_left_alone() -> None:
    """That of an addend is the output's own: it must not become the memory in which the parameter's is summed."""
    addend = Calls(lambda m, h: torch.baddbmm(m.b, h, m.w), w=matrix(2, WIDTH, WIDTH), b=matrix(2, 4, WIDTH))
    stage = stage_of(between(Layer("a", lambda: addend)), [1, 1, 1], 1)
    gradient = torch.ones(2, 4, WIDTH)
    for received, _ in hidden(2):
        _, record = stage.forward(received, {}, ForwardKey(0, 0), stage.pin({}), split=True)
        stage.prepare_backward(record.pins)
        stage.backward_input(record, {"h": gradient})
        stage.backward_weight(record)
    assert torch.equal(gradient, torch.ones(2, 4, WIDTH))
    assert torch.equal(addend.b.grad, torch.full((2, 4, WIDTH), 2.0))
