"""Build the workers of this process and what trains and evaluates with them; show, save and restore their state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cached_property

from torch import Tensor

from vpipe.checkpoint.manifest import Position, View
from vpipe.description import Description
from vpipe.description.cut import StageSpec, ties_between
from vpipe.distributed.device import DeviceMap
from vpipe.errors import UserError
from vpipe.model.model import Model
from vpipe.runtime.action_recorder import MOST_ACTIONS, Recorder
from vpipe.runtime.build_workers import build_stages, build_workers
from vpipe.runtime.collectives import Collectives
from vpipe.runtime.companions import describe_other_factors
from vpipe.runtime.evaluation import Evaluation
from vpipe.runtime.interpreter import Interpreter, Interrupts, RankPrograms
from vpipe.runtime.loaders import Loaders
from vpipe.runtime.microbatches import Batch
from vpipe.runtime.outputs import Outputs
from vpipe.runtime.sharded_tensors import whole
from vpipe.runtime.state_dict import CompanionState, StatePart, state_parts
from vpipe.runtime.step_results import StepResults
from vpipe.runtime.surroundings import Surroundings, set_aside
from vpipe.runtime.training import Training
from vpipe.runtime.transport.process_group import is_ordered, tensor_groups
from vpipe.runtime.worker import Worker, check_runnable
from vpipe.schedules.builder import with_frozen
from vpipe.schedules.schedule import Schedule


class Engine:
    """Run a lowered schedule over the stages of this process.

    Within one process all ranks take turns in one thread, in the order of dependencies; with torch.distributed this
    process is one rank. The numbers are the same.

    Attributes:
        workers: of this process, by rank.
        collectives: operations that all ranks call together.
        schedule: the lowered one, without the backwards of stages in front that train nothing.
        interrupts: lets Ctrl-C wait until the pipeline is whole.
        local_stages: the stages of this process.
        training: its position is the pipeline's.
        surroundings: what a script has around its calls.
        description: of the pipeline.
    """

    def __init__(self, model: Model, specs: Sequence[StageSpec], schedule: Schedule, description: Description,
                 world: DeviceMap, surroundings: Surroundings) -> None:
        self.surroundings, self.description = surroundings, description
        timeout_s, distributed = description.transfers.timeout_s, len(world.lanes.own) > 1
        self.workers: dict[int, Worker] = {}
        self.collectives = collectives = Collectives(self.workers, specs, schedule.placement, world, timeout_s)
        if distributed and is_ordered(world.own):  # refuses while another pipeline has transfers under way
            tensor_groups(world.own, timedelta(seconds=timeout_s))
        loaders = Loaders(model, schedule, description, world, self.workers, collectives)
        collectives.check_same(model, schedule, description)
        with collectives.job.whole():
            check_runnable(schedule.kinds)
            stages = build_stages(model, specs, schedule, description, world)
        frozen = collectives.frozen_ties(stages)
        ties = ties_between(specs, lambda name: name not in frozen)
        # How many stages from the first on train nothing on any rank; the last is never one of them.
        trained = collectives.job.united({str(number): "" for of_rank in stages.values()
                                          for number, stage in of_rank.items() if stage.trains})
        self.schedule = schedule = with_frozen(schedule, min(map(int, trained), default=schedule.stages - 1), ties)
        self.workers.update(build_workers(stages, model, specs, schedule, description, world, ties,
                                          ties_between(specs, frozen.__contains__)))
        recompute = [stage for stage, layers in enumerate(description.cut.recomputed) if layers]
        programs = RankPrograms(schedule, recompute, self.workers,
                                any(worker.transport.ordered for worker in self.workers.values()))
        if schedule.setting.normed:
            collectives.agree_on_norms(of_all=schedule.flush)
        results = StepResults(self.workers, schedule, distributed, world.lanes, collectives.across_lanes)
        self.interrupts = Interrupts(alone=world.ranks == 1)
        self._interpreter = Interpreter(self.workers, results, self.interrupts, collectives.job, distributed)
        self.local_stages = self._interpreter.stages
        with self._interpreter.taken_back():
            pass
        self.training = Training(self._interpreter, programs, collectives, loaders, schedule,
                                 description.microbatches, surroundings)
        self._evaluation = Evaluation(self._interpreter, programs, collectives, loaders, schedule.placement,
                                      description.microbatches, surroundings)
        self._recorders: dict[int, Recorder] = {}

    def record(self, limit: int = MOST_ACTIONS) -> Mapping[int, Recorder]:
        """Record the actions of training from now on; see :meth:`vpipe.Pipeline.record`."""
        if (why := self.description.execution.no_timeline) is not None:
            raise UserError(why[0], hint=why[1])
        for rank, worker in self.workers.items():
            if rank in self._recorders:
                worker.around.remove(self._recorders[rank])
            self._recorders[rank] = Recorder(worker, limit)
            worker.around.append(self._recorders[rank])
        return dict(self._recorders)

    # -- evaluate --------------------------------------------------------------------------------------

    @set_aside
    def evaluate(self, batches: Iterable[Batch], wanted: Outputs | None,
                 averaged: bool = False) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss and the outputs that are wanted; see :meth:`vpipe.Pipeline.evaluate`."""
        if averaged:
            self.check_averaged()
        iterator = iter(batches)
        self.training.settle()
        with self._averaged_weights() if averaged else nullcontext():
            return self._evaluation.run(iterator, wanted, self._recorders.values())

    def check_averaged(self) -> None:
        """Refuse to look at the average of the weights where none is kept."""
        if self.description.update.average is None:
            raise UserError("averaged is True, but no average follows the weights",
                            hint="keep one from the start: Update(optimizer, average=0.999)")

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Put the averages in place of the weights meanwhile; an evaluation gives them to all stages that use them."""
        with self.interrupts, self._interpreter.taken_back():
            with self.collectives.job.whole():
                before = [(stage, {name: value.clone() for name, value in stage.state().items()},
                           worker.optimizer_steps.companions[number]["average"])
                          for worker in self.workers.values() for number, stage in worker.stages.items()]
            try:
                with self.collectives.job.whole():
                    for stage, state, average in before:
                        stage.load(average.view(state))
                yield
            finally:
                for stage, state, _ in before:
                    stage.load(state)

    # -- the state -------------------------------------------------------------------------------------

    @set_aside
    def state(self, view: View = "trained") -> dict[str, Tensor]:
        """Return the whole model on every rank, in the order of the layers; see :meth:`vpipe.Pipeline.state_dict`."""
        if view == "average":
            self.check_averaged()
        self.training.settle()
        with self._interpreter.taken_back():
            self.collectives.check_replicas()
            return self.collectives.state(view)

    def check_replicas(self) -> None:
        """Compare the weights of replicas; see :meth:`vpipe.Pipeline.check_replicas`."""
        self.training.drain()
        with self._interpreter.taken_back():
            self.collectives.check_replicas()

    @cached_property
    def parts(self) -> list[StatePart]:
        """Return the parts of the state that a checkpoint holds."""
        return state_parts(self.workers, self.schedule.placement)

    def checkpoint_state(self) -> dict[str, Tensor]:
        """Return the state of this process that a resumed run needs; see :meth:`vpipe.Pipeline.local_state`.

        Raises:
            RunError: the pipeline failed before.
        """
        state: dict[str, Tensor] = {}
        for name, tensor in self.tensors_here().items():
            full = whole(tensor)  # one after the other; of a DTensor by all lanes, the first of which keeps it
            if not self.collectives.lanes.number:
                state[name] = full.cpu() if full is not tensor else full
        return state

    @set_aside
    def tensors_here(self) -> dict[str, Tensor]:
        """Return the same without copies, and in every lane; of DTensors the shards."""
        self.training.drain()
        with self._interpreter.taken_back(), self.collectives.job.whole():
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
        with self.collectives.job.whole():
            self.training.check_restorable(position)
            wanted = [(part, {name: tensor for name, tensor in tensors.items() if part.wants(name)})
                      for part in self.parts]
            for part, own in wanted:
                part.check(own)
        with self.interrupts:
            try:
                with self.collectives.job.whole():
                    for part, own in wanted:
                        part.load(own)
            except BaseException:
                self._interpreter.fail("while a state was loaded, of which it may have a part; it was whole before")
                raise
            with self._interpreter.taken_back():
                pass
            self.training.begin_at(replace(position, begun=position.within(self.description.microbatches)))
        [companions] = [part for part in self.parts if isinstance(part, CompanionState)]
        other_factors = self.collectives.exchange.united(companions.other_factors)
        return describe_other_factors(other_factors) if position.steps else None
