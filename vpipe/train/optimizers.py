"""Optimizers by name, with the usual division into parameters that decay and parameters that do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vpipe.errors import Problem, UserError, nearest
from vpipe.train.lamb import Lamb

OPTIMIZERS = ("sgd", "adam", "adamw", "lamb")
_FUSED_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class OptimizerSettings:
    """Which optimizer, and its numbers. Raises one UserError naming every value out of range.

    ``weight_decay`` is an L2 term in the gradient for ``sgd`` and ``adam``, and decoupled from it for ``adamw``
    and ``lamb``. ``momentum`` is read by ``sgd``, ``betas`` and ``eps`` by the others. ``eps=None`` means the
    usual 1e-8, and for LAMB the 1e-6 of its authors.
    """

    name: str
    learning_rate: float
    weight_decay: float = 0.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float | None = None

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise UserError.all_of(problems)

    def from_named(self, named: Mapping[str, nn.Parameter]) -> Optimizer | None:
        """The optimizer of these parameters; None when there are none, as in a stage without weights.

        Two parameter groups, in this order and left out when empty: the parameters that decay (see
        :func:`decays`), and those that do not; LAMB scales the second by no trust ratio, as its authors' code. A
        parameter under two names (tied) counts once, under the first. torch's fused kernels are used where they
        exist (floating tensors on CPU or CUDA).
        """
        first_names: dict[nn.Parameter, str] = {}
        for name, parameter in named.items():
            first_names.setdefault(parameter, name)
        pairs = [(name, parameter) for parameter, name in first_names.items()]
        if not pairs:
            return None
        plain: dict[str, Any] = {"weight_decay": 0.0}
        if self.name == "lamb":
            plain["trust_ratio"] = False
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in pairs if decays(name)], "weight_decay": self.weight_decay},
            {"params": [p for name, p in pairs if not decays(name)]} | plain]
        groups = [group for group in groups if group["params"]]
        rate, eps = self.learning_rate, 1e-8 if self.eps is None else self.eps
        # None, not False: torch then still picks its foreach kernels.
        fused = all(p.is_floating_point() and p.device.type in _FUSED_DEVICES for _, p in pairs) or None
        match self.name:
            case "sgd":
                sgd = torch.optim.SGD(groups, lr=rate, momentum=self.momentum, fused=fused)
                if self.momentum:
                    # torch's fused kernel makes the buffers in one go and raises when a parameter gets its first
                    # gradient later than another; from zeros the first step is the same.
                    for parameter in first_names:
                        sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                return sgd
            case "adam":
                return torch.optim.Adam(groups, lr=rate, betas=self.betas, eps=eps, fused=fused)
            case "adamw":
                return torch.optim.AdamW(groups, lr=rate, betas=self.betas, eps=eps, fused=fused)
            case _:
                return Lamb(groups, lr=rate, betas=self.betas, eps=1e-6 if self.eps is None else self.eps)


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter called ``name``.

    It does not to biases (the name ends with "bias") and norms (it contains "norm", whatever the case, as in
    "LayerNorm"). Devlin et al. 2019 (BERT's own code).
    """
    return not name.endswith("bias") and "norm" not in name.lower()


def _problems(settings: OptimizerSettings) -> Iterable[Problem]:
    if settings.name not in OPTIMIZERS:
        yield Problem(f"there is no optimizer '{settings.name}'", nearest(settings.name, OPTIMIZERS))
    if not settings.learning_rate > 0:
        yield Problem(f"the learning rate is {settings.learning_rate}", "it must be greater than 0")
    if not settings.weight_decay >= 0:
        yield Problem(f"the weight decay is {settings.weight_decay}", "it must be at least 0")
    if settings.eps is not None and not settings.eps > 0:
        yield Problem(f"the optimizer's eps is {settings.eps}", "it must be greater than 0")
    for name, value in (("momentum", settings.momentum), ("first beta", settings.betas[0]),
                        ("second beta", settings.betas[1])):
        if not 0 <= value < 1:
            yield Problem(f"the optimizer's {name} is {value}", "it must be from 0 up to, not including, 1")
