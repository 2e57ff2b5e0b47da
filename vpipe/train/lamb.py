"""LAMB: Adam whose update is scaled, tensor by tensor, to the size of the weights.

You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv:1904.00962,
algorithm 2, with phi(z) = z. For a tensor x with gradient g at step t (from 1)::

    m = beta1 m + (1 - beta1) g                 v = beta2 v + (1 - beta2) g^2
    u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay x
    x = x - lr (|x| / |u|) u                    |x| / |u| is taken as 1 when either norm is 0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT


class Lamb(Optimizer):
    """LAMB over whole lists of tensors at once; the parameters of a group share a device.

    ``trust_ratio=False`` in a parameter group leaves the factor |x| / |u| out there: the authors' code does so for
    biases and norms. State per parameter: ``step`` (scalar on the CPU), ``exp_avg`` and ``exp_avg_sq`` (like the
    parameter).
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-6, weight_decay: float = 0.0, trust_ratio: bool = True) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                  "trust_ratio": trust_ratio})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient; returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._state_of(p) for p in params]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        grads = [p.grad for p in params if p.grad is not None]
        beta1, beta2 = group["betas"]
        for state in states:
            state["step"] += 1
        steps = [state["step"].item() for state in states]

        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        scales = torch._foreach_sqrt(squares)
        torch._foreach_div_(scales, [(1 - beta2**t) ** 0.5 for t in steps])
        torch._foreach_add_(scales, group["eps"])
        updates = list(torch._foreach_div(means, [1 - beta1**t for t in steps]))
        torch._foreach_div_(updates, scales)
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        if group["trust_ratio"]:
            torch._foreach_mul_(updates, _trust_ratios(params, updates))
        torch._foreach_add_(params, updates, alpha=-group["lr"])

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _trust_ratios(params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
    """|x| / |u| of each pair, as scalars on the parameters' device: no value travels to the host."""
    weights = torch.stack(torch._foreach_norm(params))
    sizes = torch.stack(torch._foreach_norm(updates))
    return list(torch.where((weights > 0) & (sizes > 0), weights / sizes, 1.0).unbind())
