"""Leaves and hooks of parameters; refuse the use of parameters that others have replaced in their modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.errors import UserError

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where torch keeps the hooks of a tensor, by their handles: a table, or None."""

_READ = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "_backward_hooks",
         "_post_accumulate_grad_hooks")
_ALLOWED: frozenset[Callable[..., Any]] = frozenset({
    *(getattr(Tensor, name).__get__ for name in _READ), *(getattr(Tensor, name).__set__ for name in _READ[-3:]),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.is_contiguous,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.__repr__})
"""What may still be done with it: nothing that depends on the values."""


class ReplacedParameter(nn.Parameter):
    """A parameter that is not in its module any more: whoever computes with it gets an error with its name.

    The check costs nothing: torch itself asks a subclass that has ``__torch_function__``.
    """

    _replaced_name: str

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next((found._replaced_name for found in _flat((*args, *(kwargs or {}).values()))
                     if isinstance(found, ReplacedParameter)), "a parameter")
        raise UserError(f"'{name}' is used through a reference that its layer keeps beside the module's own: there it "
                        "would stay as it was at first, whatever is trained",
                        hint="read the parameter from its module in every forward, as in self.weight, instead of from "
                             "a list, a closure or another attribute")


def replace_parameter(parameter: nn.Parameter, name: str) -> None:
    """Refuse from now on to compute with a parameter; errors call it ``name``."""
    parameter._replaced_name = name  # type: ignore[attr-defined]
    parameter.__class__ = ReplacedParameter


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def new_leaf(data: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same kind as another, with the attributes that were set on that one."""
    leaf = nn.Parameter.__new__(type(like), data)
    leaf.__dict__.update(like.__dict__)
    return leaf


def has_hooks(leaf: nn.Parameter) -> bool:
    """Return whether hooks run where its gradient accumulates."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def share_hooks(leaf: nn.Parameter, like: nn.Parameter) -> None:
    """Give a parameter another one's tables of hooks themselves, so that handles remove them from both."""
    for kind in HOOKS:
        hooks = getattr(like, kind)
        if hooks is not getattr(leaf, kind):
            setattr(leaf, kind, hooks)


@contextmanager
def without_hooks(leaves: Sequence[nn.Parameter]) -> Iterator[None]:
    hooks = [(leaf, kind, getattr(leaf, kind)) for leaf in leaves for kind in HOOKS if getattr(leaf, kind)]
    for leaf, kind, _ in hooks:
        setattr(leaf, kind, OrderedDict())  # None would leave those after accumulation where autograd finds them
    try:
        yield
    finally:
        for leaf, kind, found in hooks:
            setattr(leaf, kind, found)
