"""Build the stages of a process, and a worker for each of its ranks with their optimizers and transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pkgutil import resolve_name

from vpipe.checkpoint.manifest import View
from vpipe.description import Description
from vpipe.description.cut import StageSpec, Ties, kept_inputs
from vpipe.description.execution import Executor
from vpipe.description.transfers import COMPRESSION, TRANSPORTS
from vpipe.distributed.device import DeviceMap
from vpipe.errors import UserError
from vpipe.model.model import Model
from vpipe.runtime.companions import Companion, Extrapolation, WeightAverage
from vpipe.runtime.compiled import check_compiler, compile_layers
from vpipe.runtime.fully_sharded import FullyShardedStages, check_divided
from vpipe.runtime.optimizer_step import LossScaler, OptimizerSteps
from vpipe.runtime.p2p import P2PTransfers
from vpipe.runtime.reducer import Reducer, count_buckets, owners_of
from vpipe.runtime.sharded_tensors import check_meshes
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_layers import UncalledHooks, check_not_shared
from vpipe.runtime.stage_optimizer import StageOptimizer
from vpipe.runtime.tied_weights import TiedWeights
from vpipe.runtime.transport.process_group import transport_class
from vpipe.runtime.transport.transport import InProcessTransport, Mailbox, Transport
from vpipe.runtime.values import Values
from vpipe.runtime.weight_versions import HOOKS
from vpipe.runtime.worker import Worker
from vpipe.schedules.assignment import describe_rank
from vpipe.schedules.delays import mean_delay
from vpipe.schedules.schedule import Schedule


def build_stages(model: Model, specs: Sequence[StageSpec], schedule: Schedule, description: Description,
                 world: DeviceMap) -> dict[int, dict[int, Stage]]:
    """Build the stages of this process, of its rank or, where it is alone, of all; return them by rank and stage.

    Raises:
        UserError: a layer cannot work, or two stages share one.
    """
    lane = world.lanes.own
    ranks = [lane.index(world.rank)] if len(lane) > 1 else list(range(len(schedule.programs)))
    if description.execution.mesh is not None and len(lane) > 1:
        own = [number for spec in specs if ranks[0] in schedule.placement[spec.index] for number in spec.layers]
        # Before they are built with values: what shares a tensor out would wait for ranks that build other layers.
        for layer in (model.layers[number] for number in own):
            if (outlined := layer.without_values()) is not None:
                check_meshes({f"{layer.name}.{name}": p for name, p in outlined.named_parameters()}, world.rank, lane)
    built = {rank: {spec.index: Stage(model, spec, seed=description.seed, device=world.own,
                                      recomputed=description.cut.recomputed[spec.index],
                                      precision=description.precision)
                    for spec in specs if rank in schedule.placement[spec.index]} for rank in ranks}
    here = [stage for stages in built.values() for stage in stages.values()]
    for stage in here:
        stage.divided = description.execution.data is not None
        stage.check_not_wrapped("")
        if stage.divided:
            check_divided(stage)
    check_not_shared(here)
    for stage in here if len(lane) > 1 else ():
        check_meshes(dict(stage.named_parameters()), world.rank, lane)
    return built


def build_workers(built: Mapping[int, Mapping[int, Stage]], model: Model, specs: Sequence[StageSpec],
                  schedule: Schedule, description: Description, world: DeviceMap, ties: Ties,
                  frozen_ties: Ties) -> dict[int, Worker]:
    """Build the workers of this process for its stages; return them by rank.

    Args:
        ties, frozen_ties: between stages, of weights that are trained, and that are not.

    Raises:
        UserError: a layer cannot work in this precision under this schedule, or not compiled.
    """
    placement, lanes = schedule.placement, world.lanes
    distributed = len(lanes.own) > 1
    update, execution, precision = description.update, description.execution, description.precision
    update = replace(update, learning_rate_factor=lru_cache(update.learning_rate_factor))  # which may count its calls
    here = [stage for stages in built.values() for stage in stages.values()]
    make_worker = worker_class(Executor.named(execution.executor))
    if (backend := execution.backend) is not None:
        check_compiler(backend, world.own)
        compile_layers([layer for stage in here for layer in stage.modules.values()], backend)
    group = execution.mesh.get_group(execution.data) if execution.mesh is not None and execution.data else None
    codecs = description.transfers.codecs(len(placement))
    compressed = TRANSPORTS.added(COMPRESSION) if set(codecs) - {"none"} else []
    # With compression every cut rounds all tensors, so a rank has not had what arrives there.
    kept = {} if compressed else kept_inputs(placement, specs, model.names)
    for stage in here:
        stage.kept_around.update(*(each.names for later, each in kept.items()
                                   if each.since < stage.spec.index < later))
    mailbox: Mailbox = {}
    workers: dict[int, Worker] = {}
    for rank, stages in built.items():
        for stage in stages.values():
            for weights in stage.borrowed.values() if schedule.flush else stage.all_weights:
                weights.renew()  # they will have several versions
        optimizers = {s: StageOptimizer.build(update.make_optimizer, stage.weights.masters, s)
                      for s, stage in stages.items()}
        for stage in stages.values():
            stage.uncalled_hooks = uncalled_hooks(stage, schedule, ties, execution.refused("hooks"))
            stage.check_hooks()
            stage.offloaded = stage.spec.index in schedule.offloaded_stages
            tied_here = chain.from_iterable(ties.get(stage.spec.index, {}).values())
            stage.weights.copied.update(stage.weights.names if len(placement[stage.spec.index]) > 1 else tied_here)
        replicated = {s: stage for s, stage in stages.items() if len(placement[s]) > 1}
        # Balanced by bytes, of which those weigh nothing that no optimizer steps: every replica comes to the same.
        owners = {s: owners_of([leaf.nbytes * (name in optimizers[s].of_parameter) for name, leaf in
                                zip(stage.weights.names, stage.weights.leaves(), strict=True)], len(placement[s]))
                  for s, stage in replicated.items() if update.zero1}
        for s, owned in owners.items():
            names = stages[s].weights.names
            own = [name for name, replica in zip(names, owned, strict=True) if placement[s][replica] == rank]
            optimizers[s].own(own)
            stages[s].weights.own(own)  # drops masters, which the optimizers have left then
        transport: Transport = (
            transport_class(description.transfers, world.own)(
                world.own, description.transfers.timeout_s, max(schedule.peak_activations),
                partial(describe_rank, placement, lanes=lanes.ranks), count_buckets(replicated, owners), lanes.own)
            if distributed else InProcessTransport(rank, mailbox))
        scaler = LossScaler(precision.loss_scale) if precision.scaled else None
        values = Values()
        tied = TiedWeights(ties, frozen_ties, placement, stages, transport, values)
        companions: dict[int, dict[View, Companion]] = {s: {} for s in stages}
        for s, stage in stages.items():
            if description.delay_correction and (factor := description.delay_correction * mean_delay(schedule, s)):
                companions[s]["uncorrected"] = Extrapolation(stage, optimizers[s], factor)
            if update.average is not None:
                companions[s]["average"] = WeightAverage(stage, optimizers[s], update.average)
        reducers = {s: Reducer(s, stage.weights, stage.summed_late, placement[s], transport, owners.get(s))
                    for s, stage in replicated.items()}
        steps = OptimizerSteps(stages, optimizers, reducers, tied, transport, update, scaler, companions)
        between = compressed[0](transport, codecs, description.seed) if compressed else transport
        p2p = P2PTransfers(between, kept, values)
        workers[rank] = make_worker(stages, steps, tied, transport, p2p, FullyShardedStages(stages, group), schedule)
    return workers


def worker_class(executor: Executor) -> type[Worker]:
    """Import the class of an executor's workers.

    Raises:
        UserError: it cannot be imported, or is no :class:`Worker`.
    """
    try:
        found = resolve_name(executor.worker)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"the workers of the executor {executor.name} are of the class {executor.worker}, which cannot "
                        f"be found: {error}", hint="give the executor worker='module:class'") from None
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise UserError(f"{executor.worker}, the class of the workers of the executor {executor.name}, is no Worker",
                        hint="derive it: class MyWorker(vpipe.runtime.Worker)")
    return found


def uncalled_hooks(stage: Stage, schedule: Schedule, ties: Ties,
                   refused: tuple[str, str] | None) -> list[UncalledHooks]:
    """Return the parameters whose hooks torch would not call with the whole gradient of a microbatch, and why.

    Autograd makes and adds it with a flush and whole backwards. Elsewhere it is made in parts, added without autograd,
    or on leaves of another version than the one with the hooks.

    Args:
        ties: between stages, of weights that are trained.
        refused: why the executor does not have them called, and what to do instead, if it does not.
    """
    own, number, width = stage.weights, stage.spec.index, len(schedule.placement[stage.spec.index])
    tied = {name for names in ties.get(number, {}).values() for name in names}
    return [
        *((weights, names, HOOKS, "it is tied across two stages, of which neither has the whole gradient",
           "choose a partition with both layers in one stage")
          for weights, names in [(own, tied), *((weights, weights.names) for weights in stage.borrowed.values())]),
        *((own, own.names, HOOKS, *why) for why in (*schedule.partial_gradients, refused) if why is not None),
        (own, stage.summed_late, HOOKS, "it is used by recomputed layers and by others, which have backwards of their "
         "own", "recompute all layers that use it, with those between, or none"),
        (own, own.names if width > 1 else (), HOOKS[1:], f"the {width} replicas of stage {number} each add up a part "
         "of the gradients", "use register_hook, or give the stage one replica")]
