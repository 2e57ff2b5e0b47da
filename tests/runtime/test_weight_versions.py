"""Weight versions: which are held, when memory is reused, and that autograd never sees a change."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from golden import refusal
from models import Head, RawMatmul, Words, between, frozen_front, rich_batches
from oracles import Momentum, equals_its_oracle
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Cut, Layer, Model, Pipeline
from vpipe.errors import UserError

# -- references of a layer's own -----------------------------------------------------------------------


class InList(RawMatmul):
    """Reads its parameter from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [self.w]

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden @ self.parts[0])


class InClosure(RawMatmul):
    """Adds a penalty that needs no gradient, from a closure."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.w
        self.penalty = lambda: weight.detach().square().sum()

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self.penalty()


class FromFirstForward(RawMatmul):
    """Keeps what its first forward found; ``drift`` needs no gradient of it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.found = self.found or [self.w]
        return super().forward(hidden) + (self.w - self.found[0].detach()).sum()


class FromForwardBefore(RawMatmul):
    """Keeps what the forward before found."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        before, self.found = self.found or [self.w], [self.w]
        return torch.tanh(hidden @ before[0])


USED = ("error: 'raw.w' is used through a reference that its layer keeps beside the module's own: there it would stay "
        "as it was at first, whatever is trained\nhint: read the parameter from its module in every forward, as in "
        "self.weight, instead of from a list, a closure or another attribute")
ASTRAY = ("error: 'raw.w' got a gradient in another version than its microbatch uses: its layer keeps a reference from "
          "an earlier forward, or calls backward() in its forward\nhint: read the parameter from its module in every "
          "forward, as in self.weight; take gradients in a forward with torch.autograd.grad")


def raw_model(build: type[nn.Module]) -> Model:
    return between(Layer("raw", build), Layer("raw1", RawMatmul))


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
@pytest.mark.parametrize(("build", "text"), [(InList, USED), (InClosure, USED), (FromFirstForward, USED),
                                             (FromForwardBefore, ASTRAY)])
def test_a_reference_of_a_layers_own_is_refused_where_weights_have_versions(build: type[nn.Module], text: str,
                                                                            schedule: str) -> None:
    pipe = Pipeline(raw_model(build), Momentum(), stages=[1] * 4, schedule=schedule, microbatches=4, seed=2)
    assert refusal(lambda: list(pipe.train(rich_batches(6, 4)))) == text


@pytest.mark.parametrize("build", [InList, InClosure, FromFirstForward, FromForwardBefore])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_it_is_exact_where_they_have_one(build: type[nn.Module], schedule: str) -> None:
    equals_its_oracle(raw_model(build), rich_batches(3, 4), schedule=schedule, partition=[1] * 4, microbatches=2,
                      optimizer=Momentum())


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("partition", [[2], [1, 1]])
def test_a_reference_to_a_parameter_that_a_tie_replaces_is_refused(schedule: str, partition: list[int]) -> None:
    class Keeps(Head):
        def __init__(self) -> None:
            super().__init__()
            self.kept = [self.decoder.weight]

        def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(hidden, self.kept[0]).flatten(0, 1), labels.flatten())

    model = Model([Layer("words", Words, ("ids",), ("h",)),
                   Layer("head", Keeps, ("h", "labels"), ("loss",), ties={"decoder.weight": "words.word.weight"})],
                  batch=("ids", "labels"))
    pipe = Pipeline(model, Momentum(), stages=partition, schedule=schedule)
    with pytest.raises(UserError, match=r"'(head.decoder|words.word).weight' is used through a reference"):
        list(pipe.train(rich_batches(1, 4)))


def test_shapes_of_a_replaced_parameter_may_still_be_read() -> None:
    class Sized(RawMatmul):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [self.w]

        def forward(self, hidden: Tensor) -> Tensor:
            part = self.parts[0]
            assert (part.shape, part.size(0), part.dtype, len(part), part.grad) == (
                self.w.shape, 12, torch.float32, 12, None)
            assert part.numel() == 144
            assert "Parameter" in repr(part)
            return super().forward(hidden)

    pipe = Pipeline(raw_model(Sized), Momentum(), stages=[1] * 4, schedule="pipedream")
    assert len(list(pipe.train(rich_batches(6, 4)))) == 6


class Rereads(nn.LSTM):
    """A recurrent network as a last child: it keeps a list of its parameters, which follows them."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden[None])[0][0]


def test_a_last_child_that_keeps_a_list_of_its_parameters_trains_with_the_versions() -> None:
    torch.manual_seed(3)
    model = Model.sequential(nn.Sequential(nn.Linear(4, 4), Rereads(4, 3)), nn.CrossEntropyLoss())
    batches = [{"input": torch.randn(4, 4), "target": torch.randint(3, (4,))} for _ in range(6)]
    equals_its_oracle(model, batches, schedule="pipedream", stages=2, microbatches=2, optimizer=Momentum())


def test_leaves_keep_the_kind_and_the_attributes_of_their_parameter() -> None:
    class Special(nn.Parameter):
        pass

    class Scaled(RawMatmul):
        def __init__(self) -> None:
            super().__init__()
            self.w = Special(self.w.detach().clone())
            self.w.scale = 0.5

        def forward(self, hidden: Tensor) -> Tensor:
            assert type(self.w) is Special
            return super().forward(hidden * self.w.scale)

    model, batches = raw_model(Scaled), rich_batches(6, 4)
    pipe = Pipeline(model, Momentum(), stages=[1] * 4, schedule="pipedream", seed=2)
    assert len(list(pipe.train(batches))) == 6


class Assigning(torch.optim.Optimizer):
    """Gives parameters other memory instead of changing them in place."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data.add(parameter.grad, alpha=-group["lr"])


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_an_optimizer_that_assigns_data_trains_the_same(schedule: str) -> None:
    runs = []
    for optimizer in (Assigning, lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False)):
        pipe = Pipeline(raw_model(RawMatmul), optimizer, stages=[1] * 4, schedule=schedule, microbatches=4, seed=2)
        losses = [step.loss for step in pipe.train(rich_batches(3, 4))]
        runs.append([*losses, *(float(value.sum()) for value in pipe.state_dict().values())])
    assert runs[0] == runs[1]


# -- parameters of several stages, and of none -----------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("shares", ["module", "parameter"])
def test_a_parameter_on_two_stages_without_a_tie_is_refused(shares: str, schedule: str) -> None:
    one, other = RawMatmul(), RawMatmul()
    if shares == "parameter":
        other.w = one.w
    second = one if shares == "module" else other
    model = between(Layer("a", lambda: one), Layer("b", lambda: second))
    assert refusal(Pipeline, model, Momentum(), stages=[2, 2], schedule=schedule) == (
        "error: 'b.w' and 'a.w' are one parameter, but on different stages or ranks, where "
        "each is trained by itself\nhint: let every build function make a module of its own, "
        "and tie them: Layer(..., ties={...})")
    assert len(list(Pipeline(model, Momentum(), stages=[1, 3], schedule="1f1b").train(
        rich_batches(1, 4)))) == 1, "within a stage it is one"


def test_replicas_that_are_one_module_are_refused() -> None:
    one = RawMatmul()
    model = between(Layer("a", lambda: one))
    with pytest.raises(UserError, match=r"'a\.w' and 'a\.w' are one parameter, but on different stages or ranks"):
        Pipeline(model, Momentum(), stages=Cut([1, 1, 1], ranks=[[0], [1, 2], [3]]), microbatches=2)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_parameter_that_is_freed_later_is_refused(schedule: str) -> None:
    pipe = Pipeline(frozen_front(), Momentum(), stages=[1, 1, 2], schedule=schedule, microbatches=2)
    list(pipe.train(rich_batches(1, 4)))
    pipe.engine.local_stages[0].modules[0].requires_grad_()
    assert refusal(lambda: list(pipe.train(rich_batches(1, 4)))) == (
        "error: 'words.word.weight' requires a gradient now, but did not when the pipeline was "
        "built: no optimizer steps it\nhint: save, and load into a pipeline that is built with "
        "what is trained from here on")
