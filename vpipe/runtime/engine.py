"""The engine: all ranks of this process, driven through segments of a schedule."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import gt

import torch.distributed as dist
from torch import Tensor

from vpipe.errors import RunError, UserError, counted
from vpipe.model.layer import Model
from vpipe.model.split import StageSpec, ties_between
from vpipe.runtime.all_ranks import AllRanks
from vpipe.runtime.compressed import Compressed
from vpipe.runtime.distributed import Distributed
from vpipe.runtime.feed import Batch, Feed
from vpipe.runtime.outcome import Outcomes
from vpipe.runtime.programs import Program, Programs
from vpipe.runtime.reduce import count_buckets
from vpipe.runtime.saved import Position, parts_of
from vpipe.runtime.segment import Segment
from vpipe.runtime.settings import MakeOptimizer, Settings
from vpipe.runtime.stage import Stage
from vpipe.runtime.trace import MOST_ACTIONS, Recorder
from vpipe.runtime.transport import InProcess, Mailroom, Transport
from vpipe.runtime.update import Update
from vpipe.runtime.worker import Worker
from vpipe.schedules.action import Action, Op
from vpipe.schedules.order import Schedule, describe_rank
from vpipe.schedules.registry import Recipe
from vpipe.schedules.rounds import Rounds
from vpipe.schedules.size import Placement

Pauses = Callable[[int], int | None]
"""How many steps are done -> after how many in all the pipeline runs empty next; None: only when it must."""


@dataclass(frozen=True)
class Step:
    """One optimizer step; without a flush, of a pipeline with replicas, the fewest that are whole on every stage.

    Attributes:
        index: its number, from 0.
        loss: mean over its microbatches, on every rank.
        learning_rate: of the first parameter group of this process's first stage that trains; None without.
        gradient_norm: of all stages, before clipping; None when not clipped globally.
        stop: whether the last stage's rank was told to leave off.
        skipped: whether an update of it was left out, since a loss or a gradient was not finite: with a flush on all
            stages, without one on a stage of this process.
    """

    index: int
    loss: float
    learning_rate: float | None
    gradient_norm: float | None
    stop: bool
    skipped: bool = False


@dataclass
class _Stream:
    """An asynchronous pipeline with microbatches in flight."""

    segment: Segment
    recipe: Recipe
    steps: Iterator[int]
    done: int = 0  # steps finished
    drained: deque[Step] | None = None  # those that draining made, to be yielded when training goes on


class Engine:
    """Runs a lowered schedule over the stages of this process.

    Within one process all ranks take turns in one thread, in the order of dependencies; with
    torch.distributed this process is one rank. The same programs give the same numbers.
    """

    def __init__(self, model: Model, specs: Sequence[StageSpec], schedule: Schedule, make_optimizer: MakeOptimizer,
                 settings: Settings, distributed: bool) -> None:
        self._specs, self._schedule, self._settings = specs, schedule, settings
        self._placement: Placement = schedule.placement
        self._ties = ties_between(specs)
        self._programs = Programs(schedule, [stage for stage, layers in enumerate(settings.recompute) if layers])
        self._fields = model.batch
        self._distributed = distributed
        ranks = [dist.get_rank()] if distributed else list(range(len(schedule.programs)))
        room: Mailroom = {}
        self.workers = {}
        for rank in ranks:
            own = [spec for spec in specs if rank in self._placement[spec.index]]
            stages = {spec.index: Stage(model, spec, seed=settings.seed, device=settings.device,
                                        recomputed=settings.recompute[spec.index]) for spec in own}
            optimizers = {s: make_optimizer(stage.weights.masters) for s, stage in stages.items()}
            transport: Transport = (Distributed(settings.device, settings.timeout_s,
                                                max(schedule.peak_activations),
                                                1 if len(set(self._placement)) == schedule.stages else schedule.stages,
                                                self.describe, count_buckets(stages.values()))
                                    if distributed else InProcess(rank, room))
            if settings.compression is not None:
                transport = Compressed(transport, settings.compression)
            self.workers[rank] = Worker(rank, self._placement, stages, Update(optimizers, settings.clip, settings.skip),
                                        self._ties, transport, settings.factor)
        self.all_ranks = AllRanks(self.workers, specs, self._placement, settings.device, distributed)
        if (settings.clip is not None or settings.skip) and schedule.flush:
            self.all_ranks.agree_on_norms()
        self._lend()
        self.parts = parts_of(self.workers, specs, self._placement)
        self._decisive = self._last_forwards()
        self._outcomes = Outcomes(self.workers, self._placement, distributed)
        self._made: deque[Step] = deque()  # the updates of the latest batch that were not yielded yet
        self._microbatches_done = self._steps_done = 0
        self._samples_done = 0
        self._begun = 0  # microbatches of the latest batch that are done, if it has more
        self._restored = False  # and not trained since
        self._stream: _Stream | None = None
        self._broken = False
        self._recorders: dict[int, Recorder] = {}
        self._stop: Callable[[], bool] = lambda: False

    def _lend(self) -> None:
        """Let every stage that borrows tied weights have them as they are now."""
        for worker in self.workers.values():
            worker.tied.lend_first()
        for worker in self.workers.values():
            worker.tied.borrow_first()
            worker.transport.finish()

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
        self.drain()
        self._made.clear()
        self._stop = stop
        begun, self._restored = self._begun if self._restored else 0, False
        recipe, per_step = self._schedule.recipe, self._schedule.rounds.per_step
        whole = self._schedule.microbatches if recipe is None else per_step
        feed = self._feed(batches, None if updates is None else begun + -(-updates * per_step // whole) * whole,
                          self._schedule.microbatches if recipe is None else None, begun)
        return self._train_whole(feed) if recipe is None else self._train_stream(feed, begun, recipe, pauses)

    def _train_whole(self, feed: Feed) -> Iterator[Step]:
        """Batch after batch, each with all of the schedule's programs and an empty pipeline at its end."""
        microbatches = self._settings.microbatches
        first = 0
        while feed.has(first):
            segment = Segment(feed, first, self._microbatches_done, self._steps_done, self._schedule.rounds,
                              training=True)
            if self._decisive:
                self._outcomes.expect(segment, 0)
            steps: Iterable[int] = self._run(segment, self._programs.of_batch)
            if not self._decisive:
                steps = list(steps)  # the losses are told when the batch is done
            self._made = deque(self._step(segment, step) for step in steps)
            self._microbatches_done += microbatches
            self._samples_done += feed.samples_before(first + microbatches) - feed.samples_before(first)
            self._steps_done += len(self._made)
            first += microbatches
            self._finish()
            while self._made:
                yield self._made.popleft()

    def _train_stream(self, feed: Feed, first: int, recipe: Recipe, pauses: Pauses) -> Iterator[Step]:
        while feed.has(first):
            self.drain()  # of another call of train
            pause = pauses(self._steps_done)
            if pause is not None:
                assert pause > self._steps_done, f"a pause after step {pause}, but {self._steps_done} are done"
                feed.end = first + (pause - self._steps_done) * self._schedule.rounds.per_step
            rounds = self._programs.rounds(partial(_has, feed, first))
            segment = Segment(feed, first, self._microbatches_done, self._steps_done, rounds, training=True)
            stream = self._stream = _Stream(segment, recipe,
                                            self._run(segment, self._programs.of_stream(rounds, recipe)))
            for step in stream.steps:
                stream.done += 1
                yield self._step(segment, step)
            if stream.drained is None:
                self._close(stream)
            else:
                yield from stream.drained
            first = feed.total
            feed.end = None

    def drain(self) -> Sequence[Step]:
        """Finish what is in flight in an asynchronous pipeline, and the steps that makes; training may go on after it.

        Every rank drains after the same step, so all must agree on the last microbatch that still enters: the last one
        before a pause that is known ahead (:meth:`train`), or else the latest that any rank may have asked for, rounded
        up to whole steps. Beyond the last finished step these are as many as
        the replicas of a stage hold in flight, and with several replicas those of the next update, which one may
        have ended when another ends this one, and the next forward of each.
        """
        stream = self._stream
        if stream is None or self._broken:
            return tuple(self._made)
        segment = stream.segment
        per_step, widest = segment.rounds.per_step, max(len(ranks) for ranks in self._placement)
        in_flight = max(len(ranks) * self._schedule.peak_activations[rank]
                        for ranks in self._placement for rank in ranks)
        if widest > 1:
            in_flight += (segment.every + 1) * widest
        end = segment.first + -(-(stream.done * per_step + in_flight) // per_step) * per_step
        segment.feed.end = end if segment.feed.end is None else min(end, segment.feed.end)
        stream.drained = deque()
        for step in stream.steps:
            stream.done += 1
            stream.drained.append(self._step(segment, step))
        self._close(stream)
        return stream.drained

    def _close(self, stream: _Stream) -> None:
        feed, first = stream.segment.feed, stream.segment.first
        self._microbatches_done += feed.total - first
        self._samples_done += feed.samples_before(feed.total) - feed.samples_before(first)
        self._begun = feed.total % self._settings.microbatches
        self._steps_done += stream.done
        self._stream = None
        self._finish()

    def record(self, limit: int = MOST_ACTIONS) -> Mapping[int, Recorder]:
        """From now on note the actions of training; the recorders of this process's ranks.

        To be called before training, or when all that was in flight is drained.

        Args:
            limit: how many actions of a rank are noted.
        """
        assert self._stream is None, "what is in flight was not recorded"
        self._recorders = {rank: Recorder(worker, limit) for rank, worker in self.workers.items()}
        return self._recorders

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over the samples of all batches, forward only, with the latest weights."""
        self.drain()
        source = iter(batches)
        losses: list[list[float]] = [[] for rank in self._placement[-1] if rank in self.workers]
        samples: list[int] = []
        # As many batches at a time as keep every stage busy, not all: in one process nothing bounds how far
        # the first stage runs ahead. Every replica takes equally many of them, so that the next ones are in order.
        group = -(-4 * len(self._placement) // self._settings.microbatches) * len(self._placement[-1])
        with ExitStack() as undisturbed:
            for worker in self.workers.values():
                undisturbed.enter_context(worker.evaluating())
            for recorder in self._recorders.values():
                undisturbed.enter_context(recorder.evaluating())
            undisturbed.enter_context(self.all_ranks.first_buffers())
            while (head := next(source, None)) is not None:
                feed = self._feed(chain([head], islice(source, group - 1)), None, None)
                # All are read, so that a bad batch is refused before anything runs.
                most = group * self._settings.microbatches
                microbatches = most if feed.has(most - 1) else feed.total
                rounds = Rounds(self._placement, microbatches, True, partial(gt, microbatches))
                segment = Segment(feed, 0, 0, 0, rounds, training=False)
                for _ in self._run(segment, self._programs.of_evaluation(microbatches)):
                    pass
                for rank, known in zip((r for r in self._placement[-1] if r in self.workers), losses, strict=True):
                    kept = self.workers[rank].losses
                    known += [float(kept.pop(number)) for number in sorted(kept)]
                samples += [feed.samples_before(i + 1) - feed.samples_before(i) for i in range(microbatches)]
        if not samples:
            raise UserError("there is nothing to evaluate on", hint="give evaluate at least one batch")
        total = sum(loss * size for loss, size in zip(self._outcomes.share(losses, samples), samples, strict=True))
        self._finish()
        return total / sum(samples)

    def _finish(self) -> None:
        """Wait until the losses have arrived everywhere: then this process may end."""
        for worker in self.workers.values():
            worker.transport.finish()

    def _step(self, segment: Segment, step: int) -> Step:
        number = segment.steps_before + step
        if not self._decisive:
            self._outcomes.expect(segment, step)
            for rank in self.workers:
                self._outcomes.tell(segment, step, rank, self._stop)
        loss, stop = self._outcomes.hear(segment, step)
        first = next(iter(self.workers.values()))
        norm = first.update.gradient_norm
        # Computed anew: within one process a later stage may already have set the rate of its next update.
        here = sorted((stage, rank) for rank, worker in self.workers.items() for stage in worker.stages)
        rates = (self.workers[rank].learning_rate(stage, step) for stage, rank in here)
        rate = next((rate for rate in rates if rate is not None), None)
        skipped = [number in worker.skipped for worker in self.workers.values()]
        for worker in self.workers.values():
            worker.skipped.discard(number)
        return Step(number, loss, rate, None if norm is None else float(norm), stop, any(skipped))

    def _last_forwards(self) -> Mapping[int, Action]:
        """Where a program is one update: what is done, by rank, when its losses are known, long before the update is.

        Told then, the loss is on every rank before that rank's last backward, so none waits for another between two
        updates.
        """
        schedule = self._schedule
        if schedule.recipe is not None or schedule.rounds.per_step < schedule.microbatches:
            return {}
        last = len(self._placement) - 1
        return {rank: [action for action in schedule.programs[rank]
                       if action.op is Op.FORWARD and action.stage == last][-1] for rank in self._placement[-1]}

    def _feed(self, batches: Iterable[Batch], limit: int | None, again: int | None, begun: int = 0) -> Feed:
        """``again``: after how many microbatches they are divided among replicas from the first one on, if ever;
        ``begun``: how many of the first batch are left out."""
        here = [(stage, rank) for rank, worker in self.workers.items() for stage in worker.stages]
        rounds = self._schedule.rounds

        def takers(microbatch: int) -> int:
            number = microbatch - begun if again is None else microbatch % again
            return 0 if number < 0 else sum(rounds.rank_of(stage, number) == rank for stage, rank in here)

        return Feed(iter(batches), self._settings.microbatches, self._fields, takers, limit)

    # -- carrying out ----------------------------------------------------------------------------------

    def _run(self, segment: Segment, program_of: Callable[[int], Program]) -> Iterator[int]:
        """Carry out a segment; yields a step when every stage of this process has made all its updates of it."""
        if self._broken:
            raise RunError("this pipeline failed before and cannot go on", hint="build a new one")
        programs: dict[int, Iterator[Action]] = {}
        for rank, worker in self.workers.items():
            program = program_of(rank)
            programs[rank] = program.actions
            worker.begin(segment, program.version_of, program.is_split)
        rounds, here = segment.rounds, sum(len(worker.stages) for worker in self.workers.values())
        made: Counter[int] = Counter()  # stages that have made all their updates of a step
        done = 0
        self._broken = True  # until the end is reached
        at_work: Mapping[int, Worker | Recorder] = {**self.workers, **(self._recorders if segment.training else {})}
        for rank, action in self._interleaved(programs, at_work):
            if action.op is Op.STEP:
                step, left = divmod((action.microbatch + 1) * rounds.span(action.stage), rounds.per_step)
                made[step - 1] += not left
                # Not one of fewer microbatches: some stages come to its end only when their programs end.
                if made[done] == here and len(rounds.of_step(done)) == rounds.per_step:
                    self._broken = False
                    yield done
                    self._broken = True
                    del made[done]
                    done += 1
            elif action is self._decisive.get(rank):
                self._outcomes.tell(segment, 0, rank, self._stop)
        for worker in self.workers.values():
            worker.end()
        self._broken = False
        if segment.training and rounds.of_step(done):
            yield done

    def _interleaved(self, programs: Mapping[int, Iterator[Action]],
                     at_work: Mapping[int, Worker | Recorder]) -> Iterator[tuple[int, Action]]:
        """Execute the ranks' actions, each as soon as it has what it needs; yields them when done."""
        heads = {rank: action for rank, program in programs.items() if (action := next(program, None)) is not None}
        while heads:
            moved = False
            for rank in list(heads):
                worker, execute = self.workers[rank], at_work[rank].execute
                while rank in heads and (self._distributed or worker.waits_for(heads[rank]) is None):
                    execute(heads[rank])
                    moved = True
                    yield rank, heads[rank]
                    following = next(programs[rank], None)
                    if following is None:
                        del heads[rank]
                    else:
                        heads[rank] = following
            if not moved:
                waits = "; ".join(f"rank {rank} at {action} waits for {self.workers[rank].waits_for(action)}"
                                  for rank, action in heads.items())
                raise RunError(f"no rank can go on: {waits}", hint="the schedule deadlocks: this is a defect of vpipe")

    @property
    def local_stages(self) -> list[Stage]:
        """The stages of this process."""
        return [stage for worker in self.workers.values() for stage in worker.stages.values()]

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model, on every rank, in the order of the layers."""
        self._check_whole()
        self.drain()
        self.all_ranks.check_replicas()
        return self.all_ranks.state()

    # -- to stop and go on -----------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """How far training is; what is in flight is not done."""
        return Position(self._steps_done, self._microbatches_done, self._begun, self._samples_done)

    def saved(self) -> dict[str, Tensor]:
        """All that this process must keep to go on from here as if it had not stopped: see :mod:`vpipe.runtime.saved`.

        Every rank calls it after the same step; an asynchronous pipeline drains first. No copies: training goes on in
        the same memory.

        Raises:
            RunError: the pipeline failed before.
            UserError: a layer or an optimizer keeps what a checkpoint cannot hold.
        """
        self._check_whole()
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
        self._lend()
        self._steps_done, self._microbatches_done = position.steps, position.microbatches
        self._samples_done = position.samples
        self._begun, self._restored = self._begun_at(position), True

    def check_begins(self, position: Position) -> None:
        """Refuse a position from which this pipeline cannot go on.

        Raises:
            UserError: training has begun; or the position is within a batch and the schedule takes only whole ones.
        """
        if self._steps_done or self._microbatches_done or self._stream is not None:
            raise UserError(f"training has begun: {counted(self._steps_done, 'step')} done",
                            hint="load a checkpoint into a new pipeline, before its first step")
        begun = self._begun_at(position)
        if begun and self._schedule.recipe is None:
            raise UserError(f"the checkpoint was made after {begun} of the {self._settings.microbatches} microbatches "
                            f"of a batch, but '{self._schedule.name}' takes whole ones",
                            hint="go on with the schedule that made it, or from a checkpoint at the end of a batch")

    def _begun_at(self, position: Position) -> int:
        return position.microbatches % self._settings.microbatches if position.begun is None else position.begun

    def _check_whole(self) -> None:
        if self._broken:
            raise RunError("this pipeline failed in the middle of an update: its stages are at different versions",
                           hint="keep a state_dict() from between steps, and build a new pipeline")

    def describe(self, rank: int) -> str:
        """A rank with its stages, for messages."""
        return describe_rank(self._placement, rank)


def _has(feed: Feed, first: int, microbatch: int) -> bool:
    return feed.has(first + microbatch)
