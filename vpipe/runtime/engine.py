"""The engine: all ranks of this process, driven through segments of a schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import gt

import torch
from torch import Tensor

from vpipe.errors import RunError, UserError, counted
from vpipe.model.layer import Model
from vpipe.model.split import StageSpec
from vpipe.runtime.build import Settings, make_workers
from vpipe.runtime.collectives import AllRanks
from vpipe.runtime.executors.registry import NO_TIMELINE, THREADED
from vpipe.runtime.interpreter import Crew, Programs, Stream
from vpipe.runtime.microbatches import Batch, Feed, Segment
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import MakeOptimizer, StageOptimizer, check_rescheduled
from vpipe.runtime.state_dict import Position, state_parts
from vpipe.runtime.step_results import Outcomes, Step
from vpipe.runtime.trace import MOST_ACTIONS, Recorder
from vpipe.schedules.replication import Rounds
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.size import Placement

Pauses = Callable[[int], int | None]
"""How many steps are done -> after how many in all the pipeline runs empty next; None: only when it must."""

CHANGES_HINT = ("give learning rates as learning_rate_factor=lambda step: ..., change them between two calls of train, "
                "or choose a schedule with a flush")


class Engine:
    """Runs a lowered schedule over the stages of this process.

    Within one process all ranks take turns in one thread, in the order of dependencies; with
    torch.distributed this process is one rank. The same programs give the same numbers.

    Attributes:
        workers: of this process, by rank.
        all_ranks: what they know together with those elsewhere.
        parts: what they must keep.
        position: how far training is; what is in flight is not done.
    """

    def __init__(self, model: Model, specs: Sequence[StageSpec], schedule: Schedule, make_optimizer: MakeOptimizer,
                 settings: Settings, distributed: bool) -> None:
        self._schedule, self._settings, self._fields = schedule, settings, model.batch
        self._placement: Placement = schedule.placement
        self.workers = make_workers(model, specs, schedule, make_optimizer, settings, distributed)
        self._programs = Programs(schedule, [stage for stage, layers in enumerate(settings.recompute) if layers],
                                  any(worker.transport.ordered for worker in self.workers.values()))
        self.all_ranks = AllRanks(self.workers, specs, self._placement, distributed, settings.timeout_s)
        self.all_ranks.check_ties()
        if settings.needs_norms and schedule.flush:
            self.all_ranks.agree_on_norms()
        self.parts = state_parts(self.workers, self._placement)
        self.position = Position(0, 0, 0)
        self._begun = 0  # what is done of the first batch that is given next: of a run that goes on
        self._made: deque[Step] = deque()  # the updates of the latest batch that were not yielded yet
        self._stream: Stream | None = None
        self._outcomes = Outcomes(self.workers, schedule, distributed)
        self._crew = Crew(self.workers, self._outcomes, distributed)
        self._crew.lend()
        self._compared = False  # the replicas, before they are used

    # -- training --------------------------------------------------------------------------------------

    def train(self, batches: Iterable[Batch], updates: int | None = None, stop: Callable[[], bool] = lambda: False,
              pauses: Pauses = lambda steps: None) -> Iterator[Step]:
        """Train on the batches; yields the steps, in order.

        ``updates`` ends the training after so many steps, in the middle of a batch if need be (not under a schedule
        read from a file, which ends with its batch). ``stop`` is asked where the last stage is, once per step; its
        answer comes with the step on every rank, so that all of them can leave off after the same one.

        ``pauses`` must say the same on every rank. Without a flush the pipeline then runs empty exactly there: a
        :meth:`drain` between that step and the next makes no step, and the next microbatches find the latest
        weights at every stage, whether or not anybody drained it. With a flush it is empty after every batch.

        After :meth:`restore` the first batch is the one to go on with: what was done of it is left out.
        """
        self._compare_replicas()
        self.drain()
        self._made.clear()
        self._outcomes.stop = stop
        begun, self._begun = self._begun, 0
        schedule, per_step = self._schedule, self._schedule.rounds.per_step
        whole = per_step if schedule.stream else schedule.microbatches
        feed = self._feed(batches, None if updates is None else begun + -(-updates * per_step // whole) * whole,
                          None if schedule.stream else schedule.microbatches, begun, copied=schedule.stream)
        return self._train_stream(feed, begun, pauses) if schedule.stream else self._train_whole(feed)

    def _train_whole(self, feed: Feed) -> Iterator[Step]:
        """Batch after batch, each with all of the schedule's programs and an empty pipeline at its end."""
        first, decisive = 0, self._outcomes.decisive
        while feed.has(first):
            segment = self._segment(feed, first, self._schedule.rounds)
            if decisive:
                self._outcomes.expect(segment, 0)
            steps: Iterable[int] = self._crew.run(segment, self._programs.of_batch)
            if not decisive:
                steps = list(steps)  # the losses are told when the batch is done
            self._made = deque(self._outcomes.step(segment, step) for step in steps)
            first += self._settings.microbatches
            self._close(segment, first, len(self._made))
            while self._made:
                yield from self._refusing_changes(self._made.popleft(), lambda step: bool(self._made))
        self._end_batches(feed)

    def _train_stream(self, feed: Feed, first: int, pauses: Pauses) -> Iterator[Step]:
        while feed.has(first):
            self.drain()  # of another call of train
            done = self.position.steps
            pause = pauses(done)
            if pause is not None:
                assert pause > done, f"a pause after step {pause}, but {done} are done"
                feed.end = first + (pause - done) * self._schedule.rounds.per_step
            rounds = self._programs.rounds(partial(_has, feed, first))
            segment = self._segment(feed, first, rounds)
            steps = self._steps_of_stream(segment, rounds)
            stream = self._stream = Stream(segment, steps, self._outcomes)
            in_flight = partial(_in_flight, stream, pause)
            try:
                for step in stream:
                    yield from self._refusing_changes(step, in_flight)
            except RunError as error:  # of another rank, which has the batch that could not be read here
                if feed.error is None or feed.error is error:
                    raise
                raise feed.error from error
            if stream.drained is None:
                self._end(stream)
            else:
                yield from stream.drained
            first = feed.total
            feed.end = None
        self._end_batches(feed)

    def _steps_of_stream(self, segment: Segment, rounds: Rounds) -> Iterator[int]:
        """Yield the steps of a stream; after a failure there is nothing left of it to drain."""
        try:
            yield from self._crew.run(segment, self._programs.of_stream(rounds))
        except (Exception, KeyboardInterrupt):
            self._stream = None
            raise

    def _end_batches(self, feed: Feed) -> None:
        """Raise what a batch that could not be read raised, when what was read before is done.

        Raises:
            RunError: another rank has more batches.
            Exception: the user's own.
        """
        self._agree_on_end(feed)
        feed.close()
        if feed.error is not None:
            raise feed.error
        device = self._settings.device
        if device.type == "cuda" and any(worker.transport.ordered for worker in self.workers.values()):
            torch.cuda.current_stream(device).synchronize()  # the process may end now, and take what it sends along

    def _agree_on_end(self, feed: Feed) -> None:
        """Find out whether the batches end on every rank alike, where they end before a limit and a pause."""
        for worker in self.workers.values():
            if worker.comparison is not None and feed.ended:
                worker.comparison.end(feed, self.all_ranks.agree)

    def _refusing_changes(self, step: Step, later_updates: Callable[[Step], bool]) -> Iterator[Step]:
        """Yield a step, and refuse changed parameter groups where updates of later steps are made or under way.

        Stages are then at different updates, so which of them sees a change would depend on the transport.
        """
        if self._schedule.flush:
            yield step
            return
        optimizers = self._optimizers
        before = [optimizer.options() for optimizer in optimizers]
        yield step
        if later_updates(step) and [optimizer.options() for optimizer in optimizers] != before:
            raise UserError(f"a parameter group of an optimizer was changed after step {step.index}, while "
                            f"'{self._schedule.name}' has later updates under way", hint=CHANGES_HINT)

    @property
    def _optimizers(self) -> list[StageOptimizer]:
        return [optimizer for worker in self.workers.values() for optimizer in worker.update.optimizers.values()]

    def _compare_replicas(self) -> None:
        """Refuse replicas that begin with other weights; once, or again after :meth:`restore`.

        Raises:
            UserError: they do.
        """
        if not self._compared:
            # Of a run that goes on they have buffers of their own.
            self.all_ranks.check_replicas_begin(buffers=self.position.microbatches == 0)
            self._compared = True

    def _segment(self, feed: Feed, first: int, rounds: Rounds) -> Segment:
        """What is trained next, from an empty pipeline on."""
        check_rescheduled(self._optimizers)
        return Segment(feed, first, self.position.microbatches, self.position.steps, rounds, training=True)

    def drain(self) -> Sequence[Step]:
        """Finish what is in flight in an asynchronous pipeline, and the steps that makes; training may go on after it.

        Every rank drains after the same step.
        """
        stream = self._stream
        if stream is None or self._crew.broken:
            return tuple(self._made)
        steps = stream.drain(self._schedule)
        self._end(stream)
        return steps

    def _end(self, stream: Stream) -> None:
        self._stream = None
        self._close(stream.segment, stream.segment.feed.total, stream.done)
        self._agree_on_end(stream.segment.feed)

    def _close(self, segment: Segment, end: int, steps: int) -> None:
        """The pipeline is empty; ``end``: the feed's number of the next microbatch."""
        self.position = self.position.after(steps, end - segment.first, segment.feed.samples(segment.first, end),
                                            end % self._settings.microbatches)
        self._crew.finish()

    def record(self, limit: int = MOST_ACTIONS) -> Mapping[int, Recorder]:
        """From now on note the actions of training; the recorders of this process's ranks.

        To be called before training, or when all that was in flight is drained.

        Args:
            limit: how many actions of a rank are noted.

        Raises:
            UserError: forwards go on in threads, so that actions have no times of their own.
        """
        if self._settings.executor == THREADED:
            raise UserError(NO_TIMELINE[0], hint=NO_TIMELINE[1])
        assert self._stream is None, "what is in flight was not recorded"
        self._crew.recorders = {rank: Recorder(worker, limit) for rank, worker in self.workers.items()}
        return self._crew.recorders

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over the samples of all batches, forward only, with the latest weights."""
        self._compare_replicas()
        self.drain()
        losses: list[list[float]] = [[] for rank in self._placement[-1] if rank in self.workers]
        samples: list[int] = []
        # As many batches at a time as keep every stage busy, not all: in one process nothing bounds how far
        # the first stage runs ahead. Every replica takes equally many of them, so that the next ones are in order.
        most = (-(-4 * len(self._placement) // self._settings.microbatches) * len(self._placement[-1])
                * self._settings.microbatches)
        feed, first = self._feed(batches, None, most, copied=True), 0
        with ExitStack() as undisturbed:
            for worker in self.workers.values():
                undisturbed.enter_context(worker.evaluating())
            for recorder in self._crew.recorders.values():
                undisturbed.enter_context(recorder.evaluating())
            undisturbed.enter_context(self.all_ranks.first_buffers())
            while feed.has(first):
                # All are read, so that a bad batch is refused before anything runs.
                end = first + most if feed.has(first + most - 1) else feed.total
                if feed.error is not None:
                    break
                rounds = Rounds(self._placement, end - first, True, partial(gt, end - first))
                segment = Segment(feed, first, 0, 0, rounds, training=False)
                for _ in self._crew.run(segment, self._programs.of_evaluation(end - first)):
                    pass
                for worker in self.workers.values():
                    worker.forget_batches(range(end - first))
                for rank, known in zip((r for r in self._placement[-1] if r in self.workers), losses, strict=True):
                    kept = self.workers[rank].losses
                    known += [float(kept.pop(number)) for number in sorted(kept)]
                samples += [feed.samples(i, i + 1) for i in range(first, end)]
                first = end
            self._end_batches(feed)
        if not samples:
            raise UserError("there is nothing to evaluate on", hint="give evaluate at least one batch")
        total = sum(loss * size for loss, size in zip(self._outcomes.share(losses, samples), samples, strict=True))
        self._crew.finish()
        return total / sum(samples)

    def _feed(self, batches: Iterable[Batch], limit: int | None, again: int | None, begun: int = 0,
              copied: bool = False) -> Feed:
        """``again``: after how many microbatches they are divided among replicas from the first one on, if ever;
        ``begun``: how many of the first batch are left out; ``copied``: as batches are read while others are in use."""
        here = [(stage, rank) for rank, worker in self.workers.items() for stage in worker.stages]
        rounds = self._schedule.rounds

        def takers(microbatch: int) -> int:
            number = microbatch - begun if again is None else microbatch % again
            return 0 if number < 0 else sum(rounds.rank_of(stage, number) == rank for stage, rank in here)

        used = {name for stage in self.local_stages for name in stage.spec.fields}
        comparisons = [worker.comparison for worker in self.workers.values() if worker.comparison is not None]
        return Feed(iter(batches), self._settings.microbatches, self._fields, takers, limit, used,
                    self._settings.device if copied else None, next(iter(comparisons), None))

    @property
    def local_stages(self) -> list[Stage]:
        """The stages of this process."""
        return [stage for worker in self.workers.values() for stage in worker.stages.values()]

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model, on every rank, in the order of the layers."""
        self._crew.check_whole()
        self._compare_replicas()
        self.drain()
        self.all_ranks.check_replicas()
        return self.all_ranks.state()

    # -- to stop and go on -----------------------------------------------------------------------------

    def saved(self) -> dict[str, Tensor]:
        """Return all that this process must keep to go on from here, see :mod:`vpipe.runtime.state_dict`.

        Every rank calls it after the same step; an asynchronous pipeline drains first. No copies: training goes on in
        the same memory.

        Raises:
            RunError: the pipeline failed before.
            UserError: a layer or an optimizer keeps what a checkpoint cannot hold.
        """
        self._crew.check_whole()
        self.drain()
        return {name: tensor for part in self.parts for name, tensor in part.state().items()}

    def wants(self, name: str) -> bool:
        """Whether this process takes up a tensor of this name in :meth:`restore`."""
        return any(part.wants(name) for part in self.parts)

    def restore(self, position: Position, tensors: Mapping[str, Tensor]) -> None:
        """Go on from where a run was saved, under this partition, these widths, this transport or others.

        Every rank calls it, before it trains. Weights are those of one version per stage, from which versions count
        anew.

        Args:
            tensors: what :meth:`saved` gave on all ranks together, or of that all that this process :meth:`wants`.

        Raises:
            UserError: parameters or buffers are missing; or see :meth:`check_begins`.
        """
        self.check_begins(position)
        for part in self.parts:
            part.load({name: tensor for name, tensor in tensors.items() if part.wants(name)})
        self._crew.lend()
        self._compared = False
        self._begun = position.within(self._settings.microbatches)
        self.position = replace(position, begun=self._begun)

    def check_begins(self, position: Position) -> None:
        """Refuse a position from which this pipeline cannot go on.

        Raises:
            UserError: training has begun; or the position is within a batch and the schedule takes only whole ones.
        """
        if self.position.microbatches or self._stream is not None:
            raise UserError(f"training has begun: {counted(self.position.steps, 'step')} done",
                            hint="load a checkpoint into a new pipeline, before its first step")
        begun = position.within(self._settings.microbatches)
        if begun and not self._schedule.stream:
            raise UserError(f"the checkpoint was made after {begun} of the {self._settings.microbatches} microbatches "
                            f"of a batch, but '{self._schedule.name}' takes whole ones",
                            hint="go on with the schedule that made it, or from a checkpoint at the end of a batch")


def _in_flight(stream: Stream, pause: int | None, step: Step) -> bool:
    """Whether microbatches of later steps than this one have entered the pipeline."""
    return stream.drained is None and step.index + 1 != pause


def _has(feed: Feed, first: int, microbatch: int) -> bool:
    return feed.has(first + microbatch)
