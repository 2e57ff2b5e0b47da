"""Optimizers of others over cuts: equal to plain PyTorch, or refused by the number that differs between stages."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from world import World

from vpipe import Model, Pipeline
from vpipe.errors import UserError

Make = Callable[[list[nn.Parameter]], Optimizer | None]
WIDTH, MICROBATCHES = 6, 2


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 3))


def batches() -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(5)
    return [{"input": torch.randn(8, WIDTH, generator=random), "target": torch.randint(3, (8,), generator=random)}
            for _ in range(6)]


def pipeline(make: Make, stages: int, schedule: str = "1f1b") -> Pipeline:
    return Pipeline(Model.sequential(network(), nn.CrossEntropyLoss()), make, stages=stages, schedule=schedule,
                    microbatches=MICROBATCHES)


def plain(make: Make) -> list[float]:
    """The losses of the loop that everybody writes."""
    net, losses = network(), []
    optimizer: Any = make(list(net.parameters()))
    for batch in batches():
        total = 0.0
        for x, y in zip(batch["input"].chunk(MICROBATCHES), batch["target"].chunk(MICROBATCHES), strict=True):
            loss = nn.functional.cross_entropy(net(x), y)
            (loss / MICROBATCHES).backward()
            total += float(loss.detach().double())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / MICROBATCHES)
    return losses


def other(name: str, **arguments: Any) -> Make:
    """A factory of an optimizer with a group of matrices and one of the rest; a stage may lack either."""
    def make(own: list[nn.Parameter]) -> Optimizer:
        kind = getattr(import_module("pytorch_optimizer"), name)  # late: it takes a second
        groups = [{"params": [p for p in own if (p.ndim == 2) == use], "use_muon": use} for use in (True, False)]
        return kind([group for group in groups if group["params"]], **arguments)
    return make


JOINT = " steps a parameter by the gradients of others, too, such as by a norm over all, but that of stage 0 sees one "


@pytest.mark.parametrize("stages", [2, 5])
@pytest.mark.parametrize(("name", "arguments", "refused"), [
    ("ScheduleFreeAdamW", {"lr": 0.02, "warmup_steps": 3}, None),
    ("Lion", {"lr": 0.01}, None), ("AdaFactor", {"lr": 0.02}, None), ("Muon", {"lr": 0.02}, None),
    ("SOAP", {"lr": 0.02}, None), ("CAME", {"lr": 0.02}, None), ("Lamb", {"lr": 0.02}, None),
    ("Lamb", {"lr": 0.02, "pre_norm": True}, JOINT), ("Adan", {"lr": 0.02}, None),
    ("Adan", {"lr": 0.02, "max_grad_norm": 0.5}, JOINT),
    ("Prodigy", {"lr": 1.0}, "of the parameter groups of Prodigy is"),
    ("DAdaptAdam", {"lr": 1.0}, "of the parameter groups of DAdaptAdam is")])
def test_those_of_others_equal_plain_pytorch_over_a_cut_or_are_refused_by_name(
        name: str, arguments: dict[str, Any], refused: str | None, stages: int) -> None:
    pipe = pipeline(other(name, **arguments), stages)
    if refused is None:
        assert [step.loss for step in pipe.train(batches())] == plain(other(name, **arguments))
        return
    state = torch.get_rng_state()
    with pytest.raises(UserError, match=refused):
        list(pipe.train(batches()))
    assert torch.equal(torch.get_rng_state(), state)


class Normalised(SGD):
    """Divides the gradients by a norm over all of them."""

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


class Unguarded(SGD):
    """The same without a look at parameters that have no gradient."""

    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient /= norm
        super().step()


def test_one_with_a_norm_over_all_may_step_one_stage_of_several() -> None:
    def make(own: list[nn.Parameter]) -> Optimizer | None:
        return Normalised(own, lr=0.1) if own[0].shape == (12, WIDTH) else None

    list(pipeline(make, 3).train(batches()))
    for kind in (Normalised, Unguarded):
        with pytest.raises(UserError, match=f"{kind.__name__}{JOINT}of 2 parts of the model\nhint: choose an optim"):
            pipeline(lambda own, kind=kind: kind(own, lr=0.1), 2).train(batches())


Write = Callable[[Any, dict[str, Any], float], object]


class Writing(SGD):
    """Keeps a number of all its parameters, as Prodigy does: ``write`` gets the optimizer, its group, and the norm of
    its gradients."""

    def __init__(self, own: list[nn.Parameter], write: Write) -> None:
        super().__init__(own, lr=torch.tensor(0.1))
        self.write = write
        self.param_groups[0]["size"] = 1.0

    def step(self, closure: Any = None) -> None:
        super().step()
        [group] = self.param_groups
        self.write(self, group, float(nn.utils.get_total_norm([p.grad for p in group["params"]])))


WRITES: dict[str, tuple[str, Write]] = {
    "a group": ("'size' of the parameter groups", lambda own, group, norm: group.update(size=group["size"] + norm)),
    "a tensor": ("'lr' of the parameter groups", lambda own, group, norm: group["lr"].fill_(0.1 / norm)),
    "an attribute": ("'_seen' among the attributes", lambda own, group, norm: setattr(own, "_seen", norm))}


def outcome(*, case: str, schedule: str) -> list[Any]:
    """The losses of a run, and the error that ended it."""
    losses: list[Any] = []
    try:
        for step in pipeline(lambda own: Writing(own, WRITES[case][1]), 2, schedule).train(batches()):
            losses.append(step.loss)
    except UserError as error:
        losses.append(str(error))
    return losses


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("case", WRITES)
def test_a_number_that_differs_between_stages_is_refused_wherever_it_is(case: str, schedule: str, two: World) -> None:
    """With a flush after the first update; without one as soon as the pipeline is empty."""
    here = outcome(case=case, schedule=schedule)
    if schedule == "pipedream" and case == "a tensor":  # in the middle of an update, on the rank that makes it
        assert "an optimizer changes the learning rate of its parameter groups as it steps" in here[-1]
        return
    assert f"{WRITES[case][0]} of Writing is " in here[-1]
    assert len(here) == (1 if schedule == "1f1b" else 1 + MICROBATCHES * len(batches()))
    assert two.run(outcome, case=case, schedule=schedule) == [here, here]
