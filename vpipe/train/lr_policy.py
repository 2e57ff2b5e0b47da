"""How the learning rate changes over training: a policy maps a step (from 0) to a factor in [0, 1].

All warm up linearly, ``(step + 1) / warmup_steps`` for ``step < warmup_steps``: no step is wasted on a rate of 0, and
the last step of the warm-up has the full rate, as the first one after it. With T total steps, W warm-up steps and
the progress ``x = min(1, (step - W) / (T - W))`` after the warm-up:

    constant      1
    step          gamma ^ floor((step - W) / step_every)
    polynomial    (1 - x) ^ power
    cosine        (1 + cos(pi x)) / 2
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vpipe.errors import Problem, UserError, nearest

POLICIES = ("constant", "step", "polynomial", "cosine")


@dataclass(frozen=True)
class Policy:
    """A learning-rate policy; call it with a step. Raises one UserError naming every value out of range.

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
        problems = list(_problems(self))
        if problems:
            raise UserError.all_of(problems)

    def __call__(self, step: int) -> float:
        """The factor on the learning rate at ``step`` (from 0); past ``total_steps`` the formulas go on."""
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


def _problems(policy: Policy) -> Iterable[Problem]:
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
