"""A loss with weights of its own per label is, over an update and an evaluation, the mean over all labels at once, as
in plain PyTorch on whole batches; or it is refused before a weight changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from pipelines import parts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from world import World

from vpipe import Layer, Model, Pipeline
from vpipe.errors import UserError
from vpipe.testing import assert_equals_oracle, evaluate_oracle

CLASSES, WEIGHT = 4, torch.tensor([0.1, 1.0, 5.0, 20.0])
CE = nn.CrossEntropyLoss


class Case(NamedTuple):
    """A loss of scores and labels, what stands where there is no label (None: soft labels), and what the model says."""

    loss: Callable[[Tensor, Tensor], Tensor]
    ignored: int | None = -100
    said: Callable[[Tensor], Tensor] | None = None


def flat(scores: Tensor, y: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), y.flatten(), **how)


def masked(scores: Tensor, y: Tensor) -> Tensor:
    """0 / 0 in a microbatch where the mask leaves nothing, and so are its gradients."""
    return (flat(scores, y, reduction="none") * (y > 0).flatten()).sum() / (y > 0).sum()


def shifted(scores: Tensor, y: Tensor) -> Tensor:
    return flat(scores[:, :-1], y[:, 1:])


def reported(scores: Tensor, y: Tensor) -> Tensor:
    """Tells how well the next word is predicted, and learns another."""
    shifted(scores, y)
    return flat(scores, y)


RIGHT = {
    "all of it": Case(CE(WEIGHT, ignore_index=255, label_smoothing=0.2), 255),
    "a class of weight 0": Case(CE(torch.tensor([0.0, 1.0, 2.0, 3.0])), 0),
    "nll": Case(nn.NLLLoss(WEIGHT, ignore_index=-1), -1), "soft": Case(CE(WEIGHT), None),
    "a function": Case(flat), "reported": Case(reported),
    "two heads": Case(lambda s, y: flat(s, y) + 0.4 * flat(s.flip(-1), y)),
    "shifted, said": Case(shifted, -100, lambda y: y[:, 1:] != -100), "masked, said": Case(masked, 0, lambda y: y > 0)}
REFUSED = {
    "a mean over labels that count 47.3 where those of the field count 12":
        Case(partial(flat, weight=WEIGHT)),
    "where those of the field count 12": Case(partial(flat, ignore_index=0), 0),
    "a sum over labels": Case(partial(flat, reduction="sum")),
    "a mean over labels that count 10 where those of the field count 12": Case(shifted),
    "shows no cross entropy of torch's": Case(lambda s, y: -s.log_softmax(-1)[..., 0].mean())}


class Before(nn.Module):
    """What is before a token counts in it, also from slice to slice."""

    def forward(self, h: Tensor, carried: tuple[Tensor, ...] | None = None) -> Any:
        sums = torch.cat([*(carried or ()), h], 1).cumsum(1)[:, -h.shape[1]:]
        return h + 0.1 * sums if carried is None else (h + 0.1 * sums, sums[:, -1:])


class Head(nn.Module):
    def __init__(self, case: Case, attends: bool) -> None:
        super().__init__()
        self.out, self.loss = nn.Linear(7, CLASSES), case.loss
        self.attention = nn.MultiheadAttention(7, 1, batch_first=True) if attends else None

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        h = h if self.attention is None else self.attention(h, h, h, need_weights=False)[0]
        scores = self.out(torch.tanh(h))
        if isinstance(self.loss, nn.Module):
            scores, y = scores.log_softmax(-1).flatten(0, 1), y.flatten(0, 1)
        return self.loss(scores, y)


def model(case: Case, build: Callable[[nn.Module], nn.Module] = copy.deepcopy, attends: bool = False) -> Model:
    return Model([Layer("body", lambda: build(nn.Linear(5, 7)), ("x",), carried=()),
                  Layer("before", Before, carried=("sums",)),
                  Layer("head", lambda: build(Head(case, attends)), ("h", "y"), ("loss",), carried=())],
                 ("x", "y"), "y", case.said)


def pipeline(made: Model, **how: Any) -> Pipeline:
    return Pipeline(made, **parts(**{"optimizer": partial(torch.optim.SGD, lr=0.3, momentum=0.5), "stages": [1, 2],
                                     "per_token_loss": True, "microbatches": 4, **how}))


def drawn(case: Case) -> list[dict[str, Tensor]]:
    """Two batches. Their first samples have nearly all labels, the next none at first, the others none at all; or all
    labels are soft and count."""
    random, made = torch.Generator().manual_seed(1), []
    for _ in range(2):
        x, y = torch.randn(8, 6, 5, generator=random), torch.randint(CLASSES, (8, 6), generator=random)
        left = torch.rand(8, 6, generator=random) < torch.tensor([0.1, 0.1, 0.3, 0.5, 1, 1, 1, 1])[:, None]
        left[2:4, :2] = True
        y = F.one_hot(y, CLASSES).float() if case.ignored is None else torch.where(left, case.ignored, y)
        made.append({"x": x, "y": y})
    return made


def whole(modules: nn.ModuleDict, *batches: Mapping[str, Tensor]) -> Tensor:
    x, y = (torch.cat([batch[name] for batch in batches]) for name in ("x", "y"))
    return modules["head"](modules["before"](modules["body"](x)), y)


def told(losses: list[float], evaluation: float, state: Mapping[str, Tensor]) -> list[float]:
    return [*losses, evaluation, *(float((t.double().flatten() * torch.arange(len(t.flatten()))).sum())
                                   for t in state.values())]


def plain(case: Case, updates: int = 2) -> Any:
    """What plain PyTorch gives on whole batches."""
    modules, data, losses = model(case).materialize(), drawn(case), []
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.3, momentum=0.5)
    for batch in data[:updates]:
        optimizer.zero_grad()
        loss = whole(modules, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return pytest.approx(told(losses, whole(modules, *data).item(), modules.state_dict()), rel=1e-4, abs=1e-5)


def trained(name: str, updates: int = 2, **how: Any) -> list[float]:
    case = RIGHT[name]
    pipe, data = pipeline(model(case), **how), drawn(case)
    return told([step.loss for step in pipe.train(data[:updates])], pipe.evaluate(data), pipe.state_dict())


def in_lanes(name: str) -> list[float]:
    """Each of two lanes reads half of every batch."""
    mesh, case = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")), RIGHT[name]
    pipe = pipeline(model(case, lambda layer: fully_shard(copy.deepcopy(layer), mesh=mesh["dp"])), stages=[3],
                    microbatches=2, mesh=mesh, data="dp")
    data = [{key: t[mesh["dp"].get_local_rank()::2] for key, t in batch.items()} for batch in drawn(case)]
    return told([step.loss for step in pipe.train(data)], pipe.evaluate(data), pipe.state_dict())


@pytest.mark.parametrize("name", RIGHT)
def test_equals_whole_batches(name: str) -> None:
    assert trained(name) == plain(RIGHT[name])


@pytest.mark.parametrize("name", ["all of it", "masked, said"])
@pytest.mark.parametrize("how", [trained, in_lanes])
def test_so_it_does_in_two_processes(two: World, name: str, how: Callable[..., list[float]]) -> None:
    assert two.run(how, name=name) == [plain(RIGHT[name])] * 2


@pytest.mark.parametrize("how", [
    {"schedule": "zb_h1"}, {"recompute": 1.0}, {"replicas": 2, "zero1": True, "schedule": "gpipe"},
    {"schedule": "pipedream", "update_every": 4}, {"skip_not_finite": True}, {"schedule": "seq1f1b", "slices": 3}],
    ids=str)
@pytest.mark.parametrize("name", ["all of it", "masked, said"])
def test_so_does_every_schedule(name: str, how: dict[str, Any]) -> None:
    """Without a flush the first update alone has the weights of a plain run; all equal the oracle."""
    case = RIGHT[name]
    assert trained(name, updates=1, **how) == plain(case, updates=1)
    assert_equals_oracle(pipeline(model(case), **how), drawn(case))


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_say_its_weights_is_refused(what: str) -> None:
    pipe, data = pipeline(model(REFUSED[what])), drawn(REFUSED[what])
    before = told([], 0, pipe.state_dict())
    with pytest.raises(UserError) as refusal:
        list(pipe.train(data))
    assert what in str(refusal.value)
    assert told([], 0, pipe.state_dict()) == before
    unweighted = pipeline(model(REFUSED[what]), per_token_loss=False)
    assert len(list(unweighted.train(data))) == 2
    with pytest.raises(UserError, match="label_weights"):
        unweighted.evaluate(data)


@pytest.mark.parametrize("per_token", [False, True])
def test_the_loss_of_a_sequential_says_its_weights_and_may_change_them(per_token: bool) -> None:
    net, loss = nn.Sequential(nn.Conv2d(3, 5, 1), nn.Tanh(), nn.Conv2d(5, CLASSES, 1)), CE(WEIGHT, ignore_index=255)
    batch = {"input": torch.randn(8, 3, 4, 4), "target": torch.randint(CLASSES, (8, 4, 4))}
    batch["target"][2:, 1:] = 255
    pipe = pipeline(Model.sequential(net, loss), per_token_loss=per_token)
    for weight in (WEIGHT, WEIGHT.flip(0)):
        for owner in (loss, pipe.engine.local_stages[1].modules[2].loss):
            owner.weight = weight
        expected = pytest.approx(loss(net(batch["input"]), batch["target"]).item(), rel=1e-5)
        assert pipe.evaluate([batch]) == expected
        assert ([step.loss for step in pipe.train([batch])] == [expected]) == per_token
        net.load_state_dict(pipe.state_dict())


@pytest.mark.parametrize(("attends", "backend"), [(False, "eager"), (True, False)])
def test_a_loss_that_cannot_be_seen_is_that_of_a_module_or_said(attends: bool, backend: Any) -> None:
    """Attention computes other numbers in an evaluation when calls are watched; compiled layers show none."""
    for case in (RIGHT["all of it"], Case(flat, -100, lambda y: y != -100)):
        pipe = pipeline(model(case, attends=attends), compile=backend)
        assert pipe.evaluate(drawn(case)) == evaluate_oracle(pipe.model, pipe.state_dict(), drawn(case), 4)
    with pytest.raises(UserError, match="shows no cross entropy of torch's, as it is compiled or has attention"):
        pipeline(model(RIGHT["a function"], attends=attends), compile=backend).evaluate(drawn(case))


def test_labels_must_have_values_everywhere() -> None:
    case = RIGHT["a function"]
    with pytest.raises(UserError, match="'y' of a batch is on the meta device, but per_token_loss counts"):
        list(pipeline(model(case)).train([{name: t.to("meta") for name, t in drawn(case)[0].items()}]))


class Contrast(nn.Module):
    """The representations, and either a loss over the samples of a microbatch or the pull of gradients of theirs."""

    def forward(self, r: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        return (r * pull).sum(1).mean() if pull.any() else contrastive(r), r


def contrastive(r: Tensor) -> Tensor:
    """With in-batch negatives."""
    return F.cross_entropy(r @ r.roll(1, 0).T, torch.arange(len(r)))


def test_a_contrastive_loss_is_of_the_batch_where_gradients_of_representations_are_given() -> None:
    """As docs/concepts.md says: in two passes."""
    made = Model([Layer("body", lambda: nn.Linear(5, 7), ("x",), ("r",)),
                  Layer("loss", Contrast, ("r", "pull"), ("loss", "r"))], ("x", "pull"))
    x, body = torch.randn(8, 5), made.materialize()["body"]
    contrastive(body(x)).backward()
    pipe = pipeline(made, per_token_loss=False, stages=[1, 1], microbatches=2)
    _, found = pipe.evaluate([{"x": x, "pull": torch.zeros(8, 7)}], outputs="r")
    [pull] = torch.autograd.grad(contrastive(r := found["r"].requires_grad_()), r)
    list(pipe.train([{"x": x, "pull": pull * len(r)}]))
    for name, value in body.named_parameters():
        assert torch.allclose(pipe.state_dict()[f"body.{name}"], value.detach() - 0.3 * value.grad, atol=1e-6)
