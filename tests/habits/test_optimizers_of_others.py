"""Optimizers of others over cuts: equal to plain PyTorch, or refused by the number that differs between stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from world import World

from vpipe import Cut, Model, Pipeline, Update
from vpipe.errors import RunError, UserError

Make = Callable[[list[nn.Parameter]], Optimizer]
WIDTH, MICROBATCHES = 6, 2


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 3))


def batches(count: int = 6) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(5)
    return [{"input": torch.randn(8, WIDTH, generator=random), "target": torch.randint(3, (8,), generator=random)}
            for _ in range(count)]


def pipeline(make: Any, stages: Any, **more: Any) -> Pipeline:
    return Pipeline(Model.sequential(network(), nn.CrossEntropyLoss()), make, stages=stages,
                    **{"microbatches": MICROBATCHES, **more})


def update(net: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> float:
    """Make an update as everybody writes it; return the mean loss."""
    total = 0.0
    for x, y in zip(batch["input"].chunk(MICROBATCHES), batch["target"].chunk(MICROBATCHES), strict=True):
        loss = nn.functional.cross_entropy(net(x), y)
        (loss / MICROBATCHES).backward()
        total += float(loss.detach().double())
    optimizer.step()
    optimizer.zero_grad()
    return total / MICROBATCHES


def plain(make: Make) -> tuple[list[float], dict[str, Tensor]]:
    net = network()
    optimizer = make(list(net.parameters()))
    return [update(net, optimizer, batch) for batch in batches()], net.state_dict()


def others(name: str) -> Any:
    """Import late: it takes a second, which no other test is to wait for."""
    return getattr(import_module("pytorch_optimizer"), name)


# -- the ten most used -------------------------------------------------------------------------------------------


def muon(own: list[nn.Parameter]) -> Optimizer:
    """With a group of matrices and one of the rest; a stage may lack either."""
    groups = [{"params": [p for p in own if (p.ndim == 2) == use], "use_muon": use} for use in (True, False)]
    return others("Muon")([group for group in groups if group["params"]], lr=0.02)


OF_OTHERS: dict[str, tuple[Make, str | None]] = {
    "ScheduleFreeAdamW": (lambda own: others("ScheduleFreeAdamW")(own, lr=0.02, warmup_steps=3), None),
    "Prodigy": (lambda own: others("Prodigy")(own, lr=1.0), "of the parameter groups of Prodigy is"),
    "Lion": (lambda own: others("Lion")(own, lr=0.01), None),
    "AdaFactor": (lambda own: others("AdaFactor")(own, lr=0.02), None),
    "Muon": (muon, None),
    "SOAP": (lambda own: others("SOAP")(own, lr=0.02), None),
    "Lamb": (lambda own: others("Lamb")(own, lr=0.02), None),
    "DAdaptAdam": (lambda own: others("DAdaptAdam")(own, lr=1.0), "of the parameter groups of DAdaptAdam is"),
    "Adan": (lambda own: others("Adan")(own, lr=0.02), None),
    "CAME": (lambda own: others("CAME")(own, lr=0.02), None)}


@cache
def expected(name: str) -> tuple[list[float], dict[str, Tensor]]:
    return plain(OF_OTHERS[name][0])


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("name", OF_OTHERS)
def test_the_ten_equal_plain_pytorch_over_a_cut_or_are_refused_by_name(name: str, stages: int) -> None:
    make, refused = OF_OTHERS[name]
    pipe = pipeline(make, stages)
    if refused is not None and stages > 1:
        with pytest.raises(UserError, match=refused):
            list(pipe.train(batches()))
        return
    losses, state = expected(name)
    assert [step.loss for step in pipe.train(batches())] == losses
    assert all(torch.equal(value, state[key]) for key, value in pipe.state_dict().items())


def test_schedule_free_is_evaluated_between_eval_and_train() -> None:
    """As its page says; every stage's optimizer is switched."""
    made: list[Any] = []
    make = OF_OTHERS["ScheduleFreeAdamW"][0]
    pipe, held_out = pipeline(lambda own: made.append(make(own)) or made[-1], 2), batches(7)[-1]
    net = network()
    whole: Any = make(list(net.parameters()))
    for step, batch in zip(pipe.train(batches()), batches(), strict=True):
        assert step.loss == update(net, whole, batch)
        for each in (whole, *made):
            each.eval()
        expected = nn.functional.cross_entropy(net(held_out["input"]), held_out["target"]).item()
        assert pipe.evaluate([held_out]) == pytest.approx(expected, rel=1e-6)  # a mean of means rounds otherwise
        for each in (whole, *made):
            each.train()


# -- numbers that are written nowhere ------------------------------------------------------------------------------


class Normalised(SGD):
    """Divides the gradients by a norm over all of them."""

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


JOINT: dict[str, Make] = {
    "Normalised": lambda own: Normalised(own, lr=0.1),
    "Lamb": lambda own: others("Lamb")(own, lr=0.02, pre_norm=True),
    "Adan": lambda own: others("Adan")(own, lr=0.02, max_grad_norm=0.5)}


@pytest.mark.parametrize("name", JOINT)
def test_an_optimizer_with_a_norm_over_all_is_right_in_one_stage_and_refused_in_two(name: str) -> None:
    assert [step.loss for step in pipeline(JOINT[name], 1).train(batches())] == plain(JOINT[name])[0]
    state = torch.get_rng_state()
    with pytest.raises(UserError) as error:
        pipeline(JOINT[name], 2).train(batches())
    assert str(error.value) == (
        f"error: {name} steps a parameter by the gradients of others, too, such as by a norm over all, but that of "
        "stage 0 sees one of 2 parts of the model\nhint: choose an optimizer that steps each parameter by its own "
        "gradients, clip with grad_clip=..., which is of all stages, or leave out stages and zero1")
    assert torch.equal(torch.get_rng_state(), state)


def test_such_an_optimizer_may_step_one_stage_of_several() -> None:
    """The others' are of another class, or there are none."""
    def make(own: list[nn.Parameter]) -> Optimizer:
        return Normalised(own, lr=0.1) if len(own) == 2 and own[0].shape == (WIDTH * 2, WIDTH) else SGD(own, lr=0.1)

    list(pipeline(make, 3).train(batches(1)))
    list(pipeline(lambda own: make(own) if own[0].shape == (WIDTH * 2, WIDTH) else None, 3).train(batches(1)))


def test_replicas_that_step_parts_of_a_stage_are_as_stages() -> None:
    with pytest.raises(UserError, match="Normalised steps a parameter by the gradients of others, too"):
        pipeline(Update(JOINT["Normalised"], zero1=True), Cut(1, ranks=2)).train(batches())


# -- numbers for all parameters ------------------------------------------------------------------------------------


class Writing(SGD):
    """Keeps a number of all its parameters, as Prodigy does: ``write`` gets the optimizer, its group, and the norm of
    its gradients; it is called from the step ``first`` on."""

    def __init__(self, own: list[nn.Parameter], write: Callable[[Any, dict[str, Any], float], object],
                 first: int = 0) -> None:
        super().__init__(own, lr=torch.tensor(0.1))
        # No copy of what has an object as an attribute shows before training that it is joint.
        self.write, self.left = partial(write), [None] * first
        self.param_groups[0]["size"] = 1.0

    def step(self, closure: Any = None) -> None:
        super().step()
        [group] = self.param_groups
        norm = float(nn.utils.get_total_norm([p.grad for p in group["params"]]))
        if self.left:
            self.left.pop()
        else:
            self.write(self, group, norm)


WRITES: dict[str, tuple[str, Callable[[Any, dict[str, Any], float], object]]] = {
    "a group": ("'size' of the parameter groups", lambda own, group, norm: group.update(size=group["size"] + norm)),
    "the rate": ("'lr' of the parameter groups", lambda own, group, norm: group.update(lr=0.1 / norm)),
    "a tensor": ("'lr' of the parameter groups", lambda own, group, norm: group["lr"].fill_(0.1 / norm)),
    "a pair": ("'betas' of the parameter groups", lambda own, group, norm: group.update(betas=(norm, 0.9))),
    "the state": ("'all' in the state", lambda own, group, norm: own.state.update(all=torch.tensor([norm]))),
    "a table of the state": ("'d' in a table", lambda own, group, norm: own.state["all"].update(d=norm)),
    "an attribute": ("'seen' among the attributes", lambda own, group, norm: setattr(own, "seen", norm)),
    "a private one": ("'_seen' among the attributes", lambda own, group, norm: setattr(own, "_seen", norm))}


def counted(own: list[nn.Parameter]) -> Optimizer:
    """What all stages count alike: the steps, and by them the rate, in groups of which a stage may lack one."""
    groups = [{"params": [p for p in own if (p.ndim == 2) == decays], "lr": 0.1 * (1 + decays)}
              for decays in (True, False)]
    return Counting([group for group in groups if group["params"]])


class Counting(SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.rounds = getattr(self, "rounds", 0) + 1
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.9**self.rounds


def outcome(*, case: str, first: int = 0, **arguments: Any) -> dict[str, Any]:
    """The losses of a run, and the error that ended it."""
    make = counted if case == "counted" else OF_OTHERS[case][0] if case in OF_OTHERS else (
        lambda own: Writing(own, WRITES[case][1], first))
    losses = []
    try:
        for step in pipeline(make, 2, **arguments).train(batches()):
            losses.append(step.loss)
    except (UserError, RunError) as error:
        return {"losses": losses, "error": str(error)}
    return {"losses": losses, "error": ""}


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("case", WRITES)
def test_a_number_that_differs_between_stages_is_refused_wherever_it_is(case: str, schedule: str, two: World) -> None:
    """With a flush after the first update; without one as soon as the pipeline is empty."""
    here = outcome(case=case, schedule=schedule)
    rate = schedule == "pipedream" and case in ("the rate", "a tensor")
    assert ("an optimizer changes the learning rate of its parameter groups as it steps" if rate else
            f"{WRITES[case][0]} of Writing is ") in here["error"]
    if not rate:  # that is refused in the middle of an update, on the rank that makes it
        assert len(here["losses"]) == (0 if schedule == "1f1b" else MICROBATCHES * len(batches()))
        assert two.run(outcome, case=case, schedule=schedule) == [here, here]


def test_what_all_stages_count_alike_is_right_where_a_stage_lacks_a_group() -> None:
    assert [step.loss for step in pipeline(counted, 5).train(batches())] == plain(counted)[0]


@pytest.mark.parametrize("case", ["counted", "ScheduleFreeAdamW", "Prodigy"])
def test_two_processes_are_as_one(case: str, two: World) -> None:
    here = outcome(case=case)
    assert two.run(outcome, case=case) == [here, here]
    if case != "Prodigy":
        assert here == {"losses": plain(counted if case == "counted" else OF_OTHERS[case][0])[0], "error": ""}


def test_a_number_that_begins_to_change_later_is_refused_where_processes_would_not_hear_of_it(two: World) -> None:
    here = outcome(case="a group", first=3)
    assert len(here["losses"]) == 3
    assert "'size' of the parameter groups of Writing is " in here["error"]
    two.begin(outcome, case="a group", first=3)
    said = [two.outcome(rank, 30)[1] for rank in (0, 1)]
    two.kill()
    assert [len(each["losses"]) for each in said] == [3, 3]
    assert any("'size' of the parameter groups of Writing changed in a step, but in none of the first update" in
               each["error"] for each in said)
