"""Hooks on parameters and modules run where plain PyTorch runs them, or are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from models import WIDTH, Head, Words, rich_batches
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Cut, Layer, Model, Order, Pipeline
from vpipe.errors import UserError
from vpipe.testing import TrainingRecipe, asynchronous_oracle

Call = tuple[str, float]
"""A hook that ran, and the sum of the gradient that it was given."""


class Calls:
    """What hooks were called with, in order, by hook."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}

    def __call__(self, hook: str, gradient: Tensor | None) -> None:
        self.of.setdefault(hook, []).append(0.0 if gradient is None else float(gradient.double().sum()))


class Hooked(nn.Module):
    """None of the hooks is linear: it matters what they are given. One is registered by the first forward."""

    def __init__(self, name: str, calls: Calls) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.name, self.calls, self.late = name, calls, True
        self.a.weight.register_hook(self.halve)
        self.a.weight.register_post_accumulate_grad_hook(self.clip)
        self.b.weight.register_post_accumulate_grad_hook(self.clip)
        self.b.bias.register_hook(self.narrow)
        self.b.bias.register_post_accumulate_grad_hook(self.clip)

    def narrow(self, gradient: Tensor) -> Tensor:
        self.calls(f"{self.name} bias", gradient)
        return gradient.clamp(-1e-3, 1e-3)

    def halve(self, gradient: Tensor) -> Tensor:
        self.calls(f"{self.name} before", gradient)
        return torch.where(gradient > 0, gradient * 0.5, gradient)

    def clip(self, parameter: Tensor) -> None:
        self.calls(f"{self.name} after {tuple(parameter.shape)}", parameter.grad)
        assert parameter.grad is not None
        parameter.grad.clamp_(-2e-3, 2e-3)

    def forward(self, h: Tensor) -> Tensor:
        if self.late:
            self.late = False
            self.a.bias.register_hook(lambda gradient: gradient.sign() * 1e-3)
        h = torch.tanh(self.a(torch.tanh(self.b(h) + self.b.weight.sum(0))))
        return torch.tanh(F.linear(h, self.a.weight)) + h


def hooked_model(calls: Calls, tied: bool = False) -> Model:
    """Words, hooked layers, head; ``tied``: the last of them shares a bias with the first."""
    return Model([Layer("words", Words, ("ids",), ("h",)),
                  *(Layer(f"hooked{i}", lambda i=i: Hooked(f"hooked{i}", calls),
                          ties={"b.bias": "hooked0.b.bias"} if tied and i == 3 else {}) for i in range(4)),
                  Layer("head", Head, ("h", "labels"), ("loss",))], batch=("ids", "labels"))


def momentum(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def by_name(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
    return momentum(list(named.values())) if named else None


def chain(modules: Mapping[str, nn.Module], model: Model, batch: Mapping[str, Tensor]) -> Tensor:
    """The layers of a model without dropout, one after another."""
    h: Any = batch["ids"]
    for layer in model.layers[:-1]:
        h = modules[layer.name](h)
    loss: Tensor = modules[model.layers[-1].name](h, batch["labels"])
    return loss


def microbatches(batches: Sequence[Mapping[str, Tensor]], count: int) -> list[dict[str, Tensor]]:
    return [{name: value.chunk(count)[i] for name, value in batch.items()} for batch in batches for i in range(count)]


def plain(model: Model, batches: Sequence[Mapping[str, Tensor]], count: int) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch with gradient accumulation: losses, and weights at the end."""
    modules = model.materialize(2)
    optimizer, losses = momentum(list(modules.parameters())), []
    for batch in batches:
        parts = []
        for fields in microbatches([batch], count):
            loss = chain(modules, model, fields)
            (loss / count).backward()
            parts.append(loss.detach())
        losses.append(float(torch.stack(parts).double().mean()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in modules.named_parameters()}


def assert_same(pipe: Pipeline, losses: list[float], calls: Calls, expected: tuple[list[float], dict[str, Tensor]],
                called: Calls) -> None:
    assert losses == expected[0]
    state = pipe.state_dict()
    assert [name for name in state if not torch.equal(state[name], expected[1][name])] == []
    assert {hook: sorted(given) for hook, given in calls.of.items()} == {
        hook: sorted(given) for hook, given in called.of.items()}
    assert calls.of["hooked1 before"] == called.of["hooked1 before"], "in order, too"
    assert calls.of["hooked0 bias"] == called.of["hooked0 bias"]


@pytest.mark.parametrize(("schedule", "partition", "recompute", "tied"), [
    ("1f1b", [2, 2, 2], 1.0, False), ("gpipe", [3, 3], 0.5, False), ("interleaved", [1, 2, 1, 2], 0.0, False),
    ("1f1b", [1, 4, 1], 0.0, True)])
def test_with_a_flush_and_whole_backwards_hooks_on_parameters_equal_plain_pytorch(
        schedule: str, partition: list[int], recompute: float, tied: bool) -> None:
    calls, called, batches = Calls(), Calls(), rich_batches(2, 8)
    pipe = Pipeline(hooked_model(calls, tied), momentum, stages=Cut(partition, recompute=recompute), schedule=schedule,
                    microbatches=4, seed=2)
    losses = [step.loss for step in pipe.train(batches)]
    assert_same(pipe, losses, calls, plain(hooked_model(called, tied), batches, 4), called)
    assert len(called.of["hooked1 before"]) == 8


def test_hooks_of_a_layer_and_of_an_optimizer_factory_run_and_can_be_removed() -> None:
    """The factory is given masters, which autograd never sees."""
    handles, seen, stepped = [], [], []

    class Once(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.weight.hooked_here = True
            handles.append(self.weight.register_hook(lambda gradient: seen.append("layer")))

    def hooking(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        own = [parameter for parameter in parameters if hasattr(parameter, "hooked_here")]
        handles.extend(parameter.register_hook(lambda gradient: seen.append("factory")) for parameter in own)
        stepped.extend(own)
        return momentum(parameters)

    model = Model([Layer("words", Words, ("ids",), ("h",)), Layer("once", Once),
                   Layer("head", Head, ("h", "labels"), ("loss",))], batch=("ids", "labels"))
    pipe = Pipeline(model, hooking, stages=[1, 1, 1], schedule="1f1b", microbatches=2)
    list(pipe.train(rich_batches(1, 4)))
    assert seen == ["layer", "factory"] * 2
    for left in (["layer"] * 2, []):
        seen.clear()
        handles.pop().remove()
        list(pipe.train(rich_batches(1, 4)))
        assert seen == left
    stepped[0].register_hook(lambda gradient: seen.append("later"))
    list(pipe.train(rich_batches(1, 4)))
    assert seen == ["later"] * 2


def test_hooks_survive_the_copy_of_a_sequential() -> None:
    class Kept(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.calls = 0
            self.weight.register_hook(self.count)

        def count(self, gradient: Tensor) -> Tensor:
            self.calls += 1
            return gradient * 0

    net = nn.Sequential(Kept(), nn.Linear(4, 4))
    net[1].weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    pipe = Pipeline(Model.sequential(net, nn.MSELoss()), momentum, stages=2)
    list(pipe.train([{"input": torch.ones(2, 4), "target": torch.zeros(2, 4)}]))
    state = pipe.state_dict()
    assert [name for name, value in net.state_dict().items() if torch.equal(state[name], value)] == [
        "0.weight", "1.weight"]
    assert (pipe.engine.local_stages[0].modules[0].calls, net[0].calls) == (1, 0), "the copy's method, not ours"


# -- modules -------------------------------------------------------------------------------------------


class WithModuleHooks(nn.Module):
    """Forward hooks and backward hooks that change what they see."""

    def __init__(self, calls: Calls, legacy: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.a.register_forward_pre_hook(lambda module, args: (args[0] * 1.25,))
        self.a.register_forward_hook(lambda module, args, output: torch.sigmoid(output))
        self.a.register_full_backward_pre_hook(lambda module, output: (output[0].clamp(-1e-3, 1e-3),))

        def backward(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            for gradient in (*inputs, *outputs):
                calls("backward", gradient)
            return tuple(None if gradient is None else gradient * 0.75 for gradient in inputs)

        (self.b.register_backward_hook if legacy else self.b.register_full_backward_hook)(backward)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.b(self.a(h)))


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", 1.0), ("zb_h1", 0.0), ("zb_h1", 1.0), ("pipedream", 0.0)])
def test_hooks_on_modules_equal_plain_pytorch(schedule: str, recompute: float, legacy: bool) -> None:
    def model(calls: Calls) -> Model:
        return Model([Layer("words", Words, ("ids",), ("h",)),
                      *(Layer(f"hooked{i}", lambda: WithModuleHooks(calls, legacy)) for i in range(2)),
                      Layer("head", Head, ("h", "labels"), ("loss",))], batch=("ids", "labels"))

    calls, called, batches = Calls(), Calls(), rich_batches(2, 8)
    pipe = Pipeline(model(calls), momentum, stages=Cut([1] * 4, recompute=recompute), schedule=schedule, microbatches=4,
                    seed=2)
    losses = [step.loss for step in pipe.train(batches)]
    if schedule == "pipedream":
        run = asynchronous_oracle(model(called), batches, TrainingRecipe(by_name, 4, 2), [1] * 4)
        expected = run.losses, run.state
    else:
        expected = plain(model(called), batches, 4)
    assert losses == expected[0]
    state = pipe.state_dict()
    assert [name for name in state if not torch.equal(state[name], expected[1][name])] == []
    assert sorted(calls.of["backward"]) == sorted(called.of["backward"])


# -- what is refused -----------------------------------------------------------------------------------

BOTH = "register_hook, register_post_accumulate_grad_hook"
WHOLE = "choose a schedule with a flush and whole backwards, such as gpipe or 1f1b"
NO_FLUSH = "has no flush: gradients are added over several versions of a parameter"
SPLIT = "splits the backward: gradients of weights are made later, without autograd"


def one_hooked(register: str = "", forward: bool = False) -> Model:
    """A model whose second layer registers a hook, when it is built or in its first forward."""
    class Layered(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            if not forward:
                self.register()

        def register(self) -> None:
            if register:
                getattr(self.weight, register)(lambda seen: None)

        def forward(self, h: Tensor) -> Tensor:
            if forward and not self.weight._backward_hooks:
                self.register()
            return super().forward(h)

    return Model([Layer("words", Words, ("ids",), ("h",), carried=()), Layer("a", Layered, carried=()),
                  Layer("head", Head, ("h", "labels"), ("loss",), carried=())], batch=("ids", "labels"),
                 labels="labels")


def hooking(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    for parameter in parameters:
        parameter.register_hook(lambda gradient: None)
    return momentum(parameters)


@pytest.mark.parametrize(("model", "optimizer", "words", "who", "why", "hint"), [
    (one_hooked("register_hook"), momentum, {"schedule": "pipedream"}, "'a.weight'", f"'pipedream' {NO_FLUSH}",
     WHOLE),
    (one_hooked("register_post_accumulate_grad_hook"), momentum, {"schedule": "2bw", "microbatches": 4},
     "'a.weight'", f"'2bw' {NO_FLUSH}", WHOLE),
    (one_hooked(), hooking, {"schedule": "pipedream"}, "'words.word.weight'",
     f"'pipedream' {NO_FLUSH}", WHOLE),
    (one_hooked("register_hook"), momentum, {"schedule": "zb_h1", "microbatches": 4}, "'a.weight'",
     f"'zb_h1' {SPLIT}", WHOLE),
    (one_hooked(), hooking, {"schedule": "zb_h1", "microbatches": 4, "precision": "bf16_pure"},
     "'words.word.weight'", f"'zb_h1' {SPLIT}", WHOLE),
    (one_hooked("register_hook"), momentum, {"schedule": Order("seq1f1b", slices=2)}, "'a.weight'",
     "each slice of a microbatch has a backward of its own", "leave the slices out"),
    (hooked_model(Calls(), tied=True), momentum, {"stages": Cut([1, 4, 1], recompute=[[], [4], []])},
     "'hooked0.b.bias'",
     "it is used by recomputed layers and by others, which have backwards of their own",
     "recompute all layers that use it, with those between, or none")])
def test_hooks_that_would_not_be_called_as_in_plain_pytorch_are_refused(
        model: Model, optimizer: Any, words: dict[str, Any], who: str, why: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        Pipeline(model, optimizer, **{"stages": [1] * 3, "microbatches": 2, **words})
    assert str(error.value) == (f"error: hooks on {who} ({BOTH}) are not called here: {why}\nhint: {hint}, or change "
                                "gradients in the optimizer's step")


@pytest.mark.parametrize("schedule", ["pipedream", "zb_h1"])
@pytest.mark.parametrize("last", [False, True])
def test_a_hook_that_a_forward_registers_is_refused_after_its_segment(schedule: str, last: bool) -> None:
    pipe = Pipeline(one_hooked("register_hook", forward=True), momentum, stages=[1, 2] if last else [2, 1],
                    schedule=schedule, microbatches=4)
    with pytest.raises(UserError, match=r"hooks on 'a.weight'"):
        list(pipe.train(rich_batches(3, 4)))


@pytest.mark.parametrize("schedule", ["pipedream", "zb_h1"])
@pytest.mark.parametrize("of_master", [False, True])
def test_a_hook_that_is_registered_between_two_calls_of_train_is_refused(schedule: str, of_master: bool) -> None:
    made: list[nn.Parameter] = []

    def kept(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        made.extend(parameters)
        return momentum(parameters)

    pipe = Pipeline(one_hooked(), kept, stages=[2, 1], schedule=schedule, microbatches=4)
    list(pipe.train(rich_batches(1, 4)))
    stage = pipe.engine.local_stages[0]
    parameter = made[0] if of_master else stage.modules[0].get_parameter("word.weight")
    handle = parameter.register_hook(lambda gradient: None)
    for _ in range(2):
        with pytest.raises(UserError, match=r"hooks on 'words.word.weight'"):
            list(pipe.train(rich_batches(1, 4)))
    handle.remove()
    assert len(list(pipe.train(rich_batches(1, 4)))) == (4 if schedule == "pipedream" else 1)


@pytest.mark.parametrize("where", ["owner", "borrower"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_hooks_on_a_parameter_tied_across_stages_are_refused(schedule: str, where: str) -> None:
    def words() -> nn.Module:
        module = Words()
        if where == "owner":
            module.word.weight.register_hook(lambda gradient: gradient)
        return module

    def head() -> nn.Module:
        module = Head()
        if where == "borrower":
            module.decoder.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return module

    model = Model([Layer("words", words, ("ids",), ("h",)),
                   Layer("head", head, ("h", "labels"), ("loss",), ties={"decoder.weight": "words.word.weight"})],
                  batch=("ids", "labels"))
    with pytest.raises(UserError) as error:
        Pipeline(model, momentum, stages=2, schedule=schedule)
    assert str(error.value) == (
        f"error: hooks on 'words.word.weight' ({BOTH}) are not called here: it is tied across two stages, of which "
        "neither has the whole gradient\nhint: choose a partition with both layers in one stage, or change gradients "
        "in the optimizer's step")


def test_hooks_on_a_parameter_whose_place_another_takes_are_refused() -> None:
    def head() -> nn.Module:
        module = Head()
        module.decoder.weight.register_hook(lambda gradient: gradient)
        return module

    model = Model([Layer("words", Words, ("ids",), ("h",)),
                   Layer("head", head, ("h", "labels"), ("loss",), ties={"decoder.weight": "words.word.weight"})],
                  batch=("ids", "labels"))
    with pytest.raises(UserError) as error:
        Pipeline(model, momentum, stages=1)
    assert str(error.value) == ("error: 'head.decoder.weight' has hooks, but 'words.word.weight' takes its place: they "
                                "are tied\nhint: register the hooks on 'words.word.weight'")


def test_a_hook_that_a_forward_registers_on_a_tied_parameter_is_refused_after_its_update() -> None:
    class Late(Words):
        def forward(self, ids: Tensor) -> Tensor:
            self.word.weight.register_hook(lambda gradient: gradient)
            return super().forward(ids)

    model = Model([Layer("words", Late, ("ids",), ("h",)),
                   Layer("head", Head, ("h", "labels"), ("loss",), ties={"decoder.weight": "words.word.weight"})],
                  batch=("ids", "labels"))
    pipe = Pipeline(model, momentum, stages=2, schedule="1f1b")
    with pytest.raises(UserError, match="are not called here: it is tied across two stages"):
        list(pipe.train(rich_batches(3, 4)))


def test_hooks_after_accumulation_are_refused_where_replicas_share_it_and_hooks_before_are_exact() -> None:
    calls = Calls()
    placement = [[0], [1, 2], [3]]
    with pytest.raises(UserError) as error:
        Pipeline(hooked_model(calls), momentum, stages=Cut([1, 4, 1], ranks=placement), schedule="1f1b", microbatches=4)
    assert str(error.value) == (
        "error: hooks on 'hooked0.a.weight' and 'hooked0.b.weight', ... (register_post_accumulate_grad_hook) are not "
        "called here: the 2 replicas of stage 1 each add up a part of the gradients\nhint: use register_hook, or give "
        "the stage one replica, or change gradients in the optimizer's step")

    def model() -> Model:
        def hooked() -> nn.Module:
            module = nn.Linear(WIDTH, WIDTH)
            module.weight.register_hook(lambda gradient: gradient.sign() * 2.0**-10)  # sums of these are exact
            return module

        return Model([Layer("words", Words, ("ids",), ("h",)), Layer("a", hooked),
                      Layer("head", Head, ("h", "labels"), ("loss",))], batch=("ids", "labels"))

    pipe = Pipeline(model(), momentum, stages=Cut([1, 1, 1], ranks=placement), schedule="1f1b", microbatches=4, seed=2)
    list(pipe.train(rich_batches(1, 8)))
    _, expected = plain(model(), rich_batches(1, 8), 4)
    assert torch.equal(pipe.state_dict()["a.weight"], expected["a.weight"])
