"""Operations that all ranks call together, outside of any schedule: broadcast tensors, gather the model and the usage,
agree, compare replicas and clocks."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial, reduce, wraps
from importlib.metadata import distributions
from inspect import signature
from itertools import chain, product
from math import nan
from time import perf_counter
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.checkpoint.manifest import View
from vpipe.description import Description
from vpipe.description.cut import StageSpec
from vpipe.distributed.device import DeviceMap
from vpipe.distributed.init import exchange, limit_groups
from vpipe.distributed.value_exchange import DOING, Exchange
from vpipe.distributed.watchdog import watch
from vpipe.errors import RunError, UserError
from vpipe.model.layer import check_alike, kind_of
from vpipe.model.model import Model
from vpipe.runtime.checksums import compared_text, whole_checksum
from vpipe.runtime.optimizer_step import ABSENT
from vpipe.runtime.sharded_tensors import local, shard_of, whole
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import ALONE_HINT, StageOptimizer, check_equal, is_joint, is_of_torch
from vpipe.runtime.stage_usage import StageUsage
from vpipe.runtime.transport.process_group import PeerTransfer, control_group
from vpipe.runtime.worker import Worker
from vpipe.schedules.assignment import Placement, describe_rank
from vpipe.schedules.schedule import Schedule

Method = TypeVar("Method", bound=Callable[..., Any])

LocalUsage = Mapping[int, Mapping[int, StageUsage]]
"""The usage of the ranks of a process, by rank and stage."""

_OF_PROCESS = re.compile(r" at 0x[0-9a-f]+|(?<=cuda):\d+|(?<=, index=)\d+")
"""In the text of an argument what differs between processes: addresses and devices."""

_SET = re.compile(r"\{([^{}:]*)\}")
"""A set in such a text, whose order differs between processes, too."""

_OF_RANK = ("self", "batches", "since", "stop", "tensors", "device", "mesh", "update", "transfers", "execution",
            "shared_memory")
"""Arguments that may differ between ranks, or are compared otherwise."""

ROUND_TRIPS = 40
"""Round trips of a comparison of two clocks."""


def clock_offset() -> float:
    """Return what to add to this process's ``perf_counter`` to have that of rank 0. All ranks must call it.

    Rank 0 sends its time in answer to each rank in turn. The quickest of some round trips counts, as if both ways took
    equally long (Cristian, Probabilistic clock synchronization, 1989); the error is at most half of that round trip.

    Raises:
        RunError: a rank did not answer in the process group's time, or is gone.
    """
    time_s, group = torch.zeros(1, dtype=torch.float64, device="cpu"), control_group()
    if dist.get_rank() == 0:
        for peer in range(1, dist.get_world_size()):
            with PeerTransfer(peer, "comparing clocks"):
                for _ in range(ROUND_TRIPS):
                    dist.recv(time_s, peer, group)
                    dist.send(time_s.fill_(perf_counter()), peer, group)
        return 0.0
    found = []
    with PeerTransfer(0, "comparing clocks"):
        for _ in range(ROUND_TRIPS):
            asked_s = perf_counter()
            dist.send(time_s, 0, group)
            dist.recv(time_s, 0, group)
            theirs_s = time_s.item()
            answered_s = perf_counter()
            found.append((answered_s - asked_s, theirs_s - (asked_s + answered_s) / 2))
    return min(found)[1]


def together(method: Method) -> Method:
    """Let all ranks make a call of a method of an object with an engine together, with the same arguments; no
    collective waits longer in it than a transfer."""
    name, parameters = method.__qualname__.removeprefix("Pipeline."), signature(method)

    @wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        engine = getattr(self, "engine", None) or self._engine
        training = engine.training
        training.check_outside()
        if engine.collectives.job.ranks == 1:
            return method(self, *arguments, **keywords)
        limit_groups(engine.collectives.timeout_s)
        given = parameters.bind(self, *arguments, **keywords).arguments
        said = ", ".join(f"{name}={text}" for name, value in given.items()
                         if name not in _OF_RANK and value is not parameters.parameters[name].default
                         and (text := compared_text(value)))
        # What is in flight may need what a rank does next: such calls drain first, and draining ends with an exchange.
        with engine.collectives.job.call(f"{name}({said})", at_once=training.reached() is training.position):
            try:
                return method(self, *arguments, **keywords)
            except RuntimeError as error:
                raise watch.late(error) or error from error
    return cast("Method", call)


class Collectives:
    """Operations over the ranks of this process, and with torch.distributed over all ranks: then all must call them.

    Args:
        specs: of all stages.
        world: the processes of the job.
        timeout_s: how long one transfer may take.

    Attributes:
        exchange: of values between the processes of the pipeline.
        job: of values between those of all lanes.
        across_lanes: of values between those with the same place in all lanes.
        lanes: of the job.
        timeout_s: how long a wait may take.
        compares_numbers: whether :meth:`check_numbers` is to follow every update.
    """

    def __init__(self, workers: Mapping[int, Worker], specs: Sequence[StageSpec], placement: Placement,
                 world: DeviceMap, timeout_s: float) -> None:
        self.compares_numbers = False
        self._workers, self._specs, self._placement = workers, specs, placement
        self.lanes, self._lane, self.timeout_s = (lanes := world.lanes), lanes.own, timeout_s
        if watch.watchdog is not None:
            watch.watchdog.describe = partial(describe_rank, placement, lanes=lanes.ranks)
        self.job = exchange(timeout_s=timeout_s) if lanes.count * len(lanes.own) > 1 else Exchange()
        self.exchange = self.job if lanes.count == 1 else self.job.only(lanes.own)
        self.across_lanes = exchange("lanes", timeout_s, lanes.across(lanes.own.index(world.rank)))

    def state(self, view: View) -> dict[str, Tensor]:
        """Return parameters and buffers of the whole model, of first replicas, in the order of the layers."""
        state: dict[str, Tensor] = {}
        for stage, ranks in enumerate(self._placement):
            for replica, rank in enumerate(ranks):
                here = self._stage(stage, rank)
                with self.job.whole():
                    own = here.own_state(replica) if here else {}
                    if here is not None:
                        companion = self._workers[rank].optimizer_steps.companions[stage].get(view)
                        own = own if companion is None else companion.view(own)
                    own = {name: whole(tensor) for name, tensor in own.items()}
                if here is not None and replica == 0:  # all names, in their order; other replicas fill them in
                    own = {name: own.get(name, torch.empty(0, device="cpu")) for name in here.state()}
                shared = self._broadcast(rank, own)
                state.update(shared if len(self._lane) > 1 else {name: t.clone() for name, t in shared.items()})
        return state

    def of_last_stage(self, tensors: Mapping[int, Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Return what each replica of the last stage has on every rank, of lanes that read batches of their own all.

        Args:
            tensors: by rank of the last stage in this process.
        """
        lanes = [self.lanes.ranks[lane] for lane in self.lanes.averaged]
        among = [rank for lane in lanes for rank in lane]
        if len(among) == 1:
            return [dict(tensors[rank]) for rank in self._placement[-1]]
        mine = next(iter(tensors.values()), {})
        return [self._broadcast_among(among, lane[rank % len(lane)], mine)
                for lane in lanes for rank in self._placement[-1]]

    def over_lanes(self, numbers: list[float]) -> list[float]:
        """Return the sums of numbers over the lanes that read batches of their own."""
        if len(self.lanes.averaged) == 1:
            return numbers
        of_all = self.across_lanes.all_gather(numbers)
        return [sum(each) for each in zip(*(of_all[lane] for lane in self.lanes.averaged), strict=True)]

    def check_trained(self) -> None:
        """Refuse to train if there are parameters, but no stage has an optimizer; and if several stages, or replicas
        that step parts of one, have optimizers of a kind that steps all its parameters by the gradients of each."""
        optimizers = [(type(each).__name__, stage, each) for stage, of_stage in self._optimizers.items()
                      for each in of_stage.optimizers]
        exist = any(stage.weights.names for worker in self._workers.values() for stage in worker.stages.values())
        found = self.exchange.united(dict.fromkeys(["parameters"] * exist, True) | {
            f"{kind} {stage}": is_of_torch(each) for kind, stage, each in optimizers})
        if found.keys() == {"parameters"}:
            raise UserError("the optimizer factory returned None for every stage, so nothing would be trained",
                            hint="let it return what it makes: return torch.optim.AdamW(params, lr=1e-3)")
        made = Counter(name.split()[0] for name, of_torch in found.items() if not of_torch)
        self.compares_numbers = max(made.values(), default=0) > 1
        for kind, stage, optimizer in optimizers:
            if made[kind] > 1 and is_joint(optimizer):
                raise UserError(f"{kind} steps a parameter by the gradients of others, too, such as by a norm over "
                                f"all, but that of {stage} sees one of {made[kind]} parts of the model",
                                hint=ALONE_HINT)

    @property
    def _optimizers(self) -> dict[str, StageOptimizer]:
        """Return the optimizers of this process by their stages, and ranks where each steps a part of one."""
        return {f"stage {stage}" + f", rank {rank}" * (worker.stages[stage].weights.owned is not None): optimizer
                for rank, worker in self._workers.items()
                for stage, optimizer in worker.optimizer_steps.optimizers.items()}

    def check_numbers(self) -> None:
        """Refuse numbers that the optimizers of stages have changed as they stepped, and that differ between stages.

        All stages have made the same updates.
        """
        of_all = self.job.all_gather([{stage: each.numbers() for stage, each in self._optimizers.items()},
                                      sorted(name for each in self._optimizers.values() for name in each.written)])
        check_equal({stage: own for numbers, _ in of_all for stage, own in numbers.items()},
                    dict.fromkeys(name for _, written in of_all for name in written))

    def check_same(self, model: Model, schedule: Schedule, description: Description) -> None:
        """Refuse to build a pipeline that is another one on some rank, on every rank.

        Of what builds a layer this compares the name, or all that a part of an ``nn.Sequential`` shows of itself.
        """
        whole = zlib.crc32(repr((schedule.programs, description.cut.recomputed)).encode())
        foreign = sorted(schedule.meaning(kind) for kind in schedule.kinds if not kind.is_own)
        parts = (description.update, description.transfers, description.execution, description)
        version = next((each.version for each in distributions(name="vpipe")), "not installed")
        mine = {"the version of vpipe": version, "the mesh": self.lanes,
                "the kinds of actions of packages": ", ".join(foreign) or "none",
                **{name: value for part in parts for name, value in vars(part).items() if name not in _OF_RANK},
                "batch": model.batch, "labels": model.labels, **{f"layer '{each.name}'": each for each in model.layers},
                "the schedule": f"{schedule.name}, layers {description.cut.partition}, checksum {whole:08x}"}
        texts = {name: _SET.sub(lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}",
                                " ".join(_OF_PROCESS.sub("", str(value)).split())) for name, value in mine.items()}
        if len(set(self.job.all_gather(zlib.crc32(repr(texts).encode())))) == 1:
            return  # else each sends all that it has
        first, *others = self.job.all_gather(texts)
        for name, (rank, each) in product(dict.fromkeys(chain(first, *others)), enumerate(others, start=1)):
            if each.get(name) != first.get(name):
                raise UserError(f"{name} is {first.get(name)} on rank 0 and {each.get(name)} on rank {rank}",
                                hint="give every rank the same model and arguments, and the same packages")

    def local_usage(self) -> LocalUsage:
        """Return the usage so far of the ranks of this process, without any transfer."""
        found = {rank: {stage: worker.usage(stage) for stage in worker.stages}
                 for rank, worker in self._workers.items()}
        if len(found) == 1:
            return found
        # Ranks that take turns wait for nobody: for how long they would, each in its process, is not known.
        return {rank: {stage: replace(usage, idle_s=nan) for stage, usage in stages.items()}
                for rank, stages in found.items()}

    def usage(self, before: LocalUsage | None = None) -> list[StageUsage]:
        """Return the usage of every stage, of each of its replicas, and of the rank of each lane there, in this order.

        Args:
            before: the :meth:`local_usage` at the beginning of the time that counts; None: all of it does.
        """
        here = self.local_usage()
        if before is not None:
            here = {rank: {stage: usage.since(before[rank][stage]) for stage, usage in stages.items()}
                    for rank, stages in here.items()}
        found = self.job.united({f"{self.lanes.number} {stage} {rank}": asdict(usage) for rank, stages in here.items()
                                 for stage, usage in stages.items()})
        return [StageUsage(**found[f"{lane} {stage} {rank}"]) for stage, ranks in enumerate(self._placement)
                for rank in ranks for lane in range(self.lanes.count)]

    def frozen_ties(self, built: Mapping[int, Mapping[int, Stage]]) -> set[str]:
        """Return the parameters that are tied to those of other stages and not trained, by their names there.

        Args:
            built: the stages of this process, by rank and number.

        Raises:
            UserError: on every rank: a tied parameter does not exist, or its kind is another than the owner's.
        """
        tied = {own: target for spec in self._specs for own, (_, target) in spec.borrowed.items()}
        if not tied:
            return set()
        known = self.exchange.united({
            name: [kind_of(parameter), parameter.requires_grad] for stages in built.values()
            for stage in stages.values() for name, parameter in stage.named_parameters()
            if name in tied or name in tied.values()})
        for own, target in tied.items():
            if target not in known:
                raise UserError(f"'{own}' is tied to '{target}', which is no parameter",
                                hint="correct the name, or leave out the tie")
            check_alike({own: known[own][0], target: known[target][0]})
        return {target for target in tied.values() if not known[target][1]}

    def agree_on_norms(self, of_all: bool) -> None:
        """Exchange who has which gradient norms of each stage, and set their senders and receivers on every rank.

        Args:
            of_all: each rank needs those of all stages; else those of its own that other replicas have.
        """
        owned = self.exchange.united({f"{stage} {rank}": worker.optimizer_steps.owned(stage)
                                      for rank, worker in self._workers.items() for stage in worker.stages})
        dtypes = self.exchange.united({str(dtype).removeprefix("torch."): "" for worker in self._workers.values()
                                       for dtype in worker.optimizer_steps.norm_dtypes.values()})
        widest = reduce(torch.promote_types, (getattr(torch, dtype) for dtype in dtypes or ["float32"]))
        everyone, audience = {rank for ranks in self._placement for rank in ranks}, dict[tuple[int, int], set[int]]()
        for stage, ranks in enumerate(self._placement):
            # Each replica of a stage publishes what it steps; where each steps all, the first to those without it.
            parted = len({tuple(owned[f"{stage} {rank}"]) for rank in ranks}) > 1
            for source in ranks if parted else ranks[:1]:
                audience[stage, source] = (everyone if of_all else {*ranks}) - ({source} if parted else {*ranks})
        for rank, worker in self._workers.items():
            worker.optimizer_steps.use_norms_of_others(
                {stage: {source: owned[f"{stage} {source}"] for source in ranks
                         if rank in audience.get((stage, source), ())} for stage, ranks in enumerate(self._placement)},
                {stage: sorted(audience.get((stage, rank), ())) for stage in worker.stages}, widest if of_all else None)

    def gradient_norms(self) -> dict[str, float]:
        """Return the norm of every gradient of the latest update of each stage, by the name of its parameter."""
        return self.exchange.united({
            name: norm for worker in self._workers.values() for stage, norms in worker.optimizer_steps.norms.items()
            for name, norm in zip(worker.stages[stage].weights.names, norms.tolist(), strict=True) if norm != ABSENT})

    def check_replicas(self) -> None:
        """Compare the weights of the replicas of every stage by their checksums.

        Raises:
            RunError: some differ.
        """
        for stage, name, first, rank in self._differences(_weights):
            raise RunError(f"stage {stage}: '{name}' on rank {rank} is not what it is on rank {first}",
                           hint="replicas that start alike and get the same gradients stay alike: look for a layer or "
                                "an optimizer that draws random numbers outside torch, or for ranks with different "
                                f"libraries{self._in_lanes}", rank=rank, stage=stage)

    def check_lanes(self) -> None:
        """Compare the weights that this process steps with those of the ranks with the same place in other lanes.

        Of the newest version it may not have received yet what another replica steps.

        Raises:
            RunError: some differ.
        """
        held = {f"{stage} {name} {shard_of(value)}": whole_checksum(value) for worker in self._workers.values()
                for stage, here in worker.stages.items() for name, value in _weights(here) if here.weights.owns(name)}
        for key, first, lane in _differing(enumerate(self.across_lanes.all_gather(held))):
            stage, name, _ = key.split(" ", 2)
            error = RunError(f"stage {stage}: the first update made another '{name}' in lane {lane} than in lane "
                             f"{first}, which have it in common", stage=int(stage),
                             hint="each lane has a part of its gradient: let the plan of its layer name its module, "
                                  "such as SequenceParallel() for a norm of shards of a sequence, so that it is a "
                                  "DTensor")
            watch.failed(error)
            raise error

    def check_replicas_begin(self, buffers: bool) -> None:
        """Refuse replicas with different initial weights, or with ``buffers`` different buffers, on every rank."""
        for stage, name, first, rank in self._differences(partial(_tensors, buffers=buffers)):
            raise UserError(f"stage {stage}: '{name}' begins with other values on rank {rank} than on rank {first}",
                            hint="replicas must begin alike: call torch.manual_seed with the same number on every rank "
                                 "before an nn.Sequential is built, and let layers draw from torch's generator alone"
                                 + self._in_lanes)

    @property
    def _in_lanes(self) -> str:
        return "" if self.lanes.count == 1 else (
            "; so do lanes: give them parts of a tensor as a DTensor, by parallelize_module or distribute_tensor")

    def _differences(self, tensors: Callable[[Stage], Iterator[tuple[str, Tensor]]]
                     ) -> Iterator[tuple[int, str, int, int]]:
        """Yield for each tensor that differs: stage, name, first rank of the job that holds it, one that differs.

        Lanes hold the same, but of a DTensor each its shard.
        """
        compared = [stage for stage, ranks in enumerate(self._placement) if len(ranks) * self.lanes.count > 1]
        if not compared:
            return
        sums = self.job.united({
            f"{self.lanes.number} {stage} {rank}": {f"{name} {shard_of(value)}": whole_checksum(value)
                                                     for name, value in tensors(here)}
            for rank, worker in self._workers.items() for stage, here in worker.stages.items() if stage in compared})
        for stage in compared:
            held = ((rank if self.job.ranks == 1 else own[rank % len(own)], sums[f"{lane} {stage} {rank}"])
                    for lane, own in enumerate(self.lanes.ranks) for rank in self._placement[stage])
            for name, first, holder in _differing(held):
                yield stage, name.rpartition(" ")[0], first, holder

    @contextmanager
    def first_buffers(self) -> Iterator[None]:
        """Give every replica the buffers (running statistics) of the first, and restore its own at the end."""
        own: list[tuple[Tensor, Tensor]] = []
        try:
            for stage, ranks in enumerate(self._placement):
                if len(ranks) == 1:
                    continue
                first = self._stage(stage, ranks[0])
                shared = self._broadcast(ranks[0], {name: local(buffer) for name, buffer in first.named_buffers()}
                                         if first else {})
                others = [each for rank in ranks[1:] if (each := self._stage(stage, rank)) is not None]
                with self.job.whole():
                    for name, buffer in chain.from_iterable(each.named_buffers() for each in others):
                        own.append((buffer, buffer.clone()))
                        local(buffer).copy_(shared[name])
            yield
        finally:
            for buffer, value in reversed(own):  # of a buffer under two names the first value is its own
                buffer.copy_(value)

    def _stage(self, stage: int, rank: int) -> Stage | None:
        worker = self._workers.get(rank)
        return None if worker is None else worker.stages[stage]

    def _broadcast(self, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a rank on every rank."""
        if len(self._lane) == 1:
            return dict(tensors)
        return self._broadcast_among(self._lane, self._lane[rank], tensors)

    def _broadcast_among(self, among: Sequence[int], source: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the named tensors of one rank on every rank, in host memory. All ranks of the job must call it, each
        for its own source; where one has no memory, all raise that.

        Sent from rank to rank, as everything else: the worker threads behind gloo's collectives may outlive the
        interpreter and then abort the process at its exit.

        Args:
            among: the ranks that are to have them.
            source: the rank that has them.
            tensors: of the source; the other ranks give none.

        Raises:
            RunError: a rank did not answer in the time that one tensor may take, or is gone.
        """
        limit = timedelta(seconds=self.timeout_s)
        group, own = control_group(limit), dist.get_rank() == source
        described = self.job.from_rank([[name, list(t.shape), str(t.dtype).removeprefix("torch.")]
                                        for name, t in tensors.items()], source)
        with self.job.whole():
            shared = {name: tensors[name].detach().to("cpu", copy=True).contiguous() if own else
                      torch.empty(shape, dtype=getattr(torch, dtype), device="cpu") for name, shape, dtype in described}
        for peer in (other for other in (among if own else [source]) if other != dist.get_rank()):
            with PeerTransfer(peer, DOING, self.timeout_s):
                for tensor in filter(Tensor.numel, shared.values()):
                    work = dist.isend(tensor, peer, group) if own else dist.irecv(tensor, peer, group)
                    assert work is not None, "this rank is in the group"
                    work.wait(limit)
        return shared


def _differing(tables: Iterable[tuple[int, Mapping[str, str]]]) -> Iterator[tuple[str, int, int]]:
    """Yield each name that is another thing in a numbered table than in the first with it; both tables' numbers."""
    first: dict[str, tuple[int, str]] = {}
    for number, table in tables:
        for name, found in table.items():
            holder, expected = first.setdefault(name, (number, found))
            if found != expected:
                yield name, holder, number


def _weights(stage: Stage) -> Iterator[tuple[str, Tensor]]:
    yield from zip(stage.weights.names, stage.weights.leaves(), strict=True)


def _tensors(stage: Stage, buffers: bool) -> Iterator[tuple[str, Tensor]]:
    stage.use_latest()
    yield from stage.named_parameters()
    if buffers:
        yield from stage.named_buffers()
