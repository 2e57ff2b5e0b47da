"""Train: batch after batch with a flush, or a stream of microbatches from pause to pause."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any

from vpipe.checkpoint.manifest import Position
from vpipe.distributed.read_batches import ended_before
from vpipe.distributed.watchdog import watch
from vpipe.errors import RunError, UserError, counted
from vpipe.runtime.collectives import Collectives
from vpipe.runtime.interpreter import Interpreter, RankPrograms, RunningSegment
from vpipe.runtime.loaders import Loaders
from vpipe.runtime.microbatches import Batch, MicrobatchLoader, Segment
from vpipe.runtime.stage_optimizer import check_rescheduled
from vpipe.runtime.step_results import Step
from vpipe.runtime.surroundings import ScriptChanges, Surroundings, set_aside
from vpipe.runtime.worker import Worker
from vpipe.schedules.assignment import Assignment, TiedVersionOf
from vpipe.schedules.graph import OnRank
from vpipe.schedules.schedule import Schedule

Pauses = Callable[[int], int | None]
"""Steps done -> the step after which the pipeline drains next; None: no pause is planned."""


class Training:
    """Train the stages of this process.

    Args:
        schedule: the lowered one.
        microbatches: of a batch.

    Attributes:
        surroundings: what a script has around its calls.
        position: of training; microbatches in flight are not counted.
    """

    def __init__(self, interpreter: Interpreter, programs: RankPrograms, collectives: Collectives, loaders: Loaders,
                 schedule: Schedule, microbatches: int, surroundings: Surroundings) -> None:
        self.surroundings, self._schedule, self._microbatches = surroundings, schedule, microbatches
        self._interpreter, self._programs, self._interrupts = interpreter, programs, interpreter.interrupts
        self._collectives, self._loaders, self._results = collectives, loaders, interpreter.results
        self._workers, self._stages = interpreter.workers, interpreter.stages
        self._optimizers = [optimizer for worker in self._workers.values()
                            for optimizer in worker.optimizer_steps.optimizers.values()]
        self._changes = ScriptChanges(self._stages, self._optimizers, schedule.name, surroundings)
        self._read = self._changes.calling(next, "the iterator of batches", lambda: self._stream is not None)
        self.begin_at(Position(0, 0, 0))
        self._made: deque[Step] = deque()  # steps of the latest batch that were not yielded yet
        self._stream: RunningSegment | None = None
        self._streamed: MicrobatchLoader | None = None  # the latest
        self._stopped = 0  # calls of train that ended since a rank asked
        lanes = collectives.lanes
        self._lanes_compared = lanes.count == 1  # after their first update
        # Lanes wait for one another within a layer.
        self._gives_up = lanes.count == 1 < len(lanes.own) and schedule.flush and not any(
            type(worker).forward is not Worker.forward for worker in self._workers.values())
        self._batches = count()  # that were begun; the latest, where it can be given up
        self._batch: tuple[int, int] | None = None

    def begin_at(self, position: Position) -> None:
        """Go on from a position, with the weights that are there."""
        self.position = self._restored = position  # of which the batch under way goes on, until something is trained
        self._replicas_compared = False

    def settle(self) -> None:
        """Refuse replicas that start with different weights; finish the microbatches in flight."""
        self._compare_replicas()
        self.drain()

    @set_aside
    def train(self, batches: Iterable[Batch], updates: int | None = None, stop: Callable[[], bool] | None = None,
              pauses: Pauses = lambda steps: None) -> Iterator[Step]:
        """Train on the batches; yield the steps, in order. See :meth:`vpipe.Pipeline.train`.

        After :meth:`begin_at` the first batch is the one that was under way, without its microbatches that are done. At
        a pause a :meth:`drain` makes no step, and the next microbatches use the latest weights at every stage.
        """
        iterator = iter(batches)
        self._compare_replicas()
        if self._stream is None:
            self._changes.forget()  # the caller went away between two steps that had been made
        self.drain()
        self._made.clear()
        self._raised: BaseException | None = None  # by ``stop``
        asks = partial(self._asks, stop or bool)
        self._results.stop = asks if stop is None else self._changes.calling(asks, "stop", lambda: True)
        return self._until_asked(self._train_stream(iterator, updates, pauses) if self._schedule.stream
                                 else self._train_whole(iterator, updates))

    @property
    def _training(self) -> str:
        """The name by which all ranks know what the next stop ends; a request that comes late ends no other training.
        """
        return f"training {self._stopped} of pipeline {self._loaders.number}"

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
            if self._schedule.stream:
                self._collectives.job.begin(None, f"step {number} of train()", hears=False)
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
        return self._after(stream.segment, stream.segment.first + stream.done * self._schedule.assignment.per_step,
                           stream.done)

    def _train_whole(self, batches: Iterator[Batch], updates: int | None) -> Iterator[Step]:
        """Train batch after batch, each with all of the schedule's programs and an empty pipeline at its end."""
        first, whole = 0, self._schedule.microbatches
        self._loaders.comparison.confirm()  # of a batch that was given up
        loader = self._loaders.make(batches, whole, self._read)
        if updates is not None:
            loader.end = -(-updates * self._schedule.assignment.per_step // whole) * whole
        while self._has(loader, first):
            try:
                with self._interrupts:
                    self._train_batch(loader, first)
            except KeyboardInterrupt as interrupt:
                interrupt.add_note(self._whereabouts())
                raise
            first += whole
            while self._made:
                yield from self._yield_unchanged(self._made.popleft(), lambda: bool(self._made))
        self._loaders.agree_on_end(loader)
        self._loaders.end(loader)

    def _has(self, loader: MicrobatchLoader, first: int) -> bool:
        """Return whether there is a microbatch to go on with, with what the script has made of the weights. What a rank
        cannot begin is refused on all: at once where they wait for one another, else when the rank has given it up."""
        there, checked, error, per_step = False, False, None, self._schedule.assignment.per_step
        try:
            there, done = loader.has(first), self.position.steps
            self._interpreter.check_whole()
            self._interpreter.check_weights()
            checked = True
            for stage in self._stages:
                stage.check_frozen()
                stage.check_hooks()
            check_rescheduled(self._optimizers)
            for step in range(done, done + max(1, self._schedule.microbatches // per_step) * there):
                next(iter(self._workers.values())).optimizer_steps.factor(step)
        except BaseException as caught:
            error = caught
        bad = error or (None if there else loader.error)
        what = f"step {first // per_step} of train(){self.surroundings.words}"
        own = None if bad is not None else loader.fields if there else []
        job, comparison = self._collectives.job, self._loaders.comparison
        batches = comparison.take()
        batch = self._batch = (self._loaders.number, next(self._batches)) if self._gives_up else None
        if loader.error is not None:
            loader.close()
        of_all: list[Any] = []  # where this one cannot begin a batch that others begin
        try:
            if batch is None and (self._schedule.stream or first == 0 or self._collectives.lanes.count > 1):
                job.begin(None, what, bad, batches)()
                comparison.tell(batches if self._schedule.stream else ())
            elif batch is None or own:
                comparison.expect(first, job.begin(own, what, None, batches, hears="later"))
            else:
                of_all = job.all_gather(own, what)
        except RunError as fault:
            if bad is None or bad is fault:
                raise
            raise bad from fault
        going = next((rank for rank, each in enumerate(of_all) if each), None)
        if going is not None:
            ended = ended_before(loader.batches_read, job.rank, going)
            bad = bad or RunError(ended.what, hint=ended.hint)
            if batch is None or (watchdog := watch.watchdog) is None or not watchdog.give_up(batch):
                raise bad
            [worker] = self._workers.values()
            worker.held = first, min(worker.stages), bad
            if not there:
                loader.close()
                loader.stand_in(of_all[going])
            there = True
        elif None in of_all:
            job.begin(None, what, bad)()
        elif error is not None:
            raise error
        # Also where the batches end, since they may end on one rank only.
        self._interpreter.take_back_weights(self._schedule.flush and first > 0, checked)
        if not there:
            self._interpreter.hand_out_weights()
        return there

    def _train_batch(self, loader: MicrobatchLoader, first: int) -> None:
        setting, last_forwards = self._schedule.setting, self._results.last_forwards
        segment = self._segment(loader, first, setting.assignment, setting.tied_version_of)
        if last_forwards:
            self._results.post(segment, 0)
        steps: Iterable[int] = self._interpreter.run(segment, self._programs.of_batch, self._batch)
        try:
            if not last_forwards:
                steps = list(steps)  # losses are exchanged when the batch is done
            self._made = deque(self._results.collect(segment, step) for step in steps)
            if not self._interpreter.stepped:
                self._made.clear()
                self._interpreter.undo()
                self._interpreter.raise_held()
            self._compare_lanes()
            self._close(segment, first + self._schedule.microbatches, len(self._made))
        except BaseException:
            self._interpreter.fail()
            raise
        if self._collectives.compares_numbers:
            self._collectives.check_numbers()

    def _train_stream(self, batches: Iterator[Batch], updates: int | None, pauses: Pauses) -> Iterator[Step]:
        """Train without a flush, from pause to pause, first on what an earlier call has read of the same batches."""
        loader = self._streamed
        while True:
            self.drain()  # of another call of train
            if loader is None or loader.batches is not batches:
                begun = self._restored.within(self._microbatches) if self.position == self._restored else 0
                loader = self._streamed = self._loaders.make(batches, None, self._read, begun)
                loader.end = begun
            first, done = loader.total, self.position.steps
            pause = pauses(done)
            assert pause is None or pause > done, f"a pause after step {pause}, but {done} are done"
            if updates is not None:
                pause = done + updates if pause is None else min(pause, done + updates)
            loader.end = None if pause is None else first + (pause - done) * self._schedule.assignment.per_step
            if not self._has(loader, first):
                break
            made = yield from self._train_to_pause(loader, first, pause, pauses)
            updates = None if updates is None else updates - made
        self._loaders.agree_on_end(loader)
        self._loaders.end(loader)

    def _train_to_pause(self, loader: MicrobatchLoader, first: int, pause: int | None, pauses: Pauses
                        ) -> Generator[Step, None, int]:
        """Train until the next pause, or an earlier one that is named meanwhile; return the number of steps."""
        comparison = self._loaders.comparison

        def has_microbatch(microbatch: int) -> bool:
            there = loader.has(first + microbatch)
            if comparison.untold:
                comparison.tell(comparison.take())
            return there

        assignment = replace(self._schedule.assignment, has_microbatch=has_microbatch)
        actions, tied_version_of = self._programs.for_stream(assignment)
        segment = self._segment(loader, first, assignment, tied_version_of)
        stream = self._stream = RunningSegment(segment, self._steps_of_stream(segment, actions), self._results)
        try:
            while (step := self._next_of_stream(stream)) is not None:
                self._compare_lanes()
                if segment.steps_before + stream.done == pause:
                    self.drain()  # what is left has no step: then weights may be changed
                yield from self._yield_unchanged(step, lambda: stream.drained is None)
                done = segment.steps_before + stream.done
                sooner = (pauses(done) or 0) if stream.drained is None else 0
                if done + self._schedule.steps_begun <= sooner < (pause or sooner + 1):
                    pause = sooner
                    stream.end_after(pause - segment.steps_before)
        except RunError as error:  # of another rank, which has the batch that could not be read here
            if loader.error is None or loader.error is error:
                raise
            raise loader.error from error
        if stream.drained is None:
            with self._interrupts:
                self._end_stream(stream)
        else:
            yield from stream.drained
        return stream.done

    def _next_of_stream(self, stream: RunningSegment) -> Step | None:
        before, now = stream.segment.autocast, self.surroundings.autocast
        if now != before and stream.drained is None and stream.segment.assignment.in_step(stream.done):
            raise UserError(f"torch.autocast around the loop was {before or 'off'} and is {now or 'off'} after "
                            f"{counted(self.reached().steps, 'step')}, while '{self._schedule.name}' has microbatches "
                            "in flight", hint="write pipe.drain() before the autocast changes")
        try:
            with self._interrupts:
                return next(stream, None)
        except KeyboardInterrupt as interrupt:
            if self._stream is stream:
                interrupt.add_note(f"{counted(self.reached().steps, 'update')} made, and nothing is lost: the next "
                                   "call of the pipeline ends the microbatches in flight")
            raise

    def _steps_of_stream(self, segment: Segment, actions: Iterator[OnRank]) -> Iterator[int]:
        """Yield the step numbers of a stream; after a failure nothing of it is left to drain."""
        try:
            yield from self._interpreter.run(segment, actions)
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
        versions = sorted({stage.weights.latest for stage in self._stages})
        lost = sorted({self._schedule.assignment.whole(number) for worker in self._workers.values()
                       for _, number in worker.values.records()})
        made = " and ".join(map(str, versions if len(versions) < 3 else (f"{versions[0]} to {versions[-1]}",)))
        flight = f", and microbatches {lost[0]} to {lost[-1]} in flight are lost" if lost else ""
        return (f"{done} made by all stages; stages here have made {made}{flight}: build a new pipeline, and load a "
                "checkpoint")

    def _yield_unchanged(self, step: Step, later_updates: Callable[[], bool]) -> Iterator[Step]:
        """Yield a step; refuse changed weights and parameter groups if later updates are made or under way: which stage
        sees a change would depend on the transport."""
        if self._schedule.flush:
            yield step
            return
        if later_updates():
            self._changes.mark(f"after step {step.index}")
        yield step
        for stage in self._stages:
            stage.check_not_wrapped()
        for stage in self._stages:
            stage.check_frozen()
        self._changes.check()

    def _compare_replicas(self) -> None:
        """Refuse replicas that start with different weights, once, and again after :meth:`restore`."""
        if not self._replicas_compared:
            # In a resumed run replicas have buffers of their own.
            with self._interpreter.taken_back():
                self._collectives.check_replicas_begin(buffers=self.position.microbatches == 0)
            self._replicas_compared = True

    def _compare_lanes(self) -> None:
        """Refuse weights that lanes have in common and changed differently in the first update of this process."""
        if not self._lanes_compared:
            self._collectives.check_lanes()
            self._lanes_compared = True

    def _segment(self, loader: MicrobatchLoader, first: int, assignment: Assignment,
                 tied_version_of: TiedVersionOf) -> Segment:
        """Return the segment that is trained next, beginning with an empty pipeline."""
        for steps in (worker.optimizer_steps for worker in self._workers.values() if not self.position.steps):
            for companion in chain.from_iterable(own.values() for own in steps.companions.values()):
                companion.begin()  # with what a script has made of the weights before the first update
        base = self._schedule.assignment.indices(self.position.microbatches)
        return Segment(loader, first, base, self.position.steps, assignment, True, self.surroundings.autocast,
                       self._loaders.comparison.confirm, tied_version_of)

    @set_aside
    def drain(self) -> Sequence[Step]:
        """Finish the microbatches in flight without a flush; return the steps made. All ranks drain after the same."""
        self.check_outside()
        for stage in self._stages:
            stage.check_not_wrapped()
        stream = self._stream
        if not self._interpreter.broken:
            self._changes.check()
        if stream is None or self._interpreter.broken:
            return tuple(self._made)
        with self._interrupts:
            steps = stream.drain(self._schedule)
            self._end_stream(stream)
        self._collectives.job.all_gather(None, "draining")
        return steps

    def check_outside(self) -> None:
        """Refuse a call in the middle of another one; and among processes one of a pipeline that has failed."""
        inside = self._changes.inside
        if inside is not None or self._interpreter.running:
            raise UserError(f"{inside or 'a function, a layer or an optimizer'} calls the pipeline in the middle "
                            "of an update or evaluation", hint="call it in the body of the loop, with pauses=... if "
                            "there is no flush, or when evaluate has returned")
        if self._collectives.job.ranks > 1:
            self._interpreter.check_whole()

    def _end_stream(self, stream: RunningSegment) -> None:
        self._stream = None
        self._close(stream.segment, stream.segment.loader.total, stream.done)
        self._loaders.agree_on_end(stream.segment.loader)
        if self._collectives.compares_numbers:
            self._collectives.check_numbers()

    def _close(self, segment: Segment, end: int, steps: int) -> None:
        """Count the steps and microbatches of a finished segment; ``end``: the loader's next microbatch."""
        self.position = self._after(segment, end, steps)
        self._interpreter.finish()

    def _after(self, segment: Segment, end: int, steps: int) -> Position:
        """Return the position after so many steps of a segment, whose microbatches until ``end`` are done."""
        done, within = segment.assignment.whole(end - segment.first), segment.assignment.whole(end)
        samples = segment.loader.samples(segment.first, end) * len(self._collectives.lanes.averaged)
        before = self.position
        return Position(before.steps + steps, before.microbatches + done, within % self._microbatches,
                        before.samples + samples)

    def check_restorable(self, position: Position) -> None:
        """Refuse a position that this pipeline cannot resume from.

        Raises:
            UserError: training has begun; or the position is within a batch and the schedule takes only whole ones.
        """
        if self.position.microbatches or self._stream is not None:
            raise UserError(f"training has begun: {counted(self.position.steps, 'step')} done",
                            hint="load a checkpoint into a new pipeline, before its first step")
        begun = position.within(self._microbatches)
        if begun and not self._schedule.stream:
            raise UserError(f"the checkpoint was made after {begun} of the {self._microbatches} "
                            f"microbatches of a batch, but '{self._schedule.name}' takes whole ones",
                            hint="go on with the schedule that made it, or from a checkpoint at the end of a batch")
