"""The optimizers of a stage: a list of them, parameters that none has, learning rates that the user changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import assert_golden, refusal
from models import Average, rich_batches, rich_model
from oracles import assert_same_state, decay
from pipelines import parts
from torch import Tensor, nn
from torch.optim import SGD, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vpipe import Layer, Model, Pipeline, Update
from vpipe.checkpoint.manifest import Manifest
from vpipe.errors import UserError
from vpipe.runtime.stage_optimizer import StageOptimizer
from vpipe.runtime.step_results import Step
from vpipe.testing import TrainingRecipe, asynchronous_oracle

WIDTH = 6


def both(parameters: list[nn.Parameter]) -> list[Optimizer | None]:
    """None where a stage has none of a kind."""
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    return [Muon(matrices, lr=0.02) if matrices else None,
            torch.optim.AdamW(others, lr=3e-3, fused=True) if others else None]


# -- a list of optimizers ------------------------------------------------------------------------------


def small() -> list[nn.Module]:
    torch.manual_seed(4)
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)]


def small_batches(count: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(5)
    return [{"input": torch.randn(8, WIDTH, generator=random), "target": torch.randint(3, (8,), generator=random)}
            for _ in range(count)]


def small_pipeline(**arguments: Any) -> Pipeline:
    return Pipeline(Model.sequential(nn.Sequential(*small()), nn.CrossEntropyLoss()),
                    **parts(**{"partition": [2, 3], "microbatches": 2, **arguments}))


def plain_run(batches: Sequence[Mapping[str, Tensor]], make: Callable[[list[nn.Parameter]], list[Optimizer]],
              schedulers: Callable[[Optimizer], LRScheduler] | None = None, trained: Sequence[str] | None = None,
              clip: float | None = None) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """A loop as everybody writes it: losses, learning rates, weights. ``trained``: parameters with an optimizer."""
    model = nn.Sequential(*small())
    named = dict(model.named_parameters())
    own = [p for name, p in named.items() if trained is None or name in trained]
    optimizers = make(own)
    driven = [schedulers(optimizer) for optimizer in optimizers] if schedulers else []
    losses, rates = [], []
    for batch in batches:
        total = 0.0
        for x, y in zip(batch["input"].chunk(2), batch["target"].chunk(2), strict=True):
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / 2).backward()
            total += float(loss.detach().double())
        if clip is not None:
            nn.utils.clip_grad_norm_(own, clip)
        rates.append(optimizers[0].param_groups[0]["lr"])
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(total / 2)
        for scheduler in driven:
            scheduler.step()
    return losses, rates, model.state_dict()


def test_state_of_another_optimizer_is_refused_by_the_parameter(tmp_path: Path) -> None:
    """Also by a rank whose own optimizers are of a kind that the checkpoint has, for other parameters."""
    pipe = small_pipeline(optimizer=both)
    list(pipe.train(small_batches(1)))
    pipe.save(tmp_path / "both")
    arrangement = Manifest.load(tmp_path / "both").arrangement
    assert arrangement["optimizers"] == ["AdamW", "Muon"]
    assert arrangement["optimizer_of"] == {f"{layer}.{name}": "Muon" if name == "weight" and layer != 3 else "AdamW"
                                           for layer in (0, 2, 3, 4) for name in ("weight", "bias")}
    other = small_pipeline(optimizer=torch.optim.AdamW)
    assert refusal(other.load, tmp_path / "both") == (
        "error: the checkpoint has the state of Muon for '0.weight', which AdamW steps in this pipeline\n"
        "hint: give every parameter an optimizer of the kind that saved")
    list(other.train(small_batches(1)))
    other.save(tmp_path / "one")
    with pytest.raises(UserError, match=r"has the state of AdamW for '0\.weight', which Muon steps"):
        small_pipeline(optimizer=both).load(tmp_path / "one")


class Lookahead(Optimizer):
    """An optimizer by its class, whose state is another's."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.base = SGD(parameters, lr=0.1, momentum=0.9)
        super().__init__(self.base.param_groups, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        self.base.step()


OTHERS = nn.Linear(2, 3)


REFUSED: list[Any] = [
    Lookahead, torch.optim.LBFGS, lambda own: [SGD(own[:2], 0.1), SGD(own[1:], 0.1)],
    lambda own: [SGD(own[:1], 0.1), SGD(own[2:], 0.1)] if len(own) > 2 else [SGD(own, 0.1)],
    lambda own: SGD(OTHERS.parameters(), 0.1), lambda own: [Muon([p for p in own if p.dim() > 2])], Muon,
    lambda own: {"a": SGD(own, 0.1)}]


def test_optimizers_that_would_not_train_or_save_every_parameter_once_are_refused() -> None:
    assert_golden(__file__, "refused", [refusal(small_pipeline, optimizer=make) for make in REFUSED])


class Counting(SGD):
    """Keeps a number of its own, which changes how it steps."""

    rounds = 0

    def step(self, closure: Any = None) -> None:
        self.rounds = self.rounds + 1
        super().step()


class Elsewhere(SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["all"]["rounds"] = 3


@pytest.mark.parametrize(("make", "text"), [
    (lambda own: Elsewhere(own, 0.1), "Elsewhere keeps state that is of no parameter of its stage, but of str 'all'"),
    (lambda own: Counting(own, 0.1), "'rounds' among the attributes of Counting has changed since the start")])
def test_state_beside_the_parameters_is_refused_when_it_is_saved(make: Any, text: str, tmp_path: Path) -> None:
    pipe = small_pipeline(optimizer=make)
    list(pipe.train(small_batches(1)))
    with pytest.raises(UserError, match=text):
        pipe.save(tmp_path / "point")
    assert len(list(pipe.train(small_batches(1)))) == 1


# -- what a factory sees -------------------------------------------------------------------------------


class Marked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.bias.no_decay = True


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
def test_attributes_of_parameters_reach_the_factory(precision: str) -> None:
    """Of layers, and of an nn.Sequential, whose children are copied."""
    modules = small()
    modules[4].weight.scale = 3
    modules[0].bias.no_decay = True
    seen: list[dict[str, Any]] = []

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        seen.extend(vars(parameter) for parameter in parameters)
        return SGD(parameters, lr=0.1)

    Pipeline(Model.sequential(nn.Sequential(*modules), nn.CrossEntropyLoss()), make, stages=2, precision=precision)
    assert seen == [{}, {"no_decay": True}, {}, {}, {}, {}, {"scale": 3}, {}]
    seen.clear()
    marked = Model([Layer("marked", Marked, ("x",)), Layer("mean", Average, outputs=("loss",))], ("x",))
    Pipeline(marked, make, stages=1, precision=precision)
    assert seen == [{}, {"no_decay": True}]


# -- parameters without an optimizer -------------------------------------------------------------------

FRONT = ["0.weight", "0.bias"]
PARTS: dict[str, Any] = {
    "a stage": lambda own: None if own[0].shape != (WIDTH, WIDTH) or len(own) > 2 else SGD(own, 0.1, momentum=0.9),
    "one parameter": lambda own: SGD(own[:1], 0.1, momentum=0.9)}


@pytest.mark.parametrize(("make", "trained"), [("a stage", FRONT), ("one parameter", ["0.weight", "2.weight"])])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_parameters_of_no_optimizer_stay_and_count_in_no_norm(make: str, trained: list[str], schedule: str) -> None:
    """As in plain PyTorch, where the norm is clipped over what is trained and all gradients are cleared."""
    losses, _, state = plain_run(small_batches(5), lambda own: [SGD(own, 0.1, momentum=0.9)], trained=trained, clip=0.3)
    pipe = small_pipeline(optimizer=PARTS[make], schedule=schedule, grad_clip=0.3)
    assert [step.loss for step in pipe.train(small_batches(5))] == losses
    assert_same_state(pipe.state_dict(), state)
    assert all(leaf.grad is None for stage in pipe.engine.local_stages for leaf in stage.weights.graded())


def test_a_gradient_of_no_optimizer_that_is_not_finite_leaves_nothing_out() -> None:
    """As torch's GradScaler, which looks at the gradients of an optimizer's own parameters."""
    torch.manual_seed(0)
    model = Model([Layer("front", lambda: nn.Linear(3, 3), ("x",)), Layer("root", Root),
                   Layer("loss", Average, ("h",), ("loss",))], ("x",))
    for all_of_them in (True, False):
        pipe = Pipeline(model,
                        Update(lambda own, every=all_of_them: SGD(own, 0.1) if every or own[0].dim() > 1 else None,
                               skip_not_finite=True),
                        stages=[1, 2])
        assert [step.skipped for step in pipe.train([{"x": torch.ones(2, 3)}])] == [all_of_them]


class Root(nn.Module):
    """The gradient of its weight is infinite, that of its input is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.weight.sqrt()


# -- learning rates that the user changes --------------------------------------------------------------


class Kept:
    """A factory that keeps what it makes, and drives it."""

    def __init__(self, drive: Callable[[Optimizer], LRScheduler] | None = None, **how: Any) -> None:
        self._drive, self._how = drive, {"lr": 0.1, "momentum": 0.9, **how}
        self.made: list[Optimizer] = []
        self.schedulers: list[LRScheduler] = []

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        self.made.append(SGD(parameters, **self._how))
        if self._drive is not None:
            self.schedulers.append(self._drive(self.made[-1]))
        return self.made[-1]

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def put(self, rate: float) -> None:
        for group in (group for each in self.made for group in each.param_groups):
            group["lr"] = rate


def driven(pipe: Pipeline, batches: Sequence[Mapping[str, Tensor]], kept: Kept) -> list[Step]:
    """Train, and step the schedulers after every step."""
    steps = []
    for step in pipe.train(batches):
        steps.append(step)
        kept.step()
    return steps


DRIVES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "steps": lambda optimizer: StepLR(optimizer, 2, gamma=0.3),
    "warm-up": lambda optimizer: LinearLR(optimizer, 0.1, total_iters=4),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cycle": lambda optimizer: OneCycleLR(optimizer, 0.3, total_steps=8)}


@pytest.mark.parametrize("drive", DRIVES)
def test_a_scheduler_of_torchs_equals_plain_pytorch(drive: str) -> None:
    """OneCycleLR changes the momentum, too."""
    losses, rates, state = plain_run(small_batches(7), lambda own: [SGD(own, 0.1, momentum=0.9)], DRIVES[drive])
    kept = Kept(DRIVES[drive])
    pipe = small_pipeline(optimizer=kept)
    steps = driven(pipe, small_batches(7), kept)
    assert [step.loss for step in steps] == losses
    assert [step.learning_rate for step in steps] == rates
    assert_same_state(pipe.state_dict(), state)


def test_a_changed_rate_is_what_the_factor_multiplies_and_stays_as_it_was_put() -> None:
    kept, rates = Kept(), [0.1, 0.05, 0.2, 0.01]
    pipe = small_pipeline(optimizer=kept, learning_rate_factor=decay)
    steps = []
    for step in pipe.train(small_batches(4)):
        steps.append(step)
        assert {group["lr"] for each in kept.made for group in each.param_groups} == {rates[step.index]}
        kept.put(rates[(step.index + 1) % 4])
    expected = [rate * decay(number) for number, rate in enumerate(rates)]
    assert [step.learning_rate for step in steps] == expected
    same = small_pipeline(optimizer=Kept(lr=1.0), learning_rate_factor=lambda step: expected[step])
    assert [step.loss for step in same.train(small_batches(4))] == [step.loss for step in steps]


def test_schedulers_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    """As in plain PyTorch: the rates come with the optimizers, the schedulers' own state is the user's."""
    losses, rates, state = plain_run(small_batches(6), lambda own: [SGD(own, 0.1, momentum=0.9)], DRIVES["steps"])
    kept = Kept(DRIVES["steps"])
    pipe = small_pipeline(optimizer=kept)
    driven(pipe, small_batches(3), kept)
    pipe.save(tmp_path / "point")
    again = Kept(DRIVES["steps"])
    pipe = small_pipeline(optimizer=again, partition=[1, 3, 1], schedule="gpipe")
    pipe.load(tmp_path / "point")
    for scheduler in again.schedulers:
        scheduler.load_state_dict(kept.schedulers[0].state_dict())
    steps = driven(pipe, small_batches(6)[3:], again)
    assert [step.loss for step in steps] == losses[3:]
    assert [step.learning_rate for step in steps] == rates[3:]
    assert_same_state(pipe.state_dict(), state)


def test_rates_that_no_group_can_have_together_are_refused(tmp_path: Path) -> None:
    kept = Kept()
    pipe = small_pipeline(optimizer=kept)
    for optimizer, rate in zip(kept.made, (0.2, 0.3), strict=True):
        optimizer.param_groups[0]["lr"] = rate
    list(pipe.train(small_batches(1)))
    pipe.save(tmp_path / "point")
    assert refusal(small_pipeline(optimizer=Kept(), partition=[5]).load, tmp_path / "point") == (
        "error: '0.weight' and '2.weight' are in one parameter group, but the checkpoint has them with different "
        "learning rates (lr): 0.2 and 0.3\n"
        "hint: put them into different parameter groups, or keep the partition that saved")


def test_without_a_flush_rates_change_while_the_pipeline_is_empty() -> None:
    """Between two calls of train every stage has made the same updates: the oracle, drained there, at other rates."""
    kept = Kept()
    pipe = Pipeline(rich_model(), kept, stages=[2, 2, 2, 2], schedule="pipedream", microbatches=4, seed=2)
    batches = rich_batches(4, 8)
    steps = list(pipe.train(batches[:2]))
    kept.put(0.02)
    steps += pipe.train(batches[2:])
    oracle = asynchronous_oracle(
        rich_model(), batches, TrainingRecipe(lambda named: SGD(named.values(), lr=1.0, momentum=0.9), 4, 2,
                                        lambda step: 0.1 if step < 8 else 0.02), pipe.partition, drained_at=[8])
    assert [step.loss for step in steps] == oracle.losses
    assert [step.learning_rate for step in steps] == [0.1] * 8 + [0.02] * 8
    assert_same_state(pipe.state_dict(), oracle.state)


def test_without_a_flush_a_change_while_it_is_full_is_refused_and_counts_when_it_is_empty() -> None:
    kept = Kept()
    pipe = Pipeline(rich_model(), kept, stages=[2, 2, 2, 2], schedule="pipedream", microbatches=4, seed=2)
    batches = rich_batches(6, 8)
    running = pipe.train(batches)
    steps = [next(running) for _ in range(5)]
    kept.put(0.02)
    assert refusal(lambda: next(running)) == (
        "error: a parameter group of an optimizer was changed after step 4, while 'pipedream' has microbatches in "
        "flight\nhint: change it in the body of the loop, without a flush after drain() or at a pause; "
        "give learning rates as learning_rate_factor=lambda step: ...")
    steps += pipe.engine.training.drain()
    assert [step.learning_rate for step in steps] == [0.1] * len(steps)
    how = TrainingRecipe(lambda named: SGD(named.values(), lr=0.1, momentum=0.9), 4, 2)
    expected = asynchronous_oracle(rich_model(), batches[:3], how, pipe.partition)
    assert [step.loss for step in steps] == expected.losses[:len(steps)]


def test_a_scheduler_of_one_stage_among_several_is_refused() -> None:
    """A script that keeps one optimizer is right under torchrun, and would train three of four stages without it."""
    kept = Kept()
    pipe = small_pipeline(optimizer=kept, partition=[1, 1, 1, 2])
    scheduler = StepLR(kept.made[-1], 1)
    assert refusal(lambda: next(pipe.train(small_batches(1)))) == (
        "error: the learning rate of one optimizer was changed, but the factory made 3 of them in this process: one "
        "per stage\nhint: keep all optimizers that the factory makes and change each of them, or use "
        "learning_rate_factor=lambda step: ...")
    assert scheduler.get_last_lr() == [0.1]
    alone = Kept()
    pipe = small_pipeline(optimizer=alone, partition=[5])
    alone.put(0.5)
    assert next(pipe.train(small_batches(1))).learning_rate == 0.5


def test_state_that_the_user_loads_counts_and_groups_that_are_added_are_refused() -> None:
    """Optimizer.load_state_dict replaces the parameter groups."""
    kept, again = Kept(), Kept()
    pipe = small_pipeline(optimizer=kept)
    list(pipe.train(small_batches(2)))
    kept.put(0.3)
    fresh = small_pipeline(optimizer=again)
    for stage, worker in fresh.engine.workers.items():
        worker.stages[stage].load(pipe.engine.workers[stage].stages[stage].state())
        again.made[stage].load_state_dict(deepcopy(kept.made[stage].state_dict()))  # else they share tensors
    steps = list(fresh.train(small_batches(3)))
    assert [(step.loss, step.learning_rate) for step in steps] == [
        (step.loss, 0.3) for step in pipe.train(small_batches(3))]
    assert fresh.engine.checkpoint_state()["optim.0.weight.group.lr#float"] == 0.3
    again.made[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(UserError, match="an optimizer has 2 parameter groups, but had 1 when the pipeline was made"):
        next(fresh.train(small_batches(1)))


class Decaying(SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["lr"] = self.param_groups[0]["lr"] / 2


def test_an_optimizer_that_changes_its_own_rate_is_right_or_refused() -> None:
    losses, _, _ = plain_run(small_batches(4), lambda own: [Decaying(own, 0.1)])
    pipe = small_pipeline(optimizer=lambda own: Decaying(own, 0.1))
    assert [step.loss for step in pipe.train(small_batches(4))] == losses
    for how in ({"learning_rate_factor": decay}, {"schedule": "pipedream"}):
        pipe = small_pipeline(optimizer=lambda own: Decaying(own, 0.1), **how)
        with pytest.raises(UserError, match="an optimizer changes the learning rate of its parameter groups as it st"):
            list(pipe.train(small_batches(4)))


class Rateless(Optimizer):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-0.1)


def test_an_optimizer_without_a_learning_rate_trains_unless_a_factor_is_given() -> None:
    expected, _, _ = plain_run(small_batches(2), lambda own: [SGD(own, 0.1)])
    steps = list(small_pipeline(optimizer=Rateless).train(small_batches(2)))
    assert [step.loss for step in steps] == expected
    assert steps[0].learning_rate is None
    with pytest.raises(UserError, match=r"to be multiplied by 0\.5, but a parameter group of the optimizer has none"):
        list(small_pipeline(optimizer=Rateless, learning_rate_factor=lambda step: 0.5).train(small_batches(1)))


# -- what torch puts around a step ---------------------------------------------------------------------


def one_weight(kind: type[SGD] = SGD) -> SGD:
    return kind([nn.Parameter(torch.zeros(1))], lr=1.0)


def stepped(optimizer: SGD) -> float:
    """Return by how much a step on a gradient of 1 lowers the weight."""
    (weight,) = optimizer.param_groups[0]["params"]
    before, weight.grad = weight.item(), torch.ones_like(weight)
    StageOptimizer([optimizer], {"w": weight}).step()
    return float(before - weight.item())


def test_hooks_of_a_step_run() -> None:
    optimizer, calls = one_weight(), list[object]()
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook,
                     register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        assert stepped(optimizer) == 1
        handle = register(lambda *given: calls.append(given[0]))
        assert stepped(optimizer) == 1
        handle.remove()
    assert calls == [optimizer] * 4


def test_a_step_of_ones_own_is_called() -> None:
    optimizer = one_weight()  # torch has wrapped SGD.step from here on: one that is made to look like it is not wrapped

    class Halved(SGD):
        @wraps(SGD.step)
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["params"][0].grad.mul_(0.5)
            return super().step(closure)

    assert stepped(one_weight(Halved)) == 0.5
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment, misc]
    assert stepped(optimizer) == 0


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # by torch 2.11
def test_a_profiler_names_a_step_and_a_scheduler_sees_it() -> None:
    optimizer = one_weight()
    with torch.profiler.profile() as profile:
        stepped(optimizer)
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events() or ()}
    scheduler = StepLR(optimizer, 1)
    stepped(optimizer)
    scheduler.step()  # would warn, which is an error here, if it had not seen the step
