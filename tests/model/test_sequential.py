"""An ``nn.Sequential`` as a model: what its copies share, what its loss keeps, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import refusal
from torch import Tensor, nn

from vpipe import Cut, Layer, Model, Pipeline
from vpipe.errors import UserError

WIDTH, CLASSES = 6, 3


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches(count: int, samples: int = 8) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(4)
    return [{"input": torch.randn(samples, WIDTH, generator=random),
             "target": torch.randint(CLASSES, (samples,), generator=random)} for _ in range(count)]


def plain(net: nn.Sequential, loss_of: Callable[[Tensor, Tensor], Tensor], count: int,
          microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch with gradient accumulation on a copy: losses, and the state at the end."""
    net = copy.deepcopy(net)
    optimizer, losses = momentum(list(net.parameters())), []
    for batch in batches(count):
        parts = []
        for x, target in zip(*(batch[name].chunk(microbatches) for name in ("input", "target")), strict=True):
            loss = loss_of(net(x), target)
            (loss / microbatches).backward()
            parts.append(loss.detach())
        losses.append(float(torch.stack(parts).double().mean()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, net.state_dict()


# -- modules that stand in several places --------------------------------------------------------------


class Counting(nn.Module):
    """A buffer that every forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.n: Tensor
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n = self.n + 1
        return x * (1 + self.n / 64)


def normed_twice() -> nn.Sequential:
    """A batch normalisation and a counter in two places each, one of them within another child."""
    torch.manual_seed(3)
    norm, count = nn.BatchNorm1d(WIDTH), Counting()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, count, nn.Sequential(nn.Tanh(), norm), count,
                         nn.Linear(WIDTH, CLASSES))


@pytest.mark.parametrize(("partition", "recompute"), [
    ([6], 0.0), ([6], 1.0), ([1, 4, 1], 0.0), ([1, 5], 1.0), ([6], [[1]]), ([1, 4, 1], [[], [3, 4], []])])
def test_a_module_with_buffers_that_stands_twice_in_a_stage_is_one_module(
        partition: list[int], recompute: float | list[list[int]]) -> None:
    net, loss_of = normed_twice(), nn.CrossEntropyLoss()
    pipe = Pipeline(Model.sequential(net, loss_of), momentum, stages=Cut(partition, recompute=recompute),
                    schedule="1f1b", microbatches=4)
    losses = [step.loss for step in pipe.train(batches(3))]
    expected, state = plain(net, loss_of, 3, 4)
    assert losses == expected
    mine = pipe.state_dict()
    assert set(state) - set(mine) == {"3.1.weight", "3.1.bias"}, "parameters stand under their owner's names"
    assert [name for name in mine if not torch.equal(mine[name], state[name])] == []
    assert (int(mine["1.num_batches_tracked"]), int(mine["4.n"])) == (24, 24)


def test_the_last_child_may_be_one_that_stood_before() -> None:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(WIDTH)
    net, loss_of = nn.Sequential(norm, nn.Linear(WIDTH, WIDTH), norm), nn.CrossEntropyLoss()
    pipe = Pipeline(Model.sequential(net, loss_of), momentum, stages=[3], microbatches=2)
    expected, state = plain(net, loss_of, 3, 2)
    assert [step.loss for step in pipe.train(batches(3))] == expected
    mine = pipe.state_dict()
    assert [name for name in mine if not torch.equal(mine[name], state[name])] == []
    pipe.evaluate(batches(1))
    assert all(module.training for stage in pipe.engine.local_stages for layer in stage.modules.values()
               for module in layer.modules())


@pytest.mark.parametrize(("partition", "text"), [
    ([2, 4], "error: '3.1' (stage 1) is the same module as '1' (stage 0) and has buffers, which two stages cannot "
             "share\nhint: choose a partition that has the layers from '1' to '3' in one stage, or give each place a "
             "module of its own"),
    ([4, 2], "error: layer '4' (stage 1) is the same module as '2' (stage 0) and has buffers, which two stages cannot "
             "share\nhint: choose a partition that has the layers from '2' to '4' in one stage, or give each place a "
             "module of its own")])
def test_a_module_with_buffers_on_two_stages_is_refused(partition: list[int], text: str) -> None:
    model = Model.sequential(normed_twice(), nn.CrossEntropyLoss())
    assert refusal(Pipeline, model, momentum, stages=partition) == text


def test_a_shared_module_must_be_in_an_earlier_layer() -> None:
    assert refusal(Model, [Layer("a", nn.Identity, ("x",), ("loss",), shared={"": "b"})], batch=("x",)) == (
        "error: layer 'a' shares '' with 'b', which is in no earlier layer\n"
        "hint: what is shared is '<earlier layer>' or '<earlier layer>.<submodule>'")


# -- the loss ------------------------------------------------------------------------------------------


class RunningLoss(nn.Module):
    """Divides by a running mean of itself: a loss that keeps a buffer, which every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output, target)
        if self.training:
            self.mean.lerp_(loss.detach(), 0.25)
        return loss / self.mean.clone()


def test_a_loss_that_is_a_module_moves_with_its_layer_and_changes_its_mode() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, CLASSES))
    module = Model.sequential(net, nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]))).layers[-1].materialize(0, 0)
    loss = module.get_submodule("loss")
    assert list(module.state_dict()) == ["weight", "bias"]
    module.load_state_dict(net[0].state_dict())
    assert torch.equal(loss.weight, torch.tensor([1.0, 2.0, 3.0]))
    module.eval()
    assert not loss.training
    module.to("meta")
    assert loss.weight.is_meta


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
def test_class_weights_keep_their_precision(precision: str) -> None:
    net, loss_of = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)), nn.CrossEntropyLoss(
        torch.tensor([0.1, 0.2, 0.7]))
    pipe = Pipeline(Model.sequential(net, loss_of), momentum, stages=2, precision=precision)
    list(pipe.train(batches(2)))
    assert torch.equal(pipe.engine.local_stages[1].modules[1].get_submodule("loss").weight,
                       torch.tensor([0.1, 0.2, 0.7]))
    assert list(pipe.state_dict()) == list(net.state_dict())


def test_a_child_that_has_a_loss_of_its_own_keeps_it() -> None:
    class Lossy(nn.Linear):
        loss = 3

    module = Model.sequential(nn.Sequential(Lossy(2, 2)), nn.CrossEntropyLoss()).layers[-1].materialize(0, 0)
    assert [name for name, _ in module.named_children()] == ["loss_"]


def test_buffers_of_a_loss_are_saved_and_may_be_missing_in_a_checkpoint(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    def pipeline() -> Pipeline:
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        return Pipeline(Model.sequential(net, RunningLoss()), momentum, stages=2, microbatches=2)

    def resumed(folder: Path) -> list[float]:
        pipe = pipeline()
        pipe.load(folder)
        return [step.loss for step in pipe.train(batches(4)[2:])]

    whole = [step.loss for step in pipeline().train(batches(4))]
    pipe = pipeline()
    list(pipe.train(batches(4)[:2]))
    pipe.save(tmp_path / "now")
    assert resumed(tmp_path / "now") == whole[2:]
    monkeypatch.setattr("vpipe.runtime.state_dict.loss_buffers", lambda module: {})
    pipe.save(tmp_path / "before")
    monkeypatch.undo()
    assert len(resumed(tmp_path / "before")) == 2


@pytest.mark.parametrize("last", [nn.Dropout(0.5), nn.BatchNorm1d(CLASSES)])
def test_the_last_child_trains_on_after_an_evaluation(last: nn.Module) -> None:
    torch.manual_seed(3)
    model = Model.sequential(nn.Sequential(nn.Linear(WIDTH, CLASSES), last), nn.CrossEntropyLoss())
    runs = []
    for evaluates in (False, True):
        pipe = Pipeline(model, momentum, stages=2, microbatches=2)
        losses = []
        for step in pipe.train(batches(3)):
            losses.append(step.loss)
            if evaluates:
                pipe.evaluate(batches(1))
        runs.append(losses)
    assert runs[0] == runs[1]


# -- what cannot be copied -----------------------------------------------------------------------------


class Closure(nn.Module):
    """Keeps a lambda that holds the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.scaled = lambda x: x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)


def closing_over_in_a_hook(linear: nn.Linear) -> nn.Linear:
    pair = [linear.weight]
    linear.register_forward_hook(lambda module, args, output: output + pair[0].sum())
    return linear


HINT = ("hint: let it use self alone, as a method, or write a Layer whose build function makes the module")


@pytest.mark.parametrize(("build", "text"), [
    (Closure, "error: '0.0' (Closure) has a function in 'scaled' that holds a module or a tensor of the "
              "nn.Sequential: its copy would use the original's\n" + HINT),
    (lambda: closing_over_in_a_hook(nn.Linear(WIDTH, WIDTH)),
     "error: '0.0' (Linear) has a function in '_forward_hooks' that holds a module or a tensor of the "
     "nn.Sequential: its copy would use the original's\n" + HINT)])
def test_a_function_that_holds_the_original_is_refused(build: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(UserError) as error:
        Model.sequential(nn.Sequential(nn.Sequential(build()), nn.Linear(WIDTH, CLASSES)), nn.CrossEntropyLoss())
    assert str(error.value) == text


TIED = nn.Linear(WIDTH, CLASSES)


def global_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target) + TIED.weight.square().sum()


def test_a_loss_that_holds_the_original_is_refused() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), TIED)

    class Penalised(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(output, target) + net[0].weight.square().sum()

    for loss in (global_loss, lambda output, target: net(output).sum(), Penalised()):
        assert refusal(Model.sequential, net, loss) == (
            "error: the loss holds a module or a tensor of the nn.Sequential, which is copied: it would use the "
            "original's, which are not trained\n"
            "hint: compute it from output and target alone; the optimizer decays weights")


def test_functions_that_hold_nothing_of_it_are_welcome() -> None:
    weights = torch.ones(CLASSES)

    class Acting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act: Callable[[Tensor], Tensor] = lambda x: torch.tanh(x)
            self.own = self.act_twice

        def act_twice(self, x: Tensor) -> Tensor:
            return self.act(self.act(x))

        def forward(self, x: Tensor) -> Tensor:
            return self.own(x)

    Model.sequential(nn.Sequential(nn.Linear(WIDTH, CLASSES), Acting()),
                     lambda output, target: nn.functional.cross_entropy(output, target, weights))


def scripted() -> nn.Module:
    module: nn.Module = torch.jit.script(nn.Linear(WIDTH, CLASSES))
    return module


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(("build", "text"), [
    (lambda: nn.LazyLinear(CLASSES), "error: 'head.weight' has no shape yet: its module is lazy\n"
     "hint: give the sizes (nn.Linear instead of nn.LazyLinear), or run the module once on a sample where it is made"),
    (scripted, "error: layer 'head' holds a ScriptModule with parameters or buffers, whose weights cannot be exchanged"
               "\nhint: give the module itself, without torch.jit")])
def test_lazy_and_scripted_modules_are_refused(build: Callable[[], nn.Module], text: str) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self, *tensors: Tensor) -> Any:
            return self.inner(*tensors)

    layer = Layer("head", Head, ("x",), ("loss",))
    makes: Sequence[Callable[[], object]] = (
        lambda: Pipeline(Model([layer], batch=("x",)), momentum, stages=1),
        lambda: Pipeline(Model([layer], batch=("x",)), momentum, stages=[1]))
    for make in makes:
        assert refusal(make) == text.replace("'head.weight'", "'head.inner.weight'")
    children = nn.Sequential(nn.Identity())
    children.add_module("head", build())
    assert refusal(Model.sequential, children, nn.CrossEntropyLoss()) == text


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_child_that_torch_cannot_copy_is_refused() -> None:
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, CLASSES))
    with pytest.raises(UserError) as error:
        Pipeline(Model.sequential(net, nn.CrossEntropyLoss()), momentum, stages=[1, 1])
    assert str(error.value).startswith("error: a child of the nn.Sequential, Linear, cannot be copied: Only Tensors "
                                       "created explicitly by the user")
    assert str(error.value).endswith("for weight_norm and spectral_norm use those of torch.nn.utils.parametrizations")


class Names(nn.Module):
    """Calls its layers as people do."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.loss = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.loss(self.child(x))
        return output


def test_the_last_child_may_call_its_modules_what_it_likes() -> None:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Names())
    expected = plain(net, nn.CrossEntropyLoss(), 2, 2)
    for partition in ([2], [1, 1]):
        pipe = Pipeline(Model.sequential(net, nn.CrossEntropyLoss()), momentum, stages=partition, microbatches=2)
        assert [step.loss for step in pipe.train(batches(2))] == pytest.approx(expected[0], abs=1e-6)
        assert pipe.state_dict().keys() == expected[1].keys()
