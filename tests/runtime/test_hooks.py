"""Hooks on parameters and modules run where plain PyTorch runs them, or are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from golden import refusal
from models import WIDTH, Head, Words, between, rich_batches
from oracles import Momentum, assert_same, equals_its_oracle, oracle_of, pipeline_of
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Layer, Model, Pipeline
from vpipe.errors import UserError

Calls = list[tuple[str, float]]
"""Hooks that ran, each with the sum of the gradient that it was given."""


class Hooked(nn.Module):
    """None of the hooks is linear: it matters what they are given. One is registered by the first forward."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.a, self.b, self.calls, self.late = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), calls, True
        self.a.weight.register_hook(self.halve)
        for parameter in (self.a.weight, self.b.weight, self.b.bias):
            parameter.register_post_accumulate_grad_hook(self.clip)
        self.b.bias.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    def halve(self, gradient: Tensor) -> Tensor:
        self.calls.append(("before", float(gradient.double().sum())))
        return torch.where(gradient > 0, gradient * 0.5, gradient)

    def clip(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.calls.append((f"after {tuple(parameter.shape)}", float(parameter.grad.double().sum())))
        parameter.grad.clamp_(-2e-3, 2e-3)

    def forward(self, h: Tensor) -> Tensor:
        if self.late:
            self.late = False
            self.a.bias.register_hook(lambda gradient: gradient.sign() * 1e-3)
        h = torch.tanh(self.a(torch.tanh(self.b(h) + self.b.weight.sum(0))))
        return torch.tanh(F.linear(h, self.a.weight)) + h


class ModuleHooks(nn.Module):
    """Forward hooks and backward hooks that change what they see."""

    def __init__(self, calls: Calls, legacy: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.a.register_forward_pre_hook(lambda module, args: (args[0] * 1.25,))
        self.a.register_forward_hook(lambda module, args, output: torch.sigmoid(output))
        self.a.register_full_backward_pre_hook(lambda module, output: (output[0].clamp(-1e-3, 1e-3),))

        def backward(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            calls.extend(("backward", 0.0 if gradient is None else float(gradient.double().sum()))
                         for gradient in (*inputs, *outputs))
            return tuple(None if gradient is None else gradient * 0.75 for gradient in inputs)

        (self.b.register_backward_hook if legacy else self.b.register_full_backward_hook)(backward)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.b(self.a(h)))


def hooked_model(calls: Calls, tied: bool = False) -> Model:
    """Words, hooked layers, head; ``tied``: the last of them shares a bias with the first."""
    return between(*(Layer(f"hooked{i}", lambda: Hooked(calls),
                           ties={"b.bias": "hooked0.b.bias"} if tied and i == 3 else {}) for i in range(4)))


def plain(model: Model, batches: Sequence[Mapping[str, Tensor]], count: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train as plain PyTorch does, which adds the gradients of microbatches before hooks see their sum."""
    modules, losses = model.materialize(2), []
    optimizer = Momentum().from_named(dict(modules.named_parameters()))
    assert optimizer is not None
    for batch in batches:
        parts = []
        for h, labels in zip(batch["ids"].chunk(count), batch["labels"].chunk(count), strict=True):
            for layer in model.layers[:-1]:
                h = modules[layer.name](h)
            parts.append(modules["head"](h, labels))
            (parts[-1] / count).backward()
        losses.append(float(torch.stack(parts).detach().double().mean()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in modules.named_parameters()}


@pytest.mark.parametrize(("schedule", "partition", "recompute", "tied"), [
    ("1f1b", [2, 2, 2], 1.0, False), ("gpipe", [3, 3], 0.5, False), ("interleaved", [1, 2, 1, 2], 0.0, False),
    ("1f1b", [1, 4, 1], 0.0, True)])
def test_with_a_flush_and_whole_backwards_hooks_on_parameters_equal_plain_pytorch(
        schedule: str, partition: list[int], recompute: float, tied: bool) -> None:
    calls, called, batches = Calls(), Calls(), rich_batches(2, 8)
    pipe = pipeline_of(hooked_model(calls, tied), schedule=schedule, partition=partition, recompute=recompute,
                       optimizer=Momentum())
    losses, state = plain(hooked_model(called, tied), batches, 4)
    assert [step.loss for step in pipe.train(batches)] == losses
    ours = pipe.state_dict()
    assert [name for name in ours if not torch.equal(ours[name], state[name])] == []
    assert sorted(calls) == sorted(called) != []


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(("schedule", "recompute"), [("zb_h1", 0.0), ("zb_h1", 1.0), ("pipedream", 0.0)])
def test_hooks_on_modules_equal_the_oracle(schedule: str, recompute: float, legacy: bool) -> None:
    calls, batches = Calls(), rich_batches(2, 8)
    pipe = pipeline_of(between(*(Layer(f"hooked{i}", lambda: ModuleHooks(calls, legacy)) for i in range(2))),
                       schedule=schedule, partition=[1] * 4, recompute=recompute, optimizer=Momentum())
    steps, ours = list(pipe.train(batches)), sorted(calls)
    calls.clear()
    assert_same(pipe, steps, oracle_of(pipe, batches))
    assert ours == sorted(calls) != []


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
        return torch.optim.SGD(parameters)

    pipe = Pipeline(between(Layer("once", Once)), hooking, stages=[1, 1, 1], schedule="1f1b", microbatches=2)
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
    pipe = Pipeline(Model.sequential(net, nn.MSELoss()), torch.optim.SGD, stages=2)
    list(pipe.train([{"input": torch.ones(2, 4), "target": torch.zeros(2, 4)}]))
    state = pipe.state_dict()
    assert [name for name, value in net.state_dict().items() if torch.equal(state[name], value)] == [
        "0.weight", "1.weight"]
    assert (pipe.engine.local_stages[0].modules[0].calls, net[0].calls) == (1, 0), "the copy's method, not ours"


# -- what is refused -----------------------------------------------------------------------------------

BOTH = "register_hook, register_post_accumulate_grad_hook"
WHOLE = "choose a schedule with a flush and whole backwards, such as gpipe or 1f1b"
NO_FLUSH = "has no flush: gradients are added over several versions of a parameter"
SPLIT = "splits the backward: gradients of weights are made later, without autograd"
TIED = ("it is tied across two stages, of which neither has the whole gradient",
        "choose a partition with both layers in one stage")


def hooks_on(layer: str = "", register: str = "register_hook", forward: bool = False, tied: bool = False) -> Model:
    """Words, a layer, head; one of them registers a hook on its weight when it is built, or in its first forward."""
    def hooked(name: str, module: nn.Module) -> nn.Module:
        def add(*_: object) -> None:
            getattr(next(module.parameters()), register)(lambda seen: None)
            once.remove()

        once = module.register_forward_pre_hook(add if name == layer else lambda *_: None)
        if name == layer and not forward:
            add()
        return module

    return Model([
        Layer("words", lambda: hooked("words", Words()), ("ids",), ("h",), carried=()),
        Layer("a", lambda: hooked("a", nn.Linear(WIDTH, WIDTH)), carried=()),
        Layer("head", lambda: hooked("head", Head()), ("h", "labels"), ("loss",), carried=(),
              ties={"decoder.weight": "words.word.weight"} if tied else {})], batch=("ids", "labels"), labels="labels")


def hooking(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    for parameter in parameters:
        parameter.register_hook(lambda gradient: None)
    return torch.optim.SGD(parameters)


@pytest.mark.parametrize(("model", "words", "who", "why", "hint"), [
    (hooks_on("a"), {"schedule": "pipedream"}, "'a.weight'", f"'pipedream' {NO_FLUSH}", WHOLE),
    (hooks_on("a", "register_post_accumulate_grad_hook"), {"schedule": "2bw"}, "'a.weight'", f"'2bw' {NO_FLUSH}",
     WHOLE),
    (hooks_on(), {"schedule": "pipedream", "optimizer": hooking}, "'words.word.weight'", f"'pipedream' {NO_FLUSH}",
     WHOLE),
    (hooks_on("a"), {"schedule": "zb_h1"}, "'a.weight'", f"'zb_h1' {SPLIT}", WHOLE),
    (hooks_on(), {"schedule": "zb_h1", "optimizer": hooking, "precision": "bf16_pure"}, "'words.word.weight'",
     f"'zb_h1' {SPLIT}", WHOLE),
    (hooks_on("a"), {"schedule": "seq1f1b", "slices": 2}, "'a.weight'",
     "each slice of a microbatch has a backward of its own", "leave the slices out"),
    (hooked_model(Calls(), tied=True), {"schedule": "1f1b", "partition": [1, 4, 1], "recompute": [[], [4], []]},
     "'hooked0.b.bias'", "it is used by recomputed layers and by others, which have backwards of their own",
     "recompute all layers that use it, with those between, or none"),
    *((hooks_on(layer, register, tied=True), {"schedule": schedule}, "'words.word.weight'", *TIED)
      for layer, register in (("words", "register_hook"), ("head", "register_post_accumulate_grad_hook"))
      for schedule in ("1f1b", "pipedream"))])
def test_hooks_that_would_not_be_called_as_in_plain_pytorch_are_refused(
        model: Model, words: dict[str, Any], who: str, why: str, hint: str) -> None:
    assert refusal(pipeline_of, model, **{"partition": [1] * 3, "optimizer": torch.optim.SGD, **words}) == (
        f"error: hooks on {who} ({BOTH}) are not called here: {why}\nhint: {hint}, or change "
        "gradients in the optimizer's step")


def test_hooks_on_a_parameter_whose_place_another_takes_are_refused() -> None:
    assert refusal(pipeline_of, hooks_on("head", tied=True), stages=1) == (
        "error: 'head.decoder.weight' has hooks, but 'words.word.weight' takes its place: they "
        "are tied\nhint: register the hooks on 'words.word.weight'")


@pytest.mark.parametrize(("layer", "tied", "words"), [
    *(("a", False, {"schedule": schedule, "partition": partition}) for schedule in ("pipedream", "zb_h1")
      for partition in ([1, 2], [2, 1])),
    ("words", True, {"schedule": "1f1b", "partition": [2, 1]})])
def test_a_hook_that_a_forward_registers_is_refused_after_its_segment(layer: str, tied: bool,
                                                                      words: dict[str, Any]) -> None:
    pipe = pipeline_of(hooks_on(layer, forward=True, tied=tied), **words)
    with pytest.raises(UserError, match=f"hooks on '{layer}.*weight' .* are not called here"):
        list(pipe.train(rich_batches(3, 4)))


@pytest.mark.parametrize("schedule", ["pipedream", "zb_h1"])
@pytest.mark.parametrize("of_master", [False, True])
def test_a_hook_that_is_registered_between_two_calls_of_train_is_refused(schedule: str, of_master: bool) -> None:
    made: list[nn.Parameter] = []

    def kept(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        made.extend(parameters)
        return torch.optim.SGD(parameters)

    pipe = pipeline_of(hooks_on(), optimizer=kept, partition=[2, 1], schedule=schedule)
    list(pipe.train(rich_batches(1, 4)))
    stage = pipe.engine.local_stages[0]
    parameter = made[0] if of_master else stage.modules[0].get_parameter("word.weight")
    handle = parameter.register_hook(lambda gradient: None)
    for _ in range(2):
        with pytest.raises(UserError, match=r"hooks on 'words.word.weight'"):
            list(pipe.train(rich_batches(1, 4)))
    handle.remove()
    assert len(list(pipe.train(rich_batches(1, 4)))) == (4 if schedule == "pipedream" else 1)


def test_hooks_after_accumulation_are_refused_where_replicas_share_it_and_hooks_before_are_exact() -> None:
    words: dict[str, Any] = {"schedule": "1f1b", "placement": [[0], [1, 2], [3]]}
    assert refusal(pipeline_of, hooked_model(Calls(), tied=True), partition=[1, 4, 1], **words) == (
        "error: hooks on 'hooked0.a.weight' and 'hooked0.b.weight', ... (register_post_accumulate_grad_hook) are not "
        "called here: the 2 replicas of stage 1 each add up a part of the gradients\nhint: use register_hook, or give "
        "the stage one replica, or change gradients in the optimizer's step")

    def signed() -> nn.Module:
        module = nn.Linear(WIDTH, WIDTH)
        module.weight.register_hook(torch.sign)
        return module

    equals_its_oracle(between(Layer("a", signed)), rich_batches(1, 8), partition=[1, 1, 1], **words)
