"""Hooks on parameters and modules run where plain PyTorch runs them, under every kind of schedule, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from models import WIDTH, Head, Words, rich_batches
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Asynchronous, Cut, Execution, Layer, Model, Pipeline
from vpipe.errors import UserError
from vpipe.testing import TrainingRecipe, asynchronous_oracle, version_rule

Call = tuple[str, float]
"""A hook that ran, and the sum of the gradient that it was given."""


class Calls:
    """What hooks were called with, in order, by hook."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}

    def __call__(self, hook: str, gradient: Tensor | None) -> None:
        self.of.setdefault(hook, []).append(0.0 if gradient is None else float(gradient.double().sum()))


class Hooked(nn.Module):
    """Two parameters, used in ways whose weight gradient can wait and in ways where it cannot, with hooks on both.

    None of the hooks is linear: it matters what they are given. One is registered by the first forward.
    """

    def __init__(self, name: str, calls: Calls, late: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.name, self.calls, self.late = name, calls, late
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


def hooked_model(calls: Calls, tied: bool = False, hooked: int = 4, late: bool = True) -> Model:
    """Words, hooked layers, head; ``tied``: the last of them shares a bias with the first."""
    return Model([Layer("words", Words, ("ids",), ("h",)),
                  *(Layer(f"hooked{i}", lambda i=i: Hooked(f"hooked{i}", calls, late),
                          ties={"b.bias": "hooked0.b.bias"} if tied and i == 3 else {}) for i in range(hooked)),
                  Layer("head", Head, ("h", "labels"), ("loss",))], batch=("ids", "labels"))


def momentum(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


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


def stashed(model: Model, batches: Sequence[Mapping[str, Tensor]], count: int, schedule: str, stages: int,
            every: int) -> tuple[list[float], dict[str, Tensor]]:
    """Weight stashing in plain PyTorch: a whole model per microbatch, with the weights of its version, one layer per
    stage; gradients accumulate in the order of the microbatches."""
    whole = model.materialize(2)
    names = [layer.name for layer in model.layers]
    optimizers = [momentum(list(whole[name].parameters())) for name in names]
    history = [[{k: v.clone() for k, v in whole[name].state_dict().items()}] for name in names]
    losses, parts = [], []
    used = model.materialize(2)
    for i, fields in enumerate(microbatches(batches, count)):
        for s, name in enumerate(names):
            used[name].load_state_dict(history[s][version_rule(schedule)(i, s, [1] * stages, every)])
            for mine, theirs in zip(whole[name].parameters(), used[name].parameters(), strict=True):
                theirs.grad = mine.grad
        loss = chain(used, model, fields)
        (loss / every).backward()
        parts.append(loss.detach())
        for s, name in enumerate(names):
            for mine, theirs in zip(whole[name].parameters(), used[name].parameters(), strict=True):
                mine.grad = theirs.grad
            if (i + 1) % every == 0:
                optimizers[s].step()
                optimizers[s].zero_grad()
                history[s].append({k: v.clone() for k, v in whole[name].state_dict().items()})
        if (i + 1) % every == 0:
            losses.append(float(torch.stack(parts).double().mean()))
            parts = []
    return losses, {name: value.detach() for name, value in whole.named_parameters()}


def assert_same(pipe: Pipeline, losses: list[float], calls: Calls, expected: tuple[list[float], dict[str, Tensor]],
                called: Calls) -> None:
    assert losses == expected[0]
    state = pipe.state_dict()
    assert [name for name in state if not torch.equal(state[name], expected[1][name])] == []
    assert {hook: sorted(given) for hook, given in calls.of.items()} == {
        hook: sorted(given) for hook, given in called.of.items()}
    assert calls.of["hooked1 before"] == called.of["hooked1 before"], "in order, too"
    assert calls.of["hooked0 bias"] == called.of["hooked0 bias"]


@pytest.mark.parametrize(("schedule", "partition", "executor", "recompute"), [
    ("1f1b", [2, 2, 2], "overlapped", 1.0), ("gpipe", [3, 3], "async_threaded", 0.0),
    ("gpipe", [3, 3], "async_threaded", 0.5), ("zb_h1", [2, 2, 2], "overlapped", 0.0),
    ("zb_h1", [2, 2, 2], "overlapped", 0.5), ("zb_v", [1, 2, 2, 1], "overlapped", 1.0)])
def test_hooks_on_parameters_equal_plain_pytorch(schedule: str, partition: list[int], executor: str,
                                                 recompute: float) -> None:
    calls, called, batches = Calls(), Calls(), rich_batches(2, 8)
    pipe = Pipeline(hooked_model(calls), momentum, stages=Cut(partition, recompute=recompute), schedule=schedule,
                    microbatches=4, execution=Execution(executor=executor), seed=2)
    losses = [step.loss for step in pipe.train(batches)]
    assert_same(pipe, losses, calls, plain(hooked_model(called), batches, 4), called)
    assert len(called.of["hooked1 before"]) == 8


@pytest.mark.parametrize(("schedule", "recompute", "every"), [
    ("pipedream", 0.0, 1), ("pipedream", 1.0, 2), ("2bw", 1.0, 1)])
def test_hooks_on_parameters_equal_weight_stashing_by_hand(schedule: str, recompute: float, every: int) -> None:
    if schedule == "2bw":
        every *= 4  # at least as many microbatches as stages
    calls, called, batches = Calls(), Calls(), rich_batches(2, 8)
    pipe = Pipeline(hooked_model(calls, hooked=2), momentum, stages=Cut([1] * 4, recompute=recompute),
                    schedule=Asynchronous(schedule, update_every=every), microbatches=8, seed=2)
    losses = [step.loss for step in pipe.train(batches)]
    assert_same(pipe, losses, calls, stashed(hooked_model(called, hooked=2), batches, 8, schedule, 4, every), called)


def test_the_oracle_of_an_asynchronous_run_has_hooks_too() -> None:
    class Momentum:
        def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
            return momentum(list(named.values())) if named else None

    batches = rich_batches(2, 8)
    model = hooked_model(Calls(), hooked=2, late=False)
    oracle = asynchronous_oracle(model, batches, TrainingRecipe(Momentum().from_named, 8, 2), [1] * 4)
    by_hand = stashed(model, batches, 8, "pipedream", 4, 1)
    assert oracle.losses == by_hand[0]
    assert [name for name, value in by_hand[1].items() if not torch.equal(oracle.state[name], value)] == []


@pytest.mark.parametrize("recompute", [[], [1, 2], [4]])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_hooks_on_a_parameter_that_layers_of_a_stage_share(schedule: str, recompute: list[int]) -> None:
    """In several spans, each with a backward of its own, the hooks see the sum of all."""
    calls, called, batches = Calls(), Calls(), rich_batches(2, 8)
    pipe = Pipeline(hooked_model(calls, tied=True), momentum, stages=Cut([1, 4, 1], recompute=[[], recompute, []]),
                    schedule=schedule, microbatches=4, seed=2)
    losses = [step.loss for step in pipe.train(batches)]
    assert_same(pipe, losses, calls, plain(hooked_model(called, tied=True), batches, 4), called)
    assert len(calls.of["hooked0 bias"]) == 8
    assert "hooked3 bias" not in calls.of


@pytest.mark.parametrize("build", [
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    lambda: nn.TransformerEncoderLayer(WIDTH, 3, 20, 0.0, batch_first=True)])
@pytest.mark.parametrize("schedule", ["zb_h1", "pipedream"])
def test_hooks_on_parametrised_modules(schedule: str, build: Callable[[], nn.Module]) -> None:
    def hooked() -> nn.Module:
        module = build()
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return module

    model = Model([Layer("words", Words, ("ids",), ("h",)), Layer("a", hooked), Layer("b", hooked),
                   Layer("head", Head, ("h", "labels"), ("loss",))], batch=("ids", "labels"))
    batches = rich_batches(2, 8)
    pipe = Pipeline(model, momentum, stages=[1] * 4, schedule=schedule, microbatches=4, seed=2)
    losses = [step.loss for step in pipe.train(batches)]
    expected = (stashed(model, batches, 4, schedule, 4, 1) if schedule == "pipedream" else plain(model, batches, 4))
    assert losses == expected[0]
    state = pipe.state_dict()
    assert [name for name, value in expected[1].items() if not torch.equal(state[name], value)] == []


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "pipedream"])
def test_a_hook_that_is_removed_runs_no_more(schedule: str) -> None:
    handles, seen = [], []

    class Once(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            handles.append(self.weight.register_hook(lambda gradient: seen.append(0)))

    model = Model([Layer("words", Words, ("ids",), ("h",)), Layer("once", Once),
                   Layer("head", Head, ("h", "labels"), ("loss",))], batch=("ids", "labels"))
    pipe = Pipeline(model, momentum, stages=[1, 1, 1], schedule=schedule, microbatches=2)
    list(pipe.train(rich_batches(3, 4)))
    assert len(seen) == 6
    handles[0].remove()
    list(pipe.train(rich_batches(2, 4)))
    assert len(seen) == 6


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "pipedream"])
def test_hooks_of_a_layer_and_of_an_optimizer_factory_on_one_parameter_can_be_removed(schedule: str) -> None:
    handles, seen = [], []

    class Once(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.weight.hooked_here = True
            handles.append(self.weight.register_hook(lambda gradient: seen.append("layer")))

    def hooking(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        handles.extend(parameter.register_hook(lambda gradient: seen.append("factory"))
                       for parameter in parameters if hasattr(parameter, "hooked_here"))
        return momentum(parameters)

    model = Model([Layer("words", Words, ("ids",), ("h",)), Layer("once", Once),
                   Layer("head", Head, ("h", "labels"), ("loss",))], batch=("ids", "labels"))
    pipe = Pipeline(model, hooking, stages=[1, 1, 1], schedule=schedule, microbatches=2)
    list(pipe.train(rich_batches(1, 4)))
    assert seen == ["layer", "factory"] * 2
    handles[1].remove()
    list(pipe.train(rich_batches(1, 4)))
    assert seen[4:] == ["layer"] * 2
    handles[0].remove()
    list(pipe.train(rich_batches(1, 4)))
    assert len(seen) == 6


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "pipedream"])
def test_hooks_that_an_optimizer_factory_registers_run(schedule: str) -> None:
    """It is given masters, which autograd never sees."""
    def hooking(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        for parameter in parameters:
            parameter.register_hook(lambda gradient: gradient * 0)
        return torch.optim.SGD(parameters, lr=1.0)

    calls = Calls()
    pipe = Pipeline(hooked_model(calls), hooking, stages=3, schedule=schedule, microbatches=2)
    before = pipe.state_dict()
    list(pipe.train(rich_batches(3, 4)))
    after = pipe.state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert len(calls.of["hooked0 before"]) == 6, "and those of the layers as well"


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
    expected = (stashed(model(called), batches, 4, schedule, 4, 1) if schedule == "pipedream"
                else plain(model(called), batches, 4))
    assert losses == expected[0]
    state = pipe.state_dict()
    assert [name for name in state if not torch.equal(state[name], expected[1][name])] == []
    assert sorted(calls.of["backward"]) == sorted(called.of["backward"])


# -- what is refused -----------------------------------------------------------------------------------


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
        "error: 'words.word.weight' is tied across two stages and has hooks (register_hook, "
        "register_post_accumulate_grad_hook), which are given the whole gradient of a microbatch: neither stage has "
        "it\nhint: choose a partition with both layers in one stage, or change the gradient in the optimizer")


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


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_hook_that_a_forward_registers_on_a_tied_parameter_is_refused_at_its_update(schedule: str) -> None:
    class Late(Words):
        def forward(self, ids: Tensor) -> Tensor:
            self.word.weight.register_hook(lambda gradient: gradient)
            return super().forward(ids)

    model = Model([Layer("words", Late, ("ids",), ("h",)),
                   Layer("head", Head, ("h", "labels"), ("loss",), ties={"decoder.weight": "words.word.weight"})],
                  batch=("ids", "labels"))
    pipe = Pipeline(model, momentum, stages=2, schedule=schedule)
    with pytest.raises(UserError, match="tied across two stages and has hooks"):
        list(pipe.train(rich_batches(3, 4)))


def test_hooks_after_accumulation_are_refused_where_replicas_share_it_and_hooks_before_are_exact() -> None:
    calls = Calls()
    placement = [[0], [1, 2], [3]]
    with pytest.raises(UserError) as error:
        Pipeline(hooked_model(calls), momentum, stages=Cut([1, 4, 1], ranks=placement), schedule="1f1b", microbatches=4)
    assert str(error.value) == (
        "error: 'hooked0.a.weight' has hooks that run after its gradient is added to those before "
        "(register_post_accumulate_grad_hook), but the 2 replicas of stage 1 each add up a part of them\n"
        "hint: use register_hook, which sees each microbatch's gradient, or give the stage one replica")

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
