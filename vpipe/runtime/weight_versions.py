"""Keep the weight versions that the microbatches in flight use (weight stashing).

A forward pins the latest version, and the backward of the same microbatch runs with it. A version that is neither
pinned nor the latest gives its memory to the next one. The optimizer steps master parameters, which share memory with
the latest version. A step writes in place when no microbatch holds the latest version, else into other memory. So a
schedule with a flush, and the last stage of any, holds one version and copies nothing, and stage s of p under PipeDream
holds p - s (Narayanan et al., PipeDream, SOSP 2019, section 3.3).

Autograd never sees a change: every version has parameters ("leaves") of its own, which share no version counter with
the masters, and modules are pointed to the leaves of the version in use. A layer must read its parameters from its
module in every forward; one that computes with a reference of its own gets an error, see :class:`ReplacedParameter`.

Versions may be rounded. Then the masters have memory of their own, a step takes the gradients in their precision, and
rounds them into the next version.

While nothing is in flight a script may change weights, by the optimizer's parameters or by a module: then they are
handed out. Both have the same memory, also where versions are rounded, and what the script has made of it is the
version that the next microbatches use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.runtime.sharded_tensors import completed, is_sharded, local, set_data, wrapped
from vpipe.torch_private import TorchFunctionDisabled, foreach_copy_, foreach_mul_, tree_leaves

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where torch keeps the hooks of a tensor, by their handles: a table, or None."""

Slot = tuple[nn.Module, str]
"""A place where a module keeps a parameter."""


class WeightVersions:
    """Versions of a set of parameters, numbered by the updates that made them.

    Args:
        parameters: the first version, by name.
        slots: for every name, the places in modules that hold the parameter.
        unrounded: where versions are rounded, the unrounded values of the first one, by name.

    Attributes:
        latest: the newest version.
        used: the parameters that the modules are pointed to.
        masters: the parameters that the optimizer steps: the latest version's memory, or its unrounded values.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], slots: Mapping[str, Sequence[Slot]],
                 unrounded: Mapping[str, Tensor] | None = None) -> None:
        self.names = tuple(parameters)
        self.slots = {name: tuple(slots[name]) for name in self.names}
        self.latest = 0
        self._leaves: dict[int, list[nn.Parameter]] = {0: list(parameters.values())}
        self._first = self.used = self._graded = self._leaves[0]
        self._rounds, self._sharded = unrounded is not None, any(map(is_sharded, parameters.values()))
        self.masters: dict[str, nn.Parameter] = {}
        for name, leaf in parameters.items():
            master = self.masters[name] = nn.Parameter(leaf.data if unrounded is None else unrounded[name])
            master.__dict__.update(leaf.__dict__)  # attributes that were set on the parameter, as p.no_decay = True
            share_hooks(master, leaf)  # an optimizer's factory adds its own to the same tables
        self.parted = False  # from the parameters that the modules were built with
        self.copied = set(self.names if self._rounds else ())  # other values of them are kept beside the leaves
        self._moves = any(map(self.moves, self.names))
        self.owned: frozenset[str] | None = None  # parameters that this replica steps; None: all, as every other does
        # While scripts may change the weights: the memory of masters, and where these are rounded, of leaves.
        self._handed_out: list[tuple[Tensor, Tensor | None]] = []
        self._pins: dict[int, int] = {}  # microbatches that hold a version
        self._chosen: int | None = None
        self._free: list[list[nn.Parameter]] = []
        self.most_versions = 1

    def renew(self) -> None:
        """Give the first version leaves of its own, for there will be others that modules are pointed to.

        The parameters before become :class:`ReplacedParameter`.
        """
        self.parted = True
        before = self._leaves[self.latest]
        leaves = self._leaves[self.latest] = self._first = [new_leaf(parameter.data, parameter) for parameter in before]
        for leaf, parameter in zip(leaves, before, strict=True):
            share_hooks(leaf, parameter)
        self._graded = leaves
        self.use(self.latest)
        for name, parameter in zip(self.names, before, strict=True):
            replace_parameter(parameter, name)

    def adopt(self) -> None:
        """Make the only version of the parameters that the modules have now: ``fully_shard`` exchanges them when it
        gathers or divides them. The optimizer goes on with the masters of the first ones."""
        self._leaves[self.latest] = self.used = self._graded = self._first = [
            module.get_parameter(own) for (module, own), *_ in self.slots.values()]

    def own(self, names: Iterable[str]) -> None:
        """Step these parameters only: other replicas step the others, of which masters of rounded ones are dropped."""
        self.owned = frozenset(names)
        for name, master in self.masters.items() if self._rounds else ():
            if name not in self.owned:
                self.masters[name] = nn.Parameter(torch.empty(0, dtype=master.dtype, device=master.device))

    def moves(self, name: str) -> bool:
        """Return whether forwards put a parameter into other memory: ``nn.LSTM`` and its like do (flatten_parameters).
        """
        return any(isinstance(module, nn.RNNBase) for module, _ in self.slots[name])

    def owns(self, name: str) -> bool:
        """Return whether this replica steps a parameter."""
        return self.owned is None or name in self.owned

    def hand_out(self) -> None:
        """Let a script change the weights until :meth:`take_back`: the modules have the memory of the masters."""
        if not self._handed_out:
            self._handed_out = [(local(master).data, leaf.data if self._rounds else None)
                                for leaf, master in zip(self.leaves(), self.masters.values(), strict=True)]
            for leaf, master in self._stepped_here() if self._rounds else ():
                set_data(leaf, master.data)

    def check_handed_out(self) -> None:
        """Check that :meth:`take_back` can compute with what a script has made of the weights.

        Raises:
            UserError: a parameter is another one now, or of another shape, or has a gradient of the script's.
        """
        for name, p in (*zip(self.names, self.leaves(), strict=True), *self.masters.items()):
            if p.grad is not None:
                raise UserError(f"'{name}' has a gradient that no microbatch has made",
                                hint="clear it, module.zero_grad(), and add what it is of to the loss")
        for i, (memory, _) in enumerate(self._handed_out):
            name, leaf = self.names[i], self.leaves()[i]
            if any((now := module._parameters.get(own)) is not leaf
                   and (now is not None or self.parted or name in self.copied) for module, own in self.slots[name]):
                raise UserError(f"'{name}' was replaced by another parameter between two updates, which no optimizer "
                                "steps, or taken out of its module", hint="change its values, p.data.copy_(new), and "
                                "tie, prune, parametrize or leave it out where layers are built")
            if not self.masters[name].requires_grad:
                raise UserError(f"'{name}' was frozen through its optimizer, whose parameter is another tensor than "
                                "the layer's", hint="freeze the layer's, module.requires_grad_(False), in a layer that "
                                                    "the script has kept; or leave the parameter out of the optimizer")
            for each in (leaf, self.masters[name]) if self.owns(name) else ():
                if (local(each).shape, each.dtype) != (memory.shape, memory.dtype):
                    raise UserError(f"'{name}' was given the shape {list(each.shape)} between two updates, in "
                                    f"{each.dtype}", hint="build the layer with that shape and dtype")

    @torch.no_grad()
    def take_back(self) -> None:
        """Compute with what a script has made of the weights."""
        for name, leaf, (memory, rounded) in zip(self.names, self.leaves(), self._handed_out, strict=False):
            for each in (leaf, self.masters[name]) if self.owns(name) else ():
                own = local(each)
                if (own.data_ptr(), own.stride()) != (memory.data_ptr(), memory.stride()):  # .data = ...
                    memory.copy_(own.clone())  # which may be a view of the memory
                    set_data(each, wrapped(memory, each))
            if rounded is not None:
                set_data(leaf, rounded)
        self._round()
        self._handed_out = []

    def adopt_hooks(self) -> None:
        """Take over the hooks that an optimizer's factory put on the masters, which autograd never sees."""
        for leaf, master in zip(self.leaves(), self.masters.values(), strict=True):
            share_hooks(leaf, master)

    def hooked(self, kinds: Sequence[str] = HOOKS) -> list[str]:
        """Return the names of the parameters that have hooks, of these kinds, in any version."""
        return [name for name, *leaves in zip(self.names, *self._leaves.values(), *self._free, strict=True)
                if any(has_hooks(leaf, kinds) for leaf in leaves)]

    def pin(self, version: int | None = None) -> int:
        """Pin a version (by default the chosen one, else the latest) for a microbatch; point the modules to it."""
        if version is None:
            version = self.latest if self._chosen is None else self._chosen
        self.use(version)
        self._pins[version] = self._pins.get(version, 0) + 1
        return version

    def use(self, version: int) -> None:
        """Point the modules to a version."""
        leaves = self._leaves[version]
        if leaves is self.used:
            return
        for leaf, places in zip(leaves, self.slots.values(), strict=True):
            for module, name in places:
                if type(module).__setattr__ is nn.Module.__setattr__:
                    module._parameters[name] = leaf
                else:  # such as nn.LSTM, which keeps a list of its parameters beside the table
                    setattr(module, name, leaf)
        self.used = leaves

    def begin_backward(self, version: int) -> None:
        """Move the gradients accumulated so far to this version's leaves."""
        leaves = self._leaves[version]
        if leaves is self._graded:
            return
        for i, (leaf, before) in enumerate(zip(leaves, self._graded, strict=True)):
            if leaf.grad is not None:
                raise UserError(f"'{self.names[i]}' got a gradient in another version than its microbatch uses: its "
                                "layer keeps a reference from an earlier forward, or calls backward() in its forward",
                                hint="read the parameter from its module in every forward, as in self.weight; take "
                                     "gradients in a forward with torch.autograd.grad")
            if (gradient := before.grad) is not None:
                leaf.grad, before.grad = gradient, None
        self._graded = leaves

    def unpin(self, version: int) -> None:
        """Release a version for a microbatch."""
        left = self._pins.pop(version) - 1
        if left:
            self._pins[version] = left
        else:
            self._drop_unused(version)

    def _drop_unused(self, version: int) -> None:
        if version not in self._pins and version < (self.latest if self._chosen is None else self._chosen):
            # The gradients so far may stay on leaves that are free: the next backward moves them to its own version,
            # or a step takes them, also where these leaves become its next version.
            leaves = free = self._leaves.pop(version)
            if leaves is self._first:  # to which a first forward may have kept a reference
                free = [new_leaf(leaf.data, leaf) for leaf in leaves]
                for name, leaf, other in zip(self.names, leaves, free, strict=True):
                    share_hooks(other, leaf)  # so that those of a first forward are found
                    replace_parameter(leaf, name)
            self._free.append(free)

    def choose(self, version: int | None) -> None:
        """Give the following microbatches this version; None: the latest, whichever that is by then.

        Later versions stay from now on: they will be chosen in their turn.
        """
        self._chosen = version
        for made in list(self._leaves):
            self._drop_unused(made)

    @property
    def pinned(self) -> int:
        """Return how many microbatches hold a version."""
        return sum(self._pins.values())

    @property
    def version_count(self) -> int:
        """Return how many versions there are, the latest among them."""
        return len(self._leaves)

    @property
    def gradients(self) -> list[Tensor | None]:
        """Return the gradients accumulated since the last step, in the order of ``names``."""
        return [holder.grad for holder in self._graded]

    def widen_gradients(self) -> None:
        """Move the gradients of a step to the masters, in the masters' precision."""
        masters = list(self.masters.values())
        for master, leaf in zip(masters, self._graded, strict=True):
            if (gradient := leaf.grad) is not None:
                master.grad, leaf.grad = gradient.to(master.dtype) if self._rounds else gradient, None
        self._graded = masters

    def graded(self) -> list[nn.Parameter]:
        """Return the parameters that have the gradients, in the order of ``names``: leaves of some version, and while
        a step is made the masters."""
        return self._graded

    def put_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Replace the accumulated gradients, in the order of ``names``."""
        for leaf, gradient in zip(self._graded, gradients, strict=True):
            leaf.grad = gradient

    def complete_gradients(self) -> None:
        """Add up the gradients that the ranks of a mesh have in parts."""
        if any(map(is_sharded, gradients := self.gradients)):
            self.put_gradients(completed(gradients, self._graded, self.names))

    def scale_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients."""
        if present := [gradient for gradient in self.gradients if gradient is not None]:
            foreach_mul_(list(map(local, present)), factor)

    def leaves(self) -> list[nn.Parameter]:
        """Return the latest version as autograd sees it, in the order of ``names``."""
        return self._leaves[self.latest]

    def values(self, names: Sequence[str]) -> list[Tensor]:
        """Return the latest version of some parameters; of those that are sharded, this process's shards."""
        return [local(self._leaves[self.latest][self.names.index(name)]).data for name in names]

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Add another stage's gradient of a tied weight."""
        leaf = self._graded[self.names.index(name)]
        if leaf.grad is None:
            # A copy: in one process the replicas of a stage are given the same tensor, and each scales its own.
            leaf.grad = wrapped(gradient.clone(), leaf)
        elif leaf.grad.is_sparse:
            leaf.grad = gradient + leaf.grad
        else:
            local(leaf.grad).add_(gradient)

    def pop_gradients(self) -> list[Tensor | None]:
        """Return the accumulated gradients, which start from nothing again."""
        gradients = self.gradients
        for holder in self._graded:
            holder.grad = None
        self._graded = self.leaves()
        return gradients

    def abandon(self) -> None:
        """Drop the gradients and the pins of microbatches that failed."""
        self.pop_gradients()
        self._pins.clear()
        self.choose(None)

    def unmake(self, version: int) -> None:
        """Go back to the version before a step that has changed nothing."""
        if self.latest != version:
            made, self.latest = self._leaves.pop(self.latest), version
            self._leaves.setdefault(version, made)
            for leaf, master in zip(self.leaves(), self.masters.values(), strict=True):
                set_data(master, leaf.data)

    def install(self, version: int, tensors: Sequence[Tensor]) -> None:
        """Make received values (owned by the caller no longer) the latest version."""
        leaves = [new_leaf(wrapped(tensor, leaf), leaf) for tensor, leaf in zip(tensors, self.leaves(), strict=True)]
        if self.latest not in self._pins:
            del self._leaves[self.latest]
        self._free.clear()  # received values bring their own memory
        self._add(version, leaves)

    @torch.no_grad()
    def step(self, change: Callable[[], object] | None) -> None:
        """Apply the gradients of a step to the latest version, which makes the next one.

        Args:
            change: steps the optimizers, which change the masters in place by the gradients that
                :meth:`widen_gradients` has given them; None: the next version equals the latest.
        """
        if self._rounds:
            if change is not None:
                self._apply(change)
            self._make_next()
            self._round()
            return
        self._make_next()
        if change is not None:
            self._apply(change)

    def _stepped_here(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(leaf, master) for leaf, (name, master) in zip(self.leaves(), self.masters.items(), strict=True)
                if self.owns(name)]

    def _round(self) -> None:
        if self._rounds and (own := self._stepped_here()):
            foreach_copy_([local(leaf).data for leaf, _ in own], [local(master).data for _, master in own])

    @property
    def version_before(self) -> list[Tensor] | None:
        """Return, while an optimizer steps, the version before; None where the step overwrites it."""
        before = None if self._rounds else self._leaves.get(self.latest - 1)
        return None if before is None else [leaf.data for leaf in before]

    def _apply(self, change: Callable[[], object]) -> None:
        change()
        self._graded = self.leaves()
        for master in self.masters.values():
            master.grad = None
        if not self._rounds and self._memory(self.masters.values()) != self._memory(self._graded):  # p.data = ...
            for master, leaf in zip(self.masters.values(), self._graded, strict=True):
                set_data(leaf, master.data)

    def _memory(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        return list(map(Tensor.data_ptr, map(local, parameters) if self._sharded else parameters))

    def _make_next(self) -> None:
        latest = self._leaves[self.latest]
        if self.latest not in self._pins and self._chosen is None:
            if self._moves and not self._rounds:
                for master, leaf in zip(self.masters.values(), latest, strict=True):
                    set_data(master, leaf.data)
            self._leaves[self.latest + 1] = self._leaves.pop(self.latest)
            self.latest += 1
            return
        fresh = self._free.pop() if self._free else [new_leaf(torch.empty_like(leaf), leaf) for leaf in latest]
        if latest and not self._rounds:
            memory = [leaf.data for leaf in fresh]
            foreach_copy_(list(map(local, memory)), list(map(local, latest)))
            for master, data in zip(self.masters.values(), memory, strict=True):
                set_data(master, data)
        self._add(self.latest + 1, fresh)

    def _add(self, version: int, leaves: list[nn.Parameter]) -> None:
        self._leaves[version] = leaves
        self.latest = version
        self.most_versions = max(self.most_versions, len(self._leaves))


def sample(values: Tensor) -> bytes:
    """Return the bytes of a small tensor, or of at least 1,024 values of a large one; none if the host would wait."""
    if values.device.type != "cpu" or not values.data_ptr():
        return b""
    return values.detach().reshape(-1)[::values.numel() // 1024 | 1].clone().view(torch.uint8).numpy().tobytes()


def new_leaf(data: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same kind as another, with the attributes that were set on that one."""
    leaf = nn.Parameter.__new__(type(like), data)
    leaf.__dict__.update(like.__dict__)
    return leaf


@contextmanager
def kept_apart(leaves: Sequence[nn.Parameter], into: list[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Put new gradients of leaves into a list, with the leaves, instead of adding them to those before."""
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    yield
    for leaf, gradient in zip(leaves, before, strict=True):
        if leaf.grad is not None:
            into.append((leaf, leaf.grad))
        leaf.grad = gradient


def accumulate_gradient(leaf: nn.Parameter, gradient: Tensor) -> None:
    """Add to a parameter's gradient, or begin it, as autograd's own accumulation does."""
    strided = gradient.layout is torch.strided
    if leaf.grad is None and strided and gradient.stride() == leaf.stride():
        leaf.grad = gradient
    elif leaf.grad is not None and strided and leaf.grad.layout is torch.strided and _placed(leaf.grad) == _placed(
            gradient):
        local(leaf.grad).add_(local(gradient))
    else:
        torch.autograd.backward(leaf, gradient)


def _placed(gradient: Tensor) -> object:
    return gradient.placements if is_sharded(gradient) else None


def has_hooks(leaf: nn.Parameter, kinds: Sequence[str] = HOOKS) -> bool:
    """Return whether hooks, of these kinds, run where its gradient accumulates."""
    return any(getattr(leaf, kind) for kind in kinds)


def share_hooks(leaf: nn.Parameter, like: nn.Parameter) -> None:
    """Give a parameter another one's tables of hooks themselves, so that handles remove them from both."""
    for kind in HOOKS:
        if (hooks := getattr(like, kind)) and hooks is not getattr(leaf, kind):
            setattr(leaf, kind, hooks)


_READ = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad")
_ALLOWED: frozenset[Callable[..., Any]] = frozenset({
    *(getattr(Tensor, name).__get__ for name in _READ), *(getattr(Tensor, name).__set__ for name in _READ[-1:]),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.is_contiguous,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.__repr__})
"""Operations that a replaced parameter still allows: none depends on its values."""


class ReplacedParameter(nn.Parameter):
    """A parameter that is not in its module any more; computing with it raises an error with its name."""

    _replaced_name: str

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _ALLOWED:
            with TorchFunctionDisabled():
                return func(*args, **(kwargs or {}))
        name = next((found._replaced_name for found in tree_leaves((args, kwargs))
                     if hasattr(found, "_replaced_name")), "a parameter")
        raise UserError(f"'{name}' is used through a reference that its layer keeps beside the module's own: there it "
                        "would stay as it was at first, whatever is trained",
                        hint="read the parameter from its module in every forward, as in self.weight, instead of from "
                             "a list, a closure or another attribute")


def replace_parameter(parameter: nn.Parameter, name: str) -> None:
    """Refuse from now on to compute with a parameter; errors call it ``name``."""
    parameter._replaced_name = name  # type: ignore[attr-defined]
    kind: Any = type(parameter)
    parameter.__class__ = _replaced_dtensor(kind) if is_sharded(parameter) else ReplacedParameter


@cache
def _replaced_dtensor(kind: Any) -> Any:
    """Return :class:`ReplacedParameter` with the memory layout of a DTensor, which is no nn.Parameter."""
    return type("ReplacedParameter", (kind,), {
        "__slots__": (), "__torch_function__": vars(ReplacedParameter)["__torch_function__"]})
