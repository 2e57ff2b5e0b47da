"""Weights that a script changes between two updates: what plain PyTorch computes with the same change, or a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from world import World

from vpipe import Asynchronous, Cut, Layer, Model, Pipeline, Update
from vpipe.errors import UserError
from vpipe.testing.reference import evaluate_oracle, flush_oracle
from vpipe.testing.reference_model import ReferencePrecision
from vpipe.testing.reference_optimizer import TrainingRecipe

WORDS, WIDTH, PARTS = 11, 6, 4
STREAM = Asynchronous("pipedream", update_every=PARTS)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(torch.tanh(hidden), self.weight), labels)


def model_of(tied: bool, kept: list[nn.Module], frozen: bool = False) -> Model:
    """The script keeps the modules."""
    def keep(layer: nn.Module, trained: bool) -> nn.Module:
        kept.append(layer.requires_grad_(trained))
        return layer

    return Model([Layer("embed", lambda: keep(nn.Embedding(WORDS, WIDTH), not frozen), ("ids",), ("h",)),
                  Layer("mix", lambda: keep(nn.Linear(WIDTH, WIDTH), True)),
                  Layer("head", lambda: keep(Head(), not frozen), ("h", "labels"), ("loss",),
                        ties={"weight": "embed.weight"} if tied else {})], batch=("ids", "labels"))


def batches(count: int = 4) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [{name: torch.randint(WORDS, (8,), generator=random) for name in ("ids", "labels")} for _ in range(count)]


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": torch.no_grad()(lambda p: p.clamp_(-0.4, 0.4)), "data in place": lambda p: p.data.clamp_(-0.4, 0.4),
    "other data": lambda p: setattr(p, "data", p.data.clamp(-0.4, 0.4)),
    "initialised": lambda p: nn.init.constant_(p, 0.1),
    "a view": lambda p: setattr(p, "data", p.data.T if p.shape == (WIDTH, WIDTH) else p.data),
    "one value": lambda p: p.data.view(-1)[-1].mul_(2)}
"""What a script does to each parameter, of its optimizers or of the modules that it has kept."""


class Script:
    """A pipeline, the optimizers that its factory made, and the modules that it was built of."""

    def __init__(self, tied: bool, frozen: bool = False, ranks: int = 1, zero1: bool = False, stages: int = 3,
                 **arguments: Any) -> None:
        self.made: list[Any] = []
        self.kept: list[nn.Module] = []

        def make(parameters: Sequence[nn.Parameter]) -> Any:
            self.made.append(sgd(parameters))
            return self.made[-1]

        self.pipe = Pipeline(model_of(tied, self.kept, frozen), Update(make, zero1=zero1), Cut(stages, ranks=ranks),
                             microbatches=PARTS, **arguments)

    def change(self, how: str, kept: bool) -> None:
        groups = [group["params"] for optimizer in self.made for group in optimizer.param_groups]
        for p in [p for each in ([module.parameters() for module in self.kept] if kept else groups) for p in each]:
            CHANGES[how](p)


@cache
def expected(tied: bool, change: str, precision: str) -> dict[str, Any]:
    """Plain PyTorch, in which a hook behind the step changes the weights."""
    def hooked(named: Any) -> torch.optim.Optimizer:
        made = sgd(named.values())
        made.register_step_post_hook(lambda *_: list(map(CHANGES[change], named.values())))
        return made

    model, numbers = model_of(tied, []), ReferencePrecision(precision)
    run = flush_oracle(model, batches(), TrainingRecipe(hooked, PARTS, precision=numbers))
    return {"losses": run.losses, "shown": evaluate_oracle(model, run.state, batches()[-1:], PARTS, numbers),
            "state": run.state}


def job(*, tied: bool, change: str, kept: bool, **arguments: Any) -> dict[str, Any]:
    """Change the weights after every step, and look at them: some steps are evaluated."""
    script, losses = Script(tied, **arguments), []
    for step in script.pipe.train(batches()):
        losses.append(step.loss)
        script.change(change, kept)
        shown = script.pipe.evaluate(batches()[-1:]) if step.index % 2 else None
    script.pipe.check_replicas()
    state, saved = script.pipe.state_dict(), script.pipe.local_state()
    assert all(torch.equal(saved.get(f"model.{name}", value), value) for name, value in state.items())
    return {"losses": losses, "shown": shown, "state": {name: value.tolist() for name, value in state.items()}}


TIED, FREE = True, False


@pytest.mark.parametrize(("tied", "change", "kept", "precision", "processes", "arguments"), [
    (TIED, "data in place", True, "bf16_pure", 1, {}), (TIED, "in place", False, "bf16_pure", 1, {"schedule": "zb_h1"}),
    (FREE, "other data", False, "bf16", 1, {"stages": 1}), (TIED, "initialised", True, "bf16_pure", 1, {"stages": 1}),
    (TIED, "other data", True, "fp32", 1, {"ranks": 2}), (FREE, "a view", False, "fp32", 1, {}),
    (TIED, "in place", False, "bf16_pure", 1, {"stages": 2, "ranks": 2, "zero1": True}),
    (TIED, "in place", False, "fp32", 2, {"stages": 2}), (TIED, "data in place", True, "bf16_pure", 2, {"stages": 2}),
    (TIED, "other data", True, "fp32", 2, {"stages": 1, "ranks": 2, "zero1": True}),
    (FREE, "data in place", False, "bf16_pure", 2, {"stages": 1, "ranks": 2, "zero1": True})])
def test_a_change_between_two_updates_is_that_of_plain_pytorch(
        tied: bool, change: str, kept: bool, precision: str, processes: int, arguments: dict[str, Any],
        two: World) -> None:
    arguments = {"tied": tied, "change": change, "kept": kept, "precision": precision, **arguments}
    wanted, within = expected(tied, change, precision), 1e-5 if precision == "fp32" else 2e-2
    for found in two.run(job, **arguments) if processes == 2 else [job(**arguments)]:
        assert found["losses"] == pytest.approx(wanted["losses"], abs=within)
        assert found["shown"] == pytest.approx(wanted["shown"], abs=within)
        for name, value in found["state"].items():
            torch.testing.assert_close(torch.tensor(value), wanted["state"][name], atol=within, rtol=0)


@pytest.mark.parametrize(("change", "kept", "precision"), [
    ("in place", True, "fp32"), ("data in place", False, "fp32"), ("data in place", True, "bf16_pure"),
    ("other data", False, "bf16_pure"), ("one value", False, "fp32"), ("other data", True, "fp32")])
def test_without_a_flush_a_change_is_that_of_plain_pytorch_at_a_pause_and_refused_in_flight(
        change: str, kept: bool, precision: str) -> None:
    for evaluates in (False, True):
        script = Script(True, precision=precision, schedule=STREAM)
        steps = script.pipe.train(batches())
        next(steps), next(steps)
        script.change(change, kept)
        with pytest.raises(UserError) as refused:
            script.pipe.evaluate(batches(1)) if evaluates else next(steps)
        assert str(refused.value) == (
            "error: 'embed.weight' was changed after step 1, while 'pipedream' has microbatches in flight\nhint: "
            "change it in the body of the loop, without a flush after drain() or at a pause; give "
            "learning rates as learning_rate_factor=lambda step: ...")
    script, losses = Script(True, precision=precision, schedule=STREAM), []
    for step in script.pipe.train(batches(), pauses=1):  # an update that begins with an empty pipeline is not late
        losses.append(step.loss)
        script.change(change, kept)
    assert losses == pytest.approx(expected(True, change, precision)["losses"], abs=2e-2)


EXCHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "a parameter with its memory": lambda mix: setattr(mix, "weight", nn.Parameter(mix.weight.data)),
    "narrowed": lambda mix: setattr(mix.weight, "data", mix.weight.data[:-1]),
    "set_": torch.no_grad()(lambda mix: mix.weight.set_(mix.weight.detach().clone())),
    "a view": CHANGES["a view"], "a bias less": lambda mix: setattr(mix, "bias", None),
    "a parameter more": lambda mix: setattr(mix, "more", nn.Parameter(torch.zeros(1))),
    "a module in it": lambda mix: setattr(mix, "parametrized", nn.Linear(1, 1)),
    "all by load_state_dict": lambda mix: mix.load_state_dict({n: p + 1 for n, p in mix.state_dict().items()})}


@pytest.mark.parametrize("how", EXCHANGES)
def test_what_is_exchanged_in_a_module_is_refused_in_flight(how: str) -> None:
    script = Script(False, schedule=STREAM)
    steps = script.pipe.train(batches())
    next(steps), next(steps)
    for mix in (m for m in script.kept if isinstance(m, nn.Linear)):
        EXCHANGES[how](mix.weight if how == "a view" else mix)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"'(mix|head)[a-z.]*' was changed after step 1"):
        next(steps)


def test_a_module_exchanged_whole_is_refused_in_flight() -> None:
    kept = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    layers = [Layer("mix", lambda: kept, ("x",), ("h",)), Layer("loss", nn.MSELoss, ("h", "y"), ("loss",))]
    pipe = Pipeline(Model(layers, batch=("x", "y")), Update(sgd), 2, STREAM, microbatches=PARTS)
    steps = pipe.train({"x": torch.ones(8, WIDTH), "y": torch.ones(8, WIDTH)} for _ in range(4))
    next(steps), next(steps)
    kept[0] = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(UserError, match=r"'mix.0.weight' was changed after step 1"):
        next(steps)


def frozen_job() -> list[float]:
    """Losses before and after a frozen weight that two stages share is set to 0.1."""
    script, losses = Script(True, frozen=True, stages=2), []
    for batch in batches(2):
        losses += [step.loss for step in script.pipe.train([batch])]
        script.change("initialised", kept=True)
    return losses


def test_a_frozen_weight_of_two_stages_changes_on_both(two: World) -> None:
    in_turn = frozen_job()
    assert in_turn[1] == pytest.approx(torch.tensor(WORDS).log().item()), "all words are alike"
    assert two.run(frozen_job) == [in_turn] * 2
    script = Script(True, frozen=True, stages=2)
    script.change("initialised", kept=True)
    with pytest.raises(UserError, match=re.escape("'embed.weight' changed between two batches; not")):
        script.pipe.engine.workers[0].tied.exchange_latest(frozen=False)


@pytest.mark.parametrize(("name", "value", "text"), [
    ("weight", nn.Parameter(torch.zeros(WIDTH, WIDTH)), "was replaced by another parameter between two updates, which"),
    ("weight.data", torch.zeros(1, WIDTH), "was given the shape [1, 6] between two updates"),
    ("weight.data", torch.zeros(WIDTH, WIDTH).half(), "was given the shape [6, 6] between two updates, in torch.fl")])
def test_a_parameter_that_was_replaced_is_refused(name: str, value: Tensor, text: str) -> None:
    script = Script(False)
    steps = script.pipe.train(batches(2))
    next(steps)
    for mix in (m for m in script.kept if isinstance(m, nn.Linear) and not m.weight.is_meta):
        setattr(mix.weight if name.endswith(".data") else mix, name.split(".")[-1], value)
    with pytest.raises(UserError, match="'mix.weight' " + re.escape(text)):
        next(steps)


def test_freezing_through_an_optimizer_is_refused_and_a_layer_with_replicas_may_be_frozen() -> None:
    script = Script(False, ranks=2)
    steps = script.pipe.train(batches(3))
    next(steps)
    [mixes] = [[m for m in script.kept if isinstance(m, nn.Linear) and not m.weight.is_meta]]
    for mix in mixes:
        mix.requires_grad_(False)
    before = mixes[0].weight.clone()
    next(steps)
    assert torch.equal(before, mixes[0].weight)
    script.made[0].param_groups[0]["params"][0].requires_grad_(False)
    with pytest.raises(UserError, match=r"'embed.weight' was frozen through its optimizer, whose parameter is another"):
        next(steps)


def test_an_average_begins_with_the_weights_before_the_first_update() -> None:
    kept: list[nn.Module] = []
    pipe = Pipeline(model_of(True, kept), Update(sgd, average=0.5), 2, microbatches=PARTS)
    for p in (p for module in kept for p in module.parameters()):
        CHANGES["initialised"](p)
    before, _ = pipe.state_dict(), list(pipe.train(batches(1)))
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(pipe.state_dict(averaged=True)[name], (before[name] + value) / 2)


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("how", [{"precision": "bf16_pure"}, {"ranks": 2}, {"tied": True}], ids=str)
def test_a_forward_that_changes_a_weight_of_which_copies_are_kept_is_refused(how: dict[str, Any], data: bool) -> None:
    script = Script(**{"tied": False, **how})
    for embed in (m for m in script.kept if isinstance(m, nn.Embedding)):
        embed.max_norm = None if data else 0.1
        embed.register_forward_pre_hook(lambda embed, _: (embed.weight.data.mul_(0.9 if data else 1.0), None)[1])
    with pytest.raises(UserError, match=r"'embed.weight' was changed in place by a forward, but other values of it"):
        list(script.pipe.train(batches(1)))


COPIES: list[dict[str, Any]] = [{"schedule": STREAM}, {"precision": "bf16_pure"}, {"ranks": 2}]


@pytest.mark.parametrize("how", [{}, *COPIES], ids=str)
def test_a_parameter_may_be_taken_out_of_its_module_where_no_other_values_of_it_are_kept(how: dict[str, Any]) -> None:
    script = Script(False, **how)
    steps = script.pipe.train(batches(2), pauses=1)
    next(steps)
    for mix in (m for m in script.kept if isinstance(m, nn.Linear) and not m.weight.is_meta):
        mix.bias = None
    with pytest.raises(UserError, match=r"'mix.bias' was .* or taken out of its m") if how else nullcontext():
        next(steps)
        assert "mix.bias" not in script.pipe.state_dict()


LEFT = "' has a gradient that no microbatch has made"


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("how", "pauses", "refusal"), [
    *((how, 1, LEFT) for how in ({}, *COPIES)), ({"schedule": STREAM}, None, "' was changed after step 0, while")])
def test_a_gradient_that_the_script_leaves_is_refused(how: dict[str, Any], pauses: int | None, refusal: str,
                                                      kept: bool) -> None:
    script = Script(False, **how)
    steps = script.pipe.train(batches(2), pauses=pauses)
    next(steps)
    for p in [p for m in script.kept for p in m.parameters()] if kept else script.made[0].param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    with pytest.raises(UserError, match=refusal):
        next(steps)


@pytest.mark.parametrize("schedule", ["1f1b", STREAM])
def test_stop_and_an_iterator_may_neither_change_weights_nor_call_the_pipeline_in_an_update(schedule: Any) -> None:
    def acting(act: Callable[[Script], object], script: Script) -> Iterator[dict[str, Tensor]]:
        for batch in batches():
            act(script)
            yield batch

    for act, refusal in ((lambda script: script.change("in place", kept=True), "' was changed by "),
                         (lambda script: script.pipe.evaluate(batches(1)), " calls the pipeline in the middle")):
        script = Script(True, schedule=schedule)
        with pytest.raises(UserError, match=refusal):
            list(script.pipe.train(batches(), stop=partial(act, script)))
        script = Script(True, schedule=schedule)
        with nullcontext() if schedule == "1f1b" else pytest.raises(UserError, match=refusal):
            list(script.pipe.train(acting(act, script)))
