"""What comes out of a step, on every rank: what the last stage alone knows, losses and whether to stop, is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.runtime.microbatches import Segment
from vpipe.runtime.transport.transport import Key, Spec
from vpipe.runtime.worker import Worker
from vpipe.schedules.action import Action, Op
from vpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class Step:
    """One optimizer step; without a flush, of a pipeline with replicas, the fewest that are whole on every stage.

    Attributes:
        index: its number, from 0.
        loss: mean over its microbatches, on every rank.
        learning_rate: of the first parameter group of this process's first stage that trains, with
            ``learning_rate_factor``; None without.
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


class Outcomes:
    """The exchange of losses, seen from this process.

    Each replica of the last stage tells the losses of its microbatches; every rank puts them in order, so that all
    have the same mean. The first replica says whether to stop.

    Args:
        workers: of this process.
        schedule: lowered.
        distributed: whether there are other processes.

    Attributes:
        stop: is asked where the last stage is, once per step.
        decisive: by rank, the action after which its losses are known, where a program is one update; then they are
            told at once, long before the update is made: a loss is on every rank before that rank's last backward, so
            none waits for another between two updates. Empty where they are told with the step.
    """

    def __init__(self, workers: Mapping[int, Worker], schedule: Schedule, distributed: bool) -> None:
        self._workers, self._sources, self._distributed = workers, schedule.placement[-1], distributed
        self._last_stage = schedule.stages - 1
        # To read a loss from a GPU is to wait for the GPU; so it is read when the whole batch has been queued.
        self._on_gpu = any(stage.device.type != "cpu" for worker in workers.values()
                           for stage in worker.stages.values())
        self.stop: Callable[[], bool] = lambda: False
        self.decisive = self._last_forwards(schedule)
        self._told: dict[tuple[int, int], Tensor] = {}  # by step and rank of the last stage, where that is here

    def expect(self, segment: Segment, step: int) -> None:
        """Get ready for the outcome of a step."""
        for rank in self._elsewhere():
            self._post(rank, self._key(segment, step), 1 + len(self._share(segment.rounds.of_step(step), rank)))

    def tell(self, segment: Segment, step: int, rank: int) -> None:
        """Where a last stage is, when its losses of a step are there: let every rank know."""
        if rank not in self._sources:
            return
        known = self._workers[rank].losses
        losses = [known[segment.base + i].double().reshape(()) for i in self._share(segment.rounds.of_step(step), rank)]
        ends = torch.tensor(float(rank == self._sources[0] and self.stop()), dtype=torch.float64)
        self._told[step, rank] = torch.stack([ends.to(losses[0].device) if losses else ends, *losses]).cpu()
        self._send(self._key(segment, step), self._told[step, rank])

    def step(self, segment: Segment, step: int) -> Step:
        """What came out of a step of which this process has made all its updates."""
        number = segment.steps_before + step
        for worker in self._workers.values():
            worker.forget_batches(segment.rounds.of_step(step))
        if not self.decisive:
            self.expect(segment, step)
            for rank in self._workers:
                self.tell(segment, step, rank)
        loss, stop = self._hear(segment, step)
        norm = next(iter(self._workers.values())).update.gradient_norm
        # Computed anew: within one process a later stage may already have set the rate of its next update.
        here = sorted((stage, rank) for rank, worker in self._workers.items() for stage in worker.stages)
        rates = (self._workers[rank].updates.learning_rate(stage, step) for stage, rank in here)
        rate = next((rate for rate in rates if rate is not None), None)
        skipped = [number in worker.updates.skipped for worker in self._workers.values()]
        for worker in self._workers.values():
            worker.updates.skipped.discard(number)
        return Step(number, loss, rate, None if norm is None else float(norm), stop, any(skipped))

    def _hear(self, segment: Segment, step: int) -> tuple[float, bool]:
        """A step's mean loss, and whether to stop, on every rank."""
        told = [self._told.pop((step, rank)) if rank in self._workers else self._take(rank, self._key(segment, step))
                for rank in self._sources]
        microbatches = segment.rounds.of_step(step)
        for rank in self._sources:
            if rank in self._workers:
                for i in self._share(microbatches, rank):
                    del self._workers[rank].losses[segment.base + i]
        return float(self._in_order([each[1:] for each in told], microbatches).mean()), bool(told[0][0])

    def share(self, losses: Sequence[list[float]], samples: Sequence[int]) -> list[float]:
        """The losses of an evaluation in the order of its microbatches, on every rank.

        Args:
            losses: of each local rank of the last stage, in the order of the replicas.
            samples: of each microbatch.
        """
        key, microbatches = Key("L", self._last_stage + 1, 0), range(len(samples))
        for rank in self._elsewhere():
            self._post(rank, key, len(self._share(microbatches, rank)))
        here = iter(losses)
        mine = {rank: torch.tensor(next(here), dtype=torch.float64) for rank in self._sources if rank in self._workers}
        for own in mine.values():
            self._send(key, own)
        parts = [mine[rank] if rank in mine else self._take(rank, key) for rank in self._sources
                 if self._share(microbatches, rank)]
        return self._in_order(parts, microbatches).tolist()

    def _last_forwards(self, schedule: Schedule) -> Mapping[int, Action]:
        if schedule.stream or schedule.rounds.per_step < schedule.microbatches or self._on_gpu:
            return {}
        return {rank: [action for action in schedule.programs[rank]
                       if action.op is Op.FORWARD and action.stage == self._last_stage][-1] for rank in self._sources}

    def _share(self, microbatches: range, rank: int) -> range:
        """Those that a replica of the last stage takes. A step begins with the first replica."""
        return microbatches[self._sources.index(rank)::len(self._sources)]

    def _in_order(self, parts: Sequence[Tensor], microbatches: range) -> Tensor:
        if len(parts) == 1:
            return parts[0].cpu()
        losses = torch.empty(len(microbatches), dtype=torch.float64)
        for replica, part in enumerate(parts):
            losses[replica::len(self._sources)] = part.cpu()
        return losses

    def _key(self, segment: Segment, step: int) -> Key:
        return Key("L", self._last_stage, segment.steps_before + step)

    def _elsewhere(self) -> list[int]:
        return [rank for rank in self._sources if rank not in self._workers]

    def _post(self, source: int, key: Key, count: int) -> None:
        if count:
            self._only.transport.post(source, key, [Spec((count,), torch.float64, wants_gradient=False)])

    def _take(self, source: int, key: Key) -> Tensor:
        (tensor,) = self._only.transport.take(source, key)
        return tensor

    def _send(self, key: Key, numbers: Tensor) -> None:
        """From this rank to all others, if there are others."""
        for peer in range(dist.get_world_size() if self._distributed else 0):
            if peer != self._only.rank and numbers.numel():
                self._only.transport.send(peer, key, [numbers])

    @property
    def _only(self) -> Worker:
        (worker,) = self._workers.values()
        return worker
