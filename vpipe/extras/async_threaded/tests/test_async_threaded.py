"""Forwards in threads and streams of their own, and the bits of any other executor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import jobs
import pytest
import torch
from golden import refusal
from jobs import pipeline
from models import WIDTH, norm_model, rich_batches, rich_model
from test_executors import check_on_a_gpu, out_of_turn
from torch import Tensor, nn

from vpipe import Layer, Model
from vpipe.errors import RunError, UserError
from vpipe.extras.async_threaded import worker as threaded
from vpipe.extras.async_threaded.worker import DeviceStreams, _added
from vpipe.schedules.kinds import Action, Op


class Told(torch.autograd.Function):
    """Tells in which thread its forward and its backward run."""

    threads: ClassVar[list[tuple[str, int]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Told.threads.append(("F", threading.get_ident()))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Told.threads.append(("B", threading.get_ident()))
        return gradients[0]


class Tells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Told.apply(self.linear(x))  # type: ignore[no-any-return,no-untyped-call]


class Loss(nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (x - target).square().mean()


def told_model() -> Model:
    return Model([Layer("tells", Tells, ("x",), ("h",)), Layer("loss", Loss, ("h", "target"), ("loss",))],
                 batch=("x", "target"))


def batch(samples: int = 8) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    return {name: torch.randn(samples, WIDTH, generator=random) for name in ("x", "target")}


def test_forwards_have_threads_of_their_own_and_autograd_the_callers() -> None:
    Told.threads.clear()
    pipe = out_of_turn(pipeline(told_model(), stages=1, schedule="gpipe", microbatches=4, executor="async_threaded"))
    list(pipe.train([batch(), batch()]))
    forwards = [thread for op, thread in Told.threads if op == "F"]
    assert forwards[:4] == forwards[4:], "a microbatch's thread is that of the batch before"
    assert len(set(forwards)) == 4
    assert threading.get_ident() not in forwards
    assert {thread for op, thread in Told.threads if op == "B"} == {threading.get_ident()}
    usage = pipe.engine.workers[0].usage(0)
    assert usage.forward_s > 0
    assert usage.communication_s == 0


def test_threads_have_the_context_variables_of_the_script() -> None:
    factor = ContextVar("factor", default=1.0)

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * factor.get()

    torch.manual_seed(0)
    net = nn.Sequential(Scaled(WIDTH, WIDTH))
    losses = []
    factor.set(3.0)
    for executor in ("overlapped", "async_threaded"):
        pipe = pipeline(Model.sequential(net, nn.MSELoss()), stages=1, schedule="gpipe", microbatches=4,
                        executor=executor)
        losses.append([step.loss for step in pipe.train([{"input": batch()["x"], "target": batch()["target"]}])])
    assert losses[0] == losses[1]


def test_threads_of_one_rank_give_the_same_bits_when_they_go_on_at_one_time() -> None:
    states, losses = [], []
    for model in (rich_model, norm_model):
        for executor in ("overlapped", "async_threaded"):
            pipe = pipeline(model(), stages=1, schedule="gpipe", microbatches=8, executor=executor)
            if executor == "async_threaded":
                out_of_turn(pipe)
            losses.append([step.loss for step in pipe.train(rich_batches(3, 16))])
            states.append(jobs.fingerprint(pipe.state_dict()))
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
    assert states[0] == states[1]
    assert states[2] == states[3]


class Raises(nn.Module):
    """Of four forwards the third is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise IndexError("the third is wrong")
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("in_turn", [True, False])
def test_a_failure_in_a_thread_is_named_as_any(in_turn: bool) -> None:
    model = Model([Layer("raises", Raises, ("x",), ("h",)), Layer("loss", Loss, ("h", "target"), ("loss",))],
                  batch=("x", "target"))
    pipe = pipeline(model, stages=1, schedule="gpipe", microbatches=4, executor="async_threaded")
    if not in_turn:
        out_of_turn(pipe)
    assert refusal(lambda: list(pipe.train([batch()])), kind=RunError) == (
        "error: the forward of layer 0 'raises' on x float32[2, 12] raised IndexError: the third is wrong (rank 0, "
        "stage 0, microbatch 2, action 0F2)\n"
        "hint: make the layer accept these inputs, or change the batch's field 'x'")
    assert pipe.engine.local_stages[0].modules[0].calls == 3, "what came behind it did not run"


def test_gradients_are_added_in_the_order_of_the_microbatches() -> None:
    """1 is lost beside 1e8, unless the two large ones have met before."""
    w = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    v = [None, torch.tensor([2.0]), torch.tensor([3.0])]
    assert _added([[w[number], v[number]] for number in range(3)]) == [torch.tensor([0.0]), torch.tensor([5.0])]


def test_the_turned_program_is_what_runs() -> None:
    pipe = pipeline(rich_model(), stages=2, schedule="gpipe", microbatches=3, executor="async_threaded")
    done: list[Action] = []
    for worker in pipe.engine.workers.values():
        execute = worker.execute
        worker.execute = lambda action, execute=execute: (done.append(action), execute(action))  # type: ignore
    list(pipe.train(rich_batches(1, 6)))
    for stage in (0, 1):
        assert [action.microbatch for action in done if (action.op, action.stage) == (Op.BACKWARD, stage)] == [2, 1, 0]


def hooked_model() -> Model:
    def build() -> nn.Module:
        module = Tells()
        module.linear.bias.register_hook(lambda gradient: None)
        return module

    return Model([Layer("tells", build, ("x",), ("h",)), *told_model().layers[1:]], told_model().batch)


@pytest.mark.parametrize(("model", "schedule", "text"), [
    (told_model, "1f1b", "error: the executor is async_threaded, which runs the schedule gpipe alone, but the schedule "
     "is 1f1b\nhint: use the schedule gpipe, or the executor overlapped, which runs any"),
    (hooked_model, "gpipe", "error: hooks on 'tells.linear.bias' (register_hook, register_post_accumulate_grad_hook) "
     "are not called here: the executor async_threaded adds gradients when all microbatches have theirs\n"
     "hint: use the executor overlapped, or change gradients in the optimizer's step"),
    (told_model, "gpipe", "there is no timeline of actions")])
def test_what_does_not_go_with_threads_is_refused(model: Callable[[], Model], schedule: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        pipeline(model(), stages=1, schedule=schedule, microbatches=2, executor="async_threaded").engine.record()
    assert text in str(caught.value)


# -- on a GPU ------------------------------------------------------------------------------------------------


class Clocks:
    """Of a stream that does nothing: how far it is, and how far others were that it has waited for."""

    here = threading.local()

    def __init__(self, *device: torch.device) -> None:
        self.known: dict[Clocks, int] = {}

    def tick(self) -> tuple[Clocks, dict[Clocks, int]]:
        self.known[self] = self.known.get(self, 0) + 1
        return self, dict(self.known)

    def wait_event(self, event: dict[Clocks, int]) -> None:
        self.known.update({stream: max(time, self.known.get(stream, 0)) for stream, time in event.items()})

    def record_event(self) -> dict[Clocks, int]:
        return dict(self.known)

    def wait_stream(self, other: Clocks) -> None:
        self.wait_event(other.known)


class Kept(nn.Linear):
    """Has a buffer, in which it may count its calls."""

    def __init__(self, persistent: bool, counts: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self._counts = counts
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, hidden: Tensor) -> Tensor:
        if self._counts:
            self.calls += 1
        return super().forward(hidden)


@pytest.mark.parametrize(("persistent", "counts"), [(True, False), (False, True), (False, False)])
def test_streams_are_ordered_where_a_buffer_may_be_written_and_only_there(persistent: bool, counts: bool,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    default = Clocks()

    @contextmanager
    def within(stream: Clocks) -> Iterator[None]:
        Clocks.here.stream = stream
        yield
        Clocks.here.stream = default

    def current(device: torch.device | None = None) -> Clocks:
        return getattr(Clocks.here, "stream", default)

    monkeypatch.setattr(torch.cuda, "Stream", Clocks)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(threaded, "Streams", lambda: DeviceStreams(torch.device("cuda")))
    model = Model([Layer("kept", lambda: Kept(persistent, counts), ("x",), ("h",)), Layer("loss", Loss, ("h", "target"),
                                                                                  ("loss",))], batch=("x", "target"))
    pipe = out_of_turn(pipeline(model, stages=1, schedule="gpipe", microbatches=4, executor="async_threaded"))
    calls = []
    pipe.engine.local_stages[0].modules[0].register_forward_hook(lambda *_: calls.append(current().tick()))
    list(pipe.train([batch(), batch()]))
    assert len({stream for stream, _ in calls}) == 4
    for first, end in ((0, 3), (4, 8)):  # the first three show what a forward changes
        for (before, then), (_, now) in pairwise(calls[first:end]):
            assert (now.get(before, 0) >= then[before]) is (persistent or counts or first == 0)
    (last, then), (_, now) = calls[3:5]
    assert now[last] >= then[last], "the next batch comes after all of this one"


class Gates:
    """Schedules no kernels, and notes which streams it is given."""

    def __init__(self) -> None:
        self.bound: list[tuple[int, int]] = []

    def bind_stream(self, client: int, stream: int) -> int:
        self.bound.append((client, stream))
        return -1 if client == 5 else 0

    def last_error(self) -> str:
        return "there are five"


def test_streams_of_descending_priority_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def stream(device: torch.device, priority: int = 0) -> Any:
        made.append(priority)
        return SimpleNamespace(cuda_stream=100 + len(made), wait_stream=lambda other: None)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    scheduler, streams = Gates(), DeviceStreams(torch.device("cuda"))
    streams.schedule(scheduler)
    for microbatch in (0, 2, 4, 6, 8, 0):  # a replica's
        streams.begin(microbatch, [])
    assert made == [0, -3, -2, -1, 0, 0]
    assert scheduler.bound == [(0, 102), (1, 103), (2, 104), (3, 105), (4, 106)]
    with pytest.raises(RunError, match="the scheduler refuses the stream of microbatch 5: there are five"):
        streams.begin(10, [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", [rich_model, norm_model])
def test_streams_of_one_rank_that_go_on_at_one_time_give_the_numbers_of_overlapped(model: Callable[[], Model]) -> None:
    check_on_a_gpu("async_threaded", model, stages=1, prepared=out_of_turn)
