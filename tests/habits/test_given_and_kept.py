"""docs/given.md, row by row: what a pipeline copies, changes, shares, consumes and leaves alone of what it is given."""

from __future__ import annotations

import copy
import gc
import os
import random
import signal
import sys
import threading
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
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

FLUSH, STREAMS = ("1f1b", "zb_h1"), ("pipedream", "2bw")
Batches = list[dict[str, Tensor]]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def made_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))


def made_batches(number: int = 3, samples: int = 8) -> Batches:
    random = torch.Generator().manual_seed(1)
    return [{"input": torch.randn(samples, 4, generator=random),
             "target": torch.randint(3, (samples,), generator=random)} for _ in range(number)]


def plain(net: nn.Module, batches: Batches, loss: Callable[..., Tensor] = F.cross_entropy,
          factor: Callable[[int], float] = lambda step: 1.0) -> list[float]:
    """Train as a loop does without a pipeline; return the losses."""
    optimizer, losses = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5), []
    for step, batch in enumerate(batches):
        parts = []
        for x, y in zip(batch["input"].chunk(4), batch["target"].chunk(4), strict=True):
            parts.append(loss(net(x), y))
            (parts[-1] / 4).backward()  # type: ignore[no-untyped-call]
        optimizer.param_groups[0]["lr"] = 0.5 * factor(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts) / 4)
    return losses


def pipeline(model: Model, optimizer: Any = sgd, schedule: str = "1f1b", microbatches: int = 4) -> Pipeline:
    return Pipeline(model, optimizer, stages=2, schedule=schedule, microbatches=microbatches)


def everywhere(two: World, job: Callable[..., Any], **arguments: Any) -> Any:
    """What a job returns in this process, and must return on both ranks."""
    here = job(**arguments)
    assert two.run(job, **arguments) == [here] * 2
    return here


# -- the nn.Sequential of Model.sequential, its loss ----------------------------------------------------


def two_more(net: nn.Sequential) -> None:
    net.append(nn.Linear(3, 3)).append(nn.Linear(3, 3))


def tie(net: nn.Sequential) -> None:
    two_more(net)
    net[6].weight = net[5].weight


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "freeze": lambda net: net[0].requires_grad_(False), "eval": nn.Sequential.eval, "tie": tie,
    "part in eval": lambda net: net[1].eval(),
    "load": lambda net: net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})}


def trained_copy(change: str, when: str, schedule: str = "1f1b") -> list[Any]:
    """The losses with a network that changes at some moment, and what it is with the weights of the pipeline."""
    net = made_net()
    for moment in ("first", "model", "pipeline", "trained"):
        if moment == "model":
            model = Model.sequential(net, nn.CrossEntropyLoss())
        elif moment == "pipeline":
            expected, pipe = copy.deepcopy(net), pipeline(model, schedule=schedule)
        elif moment == "trained":
            before = fingerprint(net.state_dict())
            losses = [step.loss for step in pipe.train(made_batches())]
            assert fingerprint(net.state_dict()) == before
        if moment == when:
            CHANGES[change](net)
    net.load_state_dict(pipe.state_dict(), strict=change != "tie")
    if schedule in FLUSH:
        assert losses == plain(expected, made_batches())
        assert fingerprint(net.state_dict()) == fingerprint(expected.state_dict())
    return [losses, fingerprint(net.state_dict())]


@pytest.mark.parametrize(("change", "when", "schedule"), [
    *((change, "first", "1f1b") for change in CHANGES), ("load", "first", "pipedream"),
    *((change, when, "1f1b") for change in ("freeze", "load") for when in ("model", "pipeline"))])
def test_a_network_is_copied_as_it_is_when_the_pipeline_is_built(two: World, change: str, when: str,
                                                                 schedule: str) -> None:
    everywhere(two, trained_copy, change=change, when=when, schedule=schedule)


@pytest.mark.parametrize(("before", "after"), [
    (list, lambda net: net.append(nn.Linear(3, 3))), (list, lambda net: net.__setitem__(4, nn.Linear(8, 3))),
    (two_more, lambda net: setattr(net[6], "weight", net[5].weight)),
    (tie, lambda net: setattr(net[6], "weight", nn.Parameter(torch.eye(3)))),
    (lambda net: (tie(net), net[5].requires_grad_(False)), lambda net: net[5].requires_grad_(True))])
def test_other_children_or_ties_after_the_model_was_made_are_refused(
        before: Callable[[nn.Sequential], object], after: Callable[[nn.Sequential], object]) -> None:
    net = made_net()
    before(net)
    model = Model.sequential(net, nn.CrossEntropyLoss())
    after(net)
    with pytest.raises(UserError, match="other children, or other ties between them, than when"):
        pipeline(model)
    pipeline(Model.sequential(net, nn.CrossEntropyLoss()))


class Weighted:
    weight = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.weight * F.cross_entropy(output, target)


def test_a_loss_object_is_copied_and_a_function_is_called() -> None:
    loss, batches = Weighted(), made_batches()
    called, copied = (pipeline(Model.sequential(made_net(), each))
                      for each in (lambda output, target: loss(output, target), loss))
    loss.weight = 2.0
    assert [step.loss for step in called.train(batches)] == plain(made_net(), batches, loss)
    assert [step.loss for step in copied.train(batches)] == plain(made_net(), batches)


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
    if schedule in FLUSH and end == "end":
        expected = made_net()
        expected[1].eval()
        plain(expected, made_batches())
        assert state == fingerprint(expected.state_dict())
    return state


@pytest.mark.parametrize("end", ["end", "drain", "evaluate"])
@pytest.mark.parametrize("schedule", FLUSH + STREAMS)
def test_a_module_that_is_built_elsewhere_is_trained_itself(two: World, schedule: str, end: str) -> None:
    everywhere(two, own_modules, schedule=schedule, end=end)


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("schedule", FLUSH + STREAMS)
def test_freezing_later_is_exact_or_refused(schedule: str, between: bool) -> None:
    net, batches, expected = made_net(), made_batches(), made_net()
    pipe = pipeline(model_of(net), schedule=schedule)
    with pytest.raises(UserError, match="requires no gradient now") if schedule in STREAMS else nullcontext():
        for step in pipe.train(batches[:1] if between else batches):
            if not between and step.index == 0:
                net[3].requires_grad_(False)
        net[3].requires_grad_(False)
        list(pipe.train(batches[1:] if between else []))
        plain(expected, batches[:1])
        expected[3].requires_grad_(False)
        plain(expected, batches[1:])
        assert fingerprint(pipe.state_dict()) == fingerprint(expected.state_dict())


def counted_factor(schedule: str) -> list[Any]:
    rates = (1 / number for number in count(1))
    pipe = pipeline(Model.sequential(made_net(), nn.CrossEntropyLoss()),
                    Update(sgd, learning_rate_factor=lambda step: next(rates)), schedule)
    return [[step.learning_rate for step in pipe.train(made_batches())], fingerprint(pipe.state_dict())]


def test_a_factor_that_counts_its_calls_is_asked_once_per_update(two: World) -> None:
    assert everywhere(two, counted_factor, schedule="pipedream")[0][:4] == [0.5, 0.25, 0.5 / 3, 0.125]
    plain(net := made_net(), made_batches(), factor=lambda step: 1 / (step + 1))
    assert everywhere(two, counted_factor, schedule="1f1b")[1] == fingerprint(net.state_dict())


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
    with suppress(ArithmeticError):
        for step in pipe.train(batches, updates=3 if leave == "updates" else None):
            if step.index == 2 and leave == "raise":
                raise ArithmeticError
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


@pytest.mark.parametrize("leave", ["updates", "break", "raise", "stop", "evaluate", "others"])
@pytest.mark.parametrize("schedule", ["1f1b", *STREAMS])
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


def in_calls(calls: list[dict[str, Any]]) -> list[Any]:
    batches, (pipe, _) = iter([next(numbered(8 * i)) for i in range(4)]), noting()
    return [[step.loss for call in calls for step in pipe.train(batches, **call)], fingerprint(pipe.state_dict())]


def test_several_calls_are_one_with_pauses(two: World) -> None:
    assert everywhere(two, in_calls, calls=[{"updates": 3}, {"updates": 5}, {}]) == in_calls([{"pauses": [3, 8]}])


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


# -- batches --------------------------------------------------------------------------------------------


def batches_as(how: str, schedule: str) -> list[Any]:
    """The losses on batches that are handed over in some way, and the state."""
    memory, given = made_batches(1)[0], made_batches()

    def refilled() -> Iterator[dict[str, Tensor]]:
        for batch in given:
            for name in memory:
                memory[name].copy_(batch[name])
            yield memory

    pipe, losses = pipeline(Model.sequential(made_net(), nn.CrossEntropyLoss()), schedule=schedule), []
    for step in pipe.train([UserDict({**b, "more": 1}) for b in given] if how == "mapping" else refilled()):
        losses.append(step.loss)
        if how == "overwritten":
            memory["input"].zero_()
    return [losses, fingerprint(pipe.state_dict())]


@pytest.mark.parametrize("how", ["mapping", "filled again", "overwritten"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_memory_of_a_batch_may_be_used_again(two: World, schedule: str, how: str) -> None:
    found = everywhere(two, batches_as, how=how, schedule=schedule)
    assert found == batches_as("mapping", schedule)
    assert schedule not in FLUSH or found[0] == plain(made_net(), made_batches())


def input_gradient(schedule: str) -> list[float] | None:
    [batch] = made_batches(1)
    x = batch["input"].requires_grad_()
    if schedule == "plain":
        plain(made_net(), [batch])
    else:
        list(pipeline(Model.sequential(made_net(), nn.CrossEntropyLoss()), schedule=schedule).train([batch]))
    return None if x.grad is None else x.grad.flatten().tolist()


@pytest.mark.parametrize("schedule", FLUSH)
def test_a_field_gets_its_gradient_in_the_process_that_reads_it(two: World, schedule: str) -> None:
    assert input_gradient(schedule) == input_gradient("plain")
    assert two.run(input_gradient, schedule=schedule) == [input_gradient("plain"), None]


# -- results, the process -------------------------------------------------------------------------------


def kept_results(schedule: str) -> list[Any]:
    """Whether results stay as they were when training goes on, and the pipeline when they are changed."""
    pipe = pipeline(Model.sequential(made_net(), nn.CrossEntropyLoss()), Update(sgd, average=0.5), schedule)
    list(pipe.train(made_batches()))
    held_out = made_batches(1)
    kept = [pipe.state_dict(), pipe.state_dict(averaged=True), pipe.evaluate(held_out, ("output", "target"))[1]]
    before = [*map(fingerprint, kept)]
    held_out[0]["target"].zero_()
    list(pipe.train(made_batches()))
    same, now = before == [*map(fingerprint, kept)], fingerprint(pipe.state_dict())
    for tensor in (tensor for tensors in kept for tensor in tensors.values()):
        tensor.zero_()
    return [same, now == fingerprint(pipe.state_dict()), now]


def left_behind(schedule: str) -> list[Any]:
    """What of the process a pipeline changes, but for what the first one starts, and what of it is alive after it."""
    def state() -> list[object]:
        return [sorted(thread.name for thread in threading.enumerate()), torch.get_num_threads(), os.getcwd(),
                torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), sys.excepthook,
                [*map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))], warnings.filters[:],
                dict(os.environ), torch.get_rng_state().tolist(), random.getstate()]

    pipeline(model_of(net := made_net()))
    before, pipe, batches = state(), pipeline(model_of(net), schedule=schedule), (batch for batch in made_batches())
    list(pipe.train(batches, updates=1 if schedule in FLUSH else 4))
    pipe.evaluate(made_batches())
    alive = [weakref.ref(batches), weakref.ref(pipe), weakref.ref(net[0].weight)]
    del batches
    found = [alive[0]() is None]
    del pipe, net
    gc.collect()
    return [before == state(), found + [each() is None for each in alive[1:]]]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_results_are_copies_and_nothing_is_left_behind(two: World, schedule: str) -> None:
    assert everywhere(two, kept_results, schedule=schedule)[:2] == [True, True]
    assert everywhere(two, left_behind, schedule=schedule) == [True, [True] * 3]
