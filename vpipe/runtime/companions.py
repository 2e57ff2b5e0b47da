"""Let tensors follow the weights of a stage from update to update: their average, and corrections of late gradients.

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

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vpipe.checkpoint.manifest import average_of, last_change_of
from vpipe.errors import counted
from vpipe.runtime.sharded_tensors import local
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import StageOptimizer
from vpipe.torch_private import foreach_add_, foreach_copy_, foreach_sub, foreach_sub_

_GROUP = {"cpu": 1 << 18}
"""Numbers that are extrapolated at once, by device: on a processor what its cache holds."""

_GROUP_ELSEWHERE = 1 << 26


class Companion(ABC):
    """Tensors beside the parameters of a stage that this replica steps, one for each, that follow every update: they
    take the memory of one more copy.

    Attributes:
        entry: name of a parameter -> name of its tensor in a checkpoint.
        values: by name of the parameter; unrounded, as the optimizer has them.
    """

    entry: Callable[[str], str]

    def __init__(self, stage: Stage, optimizer: StageOptimizer) -> None:
        self._stage, self._weights = stage, stage.weights
        self.values = {name: master.data.clone() for name, master in stage.weights.masters.items()
                       if name in optimizer.of_parameter and stage.weights.owns(name)}

    def begin(self) -> None:
        """Begin with the present weights, as before a first update."""
        for name, value in self.values.items():
            value.copy_(self._weights.masters[name].data)

    @abstractmethod
    def follow(self, step: Callable[[], object]) -> None:
        """Call the step of the optimizers, and follow it."""

    def view(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state of the stage as it is seen by the companion, whose tensors replace parameters."""
        return {**state, **{name: value for name, value in self.named().items() if name in state}}

    def named(self) -> dict[str, Tensor]:
        """Return the tensors by the names in the state of the stage, where a parameter may have several."""
        return {name: self.values[own] for name, own in self._stage.trained_names().items() if own in self.values}

    def _masters(self) -> list[Tensor]:
        return [local(self._weights.masters[name]).data for name in self.values]


class WeightAverage(Companion):
    """The exponential moving average of the parameters, one step after every update.

    Source of the arithmetic: ``torch.optim.swa_utils``; :class:`~torch.optim.swa_utils.AveragedModel` starts with the
    weights after the first update, this one with those before it.
    """

    entry = staticmethod(average_of)

    def __init__(self, stage: Stage, optimizer: StageOptimizer, decay: float) -> None:
        super().__init__(stage, optimizer)
        self.values = {name: value.to(torch.promote_types(value.dtype, torch.float32))  # in 16 bits it would not move
                       for name, value in self.values.items()}
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def follow(self, step: Callable[[], object]) -> None:
        step()
        values = list(map(local, self.values.values()))
        self._average(values, [master.to(each.dtype) for master, each in zip(self._masters(), values, strict=True)], 1)


class Extrapolation(Companion):
    """Extrapolate every step of a stage's optimizers. A parameter that no optimizer steps stays as it is.

    It keeps one more copy of the parameters. During a step it needs another one where that writes over the version
    before: where no microbatch uses it, or versions are rounded.

    Its ``values`` are what the latest step added to the parameters.

    Args:
        factor: strength times the mean delay of the stage; not 0.
    """

    entry = staticmethod(last_change_of)

    def __init__(self, stage: Stage, optimizer: StageOptimizer, factor: float) -> None:
        super().__init__(stage, optimizer)
        self.factor = factor
        self._positions = list(map(self._weights.names.index, self.values))
        self.begin()

    def begin(self) -> None:
        for change in self.values.values():
            change.zero_()

    def follow(self, step: Callable[[], object]) -> None:
        version = self._weights.version_before
        # A version that microbatches still use is there after the step; without one the step writes over it.
        before = [master.clone() for master in self._masters()] if version is None else [
            local(version[i]).data for i in self._positions]
        step()
        for after, earlier, last in _groups(self._masters(), before, list(map(local, self.values.values()))):
            changes = foreach_sub(after, earlier)
            foreach_sub_(last, changes)  # with all signs turned, which changes no number
            foreach_add_(after, last, alpha=-self.factor)
            foreach_copy_(last, changes)

    def view(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**state, **{name: torch.sub(state[name], change, alpha=self.factor)
                            for name, change in self.named().items() if name in state}}


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
