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
    """A loss, what stands where there is no label, what the model says, and how the loss is called."""

    loss: Callable[[Tensor, Tensor], Tensor]
    ignored: int | None = -100
    said: Callable[[Tensor], Tensor] | None = None
    called: str = "tokens"


CALLED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "tokens": lambda scores, y: (scores.flatten(0, 1), y.flatten(0, 1)), "sequences": lambda scores, y: (scores, y),
    "images": lambda scores, y: (scores.mT[..., None], y[..., None])}


def masked(scores: Tensor, y: Tensor) -> Tensor:
    """0 / 0 in a microbatch where the mask leaves nothing, and so are its gradients."""
    return (F.cross_entropy(scores, y, reduction="none") * (y > 0)).sum() / (y > 0).sum()


def focal(scores: Tensor, y: Tensor) -> Tensor:
    """Calls none of torch's losses."""
    log, weight = scores.log_softmax(-1).gather(-1, y[:, None])[:, 0], WEIGHT[y] * (y > 0)
    return -((1 - log.exp()) ** 2 * log * weight).sum() / weight.sum()


def shifted(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def words(scores: Tensor, y: Tensor, second: float = 0.0) -> Tensor:
    """Only reports how well the second word is predicted, or learns that, too."""
    report = shifted(scores, y)
    loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
    return loss + second * report if second else loss


def ctc(scores: Tensor, y: Tensor) -> Tensor:
    ordered, lengths = y.sort(1, descending=True).values, (y > 0).sum(1)
    return F.ctc_loss(scores.log_softmax(-1).transpose(0, 1), ordered, torch.full((len(y),), 6), lengths,
                      zero_infinity=True)


class Softened(CE):
    """Has class weights, which do not count in a mean over soft labels."""

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        return super().forward(scores, F.one_hot(y.clamp(0), CLASSES).float())


RIGHT = {
    "plain": Case(CE()), "label smoothing": Case(CE(label_smoothing=0.2)), "class weights": Case(CE(WEIGHT)),
    "all of it": Case(CE(WEIGHT, ignore_index=255, label_smoothing=0.2), 255),
    "padding is class 0": Case(CE(ignore_index=0), 0),
    "a class of weight 0": Case(CE(torch.tensor([0.0, 1.0, 2.0, 3.0])), 0),
    "nll": Case(nn.NLLLoss(WEIGHT, ignore_index=-1), -1),
    "images": Case(CE(WEIGHT, ignore_index=255), 255, called="images"),
    "soft": Case(CE(WEIGHT), None), "squares": Case(nn.MSELoss(), None),
    "binary": Case(nn.BCEWithLogitsLoss(pos_weight=WEIGHT), None), "a function": Case(F.cross_entropy),
    "two heads": Case(lambda s, y: F.cross_entropy(s, y) + 0.4 * F.cross_entropy(s.flip(-1), y)),
    "reported": Case(words, called="sequences"),
    "a sum by the count": Case(lambda s, y: F.cross_entropy(s, y, reduction="sum") / (y != -100).sum().clamp(min=1)),
    "an index, said": Case(partial(F.cross_entropy, ignore_index=0), 0, lambda y: y != 0),
    "weights, said": Case(partial(F.cross_entropy, weight=WEIGHT), -100, lambda y: WEIGHT[y * (y >= 0)] * (y >= 0)),
    "ctc, said": Case(ctc, 0, lambda y: y[:, 0] >= 0, "sequences"),
    "shifted, said": Case(shifted, -100, lambda y: y[:, 1:] != -100, "sequences"),
    "masked, said": Case(masked, 0, lambda y: y > 0), "focal, said": Case(focal, 0, lambda y: WEIGHT[y] * (y > 0))}
REFUSED = {
    "label_weights=lambda labels: weight[labels * (labels != -100)]": Case(partial(F.cross_entropy, weight=WEIGHT)),
    "label_weights=lambda labels: labels != 0)": Case(partial(F.cross_entropy, ignore_index=0), 0),
    "divided by 12 where the labels count 2": Case(CE(), -100, lambda y: (y != -100).any(1)),
    "divided by 1 where the labels count 12": Case(CE(reduction="sum")),
    "cross_entropy, whose sum is divided by 12 where the labels count 6": Case(
        lambda s, y: CE(reduction="none")(s, y).mean()),
    "divided by 10 where the labels count 12": Case(shifted, called="sequences"),
    "calls cross_entropy, whose sum is divided by 10": Case(partial(words, second=0.3), called="sequences"),
    "does not show a loss of torch's": Case(focal, 0), "calls ctc_loss": Case(ctc, 0, called="sequences"),
    "mse_loss, whose sum is divided by 48 where the labels count 6": Case(
        lambda s, y: F.mse_loss(s, F.one_hot(y.clamp(0), CLASSES).float())),
    "divided by 12 where the labels count 47.3": Case(Softened(WEIGHT), said=lambda y: WEIGHT[y * (y > 0)] * (y >= 0))}


class Before(nn.Module):
    """What is before a token counts in it, also from slice to slice."""

    def forward(self, h: Tensor, carried: tuple[Tensor, ...] | None = None) -> Any:
        sums = torch.cat([*(carried or ()), h], 1).cumsum(1)[:, -h.shape[1]:]
        return h + 0.1 * sums if carried is None else (h + 0.1 * sums, sums[:, -1:])


class Head(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.out, self.loss, self.called = nn.Linear(7, CLASSES), case.loss, CALLED[case.called]

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        scores = self.out(torch.tanh(h))
        return self.loss(*self.called(scores.log_softmax(-1) if isinstance(self.loss, nn.NLLLoss) else scores, y))


class Attending(Head):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.attention = nn.MultiheadAttention(7, 1, batch_first=True)

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.attention(h, h, h, need_weights=False)[0], y)


def model(case: Case, build: Callable[[nn.Module], nn.Module] = copy.deepcopy, head: type[Head] = Head) -> Model:
    return Model([Layer("body", lambda: build(nn.Linear(5, 7)), ("x",), carried=()),
                  Layer("before", Before, carried=("sums",)),
                  Layer("head", lambda: build(head(case)), ("h", "y"), ("loss",), carried=())],
                 ("x", "y"), "y", case.said)


def pipeline(made: Model, **how: Any) -> Pipeline:
    return Pipeline(made, **parts(**{"optimizer": partial(torch.optim.SGD, lr=0.3, momentum=0.5), "stages": [1, 2],
                                     "per_token_loss": True, "microbatches": 4, **how}))


def drawn(case: Case) -> list[dict[str, Tensor]]:
    """Two batches. Their first samples have nearly all labels, the next none at first, the others none at all; or all
    labels count, and those of torch's losses of elements are soft."""
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


@pytest.mark.parametrize("name", ["all of it", "a class of weight 0", "masked, said", "soft"])
def test_equals_whole_batches_in_two_processes_and_lanes(two: World, name: str) -> None:
    assert two.run(trained, name=name) == [plain(RIGHT[name])] * 2
    assert two.run(in_lanes, name=name) == [plain(RIGHT[name])] * 2


@pytest.mark.parametrize("how", [
    {"schedule": "zb_h1"}, {"recompute": 1.0}, {"replicas": 2}, {"replicas": 2, "zero1": True, "schedule": "gpipe"},
    {"schedule": "pipedream", "update_every": 4}, {"skip_not_finite": True}, {"schedule": "seq1f1b", "slices": 3}],
    ids=str)
@pytest.mark.parametrize("name", ["all of it", "a class of weight 0", "masked, said"])
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
    with pytest.raises(UserError) as refusal:
        unweighted.evaluate(data)
    assert what in str(refusal.value)


@pytest.mark.parametrize("slices", [1, 2])
def test_an_evaluation_counts_labels_where_an_update_does_not(slices: int) -> None:
    case = RIGHT["all of it"]
    pipe = pipeline(model(case), per_token_loss=False, slices=slices, schedule="gpipe")
    list(pipe.train(drawn(case)))
    expected = whole(model(case).with_weights(pipe.state_dict(), 0), *drawn(case)).item()
    assert pipe.evaluate(drawn(case)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("per_token", [False, True])
def test_the_loss_of_a_sequential_says_its_weights(per_token: bool) -> None:
    net, loss = nn.Sequential(nn.Conv2d(3, 5, 1), nn.Tanh(), nn.Conv2d(5, CLASSES, 1)), CE(WEIGHT, ignore_index=255)
    batch = {"input": torch.randn(8, 3, 4, 4), "target": torch.randint(CLASSES, (8, 4, 4))}
    batch["target"][2:, 1:] = 255
    pipe = pipeline(Model.sequential(net, loss), per_token_loss=per_token)
    expected = pytest.approx(loss(net(batch["input"]), batch["target"]).item(), rel=1e-5)
    assert pipe.evaluate([batch]) == expected
    assert ([step.loss for step in pipe.train([batch])] == [expected]) == per_token


def test_class_weights_may_change_between_two_calls() -> None:
    case = RIGHT["class weights"]
    first, second = drawn(case)
    pipe = pipeline(model(case))
    list(pipe.train([first]))
    pipe.engine.local_stages[1].modules[2].loss.weight.copy_(WEIGHT.flip(0))
    expected = whole(model(case).with_weights(pipe.state_dict(), 0), second).item()
    assert [step.loss for step in pipe.train([second])] == [pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize(("head", "backend"), [(Head, "eager"), (Attending, None)])
def test_a_loss_that_cannot_be_seen_is_that_of_a_module_or_said(head: type[Head], backend: str | None) -> None:
    """Attention computes other numbers in an evaluation when calls are watched; compiled layers show none."""
    for case in (RIGHT["plain"], Case(F.cross_entropy, -100, lambda y: y != -100)):
        pipe = pipeline(model(case, head=head), compile=backend or False)
        assert pipe.evaluate(drawn(case)) == evaluate_oracle(pipe.model, pipe.state_dict(), drawn(case), 4)
    with pytest.raises(UserError, match="does not show a loss of torch's, as it is compiled or has attention"):
        pipeline(model(RIGHT["a function"], head=head), compile=backend or False).evaluate(drawn(case))


class Contrast(nn.Module):
    """The representations, and either a loss over the samples of a microbatch or the pull of gradients of theirs."""

    def forward(self, r: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        return (r * pull).sum(1).mean() if pull.any() else contrastive(r), r


def contrastive(r: Tensor) -> Tensor:
    """With in-batch negatives."""
    return F.cross_entropy(r @ r.roll(1, 0).T, torch.arange(len(r)))


def test_a_contrastive_loss_is_of_a_microbatch_unless_gradients_of_representations_are_given() -> None:
    """As docs/concepts.md says: another loss with more microbatches, and that of the whole batch in two passes."""
    made = Model([Layer("body", lambda: nn.Linear(5, 7), ("x",), ("r",)),
                  Layer("loss", Contrast, ("r", "pull"), ("loss", "r"))], ("x", "pull"))
    x, zeros, body = torch.randn(8, 5), torch.zeros(8, 7), made.materialize()["body"]
    contrastive(r := body(x)).backward()
    losses = {}
    for count in (1, 2):
        pipe = pipeline(made, per_token_loss=False, stages=[1, 1], microbatches=count)
        losses[count], found = pipe.evaluate([{"x": x, "pull": zeros}], outputs="r")
    assert losses[1] == pytest.approx(contrastive(r).item(), rel=1e-5)
    assert losses[2] < losses[1]
    [pull] = torch.autograd.grad(contrastive(r := found["r"].requires_grad_()), r)
    list(pipe.train([{"x": x, "pull": pull * len(r)}]))
    for name, value in body.named_parameters():
        assert torch.allclose(pipe.state_dict()[f"body.{name}"], value.detach() - 0.3 * value.grad, atol=1e-6)
