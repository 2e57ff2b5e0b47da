"""docs/given.md: what a pipeline copies, changes, shares, consumes and leaves alone of what it is given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jobs import fingerprint
from torch import Tensor, nn
from world import World

from vpipe import Layer, Model, Pipeline, Update
from vpipe.errors import UserError

Batches = list[dict[str, Tensor]]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def made_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))


def made_batches() -> Batches:
    random = torch.Generator().manual_seed(1)
    return [{"input": torch.randn(8, 4, generator=random),
             "target": torch.randint(3, (8,), generator=random)} for _ in range(3)]


def plain(net: nn.Module, batches: Batches) -> None:
    """Train as a loop does without a pipeline."""
    optimizer = sgd([p for p in net.parameters() if p.requires_grad])
    for batch in batches:
        for x, y in zip(batch["input"].chunk(4), batch["target"].chunk(4), strict=True):
            (F.cross_entropy(net(x), y) / 4).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def pipeline(model: Model, optimizer: Any = sgd, schedule: str = "1f1b") -> Pipeline:
    return Pipeline(model, optimizer, stages=2, schedule=schedule, microbatches=4)


# -- the nn.Sequential of Model.sequential ----------------------------------------------------


@pytest.mark.parametrize("change", [
    lambda net: net.append(nn.Linear(3, 3)), lambda net: net.__setitem__(4, nn.Linear(8, 3)),
    lambda net: setattr(net[6], "weight", net[5].weight)], ids=["append", "replace", "tie"])
def test_other_children_or_ties_after_the_model_was_made_are_refused(change: Callable[[nn.Sequential], object]) -> None:
    net = made_net().append(nn.Linear(3, 3)).append(nn.Linear(3, 3))
    model = Model.sequential(net, nn.CrossEntropyLoss())
    change(net)
    with pytest.raises(UserError, match="other children, or other ties between them, than when"):
        pipeline(model)


# -- modules of one's own, functions --------------------------------------------------------------------


class Loss(nn.Module):
    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(h, target)


def model_of(net: nn.Sequential) -> Model:
    """Layers whose build functions return the user's own modules."""
    return Model([*(Layer(str(i), partial(net.__getitem__, i), ("h",) if i else ("input",)) for i in range(len(net))),
                  Layer("loss", Loss, ("h", "target"), ("loss",))], batch=("input", "target"))


def own_modules(schedule: str, end: str) -> dict[str, str]:
    """The state where the user's modules, one of them in evaluation mode, have the same, and keep their modes."""
    net = made_net()
    net[1].eval()
    pipe = pipeline(model_of(net), schedule=schedule)
    for step in pipe.train(made_batches()):
        assert all(torch.isfinite(parameter + 0).all() for parameter in net.parameters()), "they may be looked at"
        if end != "end" and step.index == 1:
            break
    if end == "evaluate":
        pipe.evaluate(made_batches())
    pipe.drain()
    here = {str(layer) for stage in pipe.stages for layer in stage.layers}
    mine = fingerprint({name: value for name, value in net.state_dict().items() if name[0] in here})
    modes, state = [net[0].training, net[1].training], fingerprint(pipe.state_dict())
    assert (modes, mine) == ([True, False], {name: state[name] for name in mine})
    return state


@pytest.mark.parametrize("end", ["end", "drain", "evaluate"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "2bw"])
def test_a_module_that_is_built_elsewhere_is_trained_itself(two: World, schedule: str, end: str) -> None:
    assert two.run(own_modules, schedule=schedule, end=end) == [own_modules(schedule, end)] * 2


class Merging(nn.Linear):
    """Doubles its weight in evaluation mode, as adapters merge theirs."""

    def train(self, mode: bool = True) -> nn.Linear:
        self.weight.data *= {(True, False): 2.0, (False, True): 0.5}.get((self.training, mode), 1.0)
        return super().train(mode)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_an_evaluation_calls_train_of_the_layers_again(schedule: str) -> None:
    states = []
    for evaluated in (False, True):
        net = made_net()
        net[3] = nn.Sequential(Merging(8, 8), nn.BatchNorm1d(8).eval())
        nn.init.eye_(net[3][0].weight)
        nn.init.zeros_(net[3][0].bias)
        pipe = pipeline(model_of(net), schedule=schedule)
        for batch in made_batches():
            list(pipe.train([batch]))
            if evaluated:
                pipe.evaluate([batch])
        states.append(fingerprint(pipe.state_dict()))
        assert [part.training for part in net[3].modules()] == [True, True, False]
    assert states[0] == states[1]


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_freezing_later_is_exact_or_refused(schedule: str, between: bool) -> None:
    net, batches, expected = made_net(), made_batches(), made_net()
    pipe = pipeline(model_of(net), schedule=schedule)
    with pytest.raises(UserError, match="requires no gradient now") if schedule == "pipedream" else nullcontext():
        for step in pipe.train(batches[:1] if between else batches):
            if not between and step.index == 0:
                net[3].requires_grad_(False)
        net[3].requires_grad_(False)
        list(pipe.train(batches[1:] if between else []))
        plain(expected, batches[:1])
        expected[3].requires_grad_(False)
        plain(expected, batches[1:])
        assert fingerprint(pipe.state_dict()) == fingerprint(expected.state_dict())


def test_freezing_a_whole_stage_between_updates_is_refused_with_the_remedy() -> None:
    net = made_net()
    steps = pipeline(model_of(net)).train(made_batches())
    next(steps)
    net[:3].requires_grad_(False)
    with pytest.raises(UserError, match=r"(?s) with a gradient for another .* freeze a whole stage"):
        next(steps)


def test_a_factor_that_counts_its_calls_is_asked_once_per_update() -> None:
    rates = (1 / number for number in count(1))
    pipe = pipeline(model_of(made_net()), Update(sgd, learning_rate_factor=lambda step: next(rates)), "pipedream")
    assert [step.learning_rate for step in pipe.train(made_batches())][:4] == [0.5, 0.25, 0.5 / 3, 0.125]


# -- iterators ------------------------------------------------------------------------------------------


def numbered(first: int = 0) -> Iterator[dict[str, Tensor]]:
    """Batches of eight samples, each with its number, without end."""
    for batch in count():
        x = torch.arange(8.0) + 8 * batch + first
        yield {"input": x[:, None] / 100, "target": x}


class Notes(nn.Module):
    """Note the numbers of the samples that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        self.seen += target.tolist() if self.training else []
        return (h - target[:, None] / 100).square().mean()


def noting(schedule: str = "pipedream") -> tuple[Pipeline, list[float]]:
    """A pipeline, and the numbers of the samples that its last stage has trained."""
    notes = Notes()
    layers = [Layer("front", lambda: nn.Linear(1, 4), ("input",)), Layer("back", lambda: nn.Linear(4, 4)),
              Layer("loss", lambda: notes, ("h", "target"), ("loss",))]
    return pipeline(Model(layers, batch=("input", "target")), schedule=schedule), notes.seen


def in_parts(schedule: str, leave: str) -> list[Any]:
    """Positions after calls of ``train`` of which the first is left within a batch if the schedule allows it; the next
    batch of the iterator; the state; the samples."""
    batches, positions = numbered(), []
    pipe, seen = noting(schedule)
    for step in pipe.train(batches, updates=3 if leave == "updates" else None):
        if step.index == 2 and leave == "stop":
            pipe.stop()
        elif step.index == 2 and leave != "updates":
            break
    if leave == "evaluate":
        pipe.evaluate([next(numbered())])
    for given in (numbered(first=1000) if leave == "others" else batches, batches):
        pipe.drain()
        positions.append([pipe.position.microbatches, pipe.position.begun, pipe.position.samples])
        list(pipe.train(given, updates=2))
    return [positions, int(next(batches)["target"][0]), fingerprint(pipe.state_dict()), seen]


@pytest.mark.parametrize("leave", ["updates", "break", "stop", "evaluate", "others"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_the_next_call_goes_on_with_the_rest_of_what_was_read(two: World, schedule: str, leave: str) -> None:
    *here, seen = in_parts(schedule, leave)
    [(first, begun, samples), (then, begun_then, _)], after, _ = here
    assert (begun, samples) == (first % 4, 2 * first)
    if leave != "others":
        assert seen == list(range(len(seen))), "no sample is lost, and none trained twice"
        assert begun_then == then % 4
        assert after == -(-len(seen) // 8) * 8, "no batch is read ahead of its use"
    else:
        assert seen[samples:][:2] == [1000, 1001], "other batches begin with their first"
    *there, last = zip(*two.run(in_parts, schedule=schedule, leave=leave), strict=True)
    assert (there, last[1]) == ([(each, each) for each in here], seen)


def test_several_calls_are_one_with_pauses() -> None:
    found = []
    for calls in [{"updates": 3}, {"updates": 5}, {}], [{"pauses": [3, 8]}]:
        batches, (pipe, _) = iter([next(numbered(8 * i)) for i in range(4)]), noting()
        found.append([step.loss for call in calls for step in pipe.train(batches, **call)])
    assert found[0] == found[1]


def test_two_trainings_may_take_turns_on_one_iterator() -> None:
    batches, (pipe, seen) = numbered(), noting()
    assert len(list(zip(pipe.train(batches, updates=5), pipe.train(batches, updates=5), strict=True))) == 5
    assert seen == list(range(20))


def test_a_first_batch_that_fails_is_still_the_one_under_way(tmp_path: Path) -> None:
    batches, (pipe, _), (resumed, seen) = [next(numbered(8 * i)) for i in range(2)], noting(), noting()
    list(pipe.train(batches, updates=3))
    pipe.save(tmp_path / "saved")
    assert resumed.load(tmp_path / "saved").begun == 3
    with pytest.raises(UserError, match="but not"):
        list(resumed.train([{}]))
    list(resumed.train(batches))
    assert seen == list(range(6, 16))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_nothing_is_kept_alive(schedule: str) -> None:
    pipe, batches = pipeline(model_of(net := made_net()), schedule=schedule), (batch for batch in made_batches())
    list(pipe.train(batches, updates=1 if schedule == "1f1b" else 4))
    alive = [weakref.ref(batches), weakref.ref(pipe), weakref.ref(net[0].weight)]
    del batches
    assert alive[0]() is None
    del pipe, net
    gc.collect()
    assert [each() for each in alive] == [None] * 3
