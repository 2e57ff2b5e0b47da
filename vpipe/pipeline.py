"""Train a model in stages under a schedule: the public interface."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vpipe.arguments import Arguments, as_integer, as_number, check_path, shown
from vpipe.distributed import excepthook
from vpipe.distributed.device import DeviceMap
from vpipe.distributed.init import join_world
from vpipe.distributed.orion import OrionScheduler
from vpipe.errors import PerformanceWarning, Problem, UserError, counted, nearest
from vpipe.model.layer import Model
from vpipe.model.split import StageSpec, balanced, parameter_counts, split, ties_between
from vpipe.plan.plan import Plan
from vpipe.plan.recompute import Recompute, recomputed_layers
from vpipe.runtime.action_recorder import MOST_ACTIONS, Recorder, label_actions
from vpipe.runtime.collectives import LocalUsage
from vpipe.runtime.compiled import compile_backend
from vpipe.runtime.delay_correction import DELAY_CORRECTIONS
from vpipe.runtime.engine import Engine, Pauses, Settings
from vpipe.runtime.executors.async_threaded import ThreadedWorker
from vpipe.runtime.executors.registry import EXECUTORS, THREADED, check_executor
from vpipe.runtime.microbatches import Batch
from vpipe.runtime.optimizer_step import StepObserver
from vpipe.runtime.pipeline_checkpoint import PipelineCheckpoint
from vpipe.runtime.precision import PRECISIONS, Precision
from vpipe.runtime.stage_optimizer import MakeOptimizer, Optimizers
from vpipe.runtime.stage_usage import StageUsage
from vpipe.runtime.state_dict import Position
from vpipe.runtime.step_results import Step
from vpipe.runtime.transport.compression import Compression
from vpipe.schedules.delays import fewer_updates, warn_of_delay
from vpipe.schedules.prepare import ScheduleSpec, few_microbatches, note_of
from vpipe.schedules.registry import DEFAULT_SCHEDULE
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.size import Placement


@runtime_checkable
class FromNamed(Protocol):
    """An optimizer factory that wants the parameters' names, for weight decay by name."""

    def from_named(self, named: Mapping[str, nn.Parameter]) -> Optimizers:
        """Make the optimizer of a stage, or several; None when the stage has nothing to train."""


OptimizerFactory = Callable[[list[nn.Parameter]], Optimizers] | FromNamed


class Pipeline:
    """A model cut into stages, trained under a schedule.

    Without torch.distributed all stages run in this process, taking turns. Under ``torchrun`` (or when
    the process group is initialised already) every process is one rank; the numbers are the same.

    Args:
        model: layers in order.
        stages: number of stages, of all ranks together; follows from ``partition`` or ``plan`` when they are given.
        schedule: a name that ``vpipe schedule`` lists, such as ``gpipe``, ``1f1b``, ``pipedream``, or the path of
            a schedule as a CSV file.
        microbatches: equal parts into which every batch is cut along dimension 0; 1 when not given.
        partition: layers per stage; balanced by parameters when not given.
        recompute: layers that are recomputed: a share of each stage's, from its end, as one number or one per stage;
            for a stage also a list of layers by their numbers in the model.
        optimizer: makes a stage's optimizer, or a list of them, from its parameters; see docs/optimizers.md. Its
            learning rate is the base that ``learning_rate_factor`` multiplies.
        seed: of initialisation and dropout; both are independent of the partition.
        plan: partition and recompute from a file, instead of the arguments; schedule, microbatches, placement and
            update_every where the arguments are not given.
        placement: ranks per stage; those of the schedule when not given. Several ranks are replicas: microbatch i
            goes to replica i mod their number.
        chunks: stages per rank, for schedules that may have any number of them; when not given, the number that
            follows from the processes of ``torchrun``, or the schedule's own.
        replicas: of every stage, without a ``placement``; stage s is then on ranks ``s * replicas`` and on.
        update_every: without a flush, microbatches per update, and replica (must divide ``microbatches``); as few as
            the schedule can have when not given.
        learning_rate_factor: step number -> factor.
        grad_clip: greatest gradient norm: over all stages with a flush, of each stage without one.
        skip_not_finite: skip an update when a loss or the norm of a gradient in it is not finite: with a flush on all
            stages, without one on each stage that has such a gradient. Weights and optimizer stay as they were.
        device: of this process: ``cpu``, ``cuda`` or ``cuda:1``. When not given, a GPU where there is one: that of
            ``LOCAL_RANK`` (ranks that outnumber GPUs share them), or the one that ``torch.cuda.set_device`` chose; else
            the processor. ``cuda`` means the same GPU. It becomes the current one of this process.
        backend: of transfers between ranks: ``nccl`` or ``gloo``; when not given, nccl where every rank has a GPU of
            its own, else gloo. A process group that is initialised already is used as it is.
        shared_memory: whether ranks of one host that compute on processors pass tensors through shared memory; else,
            and where there is none, over gloo. The numbers are the same.
        timeout_s: seconds after which a transfer counts as failed.
        compress: format of activations and gradients sent between ranks: ``none`` (as they are), ``bf16`` or ``int8``;
            one for all, or one for each of the ``stages - 1`` cuts. It changes the numbers.
        compress_rounding: of ``int8``: ``nearest`` or ``stochastic``.
        precision: of the layers: ``fp32``; ``bf16`` or ``fp16``, each layer under torch.autocast; ``bf16_pure``,
            weights and gradients in bf16 too, with fp32 masters. In the last three a tensor between layers is rounded,
            wherever the model is cut. ``fp16`` skips an update that overflows.
        loss_scale: by which ``fp16`` multiplies losses; found while training when not given.
        executor: ``overlapped``, ``naive`` (each action has ended when the next begins) or, with the schedule
            ``gpipe``, ``async_threaded``. The numbers are the same; see docs/executors.md.
        compile: compile every layer with torch.compile: True for its default backend, or the name of another one.
            Schedules that split the backward are refused.
        delay_correction: without a flush, ``none`` or ``extrapolate``: every step of an optimizer is extrapolated over
            the mean delay of its stage, in updates; see docs/optimizers.md.
        delay_correction_strength: share of that delay, or a multiple of it.
        warmup_depth: forwards of every stage before its first backward, under ``pipedream``,
            ``pipedream_vertical_sync`` and ``2bw``; those of 1F1B when not given. See docs/schedules.md.

    Raises:
        UserError: the numbers do not fit the model, the schedule or the processes.

    Warns:
        PerformanceWarning: a schedule with a flush has fewer microbatches than ranks, so some ranks always wait; or
            under one without, gradients are more than two updates late on average.
    """

    def __init__(self, model: Model, stages: int | None = None, schedule: str | os.PathLike[str] | None = None,
                 microbatches: int | None = None, *,
                 partition: Sequence[int] | None = None, recompute: Recompute = 0.0,
                 optimizer: OptimizerFactory, seed: int = 0, plan: Plan | None = None,
                 placement: Sequence[Sequence[int]] | None = None, chunks: int | None = None,
                 replicas: int = 1, update_every: int | None = None,
                 learning_rate_factor: Callable[[int], float] = lambda update: 1.0, grad_clip: float | None = None,
                 skip_not_finite: bool = False,
                 device: torch.device | str | None = None, backend: str | None = None, timeout_s: float = 60.0,
                 shared_memory: bool = True, compress: str | Sequence[str] = "none", compress_rounding: str = "nearest",
                 precision: str = "fp32", loss_scale: float | None = None, executor: str = "overlapped",
                 compile: bool | str = False,  # noqa: A002 - torch's word
                 delay_correction: str = "none", delay_correction_strength: float = 1.0,
                 warmup_depth: Sequence[int] | None = None) -> None:
        excepthook.install()
        given = Arguments()
        _check_model(given, model)
        _check_optimizer(given, optimizer)
        partition = given.integers("partition", partition, "[3, 2, 2, 2]")
        if isinstance(plan, Plan):
            if partition is not None and partition != list(plan.partition):
                given.refuse(f"partition is {shown(partition)} beside a plan with {shown(list(plan.partition))}",
                             "leave one of them out")
            partition = list(plan.partition)
            recompute = plan.recompute_layers or plan.recompute_ratio or recompute
            schedule = plan.schedule if schedule is None else schedule
            placement = (plan.stage_to_rank_map or None) if placement is None else placement
            microbatches = plan.microbatches if microbatches is None else microbatches
            update_every = plan.update_every if update_every is None else update_every
            if warmup_depth is None and schedule == plan.schedule:
                warmup_depth = plan.warmup_depth or None
        elif plan is not None:
            given.refuse(f"plan is {shown(plan)}", "give a Plan, such as plan=Plan.load('plan.json')")
        stages = given.integer("stages", stages, or_none=True)
        if schedule is not None:
            schedule = os.fspath(schedule) if isinstance(schedule, os.PathLike) else schedule
            given.name("schedule", schedule, DEFAULT_SCHEDULE)
        microbatches = given.integer("microbatches", microbatches, or_none=True)
        seed = given.integer("seed", seed, least=0)
        places = _places(given, placement)
        chunks = given.integer("chunks", chunks, least=1, or_none=True)
        replicas = given.integer("replicas", replicas, least=1)
        update_every = given.integer("update_every", update_every, or_none=True)
        warmup_depth = given.integers("warmup_depth", warmup_depth, "[3, 2, 1, 0]")
        given.function("learning_rate_factor", learning_rate_factor, 1,
                       "give a function of the step's number: learning_rate_factor=lambda step: 0.99**step; a "
                       "scheduler of torch's is made with the optimizer, see docs/optimizers.md")
        grad_clip = given.number("grad_clip", grad_clip, 1.0, or_none=True)
        given.flag("skip_not_finite", skip_not_finite)
        if backend is not None:
            given.name("backend", backend, "gloo", "nccl")
        given.flag("shared_memory", shared_memory)
        timeout_s = given.number("timeout_s", timeout_s, 60, most=1e9)
        given.name("precision", precision, *PRECISIONS)
        given.name("executor", executor, *EXECUTORS)
        if not isinstance(compile, bool | None):
            given.name("compile", compile, "aot_eager")
        if delay_correction not in DELAY_CORRECTIONS:
            given.refuse(f"delay_correction is {shown(delay_correction)}",
                         nearest(str(delay_correction), DELAY_CORRECTIONS))
        strength = given.number("delay_correction_strength", delay_correction_strength, 1.0, most=1e9)
        if delay_correction == "none" and strength != 1:
            given.refuse(f"delay_correction_strength is {shown(delay_correction_strength)}, but nothing is corrected",
                         "leave it out, or give delay_correction='extrapolate'")
        given.check()
        if plan is not None and sum(plan.partition) != len(model):
            raise UserError(f"the plan is for a model of {counted(sum(plan.partition), 'layer')}, but this one has "
                            f"{len(model)}", hint="give stages or a partition in its place, or a plan of this model")
        parsed = Precision.parse(precision, loss_scale)
        schedule, microbatches = schedule or DEFAULT_SCHEDULE, 1 if microbatches is None else microbatches
        if stages is None and partition is None and places is not None:
            stages = len(places)
        partition = _partition(model, stages, partition)
        recomputed = recomputed_layers(recompute, partition)
        world = join_world(backend, timeout_s, device)
        compression = (None if (compress, compress_rounding) == ("none", "nearest") else
                       Compression.parse(compress, compress_rounding, len(partition), seed))
        checked = check_executor(executor, schedule)
        lowered = ScheduleSpec(
            schedule, len(partition), microbatches, update_every,
            places, chunks, world.ranks if world.ranks > 1 else None, replicas,
            {owner: tuple(borrowers) for owner, borrowers in ties_between(split(model, partition)).items()},
            [stage for stage, layers in enumerate(recomputed) if layers],
            grad_clip is not None or skip_not_finite or parsed.scaled, last_first=checked == THREADED,
            warmup=warmup_depth).prepare()
        if refused := [Problem(f"{name} {what}", hint) for name, what, hint in parsed.refused(
                compression.codecs if compression is not None else ())]:
            raise UserError.all_of(refused)
        if lowered.flush and delay_correction != "none":
            raise UserError(f"delay_correction is '{delay_correction}', but '{schedule}' has a flush: no gradient is "
                            "late", hint="leave it out, or choose a schedule without a flush, such as pipedream")
        settings = Settings(microbatches, recomputed, _finite_factor(learning_rate_factor), grad_clip, seed,
                            world.own, timeout_s, compression, skip_not_finite, parsed, checked,
                            compile_backend(compile) if compile else None,
                            None if delay_correction == "none" else strength, shared_memory)
        self._set_up(model, partition, schedule, lowered, settings, _from_named(optimizer), world)
        if self.rank == 0 and (left_out := note_of(schedule)) is not None:
            warnings.warn(left_out, stacklevel=2)
        if self.rank == 0 and (slow := few_microbatches(lowered, "microbatches")) is not None:
            warnings.warn(slow, PerformanceWarning, stacklevel=2)
        remedies = [better] if (better := fewer_updates(lowered, microbatches)) else []
        remedies += ["an optimizer such as torch.optim.Muon"]
        remedies += ["delay_correction='extrapolate'"] if delay_correction == "none" else []
        if self.rank == 0 and (late := warn_of_delay(lowered, remedies)) is not None:
            warnings.warn(late, PerformanceWarning, stacklevel=2)

    @classmethod
    def from_schedule(cls, model: Model, partition: Sequence[int], name: str, schedule: Schedule, settings: Settings,
                      optimizer: MakeOptimizer, world: DeviceMap) -> Pipeline:
        """Create a pipeline for a schedule that is prepared already; its arguments are not checked.

        Args:
            name: of the schedule, or its file.
            schedule: lowered, as :meth:`~vpipe.schedules.prepare.ScheduleSpec.prepare` returns it.
            world: the ranks, as :func:`~vpipe.distributed.init.join_world` returns them.
        """
        excepthook.install()
        assert world.ranks in (1, schedule.ranks), f"{world.ranks} processes for {schedule.ranks} ranks"
        pipe = cls.__new__(cls)
        pipe._set_up(model, partition, name, schedule, settings, optimizer, world)
        return pipe

    def _set_up(self, model: Model, partition: Sequence[int], name: str, schedule: Schedule, settings: Settings,
                optimizer: MakeOptimizer, world: DeviceMap) -> None:
        self._model, self._seed, self._trained, self.rank = model, settings.seed, False, world.rank
        self.schedule, self.microbatches, self.partition = name, settings.microbatches, tuple(partition)
        self.recomputed, self.executor = tuple(settings.recompute), settings.executor
        self.placement, self.update_every = schedule.placement, schedule.update_every
        self._streams = schedule.stream
        self.engine = Engine(model, split(model, partition), schedule, optimizer, settings,
                             distributed=world.ranks > 1)

    def train(self, batches: Iterable[Batch], pauses: int | Collection[int] | Pauses | None = None, *,
              updates: int | None = None, stop: Callable[[], bool] = lambda: False) -> Iterator[Step]:
        """Train on batches (dicts of tensors, dimension 0 = samples); yield one :class:`Step` per update, in order.

        With a flush a batch is an update. Without one every ``update_every`` microbatches are (on every replica; with
        several a step takes the fewest microbatches that are whole updates of every stage), and the pipeline stays full
        from batch to batch; it drains when the batches end, and before :meth:`evaluate` and :meth:`state_dict`. Under
        torchrun every process passes the same batches, and they are compared (docs/data.md); a field that its layers do
        not read may be on the meta device. What raises while a batch is read is raised when those before are done.
        In one process Ctrl-C leaves the pipeline whole (docs/faults.md).

        Args:
            pauses: the updates, counted over all of training, after which a pipeline without a flush drains: every so
                many, those given, or a function from the updates that are done to the next such one. An
                :meth:`evaluate`, :meth:`save` or :meth:`state_dict` there is of exactly that update. The same on every
                rank. With a flush the pipeline is empty after every update anyway.
            updates: end after so many, within a batch if need be (not under a schedule read from a file, which ends
                with its batch).
            stop: called on the rank of the last stage, once per update. The result comes with the :class:`Step` on
                every rank, so that all can stop after the same one.
        """
        _check_batches(batches)
        next_pause = pauses if callable(pauses) else _pauses(pauses)
        if self._streams and not callable(pauses):
            self.engine.collectives.check_same("pauses", shown(pauses), "give every rank the same")
        if not self._trained:
            self.engine.collectives.check_trained()
            self._trained = True
        return self.engine.train(batches, updates, stop, next_pause)

    def drain(self) -> Sequence[Step]:
        """Finish the microbatches in flight without a flush; return the updates that this made, in order.

        Every rank must call it, after the same update. :meth:`train` then goes on: it does not yield these again.
        """
        return self.engine.drain()

    @property
    def position(self) -> Position:
        """Return the position in training: of the updates that were yielded, and of those that draining made.

        An :meth:`evaluate`, :meth:`state_dict` or :meth:`save` is of the position that it leaves.
        """
        return self.engine.reached()

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss over all samples, forward only, modules in evaluation mode; the same on every rank.

        Batches may have any size; the loss of a microbatch is weighted by its samples (docs/data.md).

        Every rank must call it, after the same step. With a flush it does not influence training. An asynchronous
        pipeline drains first, so the weights are those after all updates of the microbatches in flight, and fills again
        afterwards: the next microbatches use the versions that they would use at the start of training.
        """
        _check_batches(batches)
        return self.engine.evaluate(batches)

    def state_dict(self, *, corrected: bool = True) -> dict[str, Tensor]:
        """Return the whole model on every rank: ``"<layer>.<parameter>"``; a tied parameter under its owner's name.

        Every rank must call it, after the same step; an asynchronous pipeline drains first.

        Args:
            corrected: False takes back what ``delay_correction`` has added: the weights are then the sum of what the
                optimizer's steps changed, without the extrapolation over the delay.
        """
        return self.engine.state(corrected)

    def save(self, folder: str | Path) -> None:
        """Save a checkpoint at ``folder``, from which training resumes exactly.

        It has the format of those that ``vpipe train`` saves, and does not depend on the partition, the replicas, the
        schedule or the transport. It is complete when this returns: it is written as ``<folder>.tmp``, then renamed,
        and replaces a checkpoint that is there. Every rank must call it, after the same step, with a folder that all
        see; an asynchronous pipeline drains first, see :meth:`evaluate`.

        Raises:
            UserError: an optimizer or a layer keeps what a checkpoint cannot hold, or ``folder`` is something else than
                a checkpoint.
            RunError: it could not be written; a checkpoint that was there before still is.
        """
        self._checkpoint(folder).save({
            "partition": list(self.partition), "placement": [list(ranks) for ranks in self.placement],
            "schedule": self.schedule, "microbatches": self.microbatches, "update_every": self.update_every,
            "recompute": [sorted(layers) for layers in self.recomputed], "drained": True})

    def load(self, folder: str | Path) -> Position:
        """Load a checkpoint of :meth:`save`, or the newest one of a run's folder; every rank calls it before training.

        The pipeline may have another partition, placement and schedule; model, seed and optimizer must be those that
        saved. Steps are counted on from the checkpoint, and so are the learning rate, dropout and stochastic rounding.
        Where ``delay_correction`` looks ahead by another factor than in the checkpoint, the weights without the
        look-ahead stay, and a warning says by what they look ahead now.

        Returns:
            The position in training. The first batch to give :meth:`train` is the one after those that are done,
            ``position.microbatches // pipe.microbatches`` when all came from one call of it. When an asynchronous
            pipeline was saved within a batch, it is that batch, and the microbatches that are done are left out.

        Raises:
            UserError: it is no checkpoint, is damaged, of another model, seed or optimizer, or falls within a batch
                where the schedule takes only whole ones. Nothing has been loaded then.
        """
        return self._checkpoint(folder).load(self._model)

    # -- what a training loop of one's own asks -------------------------------------------------------------------

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages of this process, in order: numbers, layers, fields of the batch that they read."""
        return tuple(stage.spec for stage in self.engine.local_stages)

    @property
    def device(self) -> torch.device:
        """The device of the stages of this process."""
        return self.engine.local_stages[0].device

    def local_usage(self) -> LocalUsage:
        """Return the usage of training so far of this process, by rank and stage, without any transfer."""
        return self.engine.collectives.local_usage()

    def usage(self, since: LocalUsage | None = None) -> list[StageUsage]:
        """Return the usage of every stage, and of each of its replicas, in order. Every rank must call it.

        Args:
            since: the :meth:`local_usage` at the beginning of the time that counts; None: all of it does.
        """
        return self.engine.collectives.usage(since)

    def record(self, limit: int = MOST_ACTIONS) -> Mapping[int, Recorder]:
        """Record the actions of training from now on, at most ``limit`` per rank; return the recorders by rank.

        Raises:
            UserError: forwards run in threads, so that actions have no times of their own.
        """
        return self.engine.record(limit)

    @contextmanager
    def labelled(self) -> Iterator[None]:
        """Label every action meanwhile for torch's profiler, with its text and the run's number: ``0F3``."""
        with ExitStack() as stack:
            for worker in self.engine.workers.values():
                stack.callback(label_actions(worker))
            yield

    def observe(self, observer_of: Mapping[int, StepObserver]) -> None:
        """Have an observer of each rank of this process see the gradients and weights of every update from now on."""
        for rank, worker in self.engine.workers.items():
            worker.optimizer_steps.observer = observer_of[rank]

    def schedule_kernels(self, scheduler: OrionScheduler) -> None:
        """Let a scheduler gate the kernels of the microbatches of this process, before the first one."""
        for worker in self.engine.workers.values():
            assert isinstance(worker, ThreadedWorker), "only forwards that run in threads have streams of their own"
            worker.schedule(scheduler)

    def check_replicas(self) -> None:
        """Refuse weights that differ between the replicas of a stage. Every rank must call it.

        Raises:
            RunError: they do.
        """
        self.engine.collectives.check_replicas()

    def local_state(self) -> dict[str, Tensor]:
        """Return what this process adds to a checkpoint, without copies: those who save in the background need it.

        Every rank must call it, after the same step; an asynchronous pipeline drains first.

        Raises:
            UserError: a checkpoint cannot hold the state of a layer or an optimizer.
        """
        return self.engine.checkpoint_state()

    def restore(self, position: Position, tensors: Callable[[Callable[[str], bool]], Mapping[str, Tensor]]
                ) -> str | None:
        """Restore the :meth:`local_state` of all ranks of a run, on every rank before it trains; see :meth:`load`.

        Args:
            tensors: reads those whose names it is told to; called when the position has been found to fit.

        Returns:
            On every rank a line about weights that look ahead by another factor than in the checkpoint, if there are.

        Raises:
            UserError: the position does not fit, training has begun, or tensors are missing.
        """
        self.engine.check_restorable(position)
        return self.engine.restore(position, tensors(self.engine.wants))

    def _checkpoint(self, folder: str | Path) -> PipelineCheckpoint:
        check_path("the folder", folder, "checkpoint")
        return PipelineCheckpoint(self.engine, self.microbatches, self._seed, Path(folder))


def _check_model(given: Arguments, model: object) -> None:
    if isinstance(model, Model):
        return
    hint = "give a Model: Model([Layer('embed', lambda: Embed(), ...), ...], batch=('ids', 'labels'))"
    if isinstance(model, nn.Sequential):
        hint = "write Pipeline(Model.sequential(modules, loss=nn.CrossEntropyLoss()), ...)"
    given.refuse(f"the model is {shown(model)}, not a Model", hint)


def _check_optimizer(given: Arguments, optimizer: object) -> None:
    hint = "give a function that makes it: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
    made = optimizer[0] if isinstance(optimizer, (list, tuple)) and optimizer else optimizer
    if isinstance(made, torch.optim.Optimizer):
        given.refuse(f"optimizer is {shown(made)}, which was made already: of other tensors than those that the stages "
                     "train", hint)
    elif not isinstance(optimizer, FromNamed):
        given.function("optimizer", optimizer, 1, hint)


def _finite_factor(function: Callable[[int], float]) -> Callable[[int], float]:
    """Return the learning rate's factor as a function that refuses a number that is not finite."""
    def factor(step: int) -> float:
        value = function(step)
        if (number := as_number(value)) is None or not math.isfinite(number):
            raise UserError(f"learning_rate_factor({step}) is {shown(value)}",
                            hint="let it return a finite number for the number of every step, such as 1.0")
        return number

    return factor


def _check_batches(batches: object) -> None:
    if isinstance(batches, Mapping):
        raise UserError("batches is one batch", hint="give a list, or what else yields batches: [batch]")
    if isinstance(batches, (str, bytes, Tensor)) or not isinstance(batches, Iterable):
        hint = "give what yields batches, each a dict of tensors: a list, a DataLoader, a generator"
        if callable(batches) and not isinstance(batches, type):
            hint += "; of a function that is one, what it returns: call it"
        raise UserError(f"batches is {shown(batches)}", hint=hint)


def _places(given: Arguments, placement: Any) -> Placement | None:
    if placement is None:
        return None
    if not isinstance(placement, (list, tuple)) or not all(
            isinstance(ranks, (list, tuple)) and all(type(rank) is int for rank in ranks) for ranks in placement):
        given.refuse(f"the placement {shown(placement)} does not list the ranks of every stage",
                     "write a list of lists of whole numbers, such as [[0, 1], [2]]")
        return None
    return tuple(map(tuple, placement)) or None


def _pauses(given: object) -> Callable[[int], int | None]:
    """Return the function from the updates that are done to the next one to pause after."""
    if given is None:
        return lambda done: None
    if (every := as_integer(given)) is not None and every > 0:
        return lambda done: (done // every + 1) * every
    wanted: list[int] = []
    for each in given if isinstance(given, Collection) and not isinstance(given, Mapping | str) else [0]:
        wanted.append(as_integer(each) or 0)
    if min(wanted, default=1) < 1:
        raise UserError(f"pauses is {shown(given)}", hint="give the number of updates from one pause to the next, such "
                        "as pauses=100, or a list of updates, such as pauses=[100, 250]")
    return lambda done: min((number for number in wanted if number > done), default=None)


def _partition(model: Model, stages: int | None, partition: Sequence[int] | None) -> tuple[int, ...]:
    if partition is None:
        if stages is None:
            raise UserError("neither stages nor a partition is given", hint="say stages=4, or partition=[3, 2, 2, 2]")
        return tuple(balanced(parameter_counts(model), stages))
    if not partition:
        raise UserError("the partition is empty", hint="give the layers of at least one stage, such as [3, 2]")
    if stages is not None and stages != len(partition):
        raise UserError(f"{stages} stages, but the partition {list(partition)} has {len(partition)}",
                        hint="leave out stages, or give it as many entries")
    return tuple(partition)


def _from_named(factory: OptimizerFactory) -> MakeOptimizer:
    if isinstance(factory, FromNamed):
        return factory.from_named
    return lambda named: factory(list(named.values())) if named else None
