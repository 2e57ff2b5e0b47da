"""Figures are those of what happens: who waits, which memory is there, what a gradient is."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from world import World

from vpipe import Cut, Layer, Model, Pipeline, Transfers, Update
from vpipe.errors import UserError


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return super().forward(x)


def of_a_slow_receiver(*, frozen: bool, shared_memory: bool) -> list[float]:
    """Seconds of rank 0, whose receiver is slow: all, idle, at communication."""
    torch.manual_seed(0)
    first = nn.Linear(8, 256).requires_grad_(not frozen)
    model = Model.sequential(nn.Sequential(first, Slow(256, 4)), nn.CrossEntropyLoss())
    pipe = Pipeline(model, lambda p: torch.optim.SGD(p, lr=0.1), [1, 1], "gpipe", 32,
                    transfers=Transfers(shared_memory=shared_memory))
    batch = {"input": torch.randn(32 * 64, 8), "target": torch.randint(4, (32 * 64,))}
    list(pipe.train([batch]))
    since, began = pipe.local_usage(), time.perf_counter()
    list(pipe.train([batch]))
    took, usage = time.perf_counter() - began, pipe.usage(since)[0]
    return [took, usage.idle_s, usage.communication_s]


@pytest.mark.jobs
@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_rank_that_waits_for_its_receiver_is_idle(frozen: bool, shared_memory: bool, two: World) -> None:
    (took, idle_s, communication_s), _ = two.run(of_a_slow_receiver, frozen=frozen, shared_memory=shared_memory)
    assert idle_s > 0.6 * took
    assert communication_s < 0.2 * took


class Lookup(nn.Module):
    """A lookup, which may be sparse, in weights that another stage may have, too."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.weight, self._sparse = nn.Parameter(torch.arange(72.0).cos().view(12, 6)), sparse

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        return h + nn.functional.embedding(ids, self.weight, sparse=self._sparse)


def trained(sparse: tuple[bool, bool], tied: bool, schedule: str, ranks: Any = 1, **update: Any) -> list[Tensor]:
    model = Model([
        Layer("words", lambda: Lookup(sparse[0]), ("x", "ids")), Layer("body", lambda: nn.Linear(6, 6)),
        Layer("again", lambda: Lookup(sparse[1]), ("h", "ids"), ties={"weight": "words.weight"} if tied else {}),
        Layer("loss", nn.MSELoss, ("h", "x"), ("loss",))], batch=("x", "ids"))
    drawn = torch.Generator().manual_seed(1)
    batch = {"ids": torch.randint(12, (8, 3), generator=drawn), "x": torch.randn(8, 3, 6, generator=drawn)}
    make = Update(lambda p: torch.optim.SGD(p, lr=0.5), **update)
    pipe = Pipeline(model, make, Cut([1, 1, 2], ranks=ranks), schedule, 4)
    return [torch.tensor([step.loss for step in pipe.train([batch] * 3)]), *pipe.state_dict().values()]


@pytest.mark.parametrize("update", [{}, {"grad_clip": 0.1}, {"skip_not_finite": True}], ids=str)
@pytest.mark.parametrize(("schedule", "tied"), [("1f1b", True), ("1f1b", False), ("zb_h1", True)])
@pytest.mark.parametrize("sparse", [(True, False), (False, True), (True, True)])
def test_sparse_gradients_meet_dense_ones(sparse: tuple[bool, bool], tied: bool, schedule: str,
                                          update: dict[str, Any]) -> None:
    dense = trained((False, False), tied, schedule, **update)
    torch.testing.assert_close(trained(sparse, tied, schedule, **update), dense)


def test_replicas_refuse_sparse_gradients_before_anything_changes() -> None:
    with pytest.raises(UserError, match=r"'words.weight' has a gradient in the layout torch.sparse_coo"):
        trained((True, False), False, "1f1b", [[0, 1], [2], [3]])


class PassesOn(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(("kind", "options", "copies"), [
    ("SGD", {"momentum": 0.9}, False), ("AdamW", {}, False), ("AdamW", {"fused": True}, False), ("NAdam", {}, False),
    ("PassesOn", {}, False),
    ("Adafactor", {}, True), ("Rprop", {}, True), ("ASGD", {}, True)])
def test_state_before_the_first_step_is_of_the_pipelines_optimizer_and_takes_no_copies_of_weights(
        kind: str, options: Any, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[torch.optim.Optimizer]()

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(getattr(torch.optim, kind, PassesOn)(parameters, lr=0.1, **options))
        return made[-1]

    net = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    pipe = Pipeline(Model.sequential(net, nn.MSELoss()), make, 1)
    if not copies:
        monkeypatch.delattr(torch, "clone")
    state = pipe.state_dict(sharded=True)["optimizer"]
    assert (len(made), dict(made[0].state)) == (1, {})
    plain = make(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain.step()
    for name, parameter in net.named_parameters():
        for key, value in plain.state[parameter].items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(state[f"state.{name}.{key}"], value, rtol=0, atol=0)


class Keeping(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["one"] = self.state[p]["other"] = torch.zeros_like(p)


def test_a_storage_of_several_tensors_counts_once() -> None:
    """A frozen weight that two layers share, state that an optimizer keeps twice."""
    frozen = nn.Linear(16, 16).requires_grad_(False)
    layers = [Layer(f"l{i}", lambda: nn.Sequential(nn.Linear(16, 16), frozen), ("hx"[i == 0],)) for i in range(2)]
    model = Model([*layers, Layer("loss", nn.MSELoss, ("h", "x"), ("loss",))], batch=("x",))
    pipe = Pipeline(model, lambda p: Keeping(p, lr=0.1), 1)
    own = 2 * (16 * 16 + 16) * 4
    (recorder,) = pipe.record().values()
    list(pipe.train([{"x": torch.randn(4, 16)}]))
    assert (pipe.usage()[0].state_bytes, recorder.static_bytes()) == (own, {0: own + own + own // 2})
