"""Optimizers by name, with two parameter groups (with and without weight decay), and learning-rate policies.

A learning-rate policy maps a step (from 0) to a factor in [0, 1]. All policies warm up linearly,
``(step + 1) / warmup_steps`` for ``step < warmup_steps``: no step has rate 0, and the last step of the warm-up has the
full rate. With T total steps, W warm-up steps and progress ``x = min(1, (step - W) / (T - W))`` after the warm-up:

    constant      1
    step          gamma ^ floor((step - W) / step_every)
    polynomial    (1 - x) ^ power
    cosine        (1 + cos(pi x)) / 2
"""

from __future__ import annotations

import math
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
    """An optimizer's name and hyperparameters; raises one UserError that names every value out of range.

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
        """Create the optimizer of these parameters; None without any, as for a stage without weights.

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
    """Return whether weight decay applies to the parameter called ``name``.

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


POLICIES = ("constant", "step", "polynomial", "cosine")


@dataclass(frozen=True)
class LearningRatePolicy:
    """A learning-rate policy: a function of the step; raises one UserError that names every value out of range.

    ``polynomial`` is a straight line to 0 by default, as BERT was trained (Devlin et al. 2019, appendix A.2);
    NVIDIA's LAMB recipe takes ``power=0.5``. ``step`` divides by 10 every ``step_every`` steps; None means a third of
    the steps after the warm-up, rounded up: PipeDream and VPipe decay every 30 epochs of ImageNet's usual 90.
    ``cosine``: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 without restarts.
    """

    name: str
    total_steps: int
    warmup_steps: int = 0
    power: float = 1.0
    step_every: int | None = None
    gamma: float = 0.1

    def __post_init__(self) -> None:
        problems = list(_policy_problems(self))
        if problems:
            raise UserError.all_of(problems)

    def __call__(self, step: int) -> float:
        """Return the factor of the learning rate at ``step`` (from 0); past ``total_steps`` the formulas go on."""
        assert step >= 0, f"step {step} of a run that starts at step 0"
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        after, span = step - self.warmup_steps, max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, after / span)
        match self.name:
            case "constant":
                return 1.0
            case "step":
                every = math.ceil(span / 3) if self.step_every is None else self.step_every
                return float(self.gamma ** (after // every))
            case "polynomial":
                return float((1 - progress) ** self.power)
            case _:
                return (1 + math.cos(math.pi * progress)) / 2


def _policy_problems(policy: LearningRatePolicy) -> Iterable[Problem]:
    if policy.name not in POLICIES:
        yield Problem(f"there is no learning-rate policy '{policy.name}'", nearest(policy.name, POLICIES))
    if policy.total_steps < 1:
        yield Problem(f"the learning-rate policy has {policy.total_steps} steps in all", "give it at least 1")
    if policy.warmup_steps < 0:
        yield Problem(f"the learning rate warms up over {policy.warmup_steps} steps", "give it 0 or more")
    elif policy.warmup_steps > policy.total_steps >= 1:
        yield Problem(f"the learning rate warms up over {policy.warmup_steps} steps of a run of {policy.total_steps}",
                      f"warm up over at most {policy.total_steps} steps, or train longer")
    if not policy.power > 0:
        yield Problem(f"the power of the polynomial policy is {policy.power}", "it must be greater than 0")
    if policy.step_every is not None and policy.step_every < 1:
        yield Problem(f"the learning rate decays every {policy.step_every} steps", "give it at least 1")
    if not 0 < policy.gamma <= 1:
        yield Problem(f"the learning rate is multiplied by {policy.gamma} at each decay",
                      "it must be greater than 0 and at most 1")
