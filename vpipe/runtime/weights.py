"""Weight versions: values that microbatches hold, not a state the module is in.

A forward pins the latest version; the backward of the same microbatch runs with that version; a
version that nobody pins and that is not the latest gives its memory to the next one. The optimizer steps master
parameters of its own, which share memory with the latest version. A step writes in place when no
microbatch holds the latest version, and into fresh memory when one does. So a schedule with a flush,
and the last stage of any, holds one version and copies nothing, and stage s of p under PipeDream
holds p - s (Narayanan et al., PipeDream, SOSP 2019, section 3.3).

Autograd never sees a change: every version has parameters ("leaves") of its own, which share no
version counter with the masters, and the modules' slots are pointed to the leaves of the version
in use. That is right for any layer, also for one that computes ``x @ self.w``.

Versions may be rounded. Then the masters have memory of their own, a step takes the gradients in their precision, and
rounds them into the next version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

Slot = tuple[nn.Module, str]
"""A place where a module keeps a parameter."""


class Steps(Protocol):
    """What steps the masters by their gradients, such as an optimizer."""

    def step(self) -> object:
        """Change them in place."""


class Weights:
    """Versions of a set of parameters, numbered by the updates that made them.

    Args:
        parameters: the first version, by name.
        slots: for every name, the places in modules that hold the parameter.
        unrounded: where versions are rounded, what the first one is the rounding of, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], slots: Mapping[str, Sequence[Slot]],
                 unrounded: Mapping[str, Tensor] | None = None) -> None:
        self.names = tuple(parameters)
        self.slots = {name: tuple(slots[name]) for name in self.names}
        self.latest = 0
        self._leaves: dict[int, list[nn.Parameter]] = {0: list(parameters.values())}
        self._active = self._graded = self._leaves[0]
        self._unrounded = unrounded
        self._settled: list[nn.Parameter] | None = None  # that have the gradients of the step at hand
        self._pins: Counter[int] = Counter()
        self._chosen: int | None = None
        self._free: list[list[nn.Parameter]] = []
        self.most_held = 1

    @cached_property
    def masters(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps: always the memory of the latest version, or what that is the rounding of.

        They have the attributes that were set on the parameters, such as ``p.no_decay = True``.
        """
        masters = {}
        for name, leaf in zip(self.names, self._leaves[self.latest], strict=True):
            masters[name] = nn.Parameter(leaf.data if self._unrounded is None else self._unrounded[name])
            masters[name].__dict__.update(leaf.__dict__)
        return masters

    def pin(self, version: int | None = None) -> int:
        """Hold a version (unless told, the chosen one, else the latest) for a microbatch; point the modules to it."""
        if version is None:
            version = self.latest if self._chosen is None else self._chosen
        self.use(version)
        self._pins[version] += 1
        return version

    def use(self, version: int) -> None:
        """Point the modules to a version."""
        leaves = self._leaves[version]
        if leaves is self._active:
            return
        for leaf, places in zip(leaves, self.slots.values(), strict=True):
            for module, name in places:
                if type(module).__setattr__ is nn.Module.__setattr__:
                    module._parameters[name] = leaf
                else:  # such as nn.LSTM, which keeps a list of its parameters beside the table
                    setattr(module, name, leaf)
        self._active = leaves

    def begin_backward(self, version: int) -> None:
        """Let the gradients accumulated so far go on accumulating in this version's leaves."""
        leaves = self._leaves[version]
        if leaves is self._graded:
            return
        for leaf, before in zip(leaves, self._graded, strict=True):
            leaf.grad, before.grad = before.grad, None
        self._graded = leaves

    def unpin(self, version: int) -> None:
        """A microbatch needs this version no longer."""
        self._pins[version] -= 1
        if not self._pins[version]:
            del self._pins[version]
            self._drop_unused(version)

    def _drop_unused(self, version: int) -> None:
        if version not in self._pins and version < (self.latest if self._chosen is None else self._chosen):
            self._free.append(self._leaves.pop(version))

    def choose(self, version: int | None) -> None:
        """Give the following microbatches this version; None: the latest, whichever that is by then.

        From now on later versions are kept, too: they will be chosen in their turn.
        """
        self._chosen = version
        for held in list(self._leaves):
            self._drop_unused(held)

    @property
    def pinned(self) -> int:
        """How many microbatches hold a version."""
        return self._pins.total()

    @property
    def held(self) -> int:
        """How many versions there are, the latest among them."""
        return len(self._leaves)

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients accumulated since the last step, in the order of ``names``."""
        return [holder.grad for holder in self._settled or self._graded]

    def settle(self) -> None:
        """All gradients of a step are there: from now on they have the precision of the masters."""
        if self._unrounded is None:
            return
        self._settled = list(self.masters.values())
        for master, leaf in zip(self._settled, self._graded, strict=True):
            master.grad, leaf.grad = None if leaf.grad is None else leaf.grad.to(master.dtype), None

    def graded(self) -> list[nn.Parameter]:
        """The parameters whose gradients are accumulating, in the order of ``names``."""
        return self._graded

    def put_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Take these, in the order of ``names``, for what was accumulated."""
        for leaf, gradient in zip(self._graded, gradients, strict=True):
            leaf.grad = gradient

    def scale_gradients(self, factor: float) -> None:
        """Multiply what was accumulated."""
        if present := [gradient for gradient in self.gradients if gradient is not None]:
            torch._foreach_mul_(present, factor)

    def leaves(self) -> list[nn.Parameter]:
        """The latest version as autograd sees it, in the order of ``names``."""
        return self._leaves[self.latest]

    def values(self, names: Sequence[str]) -> list[Tensor]:
        """The latest version of some parameters."""
        return [self._leaves[self.latest][self.names.index(name)].data for name in names]

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Add what another stage contributed to a tied weight's gradient."""
        leaf = self._graded[self.names.index(name)]
        # A copy: in one process the replicas of a stage are given the same tensor, and each scales its own.
        leaf.grad = gradient.clone() if leaf.grad is None else leaf.grad.add_(gradient)

    @contextmanager
    def added_at_once(self, names: Sequence[str]) -> Iterator[None]:
        """Let what several backwards contribute to these parameters be summed first, then added to the gradient."""
        leaves = [self._graded[self.names.index(name)] for name in names]
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        yield
        for leaf, gradient in zip(leaves, before, strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else gradient.add_(leaf.grad)

    @contextmanager
    def kept_apart(self, into: list[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
        """Put what backwards contribute into a list, with its leaf, instead of adding it to the gradients."""
        before = self.take_gradients()
        yield
        for leaf, gradient in zip(self._graded, before, strict=True):
            if leaf.grad is not None:
                into.append((leaf, leaf.grad))
            leaf.grad = gradient

    def take_gradients(self) -> list[Tensor | None]:
        """The accumulated gradients, which start from nothing again."""
        gradients = self.gradients
        for holder in self._settled or self._graded:
            holder.grad = None
        self._settled = None
        return gradients

    def install(self, version: int, tensors: Sequence[Tensor]) -> None:
        """Make received values (owned by the caller no longer) the latest version."""
        leaves = [nn.Parameter(tensor) for tensor in tensors]
        before = self.latest
        self._advance(version, leaves)
        if before not in self._pins and before != version:
            del self._leaves[before]
        self._free.clear()  # received values bring their own memory
        self._count()

    @torch.no_grad()
    def step(self, optimizer: Steps | None) -> None:
        """Apply the accumulated gradients to the latest version, which makes the next one."""
        if self._unrounded is not None:
            if optimizer is not None:
                if self._settled is None:
                    self.settle()
                self._apply(optimizer)
            self._make_next()
            if self.names:
                torch._foreach_copy_([leaf.data for leaf in self.leaves()],
                                     [master.data for master in self.masters.values()])
            return
        self._make_next()
        if optimizer is not None:
            self._apply(optimizer)

    def _apply(self, optimizer: Steps) -> None:
        for master, gradient in zip(self.masters.values(), self.take_gradients(), strict=True):
            master.grad = gradient
        optimizer.step()
        for master in self.masters.values():
            master.grad = None

    def _make_next(self) -> None:
        latest = self._leaves[self.latest]
        if self.latest not in self._pins and self._chosen is None:
            self._leaves[self.latest + 1] = self._leaves.pop(self.latest)
            self.latest += 1
            return
        fresh = self._free.pop() if self._free else [nn.Parameter(torch.empty_like(leaf)) for leaf in latest]
        if latest and self._unrounded is None:
            torch._foreach_copy_([leaf.data for leaf in fresh], [leaf.data for leaf in latest])
            for master, leaf in zip(self.masters.values(), fresh, strict=True):
                master.data = leaf.data
        self._advance(self.latest + 1, fresh)
        self._count()

    def _advance(self, version: int, leaves: list[nn.Parameter]) -> None:
        self._leaves[version] = leaves
        self.latest = version

    def _count(self) -> None:
        self.most_held = max(self.most_held, len(self._leaves))
