"""What the last stage alone knows and every rank must: losses, and whether to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.runtime.transport import Key, Spec
from vpipe.runtime.worker import Segment, Worker
from vpipe.schedules.size import Placement


class Outcomes:
    """The exchange of losses, seen from this process.

    Args:
        workers: of this process.
        placement: ranks per stage.
        distributed: whether there are other processes.
    """

    def __init__(self, workers: Mapping[int, Worker], placement: Placement, distributed: bool) -> None:
        self._workers, self._source, self._distributed = workers, placement[-1][0], distributed
        self._last_stage = len(placement) - 1
        self._told: dict[int, Tensor] = {}  # by update, where the last stage is

    def expect(self, number: int) -> None:
        """Get ready for the outcome of an update."""
        if self._last is None:
            self._post(self._key(number), 2)

    def tell(self, segment: Segment, number: int, stop: Callable[[], bool]) -> None:
        """Where the last stage is, when its losses of an update are there: let every rank know."""
        if self._last is None:
            return
        losses = [self._last.losses[number * segment.every + i] for i in range(segment.every)]
        loss = torch.stack(losses).double().mean()
        self._told[number] = torch.stack([loss, loss.new_tensor(float(stop()))])  # not read: a GPU would be waited for
        self._send(self._key(number), self._told[number])

    def hear(self, segment: Segment, number: int) -> tuple[float, bool]:
        """An update's mean loss, and whether to stop, on every rank."""
        if self._last is None:
            outcome = self._take(self._key(number))
        else:
            outcome = self._told.pop(number)
            for i in range(segment.every):
                del self._last.losses[number * segment.every + i]
        loss, stop = outcome.tolist()
        return loss, bool(stop)

    def share(self, number: float) -> float:
        """A number that the last stage's rank knows, on every rank; elsewhere it does not matter."""
        key = Key("L", self._last_stage + 1, 0)
        if self._last is not None:
            self._send(key, torch.tensor([number], dtype=torch.float64))
            return number
        self._post(key, 1)
        return float(self._take(key)[0])

    def losses(self, samples: list[int]) -> float:
        """Sum over samples of the losses of an evaluation, where the last stage is; 0 elsewhere.

        Args:
            samples: of each of its microbatches.
        """
        if self._last is None:
            return 0.0
        return sum(float(self._last.losses.pop(number)) * size for number, size in enumerate(samples))

    def _key(self, number: int) -> Key:
        return Key("L", self._last_stage, number)

    def _post(self, key: Key, count: int) -> None:
        self._only.transport.post(self._source, key, [Spec((count,), torch.float64, wants_gradient=False)])

    def _take(self, key: Key) -> Tensor:
        (tensor,) = self._only.transport.take(self._source, key)
        return tensor

    def _send(self, key: Key, numbers: Tensor) -> None:
        """From this rank to all others, if there are others."""
        for peer in range(dist.get_world_size() if self._distributed else 0):
            if peer != self._only.rank:
                self._only.transport.send(peer, key, [numbers])

    @property
    def _only(self) -> Worker:
        (worker,) = self._workers.values()
        return worker

    @property
    def _last(self) -> Worker | None:
        return self._workers.get(self._source)
