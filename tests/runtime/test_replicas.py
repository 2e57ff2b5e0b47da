"""Replicated stages compute what their oracles say, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import Average, cut, rich_batches, rich_model, untied_model
from oracles import DECAY_AND_CLIP, assert_same, assert_same_state, decay, equals_its_oracle, oracle_of, pipeline_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vpipe import Cut, Layer, Model, Pipeline
from vpipe.errors import UserError
from vpipe.runtime.transport.transport import InProcessTransport, TransferKey, TransferKind
from vpipe.schedules.assignment import Placement, both_ways
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs, StageCosts
from vpipe.schedules.kinds import Op
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.simulator.timeline import simulate
from vpipe.testing import evaluate_oracle

BOTH_WAYS = [name for name in RegisteredSchedule.names() if RegisteredSchedule.named(name).layout is both_ways]


def placed(widths: Sequence[int]) -> Placement:
    """Rank after rank."""
    ends = list(accumulate(widths))
    return tuple(tuple(range(end - width, end)) for end, width in zip(ends, widths, strict=True))


def arranged(layers: int, widths: Sequence[int], schedule: str, microbatches: int, **words: Any) -> dict[str, Any]:
    """The words for a pipeline with so many replicas of each stage."""
    return {"schedule": schedule, "microbatches": microbatches, "placement": placed(widths),
            "partition": cut(layers, len(widths)), "learning_rate_factor": decay, **words}


def pipeline(model: Model, widths: Sequence[int], schedule: str, microbatches: int, **words: Any) -> Pipeline:
    return pipeline_of(model, **arranged(len(model), widths, schedule, microbatches, **words))


# -- with a flush


@pytest.mark.parametrize(("name", "ranks", "replicas", "microbatches", "tied"), [
    (name, *numbers) for name in BOTH_WAYS
    for numbers in ((2, 1, 8, True), (4, 1, 10, True), (2, 2, 8, False), (4, 2, 16, True))])
def test_both_directions(name: str, ranks: int, replicas: int, microbatches: int, tied: bool) -> None:
    """Two copies of every stage, which share their ranks with copies of another; and pipelines of them side by side."""
    model, batches = rich_model if tied else untied_model, rich_batches(2, microbatches)
    pipe, _ = equals_its_oracle(model, batches, schedule=name, microbatches=microbatches, partition=cut(8, ranks),
                                replicas=replicas, recompute=0.5, **DECAY_AND_CLIP)
    assert list(map(len, pipe.placement)) == [2 * replicas] * ranks
    state = pipe.state_dict()
    if tied:
        state["head.decoder.weight"] = state["embed.word.weight"]
    assert pipe.evaluate(batches) == pytest.approx(evaluate_oracle(model(), state, batches, microbatches), rel=1e-15)


def test_a_layer_that_draws_its_weights_outside_torch_is_found() -> None:
    """In one process each replica is built, too."""
    random = np.random.default_rng(3)

    def drawn() -> nn.Module:
        layer = nn.Linear(3, 2)
        layer.weight = nn.Parameter(torch.from_numpy(random.standard_normal((2, 3), np.float32)), requires_grad=False)
        return layer

    model = Model([Layer("drawn", drawn, ("x",), ("h",)), Layer("mean", Average, ("h",), ("loss",))], ("x",))
    with pytest.raises(UserError, match=r"stage 0: 'drawn\.weight' begins with other values on rank 1 than on rank 0"):
        pipeline(model, (2,), "1f1b", 2).train([])


# -- without a flush


@pytest.mark.parametrize(("schedule", "widths", "every", "warmup"), [
    ("pipedream", (2, 1, 2), 1, (4, 3, 0)), ("pipedream", (1, 3, 2), 2, (9, 2, 0)), ("pipedream", (3, 1), 1, (2, 0)),
    ("pipedream_vertical_sync", (2, 2), 1, (3, 0)), ("2bw", (1, 2), 4, (3, 0))])
def test_more_forwards_ahead(schedule: str, widths: tuple[int, ...], every: int, warmup: tuple[int, ...]) -> None:
    """Train on seven batches, evaluate, train on two more."""
    batches = rich_batches(9, 2 * every)
    _, steps = equals_its_oracle(rich_model, batches[:7], batches[7:], **arranged(
        8, widths, schedule, 2 * every, update_every=every, grad_clip=0.5, warmup_depth=warmup))
    assert [step.learning_rate for step in steps] == [3e-3 * decay(step.index) for step in steps], "of stage 0"


@pytest.mark.parametrize(("widths", "every", "warmup"), [
    ((2, 1), 1, None), ((1, 2), 2, None), ((3, 1, 2), 1, None), ((2,), 1, None), ((1, 2), 2, (6, 0)),
    ((2, 1, 1), 2, (4, 4, 0))])
def test_an_evaluation_in_the_middle_drains_up_to_a_whole_step(widths: tuple[int, ...], every: int,
                                                               warmup: tuple[int, ...] | None) -> None:
    per_step = every * math.lcm(*widths)
    batches = rich_batches(-(-10 * per_step // 4), 4)
    pipe = pipeline_of(rich_model, **arranged(8, widths, "pipedream", 4, update_every=every, warmup_depth=warmup))
    steps, drained_at = [], []
    for step in pipe.train(batches):
        steps.append(step)
        if step.index in (2, 7):
            drained_at.append(min(4 * len(batches), per_step * (step.index + 1 + len(pipe.engine.training.drain()))))
            pipe.evaluate(batches[:1])
    assert 3 * per_step < drained_at[0] <= 8 * per_step < drained_at[1]
    assert_same(pipe, steps, oracle_of(pipe, batches, drained_at=drained_at))


def test_each_replica_holds_as_few_versions_as_its_depth_asks_for() -> None:
    """Of 1-3-2: five forwards before the first backward of stage 0, one at stage 1, none at stage 2."""
    pipe = pipeline(rich_model(), [1, 3, 2], "pipedream", 6)
    list(pipe.train(rich_batches(5, 6)))
    held = [[(worker.stages[s].weights.most_versions, worker.peak_activations[s]) for rank, worker in
             sorted(pipe.engine.workers.items()) if s in worker.stages] for s in range(3)]
    assert held == [[(6, 6)], [(2, 2)] * 3, [(1, 1)] * 2]


def timetable(schedule: str, microbatches: int, columns: int) -> list[str]:
    """2-1, each action as soon as it can be; stage 0 takes two columns for a forward, stage 1 one."""
    built = build(schedule, placed([2, 1]), microbatches)
    timeline = simulate(built, Costs((StageCosts(2, 2, 2), StageCosts(1, 1, 1))))
    rows = []
    for rank, events in enumerate(timeline.events):
        row: list[str] = []
        for event in events:
            row += ["."] * (int(event.start_s) - len(row))
            if event.action.op is Op.STEP:
                row[-1] = "-S" if row[-1] == "--" else ".S"
            else:
                row += [str(event.action)[1:]] + ["--"] * (int(event.end_s - event.start_s) - 1)
        rows.append(f"stage {rank // 2}, rank {rank}  " + " ".join(
            f"{cell:2}" for cell in (row + ["."] * columns)[:columns]))
    return rows


def test_the_timetables_of_the_page_are_what_replicas_do() -> None:
    page = (Path(__file__).parents[2] / "docs" / "replicas.md").read_text()
    for title, schedule, microbatches in (("1f1b, m = 6", "1f1b", 6), ("pipedream, k = 1", "pipedream", 12)):
        shown = page.split(f"{title}\n")[1].split("\n")[:3]
        columns = (len(shown[0].removesuffix(" ...")) - len("stage 0, rank 0 ")) // 3
        assert [row.removesuffix(" ...") for row in shown] == [
            row.rstrip() for row in timetable(schedule, microbatches, columns)]


# -- what a sum over replicas meets


class Noted(nn.Module):
    """Say when a backward comes by."""

    def __init__(self, say: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.say = say

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self.say)
        return x * 1


def sent_beside_backwards(monkeypatch: pytest.MonkeyPatch, kinds: Mapping[TransferKind, str], optimizer: Any,
                          stages: Cut) -> list[list[str]]:
    """Return, of every step after the first, what left a rank and when a backward had come half its way.

    Args:
        kinds: of transfers, and how to call them, by the sending rank. There is a bucket per parameter.
    """
    monkeypatch.setattr("vpipe.runtime.reducer.BUCKET_BYTES", 1)
    events: list[str] = []
    send = InProcessTransport.send

    def noted(self: InProcessTransport, peer: int, key: TransferKey, *given: Any, **more: Any) -> None:
        if key.kind in kinds:
            events.append(kinds[key.kind].format(self.rank))
        send(self, peer, key, *given, **more)

    monkeypatch.setattr(InProcessTransport, "send", noted)
    halfway = Noted(lambda gradient: events.append("half"))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), halfway, nn.Linear(4, 4))
    pipe = Pipeline(Model.sequential(layers, nn.CrossEntropyLoss()), optimizer, stages, "1f1b", 2)
    steps = []
    for _ in pipe.train([{"input": torch.randn(2, 4), "target": torch.randint(4, (2,))}] * 3):
        steps.append(events.copy())
        events.clear()
    return steps[1:]  # the first backward shows how many gradients each weight gets


def test_gradients_leave_before_the_last_backward_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which costs no result, but time: the rest of the backward is computed while they travel."""
    of_a_replica = ["gradient", "gradient", "half", "gradient", "gradient"]
    assert sent_beside_backwards(monkeypatch, {TransferKind.SHARES: "gradient"}, torch.optim.SGD,
                                 Cut([1, 3], ranks=[[0], [1, 2]])) == [2 * of_a_replica] * 2


class Scaled(nn.Module):
    """Has a weight that its own stage gives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.w = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.w.detach()


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.w = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, h: Tensor) -> Tensor:
        return (self.inner(h) * self.w).pow(2).mean()


def noise(batches: int, samples: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    return [{"x": torch.randn(samples, 4)} for _ in range(batches)]


def test_a_gradient_that_borrowers_alone_make() -> None:
    """It is scaled on every replica of the owner: they must not share it."""
    model = Model([Layer("a", Scaled, inputs=("x",), outputs=("h",)),
                   Layer("b", Squared, inputs=("h",), outputs=("loss",), ties={"w": "a.w"})], batch=("x",))
    equals_its_oracle(model, noise(4, 4), **arranged(2, (2, 1), "pipedream", 4))


class Twice(nn.Module):
    """Uses a layer twice, each time with a backward of its own, when the first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(2 if float(x[0, 0]) > 0 else 0):
            hidden = checkpoint(self.again, hidden, use_reentrant=True)
        return hidden


def test_a_weight_that_gets_several_gradients_in_one_backward() -> None:
    model = Model([Layer("a", Twice, inputs=("x",), outputs=("h",)),
                   Layer("b", Squared, inputs=("h",), outputs=("loss",))], batch=("x",))
    batches = [{"x": -torch.ones(4, 4)}, {"x": torch.ones(4, 4)}, {"x": torch.ones(4, 4)}]
    pipe = pipeline_of(model, **arranged(2, (2, 1), "1f1b", 4))
    losses, run = [step.loss for step in pipe.train(batches)], oracle_of(pipe, batches)
    assert losses == run.losses
    # Plain PyTorch adds each of the two to the sum of the update, a stage their sum: moments differ in the last bit.
    assert_same_state(pipe.state_dict(), run.state)


class Still(nn.Module):
    """Uses a layer whose weight gets no gradient here."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.inner.weight.detach())


def test_a_weight_of_two_backwards_that_gets_a_gradient_in_one_of_them() -> None:
    """Its sum is complete when the whole backward is: its layer is recomputed, and another that uses it is not."""
    inner = nn.Linear(4, 4)
    layers = nn.Sequential(Still(inner), nn.Linear(4, 4), inner, nn.Linear(4, 3))
    model = Model.sequential(layers, nn.CrossEntropyLoss())
    batches = [{"input": each["x"], "target": torch.arange(8) % 3} for each in noise(3, 8)]
    whole, pipe = (Pipeline(model, lambda p: torch.optim.SGD(p, 0.1), stages=Cut(1, recompute=part, ranks=2),
                            microbatches=4) for part in (0.0, 0.5))
    assert [step.loss for step in pipe.train(batches)] == [step.loss for step in whole.train(batches)]


def test_sparse_gradients_are_refused() -> None:
    layers = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    model = Model.sequential(layers, loss=nn.CrossEntropyLoss())
    pipe = pipeline(model, (2, 1), "1f1b", 2, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
    batch = {"input": torch.tensor([1, 2]), "target": torch.tensor([0, 1])}
    with pytest.raises(UserError, match=r"'0\.weight' has a gradient in the layout torch.sparse_coo"):
        list(pipe.train([batch]))
