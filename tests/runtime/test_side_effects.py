"""What layers change in their forward: buffers, random states and inputs are exact, or refused in our own words."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from golden import refusal
from models import WIDTH, Frozen, Head, RawMatmul, Recurrent, Words, between, rich_batches
from oracles import Momentum, equals_its_oracle, pipeline_of
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Cut, Layer, Model, Pipeline
from vpipe.errors import RunError, UserError
from vpipe.runtime.side_effects import WATCHED

Build = Callable[[], nn.Module]


def model_of(*builds: Build) -> Model:
    """Words, these layers, head."""
    return between(*(Layer(f"layer{i}", build) for i, build in enumerate(builds)))


def assert_exact(model: Model, schedule: str = "1f1b", partition: Sequence[int] = (1, 2, 1),
                 recompute: float | list[Any] = 0.0, executor: str = "overlapped") -> Pipeline:
    """Train with four microbatches per batch, in flight together, and by plain PyTorch or the oracle: the same."""
    return equals_its_oracle(model, rich_batches(2, 8), schedule=schedule, partition=list(partition),
                             recompute=recompute, executor=executor, optimizer=Momentum())[0]


# -- recompute of what a forward changes ---------------------------------------------------------------


class Buffered(nn.Module):
    """A linear layer with buffers."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


class Normaliser(Buffered):
    """Divides by a running mean square that it changes in place; the graph saves that very buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(scale=torch.ones(()))

    def forward(self, h: Tensor) -> Tensor:
        self.scale.lerp_(h.detach().square().mean(), 0.2)
        return torch.tanh(self.linear(h) / self.scale)


class Counter(Buffered):
    """A buffer that every forward replaces, one that is not saved, one changed behind autograd's back, a late one."""

    n: Tensor
    unsaved: Tensor
    hidden: Tensor
    late: Tensor

    def __init__(self) -> None:
        super().__init__(n=torch.zeros(()), hidden=torch.zeros(WIDTH))
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)
        self.drop = nn.Dropout(0.3)

    def forward(self, h: Tensor) -> Tensor:
        self.n = self.n + 1
        self.unsaved += 1
        self.hidden.data.add_(h.detach().mean((0, 1)))
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(()), persistent=False)
        self.late.mul_(0.875)
        h = h + (self.n + self.unsaved) / 64 + self.hidden / 64 + self.late.clone()
        return torch.tanh(self.drop(self.linear(h)))


class Quantiser(Buffered):
    """Takes its codes from the first forward; the later ones move them."""

    codes: Tensor
    ready: Tensor

    def __init__(self) -> None:
        super().__init__(codes=torch.zeros(WIDTH), ready=torch.tensor(False))

    def forward(self, h: Tensor) -> Tensor:
        if self.ready:
            self.codes.mul_(0.75).add_(h.detach().mean((0, 1)), alpha=0.25)
        else:
            self.codes.copy_(h.detach()[0, 0])
            self.ready.fill_(True)
        return torch.tanh(self.linear(h) * (1 + self.codes.clone()))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=None)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.norm(h))


CHANGING: dict[str, Build] = {"normaliser": Normaliser, "counter": Counter, "quantiser": Quantiser,
                              "spectral norm": spectral, "batch norm": Normed}


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize(("schedule", "partition", "recompute", "executor"), [
    ("1f1b", [2, 2], 1.0, "overlapped"), ("1f1b", [1, 3], [[], [1]], "overlapped"),
    ("1f1b", [2, 1, 1], 0.0, "overlapped"),
    ("zb_h1", [2, 2], 1.0, "overlapped"), ("zb_h1", [2, 1, 1], 0.0, "overlapped"),
    ("pipedream", [1, 1, 1, 1], 1.0, "overlapped"),
    pytest.param("gpipe", [2, 2], 1.0, "async_threaded", marks=pytest.mark.extras("async_threaded"))])
def test_what_a_forward_changes_is_exact_with_several_microbatches_in_flight(
        name: str, schedule: str, partition: list[int], recompute: float | list[Any], executor: str) -> None:
    """A backward finds in its graph, or recomputes, what its own forward made, though others have changed it since."""
    assert_exact(model_of(CHANGING[name], CHANGING[name]), schedule, partition, recompute, executor)


def test_a_recomputed_layer_keeps_what_its_forwards_made_and_shares_what_it_shared() -> None:
    """Two buffers that are one tensor are one in the recompute, too."""
    class Pair(Buffered):
        one: Tensor
        other: Tensor

        def __init__(self) -> None:
            both = torch.zeros(())
            super().__init__(one=both, other=both)

        def forward(self, h: Tensor) -> Tensor:
            self.one.add_(1)
            return torch.tanh(self.linear(h) * (1 + self.other / 8))

    pipe = assert_exact(model_of(Pair, Pair), "1f1b", [1, 2, 1], 1.0)
    module: Any = pipe.engine.local_stages[1].modules[1]
    assert module.one is module.other
    assert module.one == 8


def test_only_what_changes_is_copied() -> None:
    class Table(Buffered):
        n: Tensor
        table: Tensor

        def __init__(self) -> None:
            super().__init__(table=torch.zeros(WIDTH), n=torch.zeros(()))

        def forward(self, h: Tensor) -> Tensor:
            self.n.add_(1)
            return torch.tanh(self.linear(h) + self.table)

    pipe = assert_exact(model_of(Table), "1f1b", [1, 1, 1], 1.0)
    effects = pipe.engine.local_stages[1]._spans[0].effects
    before = effects.begin_forward()
    module: Any = pipe.engine.local_stages[1].modules[1]
    [(_, _, held, given, _)] = before.buffers
    assert held["table"] is given["table"] is module.table
    assert held["n"] is not given["n"] is module.n
    assert before.random == []


class Skipped(nn.Module):
    """Leaves out a part of itself as random numbers say that torch's seeds have nothing to do with."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.linear, self.source = nn.Linear(WIDTH, WIDTH), source
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, h: Tensor) -> Tensor:
        number = {"python": random.random, "numpy": np.random.rand,
                  "own": lambda: float(torch.rand((), generator=self.generator))}[self.source]()
        return h + number * torch.tanh(self.linear(h)) if number > 0.25 else h


@pytest.mark.parametrize("source", ["python", "numpy", "own"])
def test_a_recompute_draws_the_same_random_numbers_and_takes_none_away(source: str) -> None:
    runs = []
    for recompute in (0.0, 1.0):
        random.seed(3)
        np.random.seed(3)
        pipe = pipeline_of(model_of(lambda: Skipped(source), lambda: Skipped(source)), partition=[1, 2, 1],
                           recompute=recompute)
        runs.append([*(step.loss for step in pipe.train(rich_batches(2, 8))), random.random(), np.random.rand(),
                     *(float(value.sum()) for value in pipe.state_dict().values())])
    assert runs[0] == runs[1]


def test_a_hook_on_an_input_runs_once_where_the_layer_is_recomputed() -> None:
    class Halves(Buffered):
        def forward(self, h: Tensor) -> Tensor:
            if h.requires_grad:
                h.register_hook(lambda gradient: gradient * 0.5)
            return torch.tanh(self.linear(h))

    assert_exact(model_of(Halves, Halves), "1f1b", [1, 1, 1, 1], 1.0)


@pytest.mark.parametrize("recompute", [0.0, 1.0])
def test_a_buffer_that_a_layer_hands_on_is_what_it_was_at_its_forward(recompute: float) -> None:
    """In one process the next stage reads it in the same memory, perhaps after another forward."""
    class Counts(Buffered):
        n: Tensor

        def __init__(self) -> None:
            super().__init__(n=torch.zeros(1))

        def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
            self.n.data.add_(1)
            return h * 2, self.n

    class Adds(nn.Module):
        def forward(self, h: Tensor, n: Tensor) -> Tensor:
            return torch.tanh(h + n / 8)

    model = between(Layer("counts", Counts, ("h",), ("h", "n")), Layer("adds", Adds, ("h", "n"), ("h",)))
    assert_exact(model, "gpipe", [2, 2], recompute)
    assert_exact(model, "1f1b", [1, 1, 2], recompute)


class Later(Buffered):
    """Changes a buffer from its sixth forward on."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__(n=torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        if self.calls >= 6:
            self.n.add_(1)
        return torch.tanh(self.linear(h) + self.n)


class Kept(Later):
    """Changes a buffer through another reference than its module's."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [self.n]

    def forward(self, h: Tensor) -> Tensor:
        self.parts[0].add_(1)
        return torch.tanh(self.linear(h))


@pytest.mark.parametrize(("build", "recompute"), [(Later, 1.0), (Kept, 0.0), (Kept, 1.0)])
def test_a_buffer_that_changes_late_or_through_another_reference_is_refused(build: Build, recompute: float) -> None:
    assert_exact(model_of(Later), "1f1b", [1, 1, 1])
    assert refusal(assert_exact, model_of(build), "1f1b", [1, 1, 1], recompute) == (
        f"error: 'layer0.n' was changed by a forward, but no copy of it: none of the first {WATCHED} forwards did so, "
        "or the layer keeps a reference beside the module's own\nhint: read the buffer from its module in every "
        "forward, as in self.mean; a layer that changes a buffer late cannot be recomputed")


def test_a_table_that_grows_with_longer_samples_is_exact_where_it_is_recomputed() -> None:
    """As rotary positions keep theirs: replaced late, in training or in an evaluation."""
    class Grows(Buffered):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(6.0)[:, None], persistent=False)

        def forward(self, h: Tensor) -> Tensor:
            if h.shape[1] > len(self.table):
                self.table = torch.arange(float(h.shape[1]))[:, None]
            return torch.tanh(self.linear(h) + self.table[:h.shape[1]] / len(self.table))

    pipe, _ = equals_its_oracle(model_of(Grows, Grows), rich_batches(2, 8), rich_batches(2, 8, lengths=(9, 7)),
                                partition=[1, 2, 1], recompute=1.0, optimizer=Momentum())
    pipe.evaluate(rich_batches(1, 8, lengths=(11,)))
    assert len(list(pipe.train(rich_batches(1, 8)))) == 1


# -- changes in place behind a cut ---------------------------------------------------------------------


class InPlace(nn.Module):
    """Changes its input in place, then multiplies."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(self.change(h))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu_, "dropout": lambda h: F.dropout(h, 0.3, True, inplace=True), "mul": lambda h: h.mul_(2),
    "part": lambda h: (h[:, 1:].add_(1), h)[1], "data": lambda h: (h.data.mul_(2), h)[1],
    "view": lambda h: h.view(-1).neg_().view_as(h)}


@pytest.mark.parametrize(("change", "schedule", "recompute"), [
    *((change, "1f1b", recompute) for change in CHANGES for recompute in (0.0, 1.0)),
    ("relu", "1f1b", [[], [2], []]), ("relu", "1f1b", [[], [3], []]), ("relu", "zb_h1", 0.0), ("relu", "zb_h1", 1.0),
    ("dropout", "pipedream", 0.0), ("dropout", "pipedream", 1.0)])
def test_changing_the_input_of_a_stage_in_place_is_exact(change: str, schedule: str,
                                                         recompute: float | list[list[int]]) -> None:
    def build() -> nn.Module:
        return InPlace(CHANGES[change])

    pipe = assert_exact(model_of(RawMatmul, build, build), schedule, [2, 2, 1], recompute)
    assert pipe.evaluate(rich_batches(2, 8, seed=9)) > 0


def skipping(change: Callable[[Tensor], Tensor]) -> Model:
    """A layer changes in place what the one before has read and a later one on another stage reads, changed."""
    class Doubles(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h * 2

    class Adds(nn.Module):
        def forward(self, h: Tensor, g: Tensor) -> Tensor:
            return torch.tanh(h + g)

    return between(Layer("first", Doubles, ("h",), ("g",)), Layer("changes", lambda: InPlace(change), ("h",), ("k",)),
                   Layer("adds", Adds, ("h", "g"), ("g",)), Layer("adds2", Adds, ("k", "g"), ("h",)))


@pytest.mark.parametrize("recompute", [0.0, [[], [2], []], 1.0])
def test_a_skip_is_read_changed_as_in_plain_pytorch(recompute: float | list[list[int]]) -> None:
    assert_exact(skipping(lambda h: h.mul_(1.5)), "1f1b", [2, 1, 3], recompute)


def test_an_input_that_is_needed_again_may_not_be_changed_in_place_by_a_later_stage_of_its_process() -> None:
    """By a recompute of the stage that handed it on, or by that stage's graph, where plain PyTorch refuses it, too."""
    with pytest.raises(UserError, match="layer 'first' is recomputed, but its input was changed in place by a later"):
        assert_exact(skipping(lambda h: h.mul_(1.5)), "1f1b", [2, 1, 3], [[1], [], []])
    with pytest.raises(RunError, match=r"backward of .* raised RuntimeError: one of the variables needed .* modified"):
        assert_exact(model_of(nn.Tanh, lambda: InPlace(F.relu_)), "1f1b", [2, 2])


@pytest.mark.parametrize("recompute", [0.0, 1.0])
def test_a_skip_that_its_rank_keeps_for_a_later_stage_is_not_changed_by_another_rank(recompute: float) -> None:
    """Neither in training nor in an evaluation: the later stage would read what it was."""
    text = ("error: stage 1, which starts at layer 'changes', changes its input in place\nhint: use the operation that "
            "is not in place there (inplace=False): the input is needed again, by recompute or by another layer")
    for run in (lambda pipe: list(pipe.train(rich_batches(1, 8))), lambda pipe: pipe.evaluate(rich_batches(1, 8))):
        pipe = Pipeline(skipping(lambda h: h.mul_(1.5)), Momentum(), Cut((2, 1, 1, 2), recompute=recompute),
                        "interleaved", 4)
        assert pipe.placement == ((0,), (1,), (0,), (1,))
        assert refusal(run, pipe) == text
    assert_exact(skipping(lambda h: h * 1.5), "interleaved", [2, 1, 1, 2], recompute)


@pytest.mark.parametrize("recompute", [0.0, 1.0])
@pytest.mark.parametrize("second", [lambda h: h, lambda h: h.view(-1), Tensor.detach, torch.clone])
def test_one_of_two_inputs_in_the_same_memory_may_not_be_changed_in_place(second: Callable[[Tensor], Tensor],
                                                                          recompute: float) -> None:
    class Gives(nn.Linear):
        def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
            return (h := super().forward(h)), second(h)

    class Takes(InPlace):
        def forward(self, h: Tensor, g: Tensor) -> Tensor:
            return super().forward(h) + g.view_as(h)

    model = between(Layer("gives", lambda: Gives(WIDTH, WIDTH), ("h",), ("h", "g")),
                    Layer("takes", lambda: Takes(lambda h: h.mul_(2)), ("h", "g"), ("h",)))
    with nullcontext() if second is torch.clone else pytest.raises(UserError, match="stage 1, which starts at"):
        assert_exact(model, "1f1b", [2, 2], recompute)


@pytest.mark.parametrize("recompute", [0.0, 1.0])
def test_an_input_without_a_gradient_may_be_changed_in_place(recompute: float) -> None:
    assert_exact(words_of(Frozen, lambda: InPlace(F.relu_)), "1f1b", [1, 1, 1], recompute)


def test_a_layer_that_changes_nothing_gets_its_input_as_it_came_and_one_that_does_gets_it_without_a_copy() -> None:
    seen: dict[str, list[tuple[bool, int, int]]] = {"still": [], "changes": []}

    class Looks(InPlace):
        def __init__(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
            super().__init__(change)
            self.name = name

        def forward(self, h: Tensor) -> Tensor:
            output = super().forward(h)
            seen[self.name].append((h.is_leaf, h.data_ptr(), output.data_ptr()))
            return output

    pipe = pipeline_of(model_of(lambda: Looks("still", lambda h: h), lambda: Looks("changes", F.relu_)), stages=4)
    list(pipe.train(rich_batches(3, 8)))
    assert [leaf for leaf, *_ in seen["still"]] == [False] * WATCHED + [True] * (12 - WATCHED)
    assert not any(leaf for leaf, *_ in seen["changes"])
    handed_on, taken = [memory for *_, memory in seen["still"]], [memory for _, memory, _ in seen["changes"]]
    assert taken[WATCHED:] == handed_on[WATCHED:], "an alias"


def test_a_layer_that_changes_its_input_late_is_refused() -> None:
    class ChangesLater(Buffered):
        def forward(self, h: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(h.relu_() if self.calls > WATCHED else h)

    with pytest.raises(UserError, match="stage 1, which starts at layer 'layer0', changes its input in place"):
        assert_exact(model_of(ChangesLater), "1f1b", [1, 1, 1])


# -- parameters in a forward ---------------------------------------------------------------------------


class Renorming(Words):
    def __init__(self) -> None:
        super().__init__()
        self.word.max_norm = 1.0


def words_of(build: Build, then: Build = RawMatmul) -> Model:
    """A first layer of one's own, and one behind it."""
    return Model([Layer("words", build, ("ids",), ("h",)), Layer("then", then),
                  Layer("head", Head, ("h", "labels"), ("loss",))], batch=("ids", "labels"))


class Clips(Words):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.word.weight.clamp_(-0.5, 0.5)
        return super().forward(ids)


@pytest.mark.parametrize(("build", "schedule", "recompute"), [
    (Renorming, "1f1b", 0.0), (Renorming, "gpipe", 1.0), (Renorming, "zb_h1", 0.0), (Renorming, "zb_h1", 1.0),
    (Clips, "1f1b", 0.0)])
def test_a_forward_that_changes_a_weight_in_place_is_exact_with_a_flush(build: Build, schedule: str,
                                                                        recompute: float) -> None:
    assert_exact(words_of(build), schedule, [1, 1, 1], recompute)


CHANGED = ("error: 'words.word.weight' was changed in place by a forward, which must find it unchanged when it is "
           "recomputed, or as long as microbatches hold that version of it\nhint: change parameters in the optimizer; "
           "or choose a schedule with a flush, such as 1f1b, and no recompute for the layer (nn.Embedding with "
           "max_norm: a flush)")


class Moves(Words):
    def forward(self, ids: Tensor) -> Tensor:
        self.word.weight.data = self.word.weight.data.clamp(-0.5, 0.5)
        return super().forward(ids)


class Replaces(Words):
    def forward(self, ids: Tensor) -> Tensor:
        self.word.weight = nn.Parameter(self.word.weight * 0.5)
        return super().forward(ids)


class Backward(Words):
    def forward(self, ids: Tensor) -> Tensor:
        self.word.weight.square().sum().backward()
        return super().forward(ids)


@pytest.mark.parametrize(("build", "schedule", "recompute", "text"), [
    (Clips, "1f1b", 1.0, CHANGED), (Clips, "pipedream", 0.0, CHANGED), (Renorming, "pipedream", 0.0, CHANGED),
    (Renorming, "2bw", 0.0, CHANGED),
    (Moves, "1f1b", 0.0, "error: 'words.word.weight' got other memory in a forward (.data = ...), where its optimizer "
                         "does not find it\nhint: change parameters in place, in the optimizer"),
    (Replaces, "1f1b", 0.0, "error: 'words.word.weight' was replaced by another parameter in a forward, which no "
                            "optimizer steps\nhint: make the parameter when the layer is built, and let an optimizer "
                            "change it"),
    *((Backward, schedule, recompute,
       "error: 'words.word.weight' got a gradient in a forward: its layer calls backward() there\nhint: take gradients "
       "in a forward with torch.autograd.grad, or add the term to the loss")
      for schedule, recompute in (("1f1b", 0.0), ("pipedream", 1.0)))])
def test_a_forward_that_changes_parameters_is_refused(build: Build, schedule: str, recompute: float, text: str) -> None:
    pipe = Pipeline(words_of(build), Momentum(), Cut([1, 1, 1], recompute=recompute), schedule, 4)
    assert refusal(lambda: list(pipe.train(rich_batches(1, 8)))) == text


class Flattens(Recurrent):
    """Puts its parameters into other memory in every forward, as flatten_parameters does on a GPU."""

    def forward(self, hidden: Tensor) -> Tensor:
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()
        return super().forward(hidden)


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", 0.0), ("zb_h1", 1.0), ("pipedream", 0.0)])
def test_recurrent_layers_may_flatten_their_parameters_in_forward(schedule: str, recompute: float) -> None:
    assert_exact(model_of(Flattens), schedule, [1, 1, 1], recompute)
