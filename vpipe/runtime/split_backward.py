"""Split the backward of operations: compute their weight gradient later than their input gradient.

While a layer runs forward, :class:`SplitBackwardMode` sees its calls of torch functions. A call that multiplies by a
parameter is replaced by an autograd Function, whose backward returns the gradient of the input and leaves that of the
parameter to a :class:`~vpipe.runtime.weight_grad_store.WeightGradStore` (Qi et al., arXiv:2401.10241, section 2, do so
by hand in Megatron's linear layer). Torch's own split walks the graph and computes much twice; this costs a few
microseconds per operation and keeps what the weights need alone: the operation's input and its output's gradient.

Gradients of parameters that are direct arguments of the functions in :data:`DEFERRED`, one of them a matrix, are
computed later. Computed with the input half, because it costs nothing there or cannot be separated cheaply, are those
of normalisation; recurrent layers (their weight half would walk through time again); parameters that reach the
operation through another one (weight_norm, ``x @ self.w.t()``, ``self.w[:4]``, packed projections of cross attention);
custom autograd Functions, scripted modules and compiled code; operations under hooks for saved tensors
(:mod:`torch.utils.checkpoint`, ``save_on_cpu``) or in a transform (``torch.vmap``); and parameters that are also used
in any of these where it can be seen.

The gradients are those of the whole backward bit for bit. They differ by rounding, because a sum has another order, for
a parameter that (1) is used in ``DEFERRED`` and at least twice inside a custom Function or scripted module, under
autocast at least once; (2) is used several times in an autocast that a layer opens itself (summed in its own precision,
not in the lower one); (3) is used in several reentrant checkpoints (summed before it is added to earlier microbatches);
(4) takes part in a gradient of a gradient that a layer takes in its forward (torch sums both parts where they meet).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vpipe.runtime.saved_tensors import only_ours
from vpipe.runtime.sharded_tensors import is_sharded, local
from vpipe.runtime.weight_grad_store import WeightGradStore, is_trained
from vpipe.torch_private import innermost_transform

Function = Callable[..., Any]

DEFERRED: frozenset[Function] = frozenset({
    F.linear, F.bilinear, torch.embedding,
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm,
    torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.einsum, torch.tensordot,
    torch.conv1d, torch.conv2d, torch.conv3d,
    torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d})
"""Operations whose weight gradient costs about as much as their input gradient, and shares no work with it."""

AUTOCAST: frozenset[Function] = DEFERRED - {F.bilinear, torch.embedding, torch.einsum, torch.tensordot}
"""Operations whose arguments autocast casts; a parameter once for all of them."""


class SplitBackwardMode(TorchFunctionMode):
    """While active, operations put the gradients of their parameters into ``store``.

    Args:
        autocasts: whether it is active around one autocast.
    """

    def __init__(self, store: WeightGradStore, autocasts: bool = False) -> None:
        super().__init__()
        self._store, self._autocasts = store, autocasts
        self._casts: dict[tuple[int, torch.dtype], Tensor] = {}

    def __torch_function__(self, func: Function, types: Iterable[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        trained = [a for a in _flat((*args, *kwargs.values())) if is_trained(a)]
        if not trained or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in DEFERRED and _worth_it(args, kwargs) and not _hooked():
            if self._autocasts and func in AUTOCAST:
                args, kwargs = [self._cast(a) for a in args], {name: self._cast(a) for name, a in kwargs.items()}
            return _defer(self._store, func, args, kwargs)
        if (inside := _opened(func)) is not None and not _changes_weight(func, args, kwargs):
            with self:
                return inside(*args, **kwargs)
        result = func(*args, **kwargs)
        if any(isinstance(t, Tensor) and t.requires_grad for t in _flat((result,))):
            self._store.exclude(trained)
        return result

    def _cast(self, argument: Any) -> Any:
        """Return an argument as autocast, where it is on, gives it to an operation of :data:`AUTOCAST`."""
        if not isinstance(argument, Tensor) or not torch.is_autocast_enabled(argument.device.type):
            return argument
        dtype = torch.get_autocast_dtype(argument.device.type)
        if argument.dtype in (dtype, torch.float64) or not argument.is_floating_point():
            return argument
        if not isinstance(argument, nn.Parameter) or not is_trained(argument) or argument.dtype is not torch.float32:
            return argument.to(dtype)
        if not torch.is_autocast_cache_enabled():
            return self._store.cast(argument, dtype)
        key = id(argument), dtype
        if key not in self._casts:
            self._casts[key] = self._store.cast(argument, dtype)
        return self._casts[key]


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    """Yield the values, and those in lists and tuples among them."""
    for value in values:
        if type(value) in (list, tuple):
            yield from value
        else:
            yield value


def _worth_it(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a matrix is among the parameters, not a bias alone, and all tensors are plain ones or DTensors."""
    values = (*args, *kwargs.values())
    tensors = [a for a in _flat(values) if isinstance(a, Tensor)]
    return ("out" not in kwargs and any(is_trained(a) and a.dim() > 1 for a in tensors)
            and all(type(a) in (Tensor, nn.Parameter) or is_sharded(a) for a in tensors)
            and len(tensors) == sum(isinstance(a, Tensor) for a in values))  # none in a list


def _changes_weight(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an embedding scales its vectors down to a greatest norm, which changes the weight."""
    return func is F.embedding and (args[3] if len(args) > 3 else kwargs.get("max_norm")) is not None


def _hooked() -> bool:
    """Return whether hooks handle what operations save (a checkpoint expects the same to be saved in its backward), or
    operations are transformed (``torch.vmap``) or have tangents."""
    return not only_ours() or innermost_transform() is not None or forward_ad._current_level >= 0


def _defer(store: WeightGradStore, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    if func is F.linear and (linear := _linear(store, *args, **kwargs)) is not None:
        return linear
    template = [None if isinstance(a, Tensor) else a for a in args]
    fixed = {name: a for name, a in kwargs.items() if not isinstance(a, Tensor)}
    places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    names = [name for name, a in kwargs.items() if isinstance(a, Tensor)]

    def call(tensors: Sequence[Tensor]) -> Tensor:
        positional = list(template)
        for i, tensor in zip(places, tensors, strict=False):
            positional[i] = tensor
        result: Tensor = func(*positional, **fixed, **dict(zip(names, tensors[len(places):], strict=True)))
        return result

    tensors = (*(args[i] for i in places), *(kwargs[name] for name in names))
    split: Tensor = _AnyOperation.apply(store, call, *tensors)  # type: ignore[no-untyped-call]
    return split


@cache
def _opened(func: Function) -> Function | None:
    """Return a copy of a torch function written in Python that runs its body under the active mode; None for others.

    Such a function (:func:`torch.nn.functional.multi_head_attention_forward`) begins by handing itself to the active
    mode. Called from there as it is, it runs with the mode off: the linear layers inside would go unseen.
    """
    if not isinstance(func, FunctionType):
        return None
    checks = [name for name in func.__code__.co_names if name.startswith("has_torch_function")]
    if not checks:
        return None
    opened = FunctionType(func.__code__, {**func.__globals__, **dict.fromkeys(checks, lambda *_: False)}, func.__name__,
                          func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


def _linear(store: WeightGradStore, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:  # noqa: A002
    """Apply ``input [N, in] or [N, M, in], weight [out, in], bias [out]``; None for others."""
    if (input.dim() not in (2, 3) or weight.dim() != 2 or not input.is_contiguous()
            or is_sharded(input) or is_sharded(weight) or (bias is not None and bias.dim() != 1)
            or (torch.is_autocast_enabled(input.device.type)
                and {t.dtype for t in (input, weight, bias) if t is not None}
                != {torch.get_autocast_dtype(input.device.type)})):  # it would cast them
        return None
    result: Tensor = _Linear.apply(store, input, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    """The most frequent operation by hand, in the very multiplications of autograd's own backward."""

    @staticmethod
    def forward(ctx: Any, store: WeightGradStore, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.store, ctx.weight, ctx.bias = store, weight, bias
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        return F.linear(x, weight, bias).detach()  # no view of anything, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        gradient, = gradients
        if gradient is None:
            return None, None, None, None
        (x, weight), store = ctx.saved_tensors, ctx.store
        _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        dx = gradient.matmul(weight) if wants_x else None
        leaf = ctx.weight  # itself: hooks for saved tensors return another object
        leaves = [t for t in (leaf, ctx.bias) if t is not None and store.defers(t)]
        if leaves:
            operand = x.detach()  # not x itself, which would hold the graph before it
            makes = [_dw if t is leaf else _db for t in leaves]  # not t itself, which may be a cast
            store.put(leaves, lambda: [make(operand, gradient) for make in makes], (operand, gradient))
        later = set(map(id, leaves))
        return (None, dx, _dw(x, gradient) if wants_weight and id(leaf) not in later else None,
                _db(x, gradient) if wants_bias and id(ctx.bias) not in later else None)


def _dw(x: Tensor, gradient: Tensor) -> Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).t().mm(x.reshape(-1, x.shape[-1]))


def _db(_: Tensor, gradient: Tensor) -> Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).sum(0)


class _AnyOperation(torch.autograd.Function):
    """Any operation with one output: a graph of its own, cut off from the graph around it.

    The input half walks it for the inputs alone, the weight half for the parameters alone, so that either computes
    the same numbers as autograd.
    """

    @staticmethod
    def forward(ctx: Any, store: WeightGradStore, call: Callable[[Sequence[Tensor]], Tensor],
                *tensors: Tensor) -> Tensor:
        cut = [t.detach().requires_grad_() if t.requires_grad else t for t in tensors]
        with torch.enable_grad():
            output = call(cut)
        ctx.store, ctx.call, ctx.cut, ctx.edge = store, call, cut, get_gradient_edge(output)
        ctx.leaves = [None if store.target(t) is None else t for t in tensors]  # hooks for saved tensors return others
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        gradient, = gradients
        tensors: Sequence[Tensor] = ctx.saved_tensors
        result: list[Tensor | None] = [None] * len(tensors)
        if gradient is None:
            return None, None, *result
        wanted = [i for i, wants in enumerate(ctx.needs_input_grad[2:]) if wants]
        later = [i for i in wanted if ctx.store.defers(ctx.leaves[i])]
        now = [i for i in wanted if i not in later]
        if torch.is_grad_enabled():  # this gradient wants a gradient itself: the cut graph would hide it
            tensors = [t.view_as(t) for t in tensors]  # one may be made from another
            found = torch.autograd.grad(ctx.call(tensors), [tensors[i] for i in now], gradient, create_graph=True,
                                        allow_unused=True)
        elif now:
            found = torch.autograd.grad(ctx.edge, [ctx.cut[i] for i in now], gradient, retain_graph=True,
                                        allow_unused=True)
        else:
            found = ()
        for i, value in zip(now, found, strict=True):
            result[i] = value
        if later:
            edge, cut = ctx.edge, [ctx.cut[i] for i in later]
            ctx.store.put([ctx.leaves[i] for i in later], lambda: _unaliased(edge, cut, gradient), (gradient,))
        return None, None, *result


def _unaliased(edge: Any, leaves: Sequence[Tensor], gradient: Tensor) -> list[Tensor | None]:
    """Return the gradients of leaves, in memory of their own: that of an addend is the output's gradient itself."""
    found = torch.autograd.grad(edge, leaves, gradient, allow_unused=True)
    return [g.clone() if g is not None and g.layout is torch.strided
            and local(g).untyped_storage().data_ptr() == local(gradient).untyped_storage().data_ptr() else g
            for g in found]
