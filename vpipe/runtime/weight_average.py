"""Follow the weights of a stage by an exponential moving average, one step of it after every update.

Source of the arithmetic: ``torch.optim.swa_utils``; :class:`~torch.optim.swa_utils.AveragedModel` starts with the
weights after the first update, this one with those before it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vpipe.runtime.sharded_tensors import local
from vpipe.runtime.stage_optimizer import StageOptimizer
from vpipe.runtime.weight_versions import WeightVersions


class WeightAverage:
    """The average of the parameters of a stage that this replica steps. It takes the memory of one more copy of them.

    Attributes:
        values: of the parameters, by name; unrounded, as the optimizer has them.
    """

    def __init__(self, weights: WeightVersions, optimizer: StageOptimizer, decay: float) -> None:
        self._weights, self._follow = weights, get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.values = {name: weights.masters[name].data.clone() for name in weights.names
                       if name in optimizer.of_parameter and weights.owns(name)}

    def follow(self) -> None:
        """Take a step towards the weights that an update has made."""
        if self.values:
            masters = self._weights.masters
            self._follow([local(value) for value in self.values.values()],
                         [local(masters[name]).data for name in self.values], 1)

    def begin_again(self) -> None:
        """Begin with the present weights."""
        for name, value in self.values.items():
            value.copy_(self._weights.masters[name].data)

    def of(self, trained: Mapping[str, str]) -> dict[str, Tensor]:
        """Return the averages by the names in the state of the stage, given its own weights by these names."""
        return {name: self.values[own] for name, own in trained.items() if own in self.values}
