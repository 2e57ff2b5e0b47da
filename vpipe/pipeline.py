"""Train a model in stages under a schedule: the public interface."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from vpipe.arguments import Arguments, as_integer, check_path, shown
from vpipe.checkpoint.manifest import Position, view_of
from vpipe.description import Description
from vpipe.description.cut import Cut, StageSpec
from vpipe.description.execution import Execution
from vpipe.description.order import Order
from vpipe.description.precision import FP32, Precision
from vpipe.description.transfers import Transfers
from vpipe.description.update import FromNamed, Update
from vpipe.distributed import excepthook
from vpipe.distributed.device import DeviceMap
from vpipe.distributed.init import exchange, is_alone, join_world
from vpipe.errors import PerformanceWarning, Problem, UserError, counted
from vpipe.model.layer import split_target
from vpipe.model.model import Model
from vpipe.plan.plan import Plan
from vpipe.runtime.action_recorder import MOST_ACTIONS, Recorder, labelled
from vpipe.runtime.collectives import LocalUsage, clock_offset, together
from vpipe.runtime.engine import Engine
from vpipe.runtime.microbatches import Batch, BatchForm, MicrobatchLoader
from vpipe.runtime.optimizer_step import StepObserver
from vpipe.runtime.outputs import Outputs, Wanted
from vpipe.runtime.pipeline_checkpoint import ShardedState, load_pipeline, save_pipeline
from vpipe.runtime.stage_layers import NARROW
from vpipe.runtime.stage_usage import StageUsage
from vpipe.runtime.step_results import Step
from vpipe.runtime.surroundings import Surroundings
from vpipe.runtime.training import Pauses
from vpipe.runtime.transport.process_group import is_idle
from vpipe.schedules.builder import prepare_schedule
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.delays import mean_delay
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule

if TYPE_CHECKING:
    from vpipe.description.update import OptimizerFactory

DEFAULT_TRANSFERS, DEFAULT_EXECUTION = Transfers(), Execution()


class Pipeline:
    """A model cut into stages, trained under a schedule.

    Without torch.distributed all stages run in this process, taking turns. Under ``torchrun`` (or when
    the process group is initialised already) every process is one rank; the numbers are the same.

    Args:
        model: layers in order.
        optimizer: makes a stage's optimizer, or a list of them, from its parameters, such as
            ``lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)``; or an :class:`~vpipe.Update`, with a schedule
            of the learning rate, and limits on gradients.
        stages: how many; or the layers of each, such as ``[3, 2, 2, 2]``; or a :class:`~vpipe.Cut`, with recomputation
            and the ranks of every stage; or a :class:`~vpipe.Plan`, which may say schedule and microbatches, too.
        schedule: a name that ``vpipe schedule`` lists, such as ``gpipe``, ``1f1b``, ``pipedream``, or the path of
            a schedule as a CSV file; or an :class:`~vpipe.Order`, with stages per rank, or, without a flush, an
            :class:`~vpipe.Asynchronous`, with microbatches per update and what makes up for the delay. 1f1b when None.
        microbatches: equal parts into which every batch is cut along dimension 0; 1 when None.
        precision: ``fp32``, ``bf16``, ``bf16_pure`` or ``fp16``, or a :class:`~vpipe.Precision`, with a loss scale.
        transfers: between ranks: what carries them, their encoding, their time-out.
        execution: on which device, by which executor, with compiled layers or not.
        seed: of initialisation and dropout; both are independent of the cut.

    Raises:
        UserError: the numbers do not fit the model, the schedule or the processes.

    Warns:
        UserWarning: trained parameters have 16 bits in ``fp32``.
        PerformanceWarning: a schedule with a flush has fewer microbatches than ranks, so some ranks always wait; or
            under one without, gradients are more than two updates late on average.
    """

    def __init__(self, model: Model, optimizer: OptimizerFactory | FromNamed | Update,
                 stages: int | Sequence[int] | Cut | Plan | None = None,
                 schedule: str | os.PathLike[str] | Order | None = None, microbatches: int | None = None, *,
                 precision: str | Precision = FP32, transfers: Transfers = DEFAULT_TRANSFERS,
                 execution: Execution = DEFAULT_EXECUTION, seed: int = 0) -> None:
        if not is_alone():
            excepthook.install()  # before they join: all ranks refuse the same arguments
        given = Arguments()
        _check_model(given, model)
        update, plan = given.part(Update, optimizer), stages if isinstance(stages, Plan) else None
        if stages is None:
            given.refuse("stages is None", "say how many, stages=4, or the layers of each, stages=[3, 2, 2, 2]")
        cut = given.part(Cut, stages) if plan is None else plan.cut
        order = Order() if schedule is None else given.part(Order, schedule) or Order()
        if plan is not None:
            _check_agrees(given, plan, order, update, microbatches)
            order = order.over(plan.order)
            microbatches = plan.microbatches if microbatches is None else microbatches
        order = order.over(RegisteredSchedule.DEFAULT_ORDER)
        microbatches = given.integer("microbatches", 1 if microbatches is None else microbatches)
        computed = given.part(Precision, precision)
        given.instance("transfers", transfers, Transfers)
        given.instance("execution", execution, Execution)
        seed = given.integer("seed", seed, least=0)
        given.check()
        if plan is not None:
            plan.check_fits(len(model), structure=model.digest({}) if plan.profiled else "")
        zero1 = plan.zero1 if plan is not None and update.zero1 is None else update.zero1
        update = replace(update, zero1=bool(zero1))
        if not isinstance(cut.stages, tuple):
            cut = replace(cut, stages=model.balanced(cut.count))
        world = join_world(transfers.group, transfers.timeout_s, execution.device, execution.mesh, execution.data)
        with exchange(timeout_s=transfers.timeout_s).call("Pipeline()", at_once=is_idle()):
            if plan is not None and plan.tensor not in (None, lanes := len(world.lanes.alike)):
                raise UserError(f"the plan splits layers over {counted(plan.tensor, 'rank')}, but there "
                                f"{'is' if lanes == 1 else 'are'} {counted(lanes, 'lane')}",
                                hint="build the layers on a mesh, Execution(mesh=mesh), or make another plan")
            description = Description(cut, order, microbatches, update, computed, transfers, execution, seed)
            lowered = prepare_schedule(model, cut, order, microbatches, execution, needs_norms=description.needs_norms,
                                       zero1=update.zero1,
                                       ranks=len(world.lanes.own) if len(world.lanes.own) > 1 else None)
            if lowered.flush and description.delay_correction:
                raise UserError(f"delay_correction is {description.delay_correction:g}, but '{order.schedule}' has a "
                                "flush: no gradient is late",
                                hint="leave it out, or choose a schedule without a flush, such as pipedream")
            if world.lanes.count > 1 or execution.data is not None:
                _check_lanes(description, max(map(len, lowered.placement)))
            self._set_up(model, description, lowered, world)
        narrow = [name for stage in self.engine.local_stages for name, p in stage.named_parameters()
                  if p.requires_grad and p.dtype in NARROW]
        if narrow and computed.dtype is None:
            warnings.warn(f"trained parameters have 16 bits, such as '{narrow[0]}'; precision 'fp32' leaves them so, "
                          "and steps below 1/256 of a number in bfloat16, 1/2048 in float16, are lost: "
                          "precision='bf16_pure' trains the same layers with fp32 masters", stacklevel=2)
        if self.rank:
            return
        if CsvFile.is_path(order.schedule) and (left_out := CsvFile.read(order.schedule).note) is not None:
            warnings.warn(left_out, stacklevel=2)
        for slow in _slow(lowered, bool(description.delay_correction)):
            warnings.warn(slow, PerformanceWarning, stacklevel=2)

    @staticmethod
    def plan(model: Model, optimizer: OptimizerFactory | FromNamed | Update, batch: Batch, *, ranks: int | None = None,
             stages: int | None = None, microbatches: int | None = None, memory_bytes: int | None = None,
             precision: str | Precision = FP32, execution: Execution = DEFAULT_EXECUTION) -> Plan:
        """Measure the layers on a batch, and return the fastest plan for such batches, with a flush.

        ``Pipeline(model, optimizer, stages=plan)`` follows it. Every rank calls this, and has the same plan; a process
        alone measures no transfers. Measuring takes some ten seconds for each number of microbatches.

        Args:
            ranks: that the pipeline will have; those of this job when None.
            stages: that the plan shall have; as many as are fastest when None, with fewer than ranks in replicas.
            microbatches: of a batch; when None one, two and four for each rank, where they divide the samples.
            memory_bytes: that the process of a rank may take; when None the memory of its device, on a CPU its part of
                the host's.

        Raises:
            UserError: nothing fits into the memory, with a hint of what would; or an argument is wrong.
            RunError: a layer cannot be run on the batch.
        """
        from vpipe.plan.solver.request import PlanRequest
        from vpipe.plan.solver.solve import solve
        from vpipe.profiling import RankGroup, measure

        given = Arguments()
        _check_model(given, model)
        update, computed = given.part(Update, optimizer), given.part(Precision, precision)
        ranks, stages, microbatches, memory_bytes = (
            given.integer(name, value, least=1, or_none=True) for name, value in (
                ("ranks", ranks), ("stages", stages), ("microbatches", microbatches), ("memory_bytes", memory_bytes)))
        given.instance("execution", execution, Execution)
        given.check()
        group = RankGroup(join_world(device=execution.device).own)
        ranks = ranks or group.ranks
        if ranks > len(model):
            raise UserError(f"ranks is {ranks}, but the model has only {counted(len(model), 'layer')}",
                            hint=f"plan for at most {len(model)} ranks")
        loader = MicrobatchLoader(iter([batch]), BatchForm(model.batch, microbatches or 1, unread=model.unread),
                                  lambda microbatch: 1)
        if not loader.has(0):
            assert loader.error is not None, "there is a batch"
            raise loader.error
        samples = loader.samples(0, microbatches or 1)
        counts = [microbatches] if microbatches else [
            count for count in (ranks, 2 * ranks, 4 * ranks) if samples % count == 0] or [1]
        parts = [{name: batch[name][:samples // count] for name in model.batch} for count in counts]
        identities = group.identify(model, parts, model_name="model", optimizer="optimizer", precision=computed.name)
        profiles = dict(zip(counts, measure(model, parts, update.make_optimizer, identities=identities,
                                            device=group.device), strict=True))
        one = profiles[counts[0]]
        if memory_bytes is None and one.device_bytes:
            memory_bytes = one.device_bytes // (1 if one.cores is None else max(ranks, one.identity.ranks_per_host))
        request = PlanRequest(profiles, ranks, memory_bytes, stages=stages)
        return solve(request, *([request.with_zero1] if update.zero1 is None and ranks > 1 else [])).plan

    @classmethod
    def prepared(cls, model: Model, description: Description, schedule: Schedule, world: DeviceMap) -> Pipeline:
        """Create a pipeline for a schedule that is prepared already; only the precision is compared with other parts.

        Args:
            description: its cut has the layers of every stage.
            schedule: lowered, as :func:`~vpipe.schedules.builder.prepare_schedule` returns it.
            world: the ranks, as :func:`~vpipe.distributed.init.join_world` returns them.
        """
        assert len(world.lanes.own) in (1, schedule.ranks), f"{world.lanes} for {schedule.ranks} ranks"
        pipe = cls.__new__(cls)
        pipe._set_up(model, description, schedule, world)
        return pipe

    def _set_up(self, model: Model, description: Description, schedule: Schedule, world: DeviceMap) -> None:
        if refused := [Problem(f"{name} {what}", hint) for name, what, hint in description.precision.refused(
                description.transfers.codecs(description.cut.count), schedule.flush)]:
            raise UserError.all_of(refused)
        _check_lowered(schedule, description)
        self.model, self._trained, self.rank, self.description = model, False, world.rank, description
        self.lane, self.lanes = world.lanes.number, world.lanes.count
        self.schedule, self.microbatches = description.order.schedule, description.microbatches
        self.partition, self.recomputed = description.cut.partition, description.cut.recomputed
        self.placement, self.update_every = schedule.placement, schedule.assignment.whole(schedule.update_every)
        surroundings = Surroundings(world.own.type)
        with surroundings.set_aside():
            self.engine = Engine(model, model.split(self.partition), schedule, description, world, surroundings)
        self.lowered = self.engine.schedule

    @together
    def train(self, batches: Iterable[Batch], pauses: int | Collection[int] | Pauses | None = None, *,
              updates: int | None = None, stop: Callable[[], bool] | None = None) -> Iterator[Step]:
        """Train on batches (dicts of tensors, dimension 0 = samples); yield one :class:`Step` per update, in order.

        With a flush a batch is an update. Without one every ``update_every`` microbatches are (on every replica; with
        several a step takes the fewest microbatches that are whole updates of every stage), and the pipeline stays full
        from batch to batch; it drains when the batches end, and before :meth:`evaluate` and :meth:`state_dict`. Where a
        call ends within a batch, the next call with the same iterator goes on with the rest, and one with another
        iterable leaves the rest out (docs/given.md). Under torchrun every process passes the same batches, and they are
        compared (docs/data.md); a field that its layers do not read may be on the meta device. What raises while a
        batch is read is raised when those before are done. In one process Ctrl-C leaves the pipeline whole.

        Args:
            pauses: the updates, counted over all of training, after which a pipeline without a flush drains: every so
                many, those given, or a function from the updates that are done to the next such one, which is asked
                after every update: an earlier one than before counts if it cannot be under way yet. An
                :meth:`evaluate`, :meth:`save` or :meth:`state_dict` there is of exactly that update. The same on every
                rank. With a flush the pipeline is empty after every update anyway.
            updates: end after so many, within a batch if need be (not under a schedule read from a file, which ends
                with its batch).
            stop: called on the rank of the last stage, once per update. The result comes with the :class:`Step` on
                every rank, and training ends after it; see :meth:`stop`.
        """
        _check_batches(batches)
        given = Arguments()
        updates = given.integer("updates", updates, least=0, or_none=True)
        given.function("stop", bool if stop is None else stop, 0,
                       "give a function without arguments that returns whether to stop")
        given.check()
        next_pause = pauses if callable(pauses) else _pauses(pauses)
        if not self._trained:
            self.engine.collectives.check_trained()
            self._trained = True
        return self.engine.training.train(batches, updates, stop, next_pause)

    def stop(self) -> None:
        """End training on every rank after the same update, the one that is under way or one soon after it.

        One rank calls it, or several, from any thread or signal handler; it does not wait. :meth:`train` then yields a
        step with ``stop`` and ends, as if its caller had left the loop: without a flush microbatches are in flight.
        Where nothing is trained at the moment, the next training ends after its first update. The one after it goes on.
        """
        self.engine.training.ask_stop()

    @together
    def drain(self) -> Sequence[Step]:
        """Finish the microbatches in flight without a flush; return the updates that this made, in order.

        Every rank must call it, after the same update. A :meth:`train` that goes on yields these, too.
        """
        return self.engine.training.drain()

    @property
    def position(self) -> Position:
        """Return the position in training: of the updates that were yielded, and of those that draining made.

        An :meth:`evaluate`, :meth:`state_dict` or :meth:`save` is of the position that it leaves.
        """
        return self.engine.training.reached()

    @overload
    def evaluate(self, batches: Iterable[Batch], *, averaged: bool = False) -> float: ...

    @overload
    def evaluate(self, batches: Iterable[Batch], outputs: Wanted, *,
                 averaged: bool = False) -> tuple[float, dict[str, Tensor]]: ...

    @together
    def evaluate(self, batches: Iterable[Batch], outputs: Wanted | None = None, *,
                 averaged: bool = False) -> float | tuple[float, dict[str, Tensor]]:
        """Return the mean loss over all samples, forward only, modules in evaluation mode; the same on every rank.

        Batches, read to their end, may have any size; a microbatch's loss is weighted by its samples (docs/data.md).

        Args:
            outputs: what to return as well, as ``(loss, {name: tensor})``, of all samples in their order, on every rank
                and in host memory: names of tensors that the last layer reads or writes; or a function from all of
                these, by name, to others with a row per sample, called for every microbatch on the last stage.
            averaged: with the average that follows the weights (``Update(average=...)``) in their place.

        Every rank must call it, after the same step. With a flush it does not influence training. An asynchronous
        pipeline drains first, so the weights are those after all updates of the microbatches in flight, and fills again
        afterwards: the next microbatches use the versions that they would use at the start of training.
        """
        _check_batches(batches)
        if callable(outputs):
            outputs = self.engine.surroundings.calling(outputs)
        wanted = None if outputs is None else Outputs(outputs, self.model)
        loss, found = self.engine.evaluate(batches, wanted, averaged)
        return loss if outputs is None else (loss, found)

    @together
    def state_dict(self, *, corrected: bool = True, sharded: bool = False, averaged: bool = False) -> dict[str, Any]:
        """Return the whole model on every rank: ``"<layer>.<parameter>"``; a tied parameter under its owner's name.

        Every rank must call it, after the same step; an asynchronous pipeline drains first.

        Args:
            sharded: instead what this rank has of the model and of the optimizer's state, for
                ``torch.distributed.checkpoint``; see :attr:`sharded`.
            corrected: False takes back what ``delay_correction`` has added: the weights are then the sum of what the
                optimizer's steps changed, without the extrapolation over the delay.
            averaged: the average that follows the weights (``Update(average=...)``) in place of those that are trained.

        Raises:
            UserError: two of the three are asked for, or ``averaged`` where no average is kept.
        """
        view = view_of(corrected, averaged, sharded)
        return self.sharded.state_dict() if sharded else self.engine.state(view)

    @together
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict` on every rank before training: a whole model; or, with the optimizer's state and
        the position in training, a sharded one, which ``torch.distributed.checkpoint`` has filled.

        Raises:
            UserError: training has begun, or a tensor of the model is missing.
        """
        whole = isinstance(state, Mapping) and not isinstance(state.get("model"), Mapping)
        self.sharded.load_state_dict({"model": state} if whole else state)

    @property
    def sharded(self) -> ShardedState:
        """The state of this rank as ``torch.distributed.checkpoint`` saves and loads it, whatever the cut and the mesh:
        ``dcp.save({"pipe": pipe.sharded}, checkpoint_id=folder)``; a plain model's, too (docs/mesh.md)."""
        return ShardedState(self.engine)

    @together
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
        check_path("the folder", folder, "checkpoint")
        save_pipeline(self.engine, Path(folder), {**self.arrangement, "drained": True})

    @together
    def load(self, folder: str | Path) -> Position:
        """Load a checkpoint of :meth:`save`, or the newest one of a run's folder; every rank calls it before training.

        The pipeline may have another partition, placement and schedule; model, seed and optimizer must be those that
        saved. Steps are counted on from the checkpoint, and so are the learning rate, dropout and stochastic rounding.
        Where ``delay_correction`` looks ahead by another factor than in the checkpoint, the weights without the
        look-ahead stay, and a warning says by what they look ahead now.

        Returns:
            The position in training. The first batch to give :meth:`train` is the one after those that are done,
            ``position.microbatches // pipe.microbatches`` when all came from one iterator. When an asynchronous
            pipeline was saved within a batch, it is that batch, and the microbatches that are done are left out.

        Raises:
            UserError: it is no checkpoint, is damaged, of another model, seed or optimizer, or falls within a batch
                where the schedule takes only whole ones. Nothing has been loaded then.
        """
        check_path("the folder", folder, "checkpoint")
        return load_pipeline(self.engine, Path(folder), self.model)

    @property
    def arrangement(self) -> dict[str, Any]:
        """How the model is cut and scheduled, as a checkpoint and a timeline say it."""
        return {"partition": list(self.partition), "placement": [list(ranks) for ranks in self.placement],
                "schedule": self.schedule, "microbatches": self.microbatches, "update_every": self.update_every,
                "recompute": [sorted(layers) for layers in self.recomputed]}

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

    @together
    def usage(self, since: LocalUsage | None = None) -> list[StageUsage]:
        """Return the usage of every stage, of each of its replicas, and on a mesh of the rank of each lane there, in
        this order. Every rank must call it.

        Args:
            since: the :meth:`local_usage` at the beginning of the time that counts; None: all of it does.
        """
        if since is not None and not isinstance(since, Mapping):
            raise UserError(f"since is {shown(since)}", hint="give what local_usage() returned before")
        return self.engine.collectives.usage(since)

    @together
    def clock_offset(self) -> float:
        """Return what to add to this process's ``perf_counter`` to have that of rank 0. Every rank must call it."""
        return clock_offset() if self.engine.collectives.job.ranks > 1 else 0.0

    def record(self, limit: int = MOST_ACTIONS) -> Mapping[int, Recorder]:
        """Record the actions of training from now on, at most ``limit`` per rank; return the recorders by rank.

        Raises:
            UserError: forwards run in threads, so that actions have no times of their own.
        """
        given = Arguments()
        limit = given.integer("limit", limit, least=1)
        given.check()
        return self.engine.record(limit)

    @contextmanager
    def labelled(self) -> Iterator[None]:
        """Label every action meanwhile for torch's profiler, with its text and the run's number: ``0F3``."""
        with ExitStack() as stack:
            for worker in self.engine.workers.values():
                worker.around.append(label := partial(labelled, worker))
                stack.callback(worker.around.remove, label)
            yield

    def observe(self, observer_of: Mapping[int, StepObserver]) -> None:
        """Have an observer of each rank of this process see the gradients and weights of every update from now on."""
        for worker, observer in [(worker, observer_of[rank]) for rank, worker in self.engine.workers.items()]:
            worker.optimizer_steps.observer = observer

    def schedule_kernels(self, scheduler: Any) -> None:
        """Let a scheduler gate the kernels of the microbatches of this process, before the first one.

        Raises:
            UserError: the executor has one stream for all microbatches.
        """
        for worker in self.engine.workers.values():
            worker.schedule_kernels(scheduler)

    @together
    def gradient_norms(self) -> dict[str, float]:
        """Return the norm of the gradients of each layer in the latest update of its stage, before clipping.

        Every rank must call it. Norms are computed where something needs them: with ``grad_clip``, which ``math.inf``
        makes clip nothing, ``skip_not_finite`` or fp16. A tied weight counts where it is owned.

        Raises:
            UserError: nothing needs norms.
        """
        if not self.description.needs_norms:
            raise UserError("gradient_norms() is called, but nothing needs norms, so that none are computed",
                            hint="have them computed: Update(optimizer, grad_clip=math.inf) clips nothing")
        squares: dict[str, float] = {}
        for name, norm in self.engine.collectives.gradient_norms().items():
            layer, _ = split_target(name, self.model.layers)
            squares[layer] = squares.get(layer, 0.0) + norm ** 2
        return {layer.name: math.sqrt(squares[layer.name]) for layer in self.model.layers if layer.name in squares}

    @together
    def check_replicas(self) -> None:
        """Refuse weights that differ between the replicas of a stage. Every rank must call it, after the same update;
        an asynchronous pipeline drains first.

        Raises:
            RunError: they do.
        """
        self.engine.check_replicas()

    @together
    def local_state(self) -> dict[str, Tensor]:
        """Return what this process adds to a checkpoint, without copies: those who save in the background need it.

        Every rank must call it, after the same step; an asynchronous pipeline drains first.

        Raises:
            UserError: a checkpoint cannot hold the state of a layer or an optimizer.
        """
        return self.engine.checkpoint_state()

    @together
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
        with self.engine.collectives.job.whole():
            self.engine.training.check_restorable(position)
            found = tensors(self.engine.wants)
        return self.engine.restore(position, found)


def _check_model(given: Arguments, model: object) -> None:
    if isinstance(model, Model):
        return
    hint = "give a Model: Model([Layer('embed', lambda: Embed(), ...), ...], batch=('ids', 'labels'))"
    if isinstance(model, nn.Sequential):
        hint = "write Pipeline(Model.sequential(modules, loss=nn.CrossEntropyLoss()), ...)"
    given.refuse(f"the model is {shown(model)}, not a Model", hint)


def _check_agrees(given: Arguments, plan: Plan, order: Order, update: Update | None, microbatches: object) -> None:
    """Refuse what a plan says otherwise."""
    said = {"microbatches": microbatches, "zero1": update and update.zero1, **vars(order)}
    planned = {"microbatches": plan.microbatches, "zero1": plan.zero1, **vars(plan.order)}
    for name, value in said.items():
        if (there := planned.get(name)) not in (None, "") and value not in (None, "", there):
            without = "order=Order()" if name in vars(order) else f"{name}=None"
            given.refuse(f"{name} is {shown(value)} beside a plan with {shown(there)}",
                         f"leave it out, or take the plan without: dataclasses.replace(plan, {without})")


def _check_lanes(description: Description, width: int) -> None:
    """Refuse what does not go together with layers that compute over several lanes; ``width``: most ranks of a stage.
    """
    execution, codecs = description.execution, set(description.transfers.codecs(description.cut.count)) - {"none"}
    why = execution.refused("mesh")
    beside = "beside a mesh whose layers compute over several lanes"
    refused = [Problem(what, hint) for what, there, hint in (
        (f"the executor is {execution.executor} {beside}", why is not None, ": ".join(why or ())),
        (f"compile is {execution.compile} {beside}", execution.backend is not None, "leave it out"),
        (f"compress is {', '.join(sorted(codecs))} {beside}", bool(codecs),
         "lanes would round what they hold in common apart: leave it out"),
        (f"stages have {width} replicas, and data is '{execution.data}'", execution.data is not None and width > 1,
         "let either replicas or lanes train on batches of their own"),
        (f"precision is {description.precision.name}, and data is '{execution.data}'",
         execution.data is not None and description.precision.pure,
         "fully_shard has the weights in their own precision: use bf16 or fp16")) if there]
    if refused:
        raise UserError.all_of(refused)


def _check_lowered(schedule: Schedule, description: Description) -> None:
    """Refuse a schedule whose actions are not those of the described update."""
    zero1 = bool(description.update.zero1) and max(map(len, schedule.placement)) > 1
    for name, there, wanted in (
            ("zero1", schedule.setting.zero1, zero1),
            ("needs_norms", schedule.setting.normed, description.needs_norms and (schedule.flush or zero1)),
            ("execution.data", schedule.setting.sharded, description.execution.data is not None)):
        if there != wanted:
            raise UserError(f"the schedule was lowered {'with' if there else 'without'} {name}, but the description is "
                            f"{'with' if wanted else 'without'} it",
                            hint="prepare the schedule for the same update and execution: prepare_schedule(...)")


def _slow(schedule: Schedule, corrected: bool) -> Iterator[str]:
    """Yield a warning of ranks that always wait, and one of gradients that come late, where a schedule has these.

    Args:
        corrected: whether every step is extrapolated over the delay of its gradients.
    """
    width = max(map(len, schedule.placement))  # copies on the same ranks need no more microbatches
    ranks = len(set(map(frozenset, schedule.placement))) * width
    if schedule.flush and schedule.microbatches < ranks:
        count = schedule.assignment.whole(schedule.microbatches)
        yield (f"{counted(count, 'microbatch')} for {counted(schedule.stages, 'stage')}"
               f"{f' with {width} replicas' * (width > 1)} leave{'s' * (count == 1)} ranks without work; raise "
               f"microbatches, at best to {schedule.assignment.whole(4 * ranks - 1) + 1}")
    means = [mean_delay(schedule, stage) for stage in range(schedule.stages)]
    if max(means) > 2:
        better = ["a larger update_every", "an optimizer such as torch.optim.Muon",
                  *([] if corrected else ["delay_correction=1.0"]), "fewer stages",
                  "a schedule with a flush, which has no delay"]
        yield (f"the gradients of stage {means.index(max(means))} are {max(means):.3g} updates late on average, so "
               f"each update lowers the loss less; better are: {'; '.join(better)}")


def _check_batches(batches: object) -> None:
    if isinstance(batches, Mapping):
        raise UserError("batches is one batch", hint="give a list of batches, or another iterable: [batch]")
    if isinstance(batches, (str, bytes, Tensor)) or not isinstance(batches, Iterable):
        hint = "give what yields batches, each a dict of tensors: a list, a DataLoader, a generator"
        if callable(batches) and not isinstance(batches, type):
            hint += "; of a function that is one, what it returns: call it"
        raise UserError(f"batches is {shown(batches)}", hint=hint)


def _pauses(given: object) -> Callable[[int], int | None]:
    """Return the function from the updates that are done to the next one to pause after."""
    if given is None:
        return lambda done: None
    if (every := as_integer(given)) is not None and every > 0:
        return lambda done: (done // every + 1) * every
    several = given if isinstance(given, Collection) and not isinstance(given, Mapping | str) else [0]
    wanted = [as_integer(each) or 0 for each in several]
    if min(wanted, default=1) < 1:
        raise UserError(f"pauses is {shown(given)}", hint="give the number of updates from one pause to the next, such "
                        "as pauses=100, or a list of updates, such as pauses=[100, 250]")
    return lambda done: min((number for number in wanted if number > done), default=None)
