"""A stage without a flush, for an oracle: the versions of its weights, and which of them a microbatch is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from vpipe.verify.initial_state import Start
from vpipe.verify.loss_scale import LossScale
from vpipe.verify.reference_optimizer import Training

VersionRule = Callable[[int, int, Sequence[int], int], int]
"""(microbatch, stage, widths, microbatches per update and replica) -> version: how many updates of the stage made the
weights it uses."""


def _pipedream(i: int, s: int, w: Sequence[int], k: int) -> int:
    warm_up = (sum(w[s:]) - 1) // w[s]  # forwards of a replica before its first backward
    return max(0, (i // w[s] - warm_up) // k)


VERSIONS: Mapping[str, VersionRule] = {
    "pipedream": _pipedream,
    "pipedream_vertical_sync": lambda i, s, w, k: max(0, (i // w[s] - (len(w) - 1)) // k),
    "2bw": lambda i, s, w, k: max(0, i // w[s] // k - 1),
}
"""What each asynchronous schedule gives microbatch i (from 0) at stage s, which has ``w[s]`` replicas, when a replica
takes k microbatches per update. Vertical sync is defined for equal widths.

Sources: PipeDream (SOSP 2019), section 3.3, weight stashing and vertical sync, and for replicas 1F1B-RR in section
3.2; PipeDream-2BW (arXiv:2006.09503), section 3.1.
"""


class Versions:
    """The versions of the parameters of one stage, and what makes the next one.

    Args:
        parameters: what its optimizer steps.
        every: microbatches of an update per replica.
        width: replicas.
        rate: learning rate relative to that of the first stage.
        start: what was done before.
        layer: its first one.

    Attributes:
        span: microbatches of an update, over all replicas.
        seen: microbatches since the last update.
        first: the version that was the latest when the pipeline began to fill.
        scale: what its gradients are multiplied with; None where losses are not scaled.
        overflow: whether, since the last update, a gradient that it handed on was not finite.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], recipe: Training, every: int, width: int,
                 rate: float, start: Start, layer: int = 0) -> None:
        self.parameters, self.span, self.seen, self.first = parameters, every * width, 0, 0
        self._recipe, self._every, self._rate = recipe, every, rate
        self.optimizers = recipe.optimizers(parameters, start)
        self.scale, self.overflow = LossScale.of(recipe.arithmetic, layer, start.tensors), False
        self._versions = [self._now()]

    @property
    def latest(self) -> int:
        return len(self._versions) - 1

    def leaves(self, version: int) -> dict[str, Tensor]:
        """The parameters for one microbatch, in the version that was made so many updates after the first one.

        With their hooks; those that run after accumulation see the gradient of this microbatch alone.
        """
        leaves = {name: value.clone().requires_grad_() for name, value in self._versions[self.first + version].items()}
        for name, leaf in leaves.items():
            for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if hooks := getattr(self.parameters[name], kind):
                    setattr(leaf, kind, hooks)
        return leaves

    def update(self, gradients: Mapping[str, Tensor | None], step: int) -> bool:
        """Apply the mean over the microbatches seen of gradients that are sums divided by ``every``; or skip it.

        Returns:
            Whether they were applied.
        """
        if self.seen != self._every:
            share = self._every / self.seen
            gradients = {name: None if each is None else each.to(self.parameters[name].dtype) * share
                         for name, each in gradients.items()}
        made = self._recipe.apply(gradients, self.parameters, self.optimizers, self.latest,
                                  self._recipe.factor(step) * self._rate, self.scale, self.overflow)
        self._versions.append(self._now())
        self.seen, self.overflow = 0, False
        return not made.skipped

    def _now(self) -> dict[str, Tensor]:
        return {name: self._recipe.arithmetic.weight(p.detach()).clone() for name, p in self.parameters.items()}
