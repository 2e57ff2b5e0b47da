"""Train and evaluate: run the workers of this process through the segments of a schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from itertools import chain, count, zip_longest
from math import inf
from operator import gt

from torch import Tensor

from vpipe import accelerator
from vpipe.checkpoint.manifest import Position, View
from vpipe.description.cut import StageSpec, ties_between
from vpipe.description.description import Description
from vpipe.distributed.device import DeviceMap
from vpipe.distributed.fault import Fault
from vpipe.distributed.init import exchange
from vpipe.distributed.watchdog import watch
from vpipe.errors import RunError, UserError, counted
from vpipe.model.model import Model
from vpipe.runtime.action_recorder import MOST_ACTIONS, Recorder
from vpipe.runtime.batch_comparison import SAME_BATCHES, LaneComparison
from vpipe.runtime.build_workers import build_stages, build_workers
from vpipe.runtime.collectives import Collectives
from vpipe.runtime.delay_correction import describe_other_factors
from vpipe.runtime.interpreter import Interpreter, Interrupts, RankPrograms, RunningSegment
from vpipe.runtime.label_weights import CLASSES_ALIKE, ClassWeights, LossCheck, Weigh
from vpipe.runtime.microbatches import Batch, MicrobatchLoader, Segment
from vpipe.runtime.outputs import Outputs, interleaved, joined
from vpipe.runtime.sharded_tensors import whole
from vpipe.runtime.slices import check_slices
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_layers import Marks
from vpipe.runtime.stage_optimizer import StageOptimizer, check_rescheduled
from vpipe.runtime.state_dict import CompanionState, StatePart, state_parts
from vpipe.runtime.step_results import Step, StepResults, read_at_once
from vpipe.runtime.surroundings import P, Surroundings, T, set_aside
from vpipe.runtime.transport.process_group import is_ordered, tensor_groups
from vpipe.runtime.worker import Worker, check_runnable
from vpipe.schedules.assignment import Assignment
from vpipe.schedules.prepare import with_frozen
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.size import Placement

Pauses = Callable[[int], int | None]
"""Steps done -> the step after which the pipeline drains next; None: no pause is planned."""

_made_here = count()


class Engine:
    """Run a lowered schedule over the stages of this process.

    Within one process all ranks take turns in one thread, in the order of dependencies; with torch.distributed this
    process is one rank. The numbers are the same.

    Attributes:
        workers: of this process, by rank.
        collectives: operations that all ranks call together.
        schedule: the lowered one, without the backwards of stages in front that train nothing.
        interrupts: lets Ctrl-C wait until the pipeline is whole.
        position: of training; microbatches in flight are not counted.
        surroundings: what a script has around its calls.
    """

    def __init__(self, model: Model, specs: Sequence[StageSpec], schedule: Schedule, description: Description,
                 world: DeviceMap, surroundings: Surroundings) -> None:
        self.surroundings = surroundings
        self._description, self._fields, self._unread = description, model.batch, model.unread
        self._labels, self._label_weights, self._losses_checked = model.labels, model.label_weights, set[bool]()
        self._device, self._lanes, timeout_s = world.own, world.lanes, description.transfers.timeout_s
        distributed = len(world.lanes.own) > 1
        check_slices(model, description, schedule.slices)
        self._placement: Placement = schedule.placement
        self.workers: dict[int, Worker] = {}
        self.collectives = Collectives(self.workers, specs, self._placement, world.lanes, timeout_s,
                                       bool(description.update.zero1))
        self._beside = beside = exchange("lanes", timeout_s, world.lanes.beside(world.lanes.own.index(world.rank)))
        self._counted = description.update.counted_labels(model.labels)
        self._lane_comparison = None if world.lanes.count == 1 else LaneComparison(beside, model.batch,
                                                                                   world.lanes.alike)
        if distributed and is_ordered(self._device):  # refuses while another pipeline has transfers under way
            tensor_groups(self._device, timedelta(seconds=timeout_s))
        self.collectives.check_same(model, schedule, description)
        with self.collectives.problems_of_all():
            check_runnable(schedule.kinds)
            stages = build_stages(model, specs, schedule, description, world)
        frozen = self.collectives.frozen_ties(stages)
        ties = ties_between(specs, lambda name: name not in frozen)
        self.schedule = schedule = with_frozen(schedule, self._frozen(stages), ties)
        self.workers.update(build_workers(stages, model, specs, schedule, description, world, ties,
                                          ties_between(specs, frozen.__contains__)))
        widest = max(map(len, self._placement))
        assert schedule.setting.zero1 == bool(description.update.zero1 and widest > 1), "lowered for another update"
        recompute = [stage for stage, layers in enumerate(description.cut.recomputed) if layers]
        self._programs = RankPrograms(schedule, recompute, any(
            worker.transport.ordered for worker in self.workers.values()))
        if description.needs_norms and schedule.flush:
            self.collectives.agree_on_norms()
        self.position = Position(0, 0, 0)
        self._restored = self.position  # of which the batch that was under way goes on, until something is trained
        self._made: deque[Step] = deque()  # steps of the latest batch that were not yielded yet
        self._stream: RunningSegment | None = None
        self._streamed: MicrobatchLoader | None = None  # the latest
        self._results = StepResults(self.workers, schedule, distributed, world.lanes, beside)
        self.interrupts = Interrupts(alone=world.ranks == 1)
        self._recorders: dict[int, Recorder] = {}
        self._interpreter = Interpreter(self.workers, self._results, schedule, self.interrupts, distributed)
        with self._taken_back():
            pass
        self._number = self.collectives.job.from_rank(next(_made_here))  # the same on all ranks
        self._stopped = 0  # calls of train that ended since a rank asked
        self._replicas_compared = False
        self._lanes_compared = world.lanes.count == 1  # after their first update
        self._holds = distributed and self._lanes_compared  # lanes wait for one another within a layer
        self._gives_up = self._holds and schedule.flush and not any(
            type(worker).forward is not Worker.forward for worker in self.workers.values())
        self._batches = count()  # that were begun; the latest, where it can be given up
        self._batch: tuple[int, int] | None = None
        self._in_flight: tuple[str, list[Marks]] | None = None  # since when, with marks
        self._inside: str | None = None  # the function of the script's that runs in the middle of an update

    def _frozen(self, built: Mapping[int, Mapping[int, Stage]]) -> int:
        """Return how many stages from the first on train nothing on any rank; the last is never one of them."""
        trained = self.collectives.job.united({str(number): "" for stages in built.values()
                                               for number, stage in stages.items() if stage.trains})
        return min(map(int, trained), default=len(self._placement) - 1)

    # -- training --------------------------------------------------------------------------------------

    @set_aside
    def train(self, batches: Iterable[Batch], updates: int | None = None, stop: Callable[[], bool] | None = None,
              pauses: Pauses = lambda steps: None) -> Iterator[Step]:
        """Train on the batches; yield the steps, in order. See :meth:`vpipe.Pipeline.train`.

        After :meth:`restore` the first batch is the one that was under way, without its microbatches that are done. At
        a pause a :meth:`drain` makes no step, and the next microbatches use the latest weights at every stage.
        """
        iterator = iter(batches)
        self._compare_replicas()
        if self._stream is None:
            self._in_flight = None  # the caller went away between two steps that had been made
        self.drain()
        self._made.clear()
        self._raised: BaseException | None = None  # by ``stop``
        asks = partial(self._asks, stop or bool)
        self._results.stop = asks if stop is None else self._calling(asks, "stop")
        return self._until_asked(self._train_stream(iterator, updates, pauses) if self.schedule.stream
                                 else self._train_whole(iterator, updates))

    @property
    def _training(self) -> str:
        """The name by which all ranks know what the next stop ends; a request that comes late ends no other training.
        """
        return f"training {self._stopped} of pipeline {self._number}"

    def ask_stop(self) -> None:
        """End the training on all ranks; see :meth:`vpipe.Pipeline.stop`."""
        watch.ask_stop("asked", self._training)

    def _asks(self, stop: Callable[[], bool]) -> bool:
        """Return whether to stop; what the user's function raises is raised when the pipeline is whole."""
        try:
            return bool(stop()) or watch.why_stop(self._training) is not None
        except BaseException as error:
            self._raised = error
            return True

    def _until_asked(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Yield steps up to the one that says stop, and those that have been made with it."""
        asked = False
        for number in count():
            if self.schedule.stream:
                self.collectives.job.note(f"step {number} of train()")
            with self.surroundings.set_aside():
                step = next(steps, None)
            if step is None:
                return
            self._stopped += step.stop and not asked
            asked = asked or step.stop
            if step.stop and self._raised is not None:
                raise self._raised
            yield step
            if asked and step.index + 1 >= self.reached().steps:
                return

    def reached(self) -> Position:
        """Return the position after the steps that were yielded, and those that :meth:`drain` made."""
        stream = self._stream
        if stream is None:
            return self.position
        first, done = stream.segment.first, stream.done * self.schedule.assignment.per_step
        return self.position.after(stream.done, done, self._samples(stream.segment, first + done),
                                   (first + done) % self._description.microbatches)

    def _train_whole(self, batches: Iterator[Batch], updates: int | None) -> Iterator[Step]:
        """Train batch after batch, each with all of the schedule's programs and an empty pipeline at its end."""
        first, whole = 0, self.schedule.microbatches
        loader = self._loader(batches, whole)
        if updates is not None:
            loader.end = -(-updates * self.schedule.assignment.per_step // whole) * whole
        while self._has(loader, first):
            try:
                with self.interrupts:
                    self._train_batch(loader, first)
            except KeyboardInterrupt as interrupt:
                interrupt.add_note(self._whereabouts())
                raise
            first += whole
            while self._made:
                yield from self._yield_unchanged(self._made.popleft(), lambda: bool(self._made))
        self._end_batches(loader)

    def _has(self, loader: MicrobatchLoader, first: int) -> bool:
        """Return whether there is a microbatch to go on with, with what the script has made of the weights. What a rank
        cannot begin is refused on all: at once where they wait for one another, else when the rank has given it up."""
        there, checked, error, per_step = False, False, None, self.schedule.assignment.per_step
        try:
            there, done = loader.has(first), self.position.steps
            self._interpreter.check_whole()
            self._interpreter.check_weights()
            checked = True
            for stage in self.local_stages:
                stage.check_frozen()
                stage.check_hooks()
            check_rescheduled(self._optimizers)
            for step in range(done, done + max(1, self.schedule.microbatches // per_step) * there):
                next(iter(self.workers.values())).optimizer_steps.factor(step)
        except BaseException as caught:
            error = caught
        bad, what = error or (None if there else loader.error), f"step {first // per_step} of train()"
        batch = self._batch = (self._number, next(self._batches)) if self._gives_up else None
        own = None if bad is not None else loader.fields if there else []
        hears = not own if self._gives_up else self.schedule.stream or first == 0 or self._lanes.count > 1
        told = self.collectives.job.note(what, own, hears)
        if hears:
            try:
                of_all = told()
            except RunError as fault:
                if bad is None:
                    raise
                raise bad from fault
            going = next((rank for rank, each in enumerate(of_all) if each), None)
            if not there and going is not None:
                bad = bad or RunError(f"batches differ between ranks: there are {loader.batches_read} on rank "
                                      f"{self.collectives.job.rank} and more on rank {going}", hint=SAME_BATCHES)
                loader.close()
            if going is None or batch is None:
                if not all(of_all) and of_all != [[]] * len(of_all):
                    self.collectives.job.begin(None, what, error if going is None else bad)()
            elif bad is not None:
                if (watchdog := watch.watchdog) is None or not watchdog.give_up(batch):
                    raise bad
                [worker] = self.workers.values()
                worker.held = first, min(worker.stages), bad
                if not there:
                    loader.stand_in(of_all[going])
                there = True
        elif error is not None:
            raise error
        # Also where the batches end, since they may end on one rank only.
        self._interpreter.take_back_weights(self.schedule.flush and first > 0, checked)
        if not there:
            self._interpreter.hand_out_weights()
        return there

    def _train_batch(self, loader: MicrobatchLoader, first: int) -> None:
        segment, last_forwards = self._segment(loader, first, self.schedule.assignment), self._results.last_forwards
        if last_forwards:
            self._results.post(segment, 0)
        steps: Iterable[int] = self._interpreter.run(segment, self._programs.for_batch, self._batch)
        try:
            if not last_forwards:
                steps = list(steps)  # losses are exchanged when the batch is done
            self._made = deque(self._results.collect(segment, step) for step in steps)
            if not self._interpreter.stepped:
                self._made.clear()
                self._interpreter.undo()
                self._raise_held()
            self._compare_lanes()
            self._close(segment, first + self.schedule.microbatches, len(self._made))
        except BaseException:
            self._interpreter.fail()
            raise
        self.collectives.check_numbers()

    def _train_stream(self, batches: Iterator[Batch], updates: int | None, pauses: Pauses) -> Iterator[Step]:
        """Train without a flush, from pause to pause, first on what an earlier call has read of the same batches."""
        loader = self._streamed
        while True:
            self.drain()  # of another call of train
            if loader is None or loader.batches is not batches:
                begun = self._restored.within(self._description.microbatches) if self.position == self._restored else 0
                loader = self._streamed = self._loader(batches, None, begun)
                loader.end = begun
            first, done = loader.total, self.position.steps
            pause = pauses(done)
            assert pause is None or pause > done, f"a pause after step {pause}, but {done} are done"
            if updates is not None:
                pause = done + updates if pause is None else min(pause, done + updates)
            loader.end = None if pause is None else first + (pause - done) * self.schedule.assignment.per_step
            if not self._has(loader, first):
                break
            made = yield from self._train_to_pause(loader, first, pause, pauses)
            updates = None if updates is None else updates - made
        self._end_batches(loader)

    def _train_to_pause(self, loader: MicrobatchLoader, first: int, pause: int | None, pauses: Pauses
                        ) -> Generator[Step, None, int]:
        """Train until the next pause, or an earlier one that is named meanwhile; return the number of steps."""
        assignment = replace(self.schedule.assignment,
                             has_microbatch=lambda microbatch: loader.has(first + microbatch))
        segment = self._segment(loader, first, assignment)
        stream = self._stream = RunningSegment(segment, self._steps_of_stream(segment, assignment), self._results)
        try:
            while (step := self._next_of_stream(stream)) is not None:
                self._compare_lanes()
                if segment.steps_before + stream.done == pause:
                    self.drain()  # what is left has no step: then weights may be changed
                yield from self._yield_unchanged(step, lambda: stream.drained is None)
                done = segment.steps_before + stream.done
                sooner = (pauses(done) or 0) if stream.drained is None else 0
                if done + self.schedule.steps_begun <= sooner < (pause or sooner + 1):
                    pause = sooner
                    stream.end_after(pause - segment.steps_before)
        except RunError as error:  # of another rank, which has the batch that could not be read here
            if loader.error is None or loader.error is error:
                raise
            raise loader.error from error
        if stream.drained is None:
            with self.interrupts:
                self._end_stream(stream)
        else:
            yield from stream.drained
        return stream.done

    def _next_of_stream(self, stream: RunningSegment) -> Step | None:
        before, now = stream.segment.autocast, self.surroundings.autocast
        if now != before and stream.drained is None and stream.segment.assignment.in_step(stream.done):
            raise UserError(f"torch.autocast around the loop was {before or 'off'} and is {now or 'off'} after "
                            f"{counted(self.reached().steps, 'step')}, while '{self.schedule.name}' has microbatches "
                            "in flight", hint="write pipe.drain() before the autocast changes")
        try:
            with self.interrupts:
                return next(stream, None)
        except KeyboardInterrupt as interrupt:
            if self._stream is stream:
                interrupt.add_note(f"{counted(self.reached().steps, 'update')} made, and nothing is lost: the next "
                                   "call of the pipeline ends the microbatches in flight")
            raise

    def _steps_of_stream(self, segment: Segment, assignment: Assignment) -> Iterator[int]:
        """Yield the step numbers of a stream; after a failure nothing of it is left to drain."""
        try:
            yield from self._interpreter.run(segment, self._programs.for_stream(assignment))
        except GeneratorExit:  # the caller goes away between two steps
            raise
        except BaseException as error:
            self.position = self.reached()
            self._stream = None
            segment.loader.close()
            if isinstance(error, KeyboardInterrupt):
                error.add_note(self._whereabouts())
            raise

    def _whereabouts(self) -> str:
        """Return, in words, what an interrupt has left."""
        done = counted(self.position.steps, "update")
        if not self._interpreter.broken:
            return f"{done} made, and the pipeline is as after the last: train, evaluate and save go on from there"
        versions = sorted({stage.weights.latest for stage in self.local_stages})
        lost = sorted({self.schedule.assignment.microbatch_and_slice(number)[0] for worker in self.workers.values()
                       for _, number in worker.records})
        made = " and ".join(map(str, versions if len(versions) < 3 else (f"{versions[0]} to {versions[-1]}",)))
        flight = f", and microbatches {lost[0]} to {lost[-1]} in flight are lost" if lost else ""
        return (f"{done} made by all stages; stages here have made {made}{flight}: build a new pipeline, and load a "
                "checkpoint")

    def _end_batches(self, loader: MicrobatchLoader) -> None:
        """Raise the user's error of a batch that could not be read, when the batches before it are done."""
        self._agree_on_end(loader)
        if not loader.rest:  # else another call may go on
            loader.close()
            if loader.error is not None:
                raise loader.error
        device = self._device
        if device.type != "cpu" and any(worker.transport.ordered for worker in self.workers.values()):
            accelerator.current_stream(device).synchronize()  # the process may end now, before its sends have

    def _agree_on_end(self, loader: MicrobatchLoader) -> None:
        """Check that the batches end on every rank alike, if they end before a limit and a pause."""
        for worker in self.workers.values():
            if worker.comparison is not None and loader.ended:
                worker.comparison.check_end(loader, self.collectives.exchange)

    def _yield_unchanged(self, step: Step, later_updates: Callable[[], bool]) -> Iterator[Step]:
        """Yield a step; refuse changed weights and parameter groups if later updates are made or under way: which stage
        sees a change would depend on the transport."""
        if self.schedule.flush:
            yield step
            return
        if later_updates():
            self._in_flight = f"after step {step.index}", self._marks()
        yield step
        self._check_not_wrapped()
        for stage in self.local_stages:
            stage.check_frozen()
        self._check_unchanged()

    def _marks(self, sampled: bool = True) -> list[Marks]:
        for stage in self.local_stages:
            stage.use_latest()  # a module may be the user's own, who looks at it
        options = [optimizer.options() for optimizer in self._optimizers]
        return [*chain.from_iterable([stage.marks(sampled) for stage in self.local_stages]),
                ([""] * len(options), options)]

    def _check_unchanged(self, sampled: bool = True) -> None:
        """Refuse what a script changed since the latest step was yielded, or its function called."""
        (when, marks), self._in_flight = self._in_flight or ("", []), None
        for before, now in zip(marks, self._marks(sampled) if marks else (), strict=True):
            if before != now:
                name = next((new or old)[0] for old, new in zip_longest(
                    zip(*before, strict=True), zip(*now, strict=True), fillvalue=()) if old != new)
                what = f"'{name}'" if name else "a parameter group of an optimizer"
                if name:  # what is under way has the rates of before
                    self._in_flight = when, marks
                raise UserError(f"{what} was changed {when}, while '{self.schedule.name}' has microbatches in flight",
                                hint="change it in the body of the loop, without a flush after drain() or at a pause; "
                                     "give learning rates as learning_rate_factor=lambda step: ...")

    def _calling(self, function: Callable[P, T], name: str) -> Callable[P, T]:
        """Return a function of the script's that may change nothing with microbatches in flight, as for ``stop``."""
        function = self.surroundings.calling(function)

        def call(*arguments: P.args, **keywords: P.kwargs) -> T:
            if name != "stop" and self._stream is None:
                return function(*arguments, **keywords)
            self._in_flight, self._inside = (f"by {name}", self._marks(sampled=False)), name
            try:
                return function(*arguments, **keywords)
            finally:
                self._inside = None
                self._check_unchanged(sampled=False)  # quicker: this is done in every update
        return call

    @property
    def _optimizers(self) -> list[StageOptimizer]:
        return [optimizer for worker in self.workers.values()
                for optimizer in worker.optimizer_steps.optimizers.values()]

    def _compare_replicas(self) -> None:
        """Refuse replicas that start with different weights, once, and again after :meth:`restore`."""
        if not self._replicas_compared:
            # In a resumed run replicas have buffers of their own.
            with self._taken_back():
                self.collectives.check_replicas_begin(buffers=self.position.microbatches == 0)
            self._replicas_compared = True

    def _compare_lanes(self) -> None:
        """Refuse weights that lanes have in common and changed differently in the first update of this process."""
        if not self._lanes_compared:
            self.collectives.check_lanes(self._beside)
            self._lanes_compared = True

    def _segment(self, loader: MicrobatchLoader, first: int, assignment: Assignment) -> Segment:
        """Return the segment that is trained next, beginning with an empty pipeline."""
        for steps in (worker.optimizer_steps for worker in self.workers.values() if not self.position.steps):
            for companion in chain.from_iterable(own.values() for own in steps.companions.values()):
                companion.begin()  # with what a script has made of the weights before the first update
        return Segment(loader, first, self.position.microbatches * loader.slices, self.position.steps, assignment,
                       training=True, autocast=self.surroundings.autocast)

    @set_aside
    def drain(self) -> Sequence[Step]:
        """Finish the microbatches in flight without a flush; return the steps made. All ranks drain after the same."""
        self.check_outside()
        self._check_not_wrapped()
        stream = self._stream
        if not self._interpreter.broken:
            self._check_unchanged()
        if stream is None or self._interpreter.broken:
            return tuple(self._made)
        with self.interrupts:
            steps = stream.drain(self.schedule)
            self._end_stream(stream)
        self.collectives.job.all_gather(None, "draining")
        return steps

    def check_outside(self) -> None:
        """Refuse a call in the middle of another one; and among processes one of a pipeline that has failed."""
        if self._inside is not None or self._interpreter.running:
            raise UserError(f"{self._inside or 'a function, a layer or an optimizer'} calls the pipeline in the middle "
                            "of an update or evaluation", hint="call it in the body of the loop, with pauses=... if "
                            "there is no flush, or when evaluate has returned")
        if self.collectives.job.ranks > 1:
            self._interpreter.check_whole()

    def _check_not_wrapped(self) -> None:
        for stage in self.local_stages:
            stage.check_not_wrapped()

    def _end_stream(self, stream: RunningSegment) -> None:
        self._stream = None
        self._close(stream.segment, stream.segment.loader.total, stream.done)
        self._agree_on_end(stream.segment.loader)
        self.collectives.check_numbers()

    def _close(self, segment: Segment, end: int, steps: int) -> None:
        """Count the steps and microbatches of a finished segment; ``end``: the loader's next microbatch."""
        slices = segment.loader.slices
        self.position = self.position.after(steps, (end - segment.first) // slices, self._samples(segment, end),
                                            end // slices % self._description.microbatches)
        self._interpreter.finish()

    def _samples(self, segment: Segment, end: int) -> int:
        """Return the samples of a segment's microbatches until ``end``, of all lanes that read batches of their own."""
        return segment.loader.samples(segment.first, end) * len(self._lanes.averaged)

    def record(self, limit: int = MOST_ACTIONS) -> Mapping[int, Recorder]:
        """Record the actions of training from now on; see :meth:`vpipe.Pipeline.record`."""
        if (why := self._description.execution.no_timeline) is not None:
            raise UserError(why[0], hint=why[1])
        for rank, worker in self.workers.items():
            if rank in self._recorders:
                worker.around.remove(self._recorders[rank])
            self._recorders[rank] = Recorder(worker, limit)
            worker.around.append(self._recorders[rank])
        return dict(self._recorders)

    @set_aside
    def evaluate(self, batches: Iterable[Batch], wanted: Outputs | None,
                 averaged: bool = False) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss over samples, or labels if the model says so, and the outputs that are wanted.

        See :meth:`vpipe.Pipeline.evaluate`.
        """
        if averaged:
            self.check_averaged()
            batches = iter(batches)
            with self._averaged_weights():
                return self.evaluate(batches, wanted)
        batches = iter(batches)
        self._compare_replicas()
        self.drain()
        losses: dict[int, list[float]] = {rank: [] for rank in self._placement[-1] if rank in self.workers}
        weights: list[float] = []  # of the labels, where the last stage is
        samples: list[int] = []
        # Only as many batches at a time as keep every stage busy: in one process nothing else bounds how far the first
        # stage runs ahead. Every replica takes equally many of them, so that the next ones are in order.
        most = (-(-2 * len(self._placement) // self._description.microbatches) * len(self._placement[-1])
                * self._description.microbatches)
        loader, first = self._loader(batches, most, training=False), 0
        with self.interrupts, self._taken_back(), ExitStack() as stack:
            for worker in self.workers.values():
                stack.enter_context(worker.evaluating(wanted, self._holds))
            for recorder in self._recorders.values():
                stack.enter_context(recorder.evaluating())
            stack.enter_context(self.collectives.first_buffers())
            read = self._read_ahead(loader, first + most)
            while (end := read()) > first:
                read = self._read_ahead(loader, end + most)  # what all have read, none waits for
                assignment = Assignment(self._placement, end - first, True, partial(gt, end - first))
                if loader.labels is not None:
                    weights += [loader.counts.pop(number)[0] for number in range(first, end)]
                segment = Segment(loader, first, 0, 0, assignment, training=False,
                                  autocast=self.surroundings.autocast)
                for _ in self._interpreter.run(segment, self._programs.for_evaluation(end - first)):
                    pass
                for worker in self.workers.values():
                    worker.drop_checksums(range(end - first))
                for rank, own in losses.items():
                    new = self.workers[rank].losses
                    own += read_at_once([new.pop(number) for number in sorted(new)])
                samples += [loader.samples(i, i + 1) for i in range(first, end)]
                first = end
            self._end_batches(loader)
            self._raise_held()
        if not samples:
            raise UserError("there is nothing to evaluate on", hint="give evaluate at least one batch")
        gather = partial(self._results.gather, microbatches=range(len(samples)), exchange=self.collectives.exchange,
                         assignment=replace(self.schedule.assignment, slices=1))
        in_order = gather(losses)
        weights = list(samples) if self._labels is None else self.collectives.exchange.from_rank(
            weights, self._placement[-1][0])
        # The loss of a microbatch without a label may be NaN: it does not count.
        total, weight = sum(loss * size for loss, size in zip(in_order, weights, strict=True) if size), sum(weights)
        self._interpreter.finish()
        return self._results.over_lanes(total, weight), {} if wanted is None else self._outputs(samples)

    def _read_ahead(self, loader: MicrobatchLoader, end: int) -> Callable[[], int]:
        """Read what an evaluation runs next; return a function that returns its end when all ranks have. A batch that
        one cannot read, or lacks, is refused on all of them before anything is under way."""
        end = end if loader.has(end - 1) else loader.total
        held = any(worker.held is not None for worker in self.workers.values())
        told = self.collectives.job.begin([loader.batches_read if loader.ended else inf, held], error=loader.error)

        def wait() -> int:
            ends, holds = zip(*told(), strict=True)
            if (fewest := min(ends)) < max(ends):
                raise RunError(f"batches differ between ranks: there are {fewest} on rank {ends.index(fewest)} and "
                               f"more on rank {ends.index(max(ends))}", hint=SAME_BATCHES)
            if any(holds):
                self._raise_held()
            return end
        return wait

    def _raise_held(self) -> None:
        """Raise on every rank what a layer or function of the user's raised first on any of them."""
        held = {worker.held[:2]: worker.held[2] for worker in self.workers.values() if worker.held is not None}
        for worker in self.workers.values():
            worker.held = None
        first = min((tuple(place) for own in self.collectives.job.all_gather(list(held)) for place in own),
                    default=())
        try:
            self.collectives.job.begin(None, error=held.pop(first, None))()
        except RunError as error:
            if error.peer is None or (watchdog := watch.watchdog) is None:
                raise
            fault = Fault((error.peer,), error.what.removeprefix(f"rank {error.peer} "), error.hint, reported=True)
            raise watchdog.error(fault, f"{watchdog.place(watchdog.rank)} was left as it was") from None

    def check_averaged(self) -> None:
        """Refuse to look at the average of the weights where none is kept."""
        if self._description.update.average is None:
            raise UserError("averaged is True, but no average follows the weights",
                            hint="keep one from the start: Update(optimizer, average=0.999)")

    @contextmanager
    def _taken_back(self) -> Iterator[None]:
        """Compute meanwhile with what the script has made of the weights; every rank enters, with nothing in flight."""
        self._interpreter.check_whole()
        with self.collectives.problems_of_all():
            self._interpreter.check_weights()
        self._interpreter.take_back_weights()
        try:
            yield
        finally:
            self._interpreter.hand_out_weights()

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Put the averages in place of the weights meanwhile; an evaluation gives them to all stages that use them."""
        self._compare_replicas()
        self.drain()
        with self.interrupts, self._taken_back():
            with self.collectives.problems_of_all():
                before = [(stage, {name: value.clone() for name, value in stage.state().items()},
                           worker.optimizer_steps.companions[number]["average"])
                          for worker in self.workers.values() for number, stage in worker.stages.items()]
            try:
                with self.collectives.problems_of_all():
                    for stage, state, average in before:
                        stage.load(average.view(state))
                yield
            finally:
                for stage, state, _ in before:
                    stage.load(state)

    def _outputs(self, samples: Sequence[int]) -> dict[str, Tensor]:
        """Return the outputs of an evaluation that is done, on every rank; ``samples``: of its microbatches."""
        kept = {rank: self.workers[rank].outputs for rank in self._placement[-1] if rank in self.workers}
        parts = self.collectives.of_last_stage({
            rank: joined([own[number] for number in sorted(own)]) for rank, own in kept.items()})
        for own in kept.values():
            own.clear()
        return interleaved(parts, samples) if len(self._placement[-1]) > 1 else joined(parts)

    def _loader(self, batches: Iterator[Batch], period: int | None, begun: int = 0,
                training: bool = True) -> MicrobatchLoader:
        """Return a loader of the microbatches that this process uses.

        Args:
            period: after how many microbatches they are divided among replicas from the first one on, if ever.
            begun: how many of the first batch are left out.
            training: all microbatches of a batch must have the same size, and are cut into slices.
        """
        here = [(stage, rank) for rank, worker in self.workers.items() for stage in worker.stages]
        slices = self.schedule.slices if training else 1
        assignment = replace(self.schedule.assignment, slices=slices)

        def uses(microbatch: int) -> int:
            number = microbatch - begun if period is None else microbatch % period
            return 0 if number < 0 else sum(assignment.rank_of(stage, number) == rank for stage, rank in here)

        used = {name for stage in self.local_stages for name in stage.spec.fields}
        counted = self._counted if training and slices == 1 else self._labels
        weigh = CLASSES_ALIKE if counted is None else self._weigh(counted, training)
        if not training and len(self._placement) - 1 not in (stage for stage, _ in here):
            counted = None  # the last stage has them
        comparison = next((worker.comparison for worker in self.workers.values()), None)
        lanes = None if self._lane_comparison is None else self._lane_comparison.compare
        return MicrobatchLoader(batches, self._description.microbatches, self._fields, uses, used,
                                self._device if self.schedule.stream or not training else None, comparison, lanes,
                                counted, weigh, self._over_lanes if training else list, slices=slices,
                                by_label=not training or self._counted is not None, equal=training,
                                read=self._calling(next, "the iterator of batches"), unread=self._unread)

    def _weigh(self, labels: str, training: bool) -> Weigh:
        """Return how much each label counts, as the model says, or now its loss; let the first losses be checked."""
        if self._label_weights is not None:
            return self._label_weights
        last = [stage for stage in self.local_stages if stage.spec.index == len(self._placement) - 1]
        found = next((ClassWeights.of_module(stage.modules[stage.spec.layers[-1]]) for stage in last), None)
        told = self.collectives.exchange.from_rank(vars(found or CLASSES_ALIKE), self._placement[-1][0])
        weigh = ClassWeights(told["ignore_index"], tuple(told["classes"]))
        for stage in () if training in self._losses_checked else last:
            stage.loss_checks = [LossCheck(labels, weigh) for _ in range(self._description.microbatches)]
        self._losses_checked.add(training)
        return weigh

    def _over_lanes(self, numbers: list[float]) -> list[float]:
        """Return the sums of numbers over the lanes that read batches of their own."""
        if len(self._lanes.averaged) == 1:
            return numbers
        of_all = self._beside.all_gather(numbers)
        return [sum(each) for each in zip(*(of_all[lane] for lane in self._lanes.averaged), strict=True)]

    @property
    def local_stages(self) -> list[Stage]:
        """Return the stages of this process."""
        return [stage for worker in self.workers.values() for stage in worker.stages.values()]

    @set_aside
    def state(self, view: View = "trained") -> dict[str, Tensor]:
        """Return the whole model on every rank, in the order of the layers; see :meth:`vpipe.Pipeline.state_dict`."""
        if view == "average":
            self.check_averaged()
        self._compare_replicas()
        self.drain()
        with self._taken_back():
            self.collectives.check_replicas()
            return self.collectives.state(view)

    def check_replicas(self) -> None:
        """Compare the weights of replicas; see :meth:`vpipe.Pipeline.check_replicas`."""
        self.drain()
        with self._taken_back():
            self.collectives.check_replicas()

    # -- save and restore ------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> list[StatePart]:
        """Return the parts of the state that a checkpoint holds."""
        return state_parts(self.workers, self._placement)

    def checkpoint_state(self) -> dict[str, Tensor]:
        """Return the state of this process that a resumed run needs; see :meth:`vpipe.Pipeline.local_state`.

        Raises:
            RunError: the pipeline failed before.
        """
        state: dict[str, Tensor] = {}
        for name, tensor in self.tensors_here().items():
            full = whole(tensor)  # one after the other; of a DTensor by all lanes, the first of which keeps it
            if not self._lanes.number:
                state[name] = full.cpu() if full is not tensor else full
        return state

    @set_aside
    def tensors_here(self) -> dict[str, Tensor]:
        """Return the same without copies, and in every lane; of DTensors the shards."""
        self.drain()
        with self._taken_back(), self.collectives.problems_of_all():
            return {name: tensor for part in self.parts for name, tensor in part.state().items()}

    def wants(self, name: str) -> bool:
        """Return whether :meth:`restore` of this process needs a tensor of this name."""
        return any(part.wants(name) for part in self.parts)

    @set_aside
    def restore(self, position: Position, tensors: Mapping[str, Tensor]) -> str | None:
        """Restore a saved run, on every rank before it trains; see :meth:`vpipe.Pipeline.restore`.

        Args:
            tensors: the :meth:`checkpoint_state` of all ranks together, or the part that this process :meth:`wants`.
        """
        with self.collectives.problems_of_all():
            self.check_restorable(position)
            wanted = [(part, {name: tensor for name, tensor in tensors.items() if part.wants(name)})
                      for part in self.parts]
            for part, own in wanted:
                part.check(own)
        with self.interrupts:
            try:
                with self.collectives.problems_of_all():
                    for part, own in wanted:
                        part.load(own)
            except BaseException:
                self._interpreter.fail("while a state was loaded, of which it may have a part; it was whole before")
                raise
            with self._taken_back():
                pass
            self._replicas_compared = False
            self.position = self._restored = replace(
                position, begun=position.within(self._description.microbatches))
        [companions] = [part for part in self.parts if isinstance(part, CompanionState)]
        other_factors = self.collectives.exchange.united(companions.other_factors)
        return describe_other_factors(other_factors) if position.steps else None

    def check_restorable(self, position: Position) -> None:
        """Refuse a position that this pipeline cannot resume from.

        Raises:
            UserError: training has begun; or the position is within a batch and the schedule takes only whole ones.
        """
        if self.position.microbatches or self._stream is not None:
            raise UserError(f"training has begun: {counted(self.position.steps, 'step')} done",
                            hint="load a checkpoint into a new pipeline, before its first step")
        begun = position.within(self._description.microbatches)
        if begun and not self.schedule.stream:
            raise UserError(f"the checkpoint was made after {begun} of the {self._description.microbatches} "
                            f"microbatches of a batch, but '{self.schedule.name}' takes whole ones",
                            hint="go on with the schedule that made it, or from a checkpoint at the end of a batch")
