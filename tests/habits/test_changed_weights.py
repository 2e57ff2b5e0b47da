"""Weights that a script changes between two updates: what plain PyTorch computes with the same change, or a refusal."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from world import World

from vpipe import Asynchronous, Cut, Layer, Model, Pipeline, Update
from vpipe.errors import UserError

WORDS, WIDTH, PARTS = 11, 6, 4
STREAM = Asynchronous("pipedream", update_every=PARTS)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(torch.tanh(hidden), self.weight), labels)


class Net(nn.Module):
    """The layers in plain PyTorch, built the same everywhere."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed, self.mix, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), Head()
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.mix(self.embed(ids)), labels)
        return loss


def batches(count: int = 4) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [{name: torch.randint(WORDS, (8,), generator=random) for name in ("ids", "labels")} for _ in range(count)]


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


# -- what a script does to each parameter, of its optimizers or of the modules that it kept


def by_a_vector(p: nn.Parameter) -> None:
    vector_to_parameters(parameters_to_vector([p]).detach().clamp(-0.4, 0.4), [p])


Change = Callable[[nn.Parameter], object]
CHANGES: dict[str, Change] = {
    "none": lambda p: None, "in place": torch.no_grad()(lambda p: p.clamp_(-0.4, 0.4)),
    "data in place": lambda p: p.data.clamp_(-0.4, 0.4),
    "other data": lambda p: setattr(p, "data", p.data.clamp(-0.4, 0.4)), "a vector": by_a_vector,
    "initialised": lambda p: nn.init.constant_(p, 0.1)}


@cache
def expected(tied: bool, change: str, precision: str) -> dict[str, Any]:
    """Train one model; under bf16_pure a rounded copy of it computes, and its gradients are widened."""
    net, dtype = Net(tied), {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    made, losses, shown, mean = sgd(list(net.parameters())), [], [], copy.deepcopy(net.state_dict())

    def working() -> nn.Module:
        return copy.deepcopy(net).bfloat16() if precision == "bf16_pure" else net

    for batch in batches():
        computing, total = working(), 0.0
        for ids, labels in zip(batch["ids"].chunk(PARTS), batch["labels"].chunk(PARTS), strict=True):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = computing(ids, labels)
            (loss.float() / PARTS).backward()
            total += loss.item() / PARTS
        for master, p in zip(net.parameters(), computing.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.to(master.dtype)
        made.step()
        made.zero_grad()
        mean = {name: value.lerp(net.state_dict()[name], 0.5) for name, value in mean.items()}
        for p in net.parameters():
            CHANGES[change](p)
        losses.append(total)
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
            shown.append(working()(batch["ids"], batch["labels"]).item())
    return {"losses": losses, "shown": shown, "state": net.state_dict(), "average": mean}


class Script:
    """A pipeline, the optimizers that its factory made, and the modules that it was built of."""

    def __init__(self, tied: bool, optimizer: Callable[..., Any] = sgd, frozen: bool = False, ranks: int = 1,
                 zero1: bool = False, stages: int = 3, **arguments: Any) -> None:
        self.made: list[Any] = []
        self.kept: list[nn.Module] = []

        def keep(name: str) -> nn.Module:
            layer = getattr(Net(tied=False), name).requires_grad_(not frozen or name == "mix")
            self.kept.append(layer)
            return layer

        def make(parameters: Sequence[nn.Parameter]) -> Any:
            self.made.append(optimizer(parameters))
            return self.made[-1]

        model = Model([Layer("embed", lambda: keep("embed"), ("ids",), ("h",)), Layer("mix", lambda: keep("mix")),
                       Layer("head", lambda: keep("head"), ("h", "labels"), ("loss",),
                             ties={"weight": "embed.weight"} if tied else {})], batch=("ids", "labels"))
        self.build = lambda: Pipeline(model, Update(make, zero1=zero1, average=0.5), Cut(stages, ranks=ranks),
                                      microbatches=PARTS, **arguments)
        self.pipe = self.build()

    def change(self, how: str, kept: bool) -> None:
        groups = [group["params"] for optimizer in self.made for group in optimizer.param_groups]
        for p in [p for each in ([module.parameters() for module in self.kept] if kept else groups) for p in each]:
            CHANGES[how](p)


def job(*, tied: bool, change: str, kept: bool = False, **arguments: Any) -> dict[str, Any]:
    """Change the weights after every step and evaluate them; save at the end, and load."""
    script, losses, shown = Script(tied, **arguments), [], []
    for step, batch in zip(script.pipe.train(batches()), batches(), strict=True):
        losses.append(step.loss)
        script.change(change, kept)
        shown += [script.pipe.evaluate([batch])] if step.index % 2 else [None]
    script.pipe.check_replicas()
    with tempfile.TemporaryDirectory() as folder:
        shared = [f"{folder}/saved"]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)
        script.pipe.save(shared[0])
        again = script.build()
        again.load(shared[0])
        states = [pipe.state_dict(averaged=mean) for mean in (False, True) for pipe in (script.pipe, again)]
    assert all(torch.equal(states[i][name], value) for i in (0, 2) for name, value in states[i + 1].items())
    assert again.evaluate([batch]) == shown[-1]
    return {"losses": losses, "shown": shown, **{name: {key: value.tolist() for key, value in states[i].items()}
                                                 for i, name in ((0, "state"), (2, "average"))}}


def assert_expected(found: dict[str, Any], tied: bool, change: str, precision: str) -> None:
    wanted, within = expected(tied, change, precision), 1e-5 if precision == "fp32" else 2e-2
    assert found["losses"] == pytest.approx(wanted["losses"], abs=within)
    assert found["shown"][1::2] == pytest.approx(wanted["shown"][1::2], abs=within)
    for part in ("state", "average"):
        for name, value in found[part].items():
            torch.testing.assert_close(torch.tensor(value), wanted[part][name], atol=within, rtol=0)


FREE, TIED = (False,), (False, True)


@pytest.mark.parametrize(("ties", "change", "kept", "precision", "arguments"), [
    (TIED, "in place", False, "fp32", {}), (TIED, "data in place", True, "bf16_pure", {}),
    (TIED, "a vector", False, "bf16_pure", {"schedule": "zb_h1"}), (TIED, "other data", True, "fp32", {}),
    (FREE, "other data", False, "bf16", {"stages": 1}), (TIED, "initialised", True, "bf16_pure", {"stages": 1}),
    (TIED, "data in place", False, "bf16_pure", {"ranks": 2}), (FREE, "initialised", False, "fp16", {}),
    (TIED, "in place", False, "bf16_pure", {"stages": 2, "ranks": 2, "zero1": True}),
    (FREE, "other data", True, "fp32", {"stages": 2, "ranks": 2, "zero1": True})])
def test_a_change_between_two_updates_is_that_of_plain_pytorch(
        ties: Sequence[bool], change: str, kept: bool, precision: str, arguments: dict[str, Any]) -> None:
    for tied in ties:
        found = job(tied=tied, change=change, kept=kept, precision=precision, **arguments)
        assert_expected(found, tied, change, precision)


@pytest.mark.parametrize(("ties", "change", "kept", "precision", "arguments"), [
    (TIED, "in place", False, "fp32", {"stages": 2}), (TIED, "data in place", True, "bf16_pure", {"stages": 2}),
    (FREE, "initialised", False, "fp16", {"stages": 2}),
    (FREE, "data in place", False, "bf16_pure", {"stages": 1, "ranks": 2}),
    (TIED, "other data", True, "fp32", {"stages": 1, "ranks": 2, "zero1": True}),
    (FREE, "data in place", False, "bf16_pure", {"stages": 1, "ranks": 2, "zero1": True})])
def test_so_it_is_in_two_processes(ties: Sequence[bool], change: str, kept: bool, precision: str,
                                   arguments: dict[str, Any], two: World) -> None:
    for tied in ties:
        for found in two.run(job, tied=tied, change=change, kept=kept, precision=precision, **arguments):
            assert_expected(found, tied, change, precision)


def test_a_change_in_a_hook_of_the_step_is_the_same_and_the_average_follows_it() -> None:
    def hooked(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        made = sgd(parameters)
        made.register_step_post_hook(lambda *_: list(map(CHANGES["in place"], parameters)))
        return made

    found = job(tied=True, change="none", precision="bf16_pure", optimizer=hooked)
    assert_expected({**found, "average": {}}, True, "in place", "bf16_pure")
    assert torch.tensor(found["average"]["mix.weight"]).abs().max() < 0.41, "it began with numbers up to 0.41"


# -- with microbatches in flight


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
@pytest.mark.parametrize(("change", "kept"), [("in place", False), ("data in place", False), ("data in place", True),
                                              ("other data", False), ("other data", True)])
def test_a_change_is_refused_while_microbatches_are_in_flight(change: str, kept: bool, precision: str) -> None:
    for evaluates in (False, True):
        script = Script(True, precision=precision, schedule=STREAM)
        steps = script.pipe.train(batches())
        next(steps), next(steps)
        script.change(change, kept)
        with pytest.raises(UserError) as refused:
            script.pipe.evaluate(batches(1)) if evaluates else next(steps)
        assert str(refused.value) == (
            "error: 'embed.weight' was changed after step 1, while 'pipedream' has microbatches in flight\nhint: "
            "change weights after drain(), at a pause, between two calls of train, or choose a schedule with a flush")


@pytest.mark.parametrize("way", ["pauses", "drain", "calls"])
@pytest.mark.parametrize(("change", "kept", "precision"), [
    ("data in place", True, "bf16_pure"), ("other data", False, "fp32"), ("in place", True, "fp32")])
def test_a_change_of_a_drained_pipeline_is_that_of_plain_pytorch(change: str, kept: bool, precision: str,
                                                                 way: str) -> None:
    """An update that begins with an empty pipeline is the one of plain PyTorch: nothing is late."""
    script, losses = Script(True, precision=precision, schedule=STREAM), []
    for call in [[batch] for batch in batches()] if way == "calls" else [batches()]:
        for step in script.pipe.train(call, pauses=1):
            losses.append(step.loss)
            if way == "drain":
                script.pipe.drain()
            if way != "calls":
                script.change(change, kept)
        if way == "calls":
            script.change(change, kept)
    within = 1e-5 if precision == "fp32" else 2e-2
    assert losses == pytest.approx(expected(True, change, precision)["losses"], abs=within)


# -- relatives: weights that are shown, frozen, or no longer there


class ScheduleFree(torch.optim.Optimizer):
    """SGD that trains between its average and its fast weights, and shows either."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            fast = state.setdefault("fast", p.clone()).sub_(p.grad, alpha=0.3)
            state.setdefault("mean", p.clone()).lerp_(fast, 1 / state["step"])
        self.show(0.1)

    @torch.no_grad()
    def show(self, fast: float) -> None:
        for p, state in self.state.items():
            p.copy_(state["mean"].lerp(state["fast"], fast))


def test_an_optimizer_that_shows_its_average_is_evaluated_with_it() -> None:
    def shown(evaluate: Callable[[], float], made: Sequence[ScheduleFree]) -> float:
        for each in made:
            each.show(0.0)
        loss = evaluate()
        for each in made:
            each.show(0.1)
        return loss

    net, batch, wanted = Net(tied=True), batches(1)[0], []
    optimizer = ScheduleFree(list(net.parameters()))
    for each in batches():
        net(**each).backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(shown(lambda: net(**batch).item(), [optimizer]))
    for arguments in ({"ranks": 2}, {"precision": "bf16_pure"}, {"schedule": STREAM}):
        script = Script(True, ScheduleFree, **arguments)
        found = [shown(lambda pipe=script.pipe: pipe.evaluate([batch]), script.made)
                 for _ in script.pipe.train(batches(), pauses=1 if "schedule" in arguments else None)]
        assert found == pytest.approx(wanted, abs=2e-2 if "precision" in arguments else 1e-5)


def frozen_job(*, between_calls: bool) -> list[float]:
    """Losses before and after a frozen weight that two stages share is set to 0.1."""
    script, losses = Script(True, frozen=True, stages=2), []
    for call in (batches(2), batches(2)):
        for step in script.pipe.train(call):
            losses.append(step.loss)
            if not between_calls:
                script.change("initialised", kept=True)
        script.change("initialised", kept=True)
    return losses


def test_a_frozen_weight_of_two_stages_changes_on_both(two: World) -> None:
    in_turn = frozen_job(between_calls=True)
    assert in_turn[2:] == pytest.approx([torch.tensor(WORDS).log().item()] * 2), "all words are alike"
    assert two.run(frozen_job, between_calls=True) == [in_turn] * 2
    assert frozen_job(between_calls=False)[1:] == pytest.approx([in_turn[2]] * 3), "in one process between batches, too"
    script = Script(True, frozen=True, stages=2)
    script.change("initialised", kept=True)
    with pytest.raises(UserError, match=re.escape(
            "'embed.weight' changed between two batches; not trained, and tied to stage 1, which has a copy\nhint: "
            "change it between two calls of train")):
        script.pipe.engine.workers[0].tied.exchange_latest(frozen=False)


@pytest.mark.parametrize(("name", "value", "text"), [
    ("weight", nn.Parameter(torch.zeros(WIDTH, WIDTH)), "was replaced by another parameter between two updates, which"),
    ("weight.data", torch.zeros(1, WIDTH), "was given the shape [1, 6] between two updates")])
def test_a_parameter_that_was_replaced_is_refused(name: str, value: Tensor, text: str) -> None:
    script = Script(False)
    steps = script.pipe.train(batches(2))
    next(steps)
    for mix in (m for m in script.kept if isinstance(m, nn.Linear) and not m.weight.is_meta):
        setattr(mix.weight if name.endswith(".data") else mix, name.split(".")[-1], value)
    with pytest.raises(UserError, match="'mix.weight' " + re.escape(text)):
        next(steps)
