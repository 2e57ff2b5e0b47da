"""Interpret the programs of a schedule: execute the actions of the ranks of this process in turn."""

from __future__ import annotations

import signal
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from threading import current_thread, main_thread
from types import FrameType
from typing import NamedTuple

from vpipe.distributed.fault import Fault
from vpipe.distributed.value_exchange import Exchange
from vpipe.distributed.watchdog import watch
from vpipe.errors import RunError
from vpipe.runtime.microbatches import Segment
from vpipe.runtime.step_results import Step, StepResults
from vpipe.runtime.worker import IsSplit, Worker
from vpipe.schedules.action import Action
from vpipe.schedules.assignment import Assignment
from vpipe.schedules.builder import build_evaluation, replica_views, stream_program, without_backwards
from vpipe.schedules.graph import Flow
from vpipe.schedules.loads import StreamVersions
from vpipe.schedules.lowering import Lowering, lower
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.setting import Setting, TiedVersionOf
from vpipe.schedules.transfer_order import StreamOrder, TransferOrder, in_one_order

MIDDLE = "the middle of an update: its stages are at different versions"


class RankProgram(NamedTuple):
    """A rank's lowered actions, the versions of borrowed weights they use, and which backwards are split."""

    actions: Iterator[Action]
    tied_version_of: TiedVersionOf
    is_split: IsSplit


class RankPrograms:
    """Give every rank its program of a lowered schedule: for batches, streams and evaluations.

    Args:
        recompute: stages that recompute activations.
        ordered: whether transfers must come in one order, see :mod:`vpipe.schedules.transfer_order`.
    """

    def __init__(self, schedule: Schedule, recompute: Collection[int], ordered: bool) -> None:
        if ordered and not schedule.stream:
            schedule, _ = in_one_order(schedule)
        self._schedule, self._recompute, self._ordered = schedule, recompute, ordered
        self._orders: dict[int, StreamOrder] = {}  # by rank
        self._evaluations: dict[int, Schedule] = {}  # the latest, by its number of microbatches

    def for_batch(self, rank: int) -> RankProgram:
        """Return a rank's program, which is the same for every batch."""
        versions, split = self._schedule.versions_used, self._schedule.split_backwards
        return RankProgram(iter(self._schedule.programs[rank]), lambda owner, microbatch: versions[owner, microbatch],
                           lambda stage, microbatch: (stage, microbatch) in split)

    def for_stream(self, assignment: Assignment) -> Callable[[int], RankProgram]:
        """Return a function that gives a rank its lowered program over all microbatches that exist.

        The generator yields the program for very many microbatches (:data:`vpipe.schedules.registry.Program`); actions
        on those that never come are left out.
        """
        split = {stage for stage, _ in self._schedule.split_backwards}
        lowered, setting = self._lowered_stream(assignment)

        def program(rank: int) -> RankProgram:
            actions = lowered(rank)
            if self._ordered and all(kind.is_own for kind in self._schedule.kinds):
                if rank not in self._orders:  # the programs repeat behind a quarter of what is proved: checker.check
                    self._orders[rank] = StreamOrder(partial(self._ordered_stream, rank), self._schedule.assignment,
                                                     rank, settled=self._schedule.microbatches // 4)
                actions = self._orders[rank].program(assignment.has_microbatch, actions)
            elif self._ordered:  # what packages add may repeat later than steps do
                actions = self._ordered_stream(rank, assignment).program(rank)
            return RankProgram(actions, setting.tied_version_of, lambda stage, microbatch: stage in split)

        return program

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

    def _ordered_stream(self, rank: int, assignment: Assignment) -> TransferOrder:
        """Return the common order of the transfers of a stream, for a rank."""
        lowered, setting = self._lowered_stream(assignment)
        return TransferOrder(setting, list(map(lowered, range(self._schedule.ranks))), ranks=[rank])

    def for_evaluation(self, microbatches: int) -> Callable[[int], RankProgram]:
        """Return a function that gives a rank its program of an evaluation: forwards through all stages."""
        if microbatches not in self._evaluations:
            schedule = lower(build_evaluation(self._schedule.placement, microbatches))
            if self._ordered:
                schedule, _ = in_one_order(schedule)
            self._evaluations = {microbatches: schedule}
        programs = self._evaluations[microbatches].programs
        return lambda rank: RankProgram(iter(programs[rank]), lambda owner, microbatch: 0,
                                        lambda stage, microbatch: False)


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
        schedule: the lowered one.
        interrupts: of the user; one that waits is raised between two actions, while a batch can still be given up.
        job: the exchange between all processes.
        distributed: whether there are other processes; then this one has one rank, which waits where it must.

    Attributes:
        stages: of this process.
        broken: whether a segment failed: the stages may be at different versions; ``why``: what failed, and what was
            last whole.
        stepped: whether weights may have changed in the latest segment.
    """

    def __init__(self, workers: Mapping[int, Worker], results: StepResults, schedule: Schedule,
                 interrupts: Interrupts, job: Exchange, distributed: bool) -> None:
        self.workers, self.results, self.interrupts = workers, results, interrupts
        self.stages = [stage for worker in workers.values() for stage in worker.stages.values()]
        self._setting, self._job, self._distributed = schedule.setting, job, distributed
        self.broken = self.stepped = False
        self._batch: tuple[int, int] | None = None
        for worker in workers.values():
            worker.optimizer_steps.stepping = self._stepping
        self.why: str | None = None  # nothing, or a segment is running

    def run(self, segment: Segment, program_of: Callable[[int], RankProgram],
            batch: tuple[int, int] | None = None) -> Iterator[int]:
        """Execute a segment, a ``batch`` that processes can give up together or another one; yield each step when every
        stage of this process has made all its updates."""
        self.stepped, self._batch, self.why = False, batch, None
        keep = segment.training and (batch is not None or not self._distributed)
        self._put_back = [stage.kept_state() for stage in self.stages if keep and stage.forwards_change_state]
        programs = {rank: program_of(rank) for rank in self.workers}
        for rank, worker in self.workers.items():
            worker.begin(segment, programs[rank].tied_version_of, programs[rank].is_split, batch)
        assignment, here = segment.assignment, sum(len(worker.stages) for worker in self.workers.values())
        made: Counter[int] = Counter()  # stages that have made all their updates of a step
        done = 0
        self.broken = True  # until the end is reached
        try:
            for rank, action in self._execute_all(programs, segment):
                if action.op.makes_version:
                    used = (action.index + 1) * assignment.per_update(action.stage)
                    step, left = divmod(used, assignment.per_step)
                    made[step - 1] += not left
                    # A step of fewer microbatches ends with the programs.
                    if made[done] == here and len(assignment.in_step(done)) == assignment.per_step:
                        self.broken = False
                        yield done
                        self.broken = True
                        del made[done]
                        done += 1
                else:
                    self.results.send(segment, 0, rank)
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

    def _execute_all(self, rank_programs: Mapping[int, RankProgram], segment: Segment) -> Iterator[tuple[int, Action]]:
        """Execute each rank's actions as soon as their inputs are there; yield steps and last forwards afterwards.

        With a flush the ranks of one process step when all can: an error before that leaves the weights unchanged.
        """
        step_together, last_forwards = segment.assignment.flush and not self._distributed, self.results.last_forwards
        # What tells whether an action can be executed, where all ranks are in this process.
        interrupts, flow = self.interrupts, None if self._distributed else Flow(replace(
            self._setting, assignment=segment.assignment,
            tied_version_of=next(iter(rank_programs.values())).tied_version_of))
        programs = {rank: program.actions for rank, program in rank_programs.items()}
        heads = {rank: first for rank, program in programs.items() if (first := next(program, None)) is not None}
        while heads:
            moved = False
            for rank in list(heads):
                execute, program = self.workers[rank].execute, programs[rank]
                action: Action | None = heads.pop(rank)
                while action is not None and (flow is None or action.op.transfer is not None
                                                  or flow.missing(action, rank) is None):
                    if interrupts.noted and not self.stepped:  # else the batch is better ended
                        interrupts.raise_noted()
                    if action.op.makes_version:
                        if step_together:
                            break
                        if self._distributed:
                            used = segment.assignment.in_update(action.stage, action.index)
                            segment.confirm(segment.first + used.stop)
                    execute(action)
                    if flow is not None and action.op.told:
                        flow.follow(action, rank)
                    moved = True
                    if action.op.makes_version or action is last_forwards.get(rank):
                        yield rank, action
                    action = next(program, None)
                if action is not None:
                    heads[rank] = action
            if step_together and not moved:
                step_together = False
            elif not moved:
                waits = "; ".join(
                    f"rank {rank} at {action} waits for the {value.name} {index} of stage {stage} from rank {home}"
                    for rank, action in heads.items() if flow is not None and (found := flow.missing(action, rank))
                    for value, stage, index, home in [found])
                raise RunError(f"no rank can go on: {waits}", hint="the schedule deadlocks: this is a defect of vpipe")

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
