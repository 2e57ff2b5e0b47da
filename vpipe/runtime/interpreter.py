"""Interpret the programs of a schedule: execute the actions of the ranks of this process in turn."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # the public functions look for names up to Python 3.11
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat
from threading import current_thread, main_thread
from types import FrameType

from vpipe.distributed.fault import Fault
from vpipe.distributed.value_exchange import Exchange
from vpipe.distributed.watchdog import watch
from vpipe.errors import RunError
from vpipe.runtime.microbatches import Segment
from vpipe.runtime.step_results import Step, StepResults
from vpipe.runtime.worker import Worker
from vpipe.schedules.assignment import Assignment, Setting, TiedVersionOf
from vpipe.schedules.builder import build_evaluation, replica_views, stream_program
from vpipe.schedules.graph import Flow, OnRank
from vpipe.schedules.kinds import Action
from vpipe.schedules.lowering import Lowering, Standing, TransferOrder, in_one_order, lower
from vpipe.schedules.registry import PLUGINS, RegisteredSchedule
from vpipe.schedules.rewrites import without_backwards
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.stream import StreamOrder, StreamVersions

MIDDLE = "the middle of an update: its stages are at different versions"


class RankPrograms:
    """Give the actions of a lowered schedule that the ranks of a process execute in batches, streams and evaluations.

    Args:
        recompute: stages that recompute activations.
        ranks: of this process; several take turns.
        ordered: whether transfers must come in one order, see :mod:`vpipe.schedules.lowering`.

    Attributes:
        of_batch: the program of every batch.
    """

    def __init__(self, schedule: Schedule, recompute: Collection[int], ranks: Collection[int], ordered: bool) -> None:
        if ordered and not schedule.stream:
            schedule, _ = in_one_order(schedule)
        self._schedule, self._recompute, self._ranks, self._ordered = schedule, recompute, ranks, ordered
        self._order: StreamOrder | None = None  # of a stream that repeats
        self.of_batch: Sequence[OnRank] = () if schedule.stream else self._in_turns(schedule)
        self._evaluations: dict[int, Sequence[OnRank]] = {}  # the latest, by its number of microbatches

    def _in_turns(self, schedule: Schedule) -> Sequence[OnRank]:
        return list(in_turns({rank: iter(schedule.programs[rank]) for rank in self._ranks}, schedule.setting, {}))

    def for_stream(self, assignment: Assignment) -> tuple[Iterator[OnRank], TiedVersionOf]:
        """Return the program over all microbatches that exist, and the versions of borrowed weights that they use.

        The generator yields the program for very many microbatches (:data:`vpipe.schedules.registry.Program`); actions
        on those that never come are left out.
        """
        _, setting = self._lowered_stream(assignment)
        return self._of_stream(assignment), setting.tied_version_of

    def _of_stream(self, assignment: Assignment) -> Iterator[OnRank]:
        schedule, program = self._schedule, RegisteredSchedule.named(self._schedule.name).program
        if not PLUGINS.is_own(getattr(program, "__globals__", {}).get("__name__", "")):  # it may never repeat
            yield from self._stream_order(assignment)[0]
            return
        if self._order is None:  # a quarter of what is proved (checker.check), then versions
            self._order = StreamOrder(self._stream_order, schedule.assignment, min(self._ranks),
                                      settled=schedule.microbatches // 4 + 2 * schedule.assignment.per_step)
        yield from self._order.program(assignment.has_microbatch)

    def _lowered_stream(self, assignment: Assignment) -> tuple[Callable[[int], Iterator[Action]], Setting]:
        """Return what gives the lowered program of a rank in a stream, and the setting of the stream."""
        schedule, placement = self._schedule, self._schedule.placement
        registered = RegisteredSchedule.named(schedule.name)
        views = replica_views(registered, placement, schedule.microbatches, assignment.update_every, schedule.warmup)

        def compute(rank: int) -> Iterator[Action]:
            program = stream_program(registered, views[rank], assignment, self._recompute)
            return without_backwards(program, assignment.frozen)

        setting = replace(schedule.setting, assignment=assignment,
                          tied_version_of=StreamVersions(assignment, compute).of)

        def lowered(rank: int) -> Iterator[Action]:
            return Lowering(setting, rank, partial(compute, rank), schedule.warmup).program()

        return lowered, setting

    def _stream_order(self, assignment: Assignment) -> tuple[Iterator[OnRank], Callable[[], Standing]]:
        """Return the order of a stream on the ranks of this process, and what returns how ranks stand in it."""
        lowered, setting = self._lowered_stream(assignment)
        if self._ordered:
            [rank] = self._ranks
            order = TransferOrder(setting, list(map(lowered, range(self._schedule.ranks))), ranks=[rank])
            return zip(order.program(rank), repeat(rank)), order.standing
        heads: dict[int, Action] = {}
        return (in_turns({rank: lowered(rank) for rank in self._ranks}, setting, heads),
                lambda: [(action, rank) for rank, action in heads.items()])

    def for_evaluation(self, microbatches: int) -> Sequence[OnRank]:
        """Return the program of an evaluation: forwards through all stages."""
        if microbatches not in self._evaluations:
            schedule = lower(build_evaluation(self._schedule.placement, microbatches))
            if self._ordered:
                schedule, _ = in_one_order(schedule)
            self._evaluations = {microbatches: self._in_turns(schedule)}
        return self._evaluations[microbatches]


def in_turns(programs: Mapping[int, Iterator[Action]], setting: Setting, heads: dict[int, Action]) -> Iterator[OnRank]:
    """Yield the actions of ranks in an order in which one thread can execute them: a rank goes on as long as all that
    it needs has been made. One rank alone waits for others where it must.

    With a flush ranks step when all can: an error before that leaves the weights unchanged.

    Args:
        heads: gets the actions before which the ranks stand, but for the one whose action was yielded last.

    Raises:
        RunError: no rank can go on.
    """
    if len(programs) == 1:
        for rank, program in programs.items():
            yield from zip(program, repeat(rank))
        return
    step_together, flow = setting.assignment.flush, Flow(setting)
    heads |= {rank: first for rank, program in programs.items() if (first := next(program, None)) is not None}
    while heads:
        moved = False
        for rank in list(heads):
            action: Action | None = heads.pop(rank)
            while action is not None and (action.op.transfer is not None or flow.missing(action, rank) is None):
                if action.op.makes_version and step_together:
                    break
                yield action, rank
                if action.op.told:
                    flow.follow(action, rank)
                moved = True
                action = next(programs[rank], None)
            if action is not None:
                heads[rank] = action
        if step_together and not moved:
            step_together = False
        elif not moved:
            waits = "; ".join(
                f"rank {rank} at {action} waits for the {value.name} {index} of stage {stage} from rank {home}"
                for rank, action in heads.items() if (found := flow.missing(action, rank))
                for value, stage, index, home in [found])
            raise RunError(f"no rank can go on: {waits}", hint="the schedule deadlocks: this is a defect of vpipe")


class Interrupts:
    """While this context is entered, note a first Ctrl-C and raise it at its end; a second one is raised at once.

    So Ctrl-C waits until the pipeline is whole, where a script or a notebook runs all ranks in one process. A handler
    of the user's stays, and so do the signals of a job of several processes (:mod:`vpipe.app.signals`).

    Contexts may be nested: what counts is the end of the outermost. Code of the user that may take long, such as the
    loop over the steps, belongs outside.

    Args:
        alone: whether there are no other processes; else nothing waits.

    Attributes:
        noted: whether one came that was not raised yet.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone, self._depth, self.noted = alone, 0, False

    def __enter__(self) -> None:
        if (self._alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler
                and current_thread() is main_thread()):
            self._depth, self.noted = 0, False
            signal.signal(signal.SIGINT, self._note)  # until this line one is raised, but nothing has begun
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._depth -= 1
        if self._depth == 0 and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if not isinstance(error, KeyboardInterrupt):
                self.raise_noted()  # also where an error covers it, which is then the context

    def raise_noted(self) -> None:
        """Raise KeyboardInterrupt if one was noted."""
        if self.noted:
            self.noted = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.raise_noted()
        self.noted = True


class Interpreter:
    """Execute the programs of a segment on the ranks of this process, which take turns in one thread.

    Args:
        workers: of this process, by rank.
        results: sends losses as soon as they are computed.
        interrupts: of the user; one that waits is raised between two actions, while a batch can still be given up.
        job: the exchange between all processes.
        distributed: whether there are other processes; then this one has one rank, which waits where it must.

    Attributes:
        stages: of this process.
        broken: whether a segment failed: the stages may be at different versions; ``why``: what failed, and what was
            last whole.
        stepped: whether weights may have changed in the latest segment.
    """

    def __init__(self, workers: Mapping[int, Worker], results: StepResults, interrupts: Interrupts, job: Exchange,
                 distributed: bool) -> None:
        self.workers, self.results, self.interrupts = workers, results, interrupts
        self.stages = [stage for worker in workers.values() for stage in worker.stages.values()]
        self._job, self._distributed = job, distributed
        self.broken = self.stepped = False
        self._batch: tuple[int, int] | None = None
        for worker in workers.values():
            worker.optimizer_steps.stepping = self._stepping
        self.why: str | None = None  # nothing, or a segment is running

    def run(self, segment: Segment, actions: Iterable[OnRank], batch: tuple[int, int] | None = None) -> Iterator[int]:
        """Execute a segment, a ``batch`` that processes can give up together or another one; yield each step when every
        stage of this process has made all its updates."""
        self.stepped, self._batch, self.why = False, batch, None
        keep = segment.training and (batch is not None or not self._distributed)
        self._put_back = [stage.kept_state() for stage in self.stages if keep and stage.forwards_change_state]
        for worker in self.workers.values():
            worker.begin(segment, batch)
        assignment, here = segment.assignment, len(self.stages)
        interrupts, last_forwards = self.interrupts, self.results.last_forwards
        made: Counter[int] = Counter()  # stages that have made all their updates of a step
        done = 0
        self.broken = True  # until the end is reached
        try:
            for action, rank in actions:
                if interrupts.noted and not self.stepped:  # else the batch is better ended
                    interrupts.raise_noted()
                if self._distributed and action.op.makes_version:
                    segment.confirm(segment.first + assignment.in_update(action.stage, action.index).stop)
                self.workers[rank].execute(action)
                if action is last_forwards.get(rank):
                    self.results.send(segment, 0, rank)
                if not action.op.makes_version:
                    continue
                step, left = divmod((action.index + 1) * assignment.per_update(action.stage), assignment.per_step)
                made[step - 1] += not left
                # A step of fewer microbatches ends with the programs.
                if made[done] == here and len(assignment.in_step(done)) == assignment.per_step:
                    self.broken = False
                    yield done
                    self.broken = True
                    del made[done]
                    done += 1
            if segment.training:
                with self._stepping(lambda: bool):
                    pass
            if not segment.training or self.stepped:
                for worker in self.workers.values():
                    worker.end()
                if segment.training:
                    self.hand_out_weights()
        except BaseException:
            if not self.broken:  # the caller goes away between two steps
                raise
            if not self.stepped and not self._distributed:  # training may go on
                self.undo()
            else:
                self.why = (f"in {MIDDLE if self.stepped else 'transfers between ranks, which cannot be called back'}; "
                            f"update {segment.steps_before + done} was the last that all stages here have made")
            raise
        self.broken = False
        if segment.training and assignment.in_step(done):
            yield done

    @contextmanager
    def _stepping(self, mark: Callable[[], Callable[[], bool]]) -> Iterator[bool]:
        """Let a stage step, unless the batch is given up; the first one here may fail before it has changed anything,
        which the function that ``mark`` returns tells."""
        if self.stepped:
            yield True
            return
        changed = mark()
        self.stepped = self._may_step(None)
        try:
            yield self.stepped
        except BaseException:
            self.stepped = changed()
            raise
        finally:
            self._may_step(self.stepped)

    def _may_step(self, stepped: bool | None) -> bool:
        return self._batch is None or watch.watchdog is None or watch.watchdog.may_step(self._batch, stepped)

    @property
    def running(self) -> bool:
        """Return whether a segment is between two steps."""
        return self.broken and self.why is None

    def fail(self, why: str = "") -> None:
        """Note a failure before the steps that stages have made were counted; or another, and why."""
        self.broken = self.broken or self.stepped or bool(why)
        self.why = why or self.why or f"in {MIDDLE}"

    def undo(self) -> None:
        """Undo a segment in which no stage has stepped on any rank, and nothing is under way to another."""
        for put_back in self._put_back:
            put_back()
        for worker in self.workers.values():
            worker.abandon()
        self.hand_out_weights()
        self.broken = False

    def take_back_weights(self, between_batches: bool = False, checked: bool = True) -> None:
        """Compute with what a script has made of the weights, on every stage that has a copy of them. Every rank must
        call it, while nothing is in flight; ``between_batches`` of one call the transfers count."""
        for stage in self.stages if checked else ():
            stage.weights.take_back()
        self._exchange_weights(counted=between_batches)

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Compute meanwhile with what the script has made of the weights; every rank enters, with nothing in flight."""
        self.check_whole()
        with self._job.whole():
            self.check_weights()
        self.take_back_weights()
        try:
            yield
        finally:
            self.hand_out_weights()

    def raise_held(self) -> None:
        """Raise on every rank what a layer or function of the user's raised first on any of them."""
        held = {worker.held[:2]: worker.held[2] for worker in self.workers.values() if worker.held is not None}
        for worker in self.workers.values():
            worker.held = None
        first = min((tuple(place) for own in self._job.all_gather(list(held)) for place in own), default=())
        try:
            self._job.begin(None, error=held.pop(first, None))()
        except RunError as error:
            if error.peer is None or (watchdog := watch.watchdog) is None:
                raise
            fault = Fault((error.peer,), error.what.removeprefix(f"rank {error.peer} "), error.hint, reported=True)
            raise watchdog.error(fault, f"{watchdog.place(watchdog.rank)} was left as it was") from None

    def check_whole(self) -> None:
        """Refuse a pipeline of which a call has changed a part."""
        if self.broken:
            raise RunError(f"this pipeline failed {self.why}",
                           hint="build a new pipeline, and load a checkpoint, or a state_dict() from between steps")

    def check_weights(self) -> None:
        """Refuse what a script has made of the weights where stages cannot compute with it, before any does."""
        for stage in self.stages:
            stage.check_not_wrapped()
            for weights in stage.all_weights:
                weights.check_handed_out()

    def hand_out_weights(self) -> None:
        """Let a script see and change the weights. In one process it also sees what is to be exchanged."""
        for stage in self.stages:
            stage.weights.hand_out()
        if not self._distributed:
            self._exchange_weights(counted=False)
        for stage in self.stages:
            stage.use_latest()

    def _exchange_weights(self, counted: bool) -> None:
        """Send what a replica steps to the others of its stage, then tied weights to every stage that borrows them."""
        workers = self.workers.values()
        with ExitStack() as stack:
            for worker in () if counted else workers:
                stack.enter_context(worker.uncounted())
            owned = [(worker.optimizer_steps.reducers[number], stage.weights.latest) for worker in workers
                     for number, stage in worker.stages.items() if stage.weights.owned is not None]
            for reducer, version in owned:
                reducer.send_weights(version)
            for reducer, version in owned:
                reducer.gather_weights(version)
            for worker in workers:
                worker.tied.exchange_latest(frozen=not (counted and self._distributed))
            for worker in workers:
                worker.tied.install_all()
            self.finish()

    def finish(self) -> None:
        """Wait until all sends have arrived: then this process may end."""
        for worker in self.workers.values():
            worker.transport.finish()


class RunningSegment:
    """A segment of a pipeline without a flush, with microbatches in flight; iterate over its steps.

    Args:
        segment: its loader determines its length.
        steps: yields the numbers of its steps, as they are made.

    Attributes:
        done: number of finished steps.
        drained: steps made by :meth:`drain`, to be yielded when training goes on; None before.
    """

    def __init__(self, segment: Segment, steps: Iterator[int], results: StepResults) -> None:
        self.segment, self._steps, self._results = segment, steps, results
        self.done = 0
        self.drained: deque[Step] | None = None

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        step = next(self._steps)
        self.done += 1
        return self._results.collect(self.segment, step)

    def drain(self, schedule: Schedule) -> deque[Step]:
        """Finish the microbatches in flight; return the steps made.

        Every rank drains after the same step, so all must agree on the last microbatch that still enters: the last one
        before a known pause, or else the last of the latest step that any rank may have begun.
        """
        self.end_after(self.done + schedule.steps_begun)
        self.drained = deque()
        self.drained.extend(self)
        return self.drained

    def end_after(self, steps: int) -> None:
        """Let the segment end after so many steps, unless it ends earlier; none may be begun behind them."""
        loader, end = self.segment.loader, self.segment.first + steps * self.segment.assignment.per_step
        loader.end = end if loader.end is None else min(end, loader.end)
