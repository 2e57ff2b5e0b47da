"""Numbers that layers read in their forward, and that change, by a layer or the script, before it is recomputed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss
from torch.utils.checkpoint import checkpoint
from world import World

from vpipe import Cut, Layer, Model, Pipeline

SCRIPT = {"factor": 1.0, "p": 0.0}
"""What a script sets between updates."""


class Warm(nn.Module):
    """Scales by a number that every forward in training lowers: an attribute, or a buffer."""

    scale: Any

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if keeps == "buffer":
            self.register_buffer("scale", torch.ones(()))
        else:
            self.scale = 1.0
        self.rate = 1.0 if keeps == "nothing" else 0.9

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * self.rate
        return dropout(torch.tanh(self.linear(x)) * self.scale * SCRIPT["factor"], SCRIPT["p"])


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.linear(h), y)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{name: torch.randn(8, 4, generator=generator) for name in "xy"} for _ in range(4)]


def plain(keeps: str, state: dict[str, Tensor], recompute: bool) -> list[float]:
    """Plain PyTorch in the order of ``gpipe``: four forwards, then four backwards; perhaps with torch's checkpoint, of
    which the re-entrant one runs the whole forward again."""
    warm, head = Warm(keeps), Head()
    for name, part in (("warm", warm), ("head", head)):
        part.load_state_dict({key[5:]: value for key, value in state.items() if key.startswith(name)})
    optimizer, losses = sgd([*warm.parameters(), *head.parameters()]), []
    for batch in batches():
        each = [head(checkpoint(warm, x.requires_grad_(), use_reentrant=True) if recompute else warm(x), y)
                for x, y in zip(batch["x"].chunk(4), batch["y"].chunk(4), strict=True)]
        for loss in each:
            (loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in each) / 4)
    return losses


def run(keeps: str, schedule: str, recompute: bool, sets: str = "", drains: bool = False) -> list[list[float]]:
    """The losses, and those of plain PyTorch; the script sets a number after the second update."""
    SCRIPT.update(factor=1.0, p=0.0)
    model = Model([Layer("warm", partial(Warm, keeps), ("x",)), Layer("head", Head, ("h", "y"), ("loss",))], ("x", "y"))
    pipe = Pipeline(model, sgd, Cut([1, 1], recompute=[float(recompute), 0.0]), schedule, 4)
    expected, losses = plain(keeps, pipe.state_dict(), recompute), []
    for step in pipe.train(batches()):
        losses.append(step.loss)
        if sets and step.index == 1:
            losses += [later.loss for later in pipe.drain()] if drains else []
            SCRIPT[sets] = 0.5
    SCRIPT.update(factor=1.0, p=0.0)
    return [losses, expected]


@pytest.mark.parametrize("recompute", [False, True])
def test_an_attribute_that_a_forward_changes_is_changed_again_as_by_torchs_checkpoint(recompute: bool,
                                                                                      two: World) -> None:
    found, expected = run("attribute", "gpipe", recompute)
    assert found == expected
    assert two.run(run, keeps="attribute", schedule="gpipe", recompute=recompute) == [[found, expected]] * 2
    assert (found == run("attribute", "gpipe", False)[0]) is not recompute


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "pipedream"])
def test_a_buffer_that_a_forward_changes_is_as_without_recomputation(schedule: str) -> None:
    kept, expected = run("buffer", schedule, False)
    assert run("buffer", schedule, True)[0] == kept
    assert (kept == expected) is (schedule != "pipedream")


@pytest.mark.parametrize("sets", ["factor", "p"])
@pytest.mark.parametrize(("schedule", "drains", "exact"), [
    ("gpipe", False, True), ("1f1b", False, True), ("zb_h1", False, True), ("pipedream", False, False),
    ("pipedream", True, True)])
def test_a_number_that_the_script_sets_is_exact_where_no_microbatch_is_in_flight(
        sets: str, schedule: str, drains: bool, exact: bool, two: World) -> None:
    arguments: dict[str, Any] = {"keeps": "nothing", "schedule": schedule, "sets": sets, "drains": drains}
    recomputed, kept = (run(recompute=recompute, **arguments)[0] for recompute in (True, False))
    assert (recomputed == kept) is exact
    if schedule in ("1f1b", "pipedream"):
        assert [found for found, _ in two.run(run, recompute=True, **arguments)] == [recomputed] * 2
