"""The engine: all ranks of this process, driven through segments of a schedule."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vpipe.errors import RunError, UserError
from vpipe.model.layer import Model
from vpipe.model.split import StageSpec, ties_between
from vpipe.runtime.distributed import Distributed, share_tensors
from vpipe.runtime.feed import Batch, Feed
from vpipe.runtime.outcome import Outcomes
from vpipe.runtime.programs import Program, Programs
from vpipe.runtime.stage import Stage
from vpipe.runtime.transport import InProcess, Mailroom, Transport
from vpipe.runtime.update import Update
from vpipe.runtime.usage import StageUsage
from vpipe.runtime.worker import Segment, Worker
from vpipe.schedules.action import Action, Op
from vpipe.schedules.order import Schedule, describe_rank
from vpipe.schedules.registry import Recipe
from vpipe.schedules.size import Placement

MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer | None]
"""Named parameters of a stage -> its optimizer."""


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        index: its number, from 0.
        loss: mean over its microbatches, on every rank.
        learning_rate: of the first parameter group of this process's first stage that trains; None without.
        gradient_norm: of all stages, before clipping; None when not clipped globally.
        stop: whether the last stage's rank was told to leave off.
    """

    index: int
    loss: float
    learning_rate: float | None
    gradient_norm: float | None
    stop: bool


@dataclass(frozen=True)
class Settings:
    """What the engine needs to know beside the model.

    Attributes:
        microbatches: per batch.
        recompute: ratio per stage.
        factor: learning rate of an update relative to the optimizer's own.
        clip: greatest gradient norm; of all stages with a flush, of each stage without.
        seed: of initialisation and dropout.
        device: where this process computes.
        timeout_s: how long a transfer may take.
    """

    microbatches: int
    recompute: Sequence[float]
    factor: Callable[[int], float]
    clip: float | None
    seed: int
    device: torch.device
    timeout_s: float


@dataclass
class _Stream:
    """An asynchronous pipeline with microbatches in flight."""

    segment: Segment
    recipe: Recipe
    updates: Iterator[int]
    done: int = 0  # updates finished
    drained: deque[Step] | None = None  # the steps that draining made, to be yielded when training goes on


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
        self._programs = Programs(schedule, [spec.index for spec in specs
                                             if int(settings.recompute[spec.index] * len(spec.layers))])
        self._fields = model.batch
        self._distributed = distributed
        ranks = [dist.get_rank()] if distributed else list(range(len(schedule.programs)))
        room: Mailroom = {}
        self.workers = {}
        for rank in ranks:
            own = [spec for spec in specs if rank in self._placement[spec.index]]
            stages = {spec.index: Stage(model, spec, seed=settings.seed, device=settings.device,
                                        recompute=settings.recompute[spec.index]) for spec in own}
            optimizers = {s: make_optimizer(stage.weights.masters) for s, stage in stages.items()}
            transport: Transport = (Distributed(settings.device, settings.timeout_s,
                                                max(schedule.peak_activations),
                                                1 if schedule.ranks == schedule.stages else schedule.stages,
                                                self.describe)
                                    if distributed else InProcess(rank, room))
            update = Update(optimizers, settings.factor, settings.clip)
            self.workers[rank] = Worker(rank, self._placement, stages, update, self._ties, transport)
        self._agree_on_norms()
        for worker in self.workers.values():
            worker.tied.lend_first()
        for worker in self.workers.values():
            worker.tied.borrow_first()
            worker.transport.finish()
        self._decisive = self._last_forward()
        self._outcomes = Outcomes(self.workers, self._placement, distributed)
        self._made: deque[Step] = deque()  # the updates of the latest batch that were not yielded yet
        self._microbatches_done = 0
        self._stream: _Stream | None = None
        self._broken = False
        self._stop: Callable[[], bool] = lambda: False

    # -- training --------------------------------------------------------------------------------------

    def train(self, batches: Iterable[Batch], updates: int | None = None,
              stop: Callable[[], bool] = lambda: False) -> Iterator[Step]:
        """Train on the batches; yields one step per update, in order.

        ``updates`` ends the training after so many, in the middle of a batch if need be (not under a schedule
        read from a file, which ends with its batch). ``stop`` is asked where the last stage is, once per update; its
        answer comes with the step on every rank, so that all of them can leave off after the same one.
        """
        self.drain()
        self._made.clear()
        self._stop = stop
        recipe, every = self._schedule.recipe, self._schedule.update_every
        whole = self._schedule.microbatches if recipe is None else every
        feed = self._feed(batches, None if updates is None else -(-updates * every // whole) * whole)
        return self._train_whole(feed) if recipe is None else self._train_stream(feed, recipe)

    def _train_whole(self, feed: Feed) -> Iterator[Step]:
        """Batch after batch, each with all of the schedule's programs and an empty pipeline at its end."""
        microbatches = self._settings.microbatches
        first = 0
        while feed.has(first):
            segment = Segment(feed, first, self._microbatches_done, self._schedule.update_every, training=True)
            if self._decisive is not None:
                self._outcomes.expect(segment.base // segment.every)
            updates: Iterable[int] = self._run(segment, self._programs.of_batch)
            if self._decisive is None:
                updates = list(updates)  # the losses are told when the batch is done
            self._made = deque(self._step(segment, update) for update in updates)
            self._microbatches_done += microbatches
            first += microbatches
            for worker in self.workers.values():
                worker.transport.finish()  # the losses have arrived everywhere: this process may end now
            while self._made:
                yield self._made.popleft()

    def _train_stream(self, feed: Feed, recipe: Recipe) -> Iterator[Step]:
        first, every = 0, self._schedule.update_every
        while feed.has(first):
            self.drain()  # of another call of train
            segment = Segment(feed, first, self._microbatches_done, every, training=True)
            stream = self._stream = _Stream(segment, recipe,
                                            self._run(segment, self._programs.of_stream(feed, first, recipe)))
            for update in stream.updates:
                stream.done += 1
                yield self._step(segment, update)
            if stream.drained is None:
                self._close(stream)
            else:
                yield from stream.drained
            first += stream.done * every
            feed.end = None

    def drain(self) -> Sequence[Step]:
        """Finish what is in flight in an asynchronous pipeline, and the steps that makes; training may go on after it.

        Every rank drains after the same step, so all must agree on the last microbatch that still enters:
        the latest that the first stage may have begun, which is as many beyond the last finished update
        as it holds in flight, rounded up to whole updates.
        """
        stream = self._stream
        if stream is None or self._broken:
            return tuple(self._made)
        every = stream.segment.every
        entered = stream.done * every + stream.recipe.peak_activations(0, self._programs.endless)
        stream.segment.feed.end = stream.segment.first + -(-entered // every) * every
        stream.drained = deque()
        for update in stream.updates:
            stream.done += 1
            stream.drained.append(self._step(stream.segment, update))
        self._close(stream)
        return stream.drained

    def _close(self, stream: _Stream) -> None:
        self._microbatches_done += stream.done * stream.segment.every
        self._stream = None

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over the samples of all batches, forward only, with the latest weights."""
        self.drain()
        source = iter(batches)
        total, samples = 0.0, 0
        # As many batches at a time as keep every stage busy, not all: in one process nothing bounds how far
        # the first stage runs ahead.
        group = -(-4 * len(self._placement) // self._settings.microbatches)
        with ExitStack() as undisturbed:
            for worker in self.workers.values():
                undisturbed.enter_context(worker.evaluating())
            while (head := next(source, None)) is not None:
                feed = self._feed(chain([head], islice(source, group - 1)))
                # All are read, so that a bad batch is refused before anything runs.
                most = group * self._settings.microbatches
                microbatches = most if feed.has(most - 1) else feed.total
                segment = Segment(feed, 0, 0, self._settings.microbatches, training=False)
                for _ in self._run(segment, self._programs.of_evaluation(microbatches)):
                    pass
                total += self._outcomes.losses(feed.samples)
                samples += sum(feed.samples)
        if not samples:
            raise UserError("there is nothing to evaluate on", hint="give evaluate at least one batch")
        return self._outcomes.share(total) / samples

    def _step(self, segment: Segment, update: int) -> Step:
        number = segment.base // segment.every + update
        if self._decisive is None:
            self._outcomes.expect(number)
            self._outcomes.tell(segment, number, self._stop)
        loss, stop = self._outcomes.hear(segment, number)
        groups = [group for worker in self.workers.values() for optimizer in worker.update.optimizers.values()
                  if optimizer is not None for group in optimizer.param_groups]
        norm = next(iter(self.workers.values())).update.gradient_norm
        # Computed anew: within one process a later stage may already have set the rate of its next update.
        rate = float(groups[0]["initial_lr"]) * self._settings.factor(number) if groups else None
        return Step(number, loss, rate, None if norm is None else float(norm), stop)

    def _last_forward(self) -> Action | None:
        """Where a program is one update: what is done when its loss is known, long before the update is made.

        Told then, the loss is on every rank before that rank's last backward, so none waits for another between two
        updates.
        """
        schedule = self._schedule
        if schedule.recipe is not None or schedule.update_every < schedule.microbatches:
            return None
        return [action for action in schedule.programs[self._placement[-1][0]]
                if action.op is Op.FORWARD and action.stage == len(self._placement) - 1][-1]

    def _feed(self, batches: Iterable[Batch], limit: int | None = None) -> Feed:
        takers = sum(len(worker.stages) for worker in self.workers.values())
        return Feed(iter(batches), self._settings.microbatches, self._fields, takers, limit)

    # -- carrying out ----------------------------------------------------------------------------------

    def _run(self, segment: Segment, program_of: Callable[[int], Program]) -> Iterator[int]:
        """Carry out a segment; yields an update when every stage of this process has made it."""
        if self._broken:
            raise RunError("this pipeline failed before and cannot go on", hint="build a new one")
        programs: dict[int, Iterator[Action]] = {}
        for rank, worker in self.workers.items():
            program = program_of(rank)
            programs[rank] = program.actions
            worker.begin(segment, program.version_of, program.is_split)
        stages = sum(len(worker.stages) for worker in self.workers.values())
        made: Counter[int] = Counter()
        self._broken = True  # until the end is reached
        for action in self._interleaved(programs):
            if action.op is Op.STEP:
                made[action.microbatch] += 1
                if made[action.microbatch] == stages:
                    del made[action.microbatch]
                    self._broken = False
                    yield action.microbatch
                    self._broken = True
            elif action is self._decisive:
                self._outcomes.tell(segment, segment.base // segment.every, self._stop)
        for worker in self.workers.values():
            worker.end()
        self._broken = False

    def _interleaved(self, programs: Mapping[int, Iterator[Action]]) -> Iterator[Action]:
        """Execute the ranks' actions, each as soon as it has what it needs; yields them when done."""
        heads = {rank: action for rank, program in programs.items() if (action := next(program, None)) is not None}
        while heads:
            moved = False
            for rank in list(heads):
                worker = self.workers[rank]
                while rank in heads and (self._distributed or worker.waits_for(heads[rank]) is None):
                    worker.execute(heads[rank])
                    moved = True
                    yield heads[rank]
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

    def usage(self) -> list[StageUsage]:
        """Where the time of training went so far, per stage, on every rank."""
        mine = {s: worker.usage(s) for worker in self.workers.values() for s in worker.stages}
        if not self._distributed:
            return [mine[spec.index] for spec in self._specs]
        empty = StageUsage.empty()
        return [StageUsage.of(share_tensors({"usage": mine.get(spec.index, empty).as_tensor()},
                                            self._placement[spec.index][0], self._settings.device)["usage"])
                for spec in self._specs]

    # -- the whole model -------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model, on every rank, in the order of the layers."""
        if self._broken:
            raise RunError("this pipeline failed in the middle of an update: its stages are at different versions",
                           hint="keep a state_dict() from between steps, and build a new pipeline")
        self.drain()
        local = {s: stage.state() for worker in self.workers.values() for s, stage in worker.stages.items()}
        whole: dict[str, Tensor] = {}
        for spec in self._specs:
            owner = self._placement[spec.index][0]
            state = local.get(spec.index, {})
            whole.update(share_tensors(state, owner, self._settings.device) if self._distributed else
                         {name: tensor.clone() for name, tensor in state.items()})
        return whole

    def _agree_on_norms(self) -> None:
        """Let every rank know how many gradient norms each stage publishes."""
        if self._settings.clip is None or not self._schedule.flush:
            return
        stages = {s: worker for worker in self.workers.values() for s in worker.stages}
        counts = {s: len(worker.stages[s].weights.names) for s, worker in stages.items()}
        if self._distributed:
            for spec in self._specs:
                count = torch.tensor([counts.get(spec.index, 0)])
                shared = share_tensors({"count": count}, self._placement[spec.index][0], self._settings.device)
                counts[spec.index] = int(shared["count"])
        for worker in self.workers.values():
            worker.update.clip_globally({s: (self._placement[s][0], n) for s, n in counts.items()
                                         if s not in worker.stages})

    def describe(self, rank: int) -> str:
        """A rank with its stages, for messages."""
        return describe_rank(self._placement, rank)
