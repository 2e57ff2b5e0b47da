"""An emulated device: a stage that sleeps where a device would compute.

A stage is a linear layer whose forward and whose two products in the backward sleep: that for the gradient of the input
and that for the gradient of the weight. So whoever splits a backward (torch's pipelining walks the graph twice, vpipe
intercepts ``F.linear``) sleeps in either half for exactly that half, and nothing is patched anywhere.

What the layer's own operations take is a part of the time that they emulate: the sleep is that much shorter.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 16
"""Numbers per message: few, so that what counts is how soon a message arrives, not how large it is."""

pause = time.sleep


def exact_pauses() -> None:
    """Let sleeps of this process end when they should: Linux else adds 50 us to each, to wake several at one time."""
    pr_set_timerslack = 29
    ctypes.CDLL(None).prctl(pr_set_timerslack, 1, 0, 0, 0)


@dataclass(frozen=True)
class Times:
    """How long one microbatch takes on one rank; each of its stages takes its share.

    Attributes:
        forward_s: F.
        backward_s: a whole backward; either half takes half of it.
    """

    forward_s: Fraction
    backward_s: Fraction

    def share(self, chunks: int) -> Times:
        """Of one of ``chunks`` stages."""
        return Times(self.forward_s / chunks, self.backward_s / chunks)

    def __str__(self) -> str:
        return f"{float(self.forward_s * 1000):g} + {float(self.backward_s * 1000):g} ms"


class SlowGradient(Tensor):
    """The gradient of a linear layer's output: every product with it takes ``product_s``, of which ``spent_s`` have
    passed in operations before."""

    value: Tensor
    product_s: float
    spent_s: float
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: Tensor, product_s: float, spent_s: float) -> SlowGradient:
        gradient: SlowGradient = Tensor._make_wrapper_subclass(cls, value.shape, strides=value.stride(),
                                                              dtype=value.dtype)
        gradient.value, gradient.product_s, gradient.spent_s = value, product_s, spent_s
        return gradient

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        started = time.perf_counter()
        slow = next(a for a in args if isinstance(a, SlowGradient))
        result = func(*(a.value if isinstance(a, SlowGradient) else a for a in args), **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            pause(max(0.0, slow.product_s - slow.spent_s - (time.perf_counter() - started)))
            return result
        return SlowGradient(result, slow.product_s, slow.spent_s + time.perf_counter() - started)


class Device(nn.Module):
    """One stage: ``h [1, WIDTH] -> h [1, WIDTH]``; the last one gives the loss, a scalar.

    The first one has a parameter in front, as models do: so its backward has an input half, too.
    """

    def __init__(self, times: Times, first: bool, last: bool) -> None:
        super().__init__()
        self.forward_s, self.product_s = float(times.forward_s), float(times.backward_s / 2)
        self.front = nn.Parameter(torch.ones(WIDTH)) if first else None
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.last = last

    def forward(self, hidden: Tensor) -> Tensor:
        started = time.perf_counter()
        if self.front is not None:
            hidden = hidden * self.front
        hidden = F.linear(hidden, self.weight)
        hidden.register_hook(self._slow)
        pause(max(0.0, self.forward_s - (time.perf_counter() - started)))
        return hidden.mean() if self.last else hidden

    def _slow(self, gradient: Tensor) -> Tensor:
        # Whoever splits a backward may bring the same gradient a second time.
        return gradient if isinstance(gradient, SlowGradient) else SlowGradient(gradient, self.product_s, 0.0)
