"""Executors change how actions are carried out, never what they compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar, get_args

import jobs
import pytest
import torch
import torch.distributed as dist
from jobs import pipeline
from models import WIDTH, norm_model, rich_batches, rich_model
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from world import World

from vpipe import Execution, Layer, Model, Pipeline
from vpipe.distributed.watchdog import watch
from vpipe.errors import RunError, UserError
from vpipe.runtime.executors import async_threaded as threaded
from vpipe.runtime.executors.async_threaded import DeviceStreams, ThreadedWorker, _Done
from vpipe.runtime.transport.process_group import DistributedTransport
from vpipe.runtime.transport.transport import TensorSpec, TransferKey, TransferKind
from vpipe.runtime.weight_versions import WeightVersions
from vpipe.schedules.action import Action, Op

# -- jobs ---------------------------------------------------------------------------------------------


_PATIENCE = timedelta(seconds=30)
_F = TransferKey(TransferKind.ACTIVATIONS, 1, 0)


def most_behind(*, executor: str, schedule: str) -> int:
    """Most sends of a program that over gloo were still under way after an action, once the shapes are known to all."""
    pipe = pipeline(rich_model(), schedule=schedule, partition=[2, 2, 2, 2], microbatches=4, executor=executor,
                    shared_memory=False)
    [worker] = pipe.engine.workers.values()
    transport = worker.transport
    assert isinstance(transport, DistributedTransport)
    most, execute = 0, worker.execute

    def counting(action: Action) -> None:
        nonlocal most
        execute(action)
        if steps:
            most = max(most, *(len(behind) for (_, kind), behind in transport._sent.items() if kind in "FBWG"), 0)

    worker.execute = counting  # type: ignore[method-assign]
    steps: list[Any] = []
    steps += pipe.train(rich_batches(1, 8))
    steps += pipe.train(rich_batches(2, 8))
    return most


def settles(*, announce: bool) -> bool:
    """Over gloo the first rank sends and settles: whether the second was ready to receive by then."""
    store = _get_default_store()
    transport = DistributedTransport(torch.device("cpu"), 30.0, 1, lambda rank: f"rank {rank}", 0, shared_memory=False)
    name, tensor = f"settles {announce}", torch.ones(3)
    ready = False
    if dist.get_rank() == 0:
        transport.send(1, _F, [tensor], announce=announce)
        store.set(f"{name} sent", "")
        transport.wait_sent(TransferKind.ACTIVATIONS)
        ready = store.check([f"{name} ready"])
        store.set(f"{name} settled", "")
    elif dist.get_rank() == 1:
        store.wait([f"{name} sent"], _PATIENCE)
        if announce:
            store.wait([f"{name} settled"], _PATIENCE)
        else:  # long enough for the other to go on if it does not wait
            if _never(store, f"{name} settled"):
                store.set(f"{name} ready", "")
        transport.post(0, _F, None if announce else [TensorSpec.from_tensor(tensor)])
        if announce:
            transport.receive_specs(0, _F)
        assert torch.equal(transport.receive(0, _F)[0], tensor)
    transport.finish()
    return ready


def _never(store: dist.Store, key: str) -> bool:
    """Whether nobody sets a key within a moment."""
    try:
        store.wait([key], timedelta(seconds=0.3))
    except dist.DistStoreError:
        return True
    return False


EVEN = [2, 2, 2, 2]
RUNS: Mapping[str, Mapping[str, Any]] = {
    "ties-dropout-recompute-clip": {"model": "rich", "partition": EVEN, "recompute": 0.5, "grad_clip": 0.5,
                                    "evaluate_after": [1], "lengths": [6, 9]},
    "one-stage": {"model": "rich", "partition": [8], "recompute": [[2, 3, 6]]},
    "replicas": {"model": "untied", "partition": [2, 2, 4], "placement": [[0, 1], [2], [3, 4]], "grad_clip": 0.5},
    "running-statistics": {"model": "norm", "stages": 2}}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_all_executors_give_the_same_bits(run: Mapping[str, Any]) -> None:
    expected, *others = (jobs.train(schedule="gpipe", microbatches=4, batches=2, executor=executor, **run)
                         for executor in get_args(Execution.Executor))
    assert others == [expected] * 2


def test_all_executors_give_the_same_bits_over_gloo(world: World) -> None:
    """Where the threads of a rank and its transfers go on at one time; a stage has two replicas."""
    run: dict[str, Any] = {
        "model": "rich", "schedule": "gpipe", "microbatches": 4, "batches": 2, "partition": [2, 2, 4],
        "placement": [[0], [1, 2], [3]], "recompute": [1.0, 0.5, 0.0], "grad_clip": 0.5, "evaluate_after": [0]}
    expected = jobs.train(**run)
    for executor in ("naive", "async_threaded"):
        assert world.run(jobs.train, executor=executor, **run) == [expected] * 4, executor


def test_naive_streams_over_gloo_as_in_one_process(world: World) -> None:
    run: dict[str, Any] = {"model": "rich", "schedule": "pipedream", "microbatches": 4, "partition": EVEN,
                           "executor": "naive", "batches": 2, "lengths": [6, 9]}
    assert world.run(jobs.train, **run) == [jobs.train(**{**run, "executor": "overlapped"})] * 4


def test_naive_leaves_no_send_behind(world: World) -> None:
    assert world.run(most_behind, executor="naive", schedule="1f1b") == [0] * 4
    assert max(world.run(most_behind, executor="overlapped", schedule="1f1b")) > 0


@pytest.mark.parametrize("announce", [False, True])
def test_to_settle_is_to_wait_until_the_receiver_is_ready_unless_it_must_learn_first(world: World,
                                                                                   announce: bool) -> None:
    assert world.run(settles, announce=announce)[0] is not announce


# -- async_threaded ------------------------------------------------------------------------------------------


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


def out_of_turn(pipe: Pipeline) -> Pipeline:
    """Threads go on as in a process of its own."""
    for worker in pipe.engine.workers.values():
        assert isinstance(worker, ThreadedWorker)
        worker._in_turn = False
    return pipe


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
    with pytest.raises(RunError) as caught:
        list(pipe.train([batch()]))
    assert str(caught.value) == (
        "error: the forward of layer 0 'raises' on x float32[2, 12] raised IndexError: the third is wrong (rank 0, "
        "stage 0, microbatch 2, action 0F2)\n"
        "hint: make the layer accept these inputs, or change the outputs of the layers before it")
    assert pipe.engine.local_stages[0].modules[0].calls == 3, "what came behind it did not run"


def test_a_forward_counts_as_long_as_its_thread_worked() -> None:
    """From 2 to 5, of which the rank waited for others from 1 to 3, for the thread from 4 to 5."""
    pipe = pipeline(told_model(), stages=1, schedule="gpipe", microbatches=4, executor="async_threaded")
    [worker] = pipe.engine.workers.values()
    assert isinstance(worker, ThreadedWorker)
    worker._waits, worker.transport.wait_s = [(0.0, 0.5), (1.0, 3.0)], 2.5
    worker._under_way[0, 3] = None  # type: ignore[assignment]
    watch.activity.now = Action(Op.BACKWARD, 0, 3), 4.0
    worker.seconds[0, Op.BACKWARD] = 0.0
    worker._account(0, _Done([], None, 2.0, 5.0), waited=1.0)  # type: ignore[arg-type]
    assert worker.transport.wait_s == 1.5
    # What the action is given at its end, (5 - 4) - (1.5 - 2.5), makes it 0.
    assert worker.seconds == {(0, Op.FORWARD): 3.0, (0, Op.BACKWARD): -2.0}
    assert len(worker._waits) == 2, "another forward is under way"
    worker._under_way.clear()
    worker._account(0, _Done([], None, 5.0, 6.0), waited=1.0)  # type: ignore[arg-type]
    assert worker.transport.wait_s == 1.5
    assert worker._waits == []
    watch.activity.rest()


def test_who_waits_for_a_thread_is_at_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline(told_model(), stages=1, schedule="gpipe", microbatches=4, executor="async_threaded")
    [worker] = pipe.engine.workers.values()
    assert isinstance(worker, ThreadedWorker)
    seen = []

    def result() -> _Done:
        seen.append(watch.activity.describe()[0])
        return _Done([], None, 0.0, 0.0)  # type: ignore[arg-type]

    worker._under_way[0, 2] = None, SimpleNamespace(result=result)  # type: ignore[assignment]
    monkeypatch.setattr(worker, "_end_forward", lambda *given: seen.append(watch.activity.describe()[0]))
    watch.activity.now = Action(Op.BACKWARD, 0, 3), 0.0
    worker._finish_forward(0, 2)
    watch.activity.rest()
    assert seen == ["running 0F2", "running 0B3"]


def test_gradients_are_added_in_the_order_of_the_microbatches() -> None:
    """1 is lost beside 1e8, unless the two large ones have met before."""
    weights = WeightVersions({"w": nn.Parameter(torch.zeros(1)), "v": nn.Parameter(torch.zeros(1))}, {"w": [], "v": []})
    w = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    v = [None, torch.tensor([2.0]), torch.tensor([3.0])]
    weights.accumulate([[w[number], v[number]] for number in range(3)])
    assert weights.gradients == [torch.tensor([0.0]), torch.tensor([5.0])]


def test_the_turned_program_is_what_runs() -> None:
    pipe = pipeline(rich_model(), stages=2, schedule="gpipe", microbatches=3, executor="async_threaded")
    done: list[Action] = []
    for worker in pipe.engine.workers.values():
        execute = worker.execute
        worker.execute = lambda action, execute=execute: (done.append(action), execute(action))  # type: ignore
    list(pipe.train(rich_batches(1, 6)))
    for stage in (0, 1):
        assert [action.microbatch for action in done if (action.op, action.stage) == (Op.BACKWARD, stage)] == [2, 1, 0]


def test_threads_have_no_timeline() -> None:
    pipe = pipeline(rich_model(), stages=2, schedule="gpipe", executor="async_threaded")
    with pytest.raises(UserError, match="there is no timeline of actions"):
        pipe.engine.record()


def test_coded_tensors_give_the_same_bits() -> None:
    run: dict[str, Any] = {"model": "untied", "stages": 2, "schedule": "gpipe", "microbatches": 4, "batches": 2,
                           "compress": "int8_stochastic"}
    assert jobs.train(executor="async_threaded", **run) == jobs.train(**run)


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("executor", ["naive", "async_threaded"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("model", [rich_model, norm_model])
def test_on_a_gpu_executors_give_the_numbers_of_overlapped(executor: str, apart: bool,
                                                           model: Callable[[], Model]) -> None:
    """In one process; with streams going on at one time where one rank has all layers."""
    def run(executor: str) -> tuple[list[float], dict[str, Tensor]]:
        pipe = pipeline(model(), stages=1 if apart else 2, schedule="gpipe", microbatches=4, executor=executor,
                        device="cuda", recompute=0.5, grad_clip=0.5)
        if apart and executor == "async_threaded":
            out_of_turn(pipe)
        return [step.loss for step in pipe.train(rich_batches(4, 16))], pipe.state_dict()

    losses, state = run("overlapped")
    others, other_state = run(executor)
    assert others == pytest.approx(losses, rel=1e-5)
    for name, tensor in state.items():
        torch.testing.assert_close(other_state[name], tensor, rtol=1e-4, atol=1e-5)
