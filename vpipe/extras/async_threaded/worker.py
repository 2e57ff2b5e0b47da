"""Run the forwards of a batch in a thread each, then the backwards from the last microbatch to the first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function

from vpipe import accelerator
from vpipe.distributed import watch
from vpipe.errors import RunError
from vpipe.runtime import Worker, transport
from vpipe.schedules import Action, kinds

Op, GRADIENT = kinds.Op, kinds.GRADIENT


class KernelScheduler(Protocol):
    """Decide when the kernels of each microbatch run, where several share a device.

    A call that fails returns something else than 0, and ``last_error`` says why.
    """

    def bind_stream(self, client: int, stream: int) -> int:
        """Count the kernels that are launched in a stream, given by its handle, for a microbatch of the rank."""

    def last_error(self) -> str:
        """Return why the last call failed."""


class Streams:
    """Streams of the CPU, where everything is done when its call returns; the contract of :class:`DeviceStreams`."""

    def schedule(self, scheduler: KernelScheduler) -> None:
        """Give the microbatches that come streams of descending priority, each a client of the scheduler."""

    def begin(self, microbatch: int, given: Iterable[Tensor]) -> None:
        """Let a microbatch's stream wait for the caller's stream, which made the tensors ``given``."""

    def computing(self, microbatch: int, *, ordered: bool) -> AbstractContextManager[None]:
        """Return the context that queues the forward of a microbatch, in any thread.

        Args:
            ordered: compute it after the forward that was queued before it, whatever the stream.
        """
        return nullcontext()

    def computed(self, microbatch: int) -> None:
        """Note that all of a forward has been queued."""

    def prepare_sends(self, tensors: Iterable[Tensor]) -> None:
        """Allow tensors of any stream to be sent, and read by the caller."""

    def sending(self, microbatch: int | None) -> AbstractContextManager[None]:
        """Return the context of sends: of a microbatch's forward, or for None of what the caller's stream made."""
        return nullcontext()

    def gather(self) -> None:
        """Let the caller's stream wait for all forwards."""


class DeviceStreams(Streams):
    """Streams and events of one device.

    - Streams wait for each other by events, never the host, so that forwards of several microbatches run at one time.
    - A tensor that is used in another stream than that of its allocation is recorded there (``Tensor.record_stream``),
      or its memory could be reused while it is still read.
    - Forwards of a stage with saved buffers (running statistics) have their streams in the order of the microbatches:
      each writes what the next one reads.
    - Autograd runs the backward of an operation in the stream of its forward, waits where tensors cross, and lets the
      stream in which ``backward`` was called wait for the leaves at its end (PyTorch, CUDA semantics: stream semantics
      of backward passes). So gradients may be given, and read, where the backward was called.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sends = accelerator.new_stream(device)
        self._of: dict[int, torch.Stream] = {}
        self._ends: dict[int, torch.Event] = {}
        self._newest: torch.Stream | None = None  # that a forward was queued in
        self._scheduler: KernelScheduler | None = None
        # The microbatches' graphs share the nodes that accumulate a weight's gradient, which have the stream of one of
        # them. Autograd waits there, so the mismatch is harmless.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def schedule(self, scheduler: KernelScheduler) -> None:
        assert not self._of, "streams keep their priority"
        self._scheduler = scheduler

    def begin(self, microbatch: int, given: Iterable[Tensor]) -> None:
        if microbatch not in self._of:
            self._of[microbatch] = self._new_stream(client=len(self._of))
        stream, caller = self._of[microbatch], accelerator.current_stream(self._device)
        stream.wait_stream(caller)
        _record(given, caller, stream)

    def _new_stream(self, client: int) -> torch.Stream:
        if self._scheduler is None:
            return accelerator.new_stream(self._device)
        stream = accelerator.new_stream(self._device, min(0, client - HIGHEST_PRIORITY))
        if self._scheduler.bind_stream(client, accelerator.handle_of(self._device, stream)):
            raise RunError(f"the scheduler refuses the stream of microbatch {client}: {self._scheduler.last_error()}",
                           hint="this is a defect of vpipe, or of the scheduler: please report it")
        return stream

    @contextmanager
    def computing(self, microbatch: int, *, ordered: bool) -> Iterator[None]:
        stream = self._of[microbatch]
        if ordered and self._newest is not None:
            stream.wait_stream(self._newest)
        self._newest = stream
        with accelerator.using(self._device, stream):
            yield

    def computed(self, microbatch: int) -> None:
        self._ends[microbatch] = self._of[microbatch].record_event()

    def prepare_sends(self, tensors: Iterable[Tensor]) -> None:
        _record(tensors, accelerator.current_stream(self._device), self._sends)

    @contextmanager
    def sending(self, microbatch: int | None) -> Iterator[None]:
        if microbatch in self._ends:
            self._sends.wait_event(self._ends[microbatch])
        else:  # the caller's stream has waited for it
            self._sends.wait_stream(accelerator.current_stream(self._device))
        with accelerator.using(self._device, self._sends):
            yield

    def gather(self) -> None:
        caller = accelerator.current_stream(self._device)
        for event in self._ends.values():
            caller.wait_event(event)
        self._ends.clear()


HIGHEST_PRIORITY = 3
"""The highest priority of a stream, which torch counts as -3; streams after the third have 0, as all others."""


def _record(tensors: Iterable[Tensor], *streams: torch.Stream) -> None:
    """Keep the memory of freed tensors until these streams have done what is queued there."""
    for tensor in tensors:
        for stream in streams:
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)


_Gradients = list[list[Tensor | None]]
"""Gradients of the stage's own weights and of those that it borrows, in order."""

_BESIDE_FORWARDS = frozenset({Op.FORWARD, Op.SEND_F, Op.RECV_F})
"""Actions that may run while forwards are under way; every other one waits for them."""


class _Done(NamedTuple):
    """The result of a forward, and when its thread began and ended, in seconds of ``perf_counter``."""

    outputs: list[Tensor]
    record: Any
    began: float
    ended: float


class ThreadedWorker(Worker):
    """Execute GPipe with its backwards in reverse order (:func:`vpipe.schedules.rewrites.reverse_backwards`).

    Each forward of a batch runs in the thread of its microbatch, on a GPU in its own stream (:class:`DeviceStreams`).
    The threads run one after another in the order of the microbatches, so that random numbers are drawn, and buffers
    written, as without threads. On a GPU that orders the queueing, not the computation; so a stage whose layers have
    saved buffers has its streams ordered, too. Buffers that are not saved (``persistent=False``) are taken for
    constants. The calling thread receives, sends (beside the threads' work) and runs autograd.

    The gradients of each microbatch are stored until all are there, then added in the order of the microbatches: the
    operations, and so the bits, of any other executor. That takes the memory of the gradients once per microbatch.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_one_process = not isinstance(self.transport, transport.DistributedTransport)
        device = next(iter(self.stages.values())).device
        self._streams = DeviceStreams(device) if device.type != "cpu" else Streams()
        self._ordered = {index for index, stage in self.stages.items() if stage.saves_buffers}
        self._threads: dict[int, ThreadPoolExecutor] = {}  # one thread each, by microbatch
        self._latest: Future[_Done] | None = None
        self._under_way: dict[tuple[int, int], tuple[Any, Future[_Done]]] = {}
        self._waits: list[tuple[float, float]] = []  # for other ranks, while forwards may have gone on
        self._deferred: deque[Action] = deque()  # ends of forwards, and sends, in the program's order
        self._at_fault: Action | None = None  # its failure shows in a later action
        self._backward_here = False  # in the calling thread, not in autograd's
        self.around.append(self._beside_forwards)

    def _beside_forwards(self, action: Action, run: Callable[[], None]) -> None:
        """Execute an action now, or defer it, while forwards may be under way."""
        if action.op not in _BESIDE_FORWARDS:
            self._gather()
        elif action.op is Op.RECV_F and self.transport.ordered:
            self._catch_up()  # deferred sends come before the receives after them
        if action.op is Op.SEND_F and self.segment.training:
            self._deferred.append(action)
            if self._in_one_process:
                self._catch_up()
        else:
            with self._streams.sending(None) if action.op is Op.SEND_B else nullcontext():
                run()

    def schedule_kernels(self, scheduler: KernelScheduler) -> None:
        """Let a scheduler gate the kernels of the microbatches; called before the first one.

        Backwards then run in the calling thread. Autograd's own thread serves all backwards of a device, so a launch of
        one that waits would hold up the others.
        """
        self._streams.schedule(scheduler)
        self._backward_here = True

    # -- forwards, in threads --------------------------------------------------------------------------

    def forward(self, stage_index: int, microbatch: int) -> None:
        if not self.segment.training:
            super().forward(stage_index, microbatch)
            return
        if 0 < stage_index < self.last_stage:
            self._catch_up()  # send what others wait for before waiting for them
        waited = self.transport.wait_s
        given = self.forward_inputs(stage_index, microbatch)  # which waits last
        now = perf_counter()
        self._waits.append((now - (self.transport.wait_s - waited), now))
        self._streams.begin(microbatch, (*given.received, *given.fields.values()))
        if microbatch not in self._threads:
            self._threads[microbatch] = ThreadPoolExecutor(1, thread_name_prefix=f"microbatch-{microbatch}")
        self._latest = self._threads[microbatch].submit(
            copy_context().run, self._compute, stage_index, microbatch, given, self._latest, torch.get_num_threads(),
            torch._C._autograd._top_saved_tensors_default_hooks(True))
        self._under_way[stage_index, microbatch] = given, self._latest
        self._deferred.append(Action(Op.FORWARD, stage_index, microbatch))
        if self._in_one_process or (stage_index == self.last_stage and microbatch == self.segment.assignment.share(
                stage_index, 0, stage_index, self.rank)[-1]):  # after a batch's last forward the losses are sent
            self._gather()

    def _compute(self, stage_index: int, microbatch: int, given: Any, before: Future[_Done] | None,
                 threads: int, hooks: Any) -> _Done:
        """Run the forward in the microbatch's thread, once the one before has been queued."""
        if before is not None and before.exception() is not None:  # known when that one has ended
            raise RunError(f"the microbatch before {microbatch} failed", hint="see there")
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)  # OpenMP keeps the number by thread, and sums depend on it
        began = perf_counter()
        ordered = stage_index in self._ordered or self.stages[stage_index].changes_buffers
        with (nullcontext() if hooks is None else saved_tensors_hooks(*hooks),  # those of the script's thread
              self._streams.computing(microbatch, ordered=ordered),
              self._labelled(Action(Op.FORWARD, stage_index, microbatch))):
            outputs, record = self.compute(stage_index, microbatch, given)
        return _Done(outputs, record, began, perf_counter())

    def _gather(self) -> None:
        """Wait until all forwards have ended, or on a GPU are queued before the calling thread's next work."""
        self._catch_up()
        self._streams.gather()

    def _labelled(self, action: Action) -> AbstractContextManager[None]:
        """Return the context that labels an action for torch's profiler."""
        return record_function(f"{action.stage}{action.op}{self.segment.number_of(action)}")

    def _catch_up(self) -> None:
        """Wait for the threads, end their forwards, and make the deferred sends."""
        while self._deferred:
            action = self._deferred.popleft()
            try:
                if action.op is Op.FORWARD:
                    self._finish_forward(action.stage, action.index)
                else:
                    with self._streams.sending(action.index), self._labelled(action):
                        self.operations[action.op](action.stage, action.index)
            except Exception:
                self._at_fault = action
                raise

    def _finish_forward(self, stage_index: int, microbatch: int) -> None:
        given, future = self._under_way.pop((stage_index, microbatch))
        activity = watch.activity
        before, started = activity.now, perf_counter()
        activity.now = Action(Op.FORWARD, stage_index, microbatch), started  # what the watchdog reports if it hangs
        done = future.result()
        activity.now, waited = before, perf_counter() - started
        if self._latest is future:
            self._latest = None  # it refers to its result
        self._account(stage_index, done, waited)
        self._streams.computed(microbatch)
        self._streams.prepare_sends(done.outputs)
        self.end_forward(stage_index, microbatch, given, done.outputs, done.record)

    def _account(self, stage_index: int, done: _Done, waited: float) -> None:
        """Count the seconds of a forward's thread as the forward's, not as idle or the action's that ``waited``."""
        idle = sum(max(0.0, min(done.ended, end) - max(done.began, begin)) for begin, end in self._waits)
        if not self._under_way:
            self._waits.clear()
        self.transport.wait_s -= idle
        self.seconds[stage_index, Op.FORWARD] += done.ended - done.began
        now, _ = watch.activity.now
        if isinstance(now, Action):
            self.seconds[now.stage, now.op] -= waited + idle  # idle: no longer a wait

    # -- backwards, in the calling thread ----------------------------------------------------------------

    def backward(self, stage_index: int, microbatch: int) -> None:
        with torch.autograd.set_multithreading_enabled(False) if self._backward_here else nullcontext():
            super().backward(stage_index, microbatch)

    def end_backward(self, stage_index: int, microbatch: int, returned: list[Tensor]) -> None:
        self._streams.prepare_sends(returned)
        super().end_backward(stage_index, microbatch, returned)

    @contextmanager
    def completing(self, stage_index: int, microbatch: int, whole: bool) -> Iterator[None]:
        stage = self.stages[stage_index]
        everything = [stage.weights, *stage.borrowed.values()]
        last = not any(other == stage_index for other, _ in self.values.records())
        with super().completing(stage_index, microbatch, whole=False):
            yield
            self.values[GRADIENT, stage_index, microbatch] = [weights.pop_gradients() for weights in everything]
            if last:
                apart: list[_Gradients] = self.values.take_all(GRADIENT, stage_index)
                for weights, gradients in zip(everything, zip(*apart, strict=True), strict=True):
                    weights.put_gradients(_added(gradients))

    def abandon(self) -> None:
        wait([future for _, future in self._under_way.values()])
        for store in (self._under_way, self._deferred, self._waits):
            store.clear()
        self._latest = self._at_fault = None
        super().abandon()

    # -- failures ----------------------------------------------------------------------------------------

    def report_failure(self, error: RunError, action: Action) -> RunError | None:
        at_fault, self._at_fault = self._at_fault or action, None
        return super().report_failure(error, at_fault)


def _added(gradients: Sequence[list[Tensor | None]]) -> list[Tensor | None]:
    """Return the sums of the gradients of several backwards, in the memory of the first ones."""
    total, *others = gradients
    for each in others:
        both = [(mine, more) for mine, more in zip(total, each, strict=True) if mine is not None and more is not None]
        if both:
            torch._foreach_add_([mine for mine, _ in both], [more for _, more in both])
        total = [more if mine is None else mine for mine, more in zip(total, each, strict=True)]
    return total
