"""Store the weight half of a backward: weight gradients that are computed later.

A backward computes, operation by operation, the gradient of the input, which the stage before waits for, and that of
the weights, which are not needed before the optimizer steps. Zero-bubble schedules run the second when the device would
idle (Qi et al., arXiv:2401.10241, section 2). :mod:`vpipe.runtime.split_backward` makes operations put their weight
gradients here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from vpipe.runtime.sharded_tensors import is_sharded
from vpipe.runtime.weight_versions import accumulate_gradient
from vpipe.torch_private import current_backward, is_reached


@dataclass(slots=True, eq=False)
class CastParameter:
    """A parameter that a layer under autocast casts once for all its operations; their gradients are summed in that
    precision, and the sum is one contribution to the parameter's."""

    parameter: nn.Parameter


@dataclass(slots=True)
class DeferredGradients:
    """The deferred weight gradients of one operation.

    Attributes:
        leaves: parameters that they are of.
        compute: returns them, in that order; None where the operation did not use one.
        operands: detached tensors that they are computed from; must not change until then.
        versions: autograd's versions of the operands when they were stored.
    """

    leaves: Sequence[nn.Parameter | CastParameter]
    compute: Callable[[], Sequence[Tensor | None]]
    operands: Sequence[Tensor]
    versions: Sequence[int]


class WeightGradStore:
    """The deferred weight gradients of one span's backward.

    The forward notes which parameters may wait, the input half fills the store, :meth:`accumulate` empties it. The
    gradients are the whole backward's bit for bit: a parameter's contributions are computed by the same kernels and
    summed in the order in which the engine would have summed them, then added to its gradient at once.
    """

    def __init__(self) -> None:
        self._gathering = False
        self._walk, self._whole = -1, False  # the latest backward that has asked
        self._elsewhere: set[int] = set()
        self._later: deque[DeferredGradients] = deque()
        self._now: list[tuple[nn.Parameter, Tensor]] = []
        self._casts: dict[int, tuple[Tensor, CastParameter]] = {}  # until the input half is done

    def waiting(self) -> Iterator[Tensor]:
        """Yield the known tensors that the store holds; an operation may hold a graph of its own."""
        for deferred in self._later:
            yield from deferred.operands
        for _, gradient in self._now:
            yield gradient

    def exclude(self, parameters: Iterable[nn.Parameter]) -> None:
        """Exclude parameters with contributions that cannot wait: then none waits, as a sum depends on the order."""
        self._elsewhere.update(map(id, parameters))

    def cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return a parameter as operations under autocast use it."""
        tensor = parameter.to(dtype)
        self._casts[id(tensor)] = tensor, CastParameter(parameter)
        return tensor

    def begin(self) -> None:
        """Begin the input half, in which gradients wait; they do not in a backward that a layer runs in its forward."""
        self._gathering = True

    def end(self, now: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """End the input half; ``now``: gradients that did not wait, which the weight half adds."""
        self._gathering = False
        self._now += now
        self._casts.clear()

    def defers(self, tensor: Tensor) -> bool:
        """Return whether the gradient of an operation's argument waits."""
        target = self.target(tensor)
        parameter = target.parameter if isinstance(target, CastParameter) else target
        return (self._gathering and parameter is not None and id(parameter) not in self._elsewhere
                and not torch.is_grad_enabled()  # as it is where that gradient wants a gradient itself
                and self._in_whole_walk(parameter))

    def _in_whole_walk(self, parameter: nn.Parameter) -> bool:
        """Return whether the backward that runs, asked once, goes to all leaves, unlike one by tensors in a hook."""
        if (walk := current_backward()) != self._walk:
            self._walk = walk
            try:
                self._whole = is_reached(get_gradient_edge(parameter).node)
            except RuntimeError:  # the parameter is one of these tensors
                self._whole = False
        return self._whole

    def put(self, leaves: Sequence[Tensor], compute: Callable[[], Sequence[Tensor | None]],
                operands: Sequence[Tensor]) -> None:
        """Store the gradients of some parameters, in the order of the engine."""
        targets = [target for leaf in leaves if (target := self.target(leaf)) is not None]
        self._later.append(DeferredGradients(targets, compute, operands, [t._version for t in operands]))

    def accumulate(self) -> None:
        """Compute the deferred gradients and add them; free each operation's memory as soon as it is used."""
        waiting = Counter(id(leaf) for deferred in self._later for leaf in deferred.leaves)
        casts = {id(leaf): leaf for deferred in self._later for leaf in deferred.leaves
                 if isinstance(leaf, CastParameter)}
        waiting.update(id(cast.parameter) for cast in casts.values())
        totals: dict[int, Tensor] = {}

        def contribute(leaf: nn.Parameter | CastParameter, contribution: Tensor | None) -> None:
            if contribution is not None:
                before = totals.pop(id(leaf), None)
                totals[id(leaf)] = contribution if before is None else before + contribution
            waiting[id(leaf)] -= 1
            if not waiting[id(leaf)]:
                total = totals.pop(id(leaf), None)
                if isinstance(leaf, CastParameter):
                    contribute(leaf.parameter, None if total is None else total.to(leaf.parameter.dtype))
                elif total is not None:
                    accumulate_gradient(leaf, total)

        for leaf, gradient in self._now:
            if waiting[id(leaf)]:
                totals[id(leaf)] = gradient
            else:
                accumulate_gradient(leaf, gradient)
        self._now.clear()
        while self._later:
            deferred = self._later.popleft()
            if [t._version for t in deferred.operands] != deferred.versions:
                raise RuntimeError(
                    "an activation or a gradient was changed in place between the two halves of a backward")
            for target, contribution in zip(deferred.leaves, deferred.compute(), strict=True):
                contribute(target, contribution)

    def target(self, tensor: Tensor | None) -> nn.Parameter | CastParameter | None:
        """Return the trained parameter, or its cast, that an operation's argument is; None for another tensor."""
        if isinstance(tensor, nn.Parameter) and is_trained(tensor):
            return tensor
        return self._casts[id(tensor)][1] if id(tensor) in self._casts else None


def is_trained(argument: object) -> bool:
    """Return whether an argument is a parameter that wants a gradient."""
    return isinstance(argument, nn.Parameter) and argument.requires_grad and (
        type(argument) is nn.Parameter or is_sharded(argument))
