"""Correct late gradients: extrapolate every step of an optimizer over the mean delay of its stage.

Without a flush a gradient is applied some updates after the version that it was computed with. With tau, the mean of
that delay at the stage (:mod:`vpipe.schedules.delays`), every trained parameter p is stepped like this::

    before = p.clone(); optimizer.step(); change = p - before
    p += strength * tau * (change - previous); previous = change

``previous`` begins with zeros. At all times p = Z + strength * tau * previous, where Z is the sum of the plain changes:
the weights look tau updates ahead, at the pace of the latest one, so that late gradients are computed near the weights
that they will be applied to. Where tau is 0 nothing is done, and nothing is kept.

Source: error feedback on whole steps (arXiv:2606.30634). It is the same iteration as predicting the weights tau updates
ahead (SpecTrain, arXiv:1809.02839; XPipe, arXiv:1911.04610), with the optimizer's latest change as the prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from vpipe.errors import counted
from vpipe.runtime.sharded_tensors import local
from vpipe.runtime.stage_optimizer import StageOptimizer
from vpipe.runtime.weight_versions import WeightVersions

_GROUP = {"cpu": 1 << 18}
"""Numbers that are extrapolated at once, by device: on a processor what its cache holds."""

_GROUP_ELSEWHERE = 1 << 26


class Extrapolation:
    """Step the optimizers of a stage, then extrapolate. A parameter that no optimizer steps stays as it is.

    It keeps one more copy of the parameters. During a step it needs another one where that writes over the version
    before: where no microbatch uses it, or versions are rounded.

    Args:
        factor: strength times the mean delay of the stage; not 0.

    Attributes:
        last_changes: of the parameters that this replica steps, by name: what the latest step added to them.
    """

    def __init__(self, weights: WeightVersions, optimizer: StageOptimizer, factor: float) -> None:
        self._weights, self._optimizer, self.factor = weights, optimizer, factor
        own = [name for name in weights.names if name in optimizer.of_parameter and weights.owns(name)]
        self._positions = list(map(weights.names.index, own))
        self.last_changes = {name: torch.zeros_like(weights.masters[name].data) for name in own}

    def step(self) -> None:
        """Step the optimizers, and extrapolate what they changed."""
        if not self.last_changes:
            self._optimizer.step()
            return
        masters, before = self._own([*self._weights.masters.values()]), self._weights.version_before
        # A version that microbatches still use is there after the step; without one the step writes over it.
        before = [master.clone() for master in masters] if before is None else self._own(before)
        self._optimizer.step()
        for after, earlier, last in _groups(masters, before, list(map(local, self.last_changes.values()))):
            changes = torch._foreach_sub(after, earlier)
            torch._foreach_sub_(last, changes)  # with all signs turned, which changes no number
            torch._foreach_add_(after, last, alpha=-self.factor)
            torch._foreach_copy_(last, changes)

    def _own(self, of_stage: Sequence[Tensor]) -> list[Tensor]:
        return [local(of_stage[i]).data for i in self._positions]

    def changes_of(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the last changes by the names in the state of the stage, where a parameter may have several."""
        weights = self._weights
        by_memory: dict[tuple[int, torch.Size], Tensor] = {}
        for name, leaf, master in zip(weights.names, weights.leaves(), weights.masters.values(), strict=True):
            if name in self.last_changes:
                by_memory |= dict.fromkeys(((local(leaf).data_ptr(), leaf.shape),
                                            (local(master).data_ptr(), master.shape)), self.last_changes[name])
        found = ((name, by_memory.get((local(value).data_ptr(), value.shape))) for name, value in state.items())
        return {name: change for name, change in found if change is not None}

    def factors_of(self, trained: Mapping[str, str]) -> dict[str, float]:
        """Return the factor by the names in the state of the stage, also of what other replicas step.

        Args:
            trained: the stage's own weights by these names.
        """
        return {name: self.factor for name, own in trained.items() if own in self._optimizer.of_parameter}

    def uncorrected(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters in the state of the stage without what extrapolation has added to them."""
        return {name: torch.sub(state[name], change, alpha=self.factor)
                for name, change in self.changes_of(state).items()}


def describe_other_factors(changed: Mapping[str, str]) -> str | None:
    """Return a line about parameters that look ahead by another factor than in their checkpoint; None without any.

    Args:
        changed: ``3 -> 0.75`` by parameter, ``? -> 0.75`` where the checkpoint does not state the factor.
    """
    counts = Counter(changed.values())
    known, unknown = [{pair: count for pair, count in counts.items() if pair.startswith("?") is unstated}
                      for unstated in (False, True)]
    lines = []
    if known:
        lines.append("the weights look ahead by other factors than in the checkpoint: "
                     + ", ".join(f"{pair} in {counted(count, 'parameter')}" for pair, count in known.items())
                     + "; without the look-ahead they are those of the checkpoint")
    if unknown:
        lines.append(f"the checkpoint does not say by which factor {counted(sum(unknown.values()), 'parameter')} look "
                     "ahead, so they stay as they are: if it was another one, the weights without the look-ahead are "
                     "wrong by the difference times the latest change")
    return "; ".join(lines) or None


def _groups(*of_each: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Yield groups of the tensors of several lists, the same of each; large tensors are cut into views."""
    if sum(tensor.numel() for tensor in of_each[0]) <= _GROUP["cpu"]:
        yield list(map(list, of_each))
        return
    groups: list[list[Tensor]] = [[] for _ in of_each]
    size = 0
    for tensors in zip(*of_each, strict=True):
        most = _GROUP.get(tensors[0].device.type, _GROUP_ELSEWHERE)
        whole = tensors[0].numel() <= most or not all(tensor.is_contiguous() for tensor in tensors)
        for pieces in [tensors] if whole else zip(*(tensor.view(-1).split(most) for tensor in tensors), strict=True):
            if size and size + pieces[0].numel() > most:
                yield groups
                groups, size = [[] for _ in of_each], 0
            size += pieces[0].numel()
            for group, piece in zip(groups, pieces, strict=True):
                group.append(piece)
    yield groups
