"""Make optimizers by name, with parameter groups with and without weight decay, and learning-rate policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from vpipe import Model, accelerator
from vpipe.errors import UserError, nearest

OPTIMIZERS = ("sgd", "adam", "adamw", "nadam", "lamb", "muon")


@dataclass(frozen=True)
class OptimizerSettings:
    """The name of an optimizer, as in ``training.optimizer`` of a config, and its hyperparameters.

    ``weight_decay`` is an L2 term in the gradient for ``sgd`` and ``adam``, and decoupled from it for all others. Only
    ``sgd`` reads ``momentum``. ``muon`` needs the names of the model's :func:`hidden_matrices`.

    Raises:
        UserError: there is no such optimizer, or ``muon`` is given no hidden matrices.
    """

    name: str
    learning_rate: float
    weight_decay: float = 0.0
    momentum: float = 0.9
    matrices: Collection[str] | None = None

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise UserError(f"no optimizer is called '{self.name}'", hint=nearest(self.name, OPTIMIZERS))
        if self.name == "muon" and not self.matrices:
            if self.matrices is None:
                raise UserError("muon is not told which parameters are hidden matrices",
                                hint="give it matrices=hidden_matrices(model)")
            raise UserError("muon is an optimizer of hidden matrices, but the model has none: its parameters with two "
                            "dimensions are embeddings, or in the head", hint="choose adamw")

    def from_named(self, named: Mapping[str, nn.Parameter]) -> Optimizer | list[Optimizer] | None:
        """Create the optimizer of these parameters; None without any, as for a stage without weights.

        Two parameter groups, in this order and left out when empty: the parameters that decay (see
        :func:`decays`), and those that do not; LAMB scales the second by no trust ratio, as its authors' code. A
        parameter under two names (tied) counts once, under the first. torch's fused kernels are used where they
        exist (floating tensors on CPU or CUDA). DTensors have groups of their own, after those of plain tensors.

        Muon comes in a list, with AdamW of the other parameters after it; each is left out where it has none.
        """
        first_names: dict[nn.Parameter, str] = {}
        for name, parameter in named.items():
            first_names.setdefault(parameter, name)
        if self.name != "muon":
            return self._made(self.name, first_names)
        matrices = {p: name for p, name in first_names.items() if name in (self.matrices or ())}
        others = {p: name for p, name in first_names.items() if p not in matrices}
        return [made for made in (self._made("muon", matrices), self._made("adamw", others)) if made is not None]

    def _made(self, kind: str, first_names: Mapping[nn.Parameter, str]) -> Optimizer | None:
        """Create an optimizer of this kind for parameters with their names."""
        if not first_names:
            return None
        plain = {"weight_decay": 0.0} | ({"trust_ratio": False} if kind == "lamb" else {})
        # Apart by kind: torch steps no list of DTensors and plain tensors. Only the former have placements; the module
        # of their class takes as long to import as all of vpipe.
        groups: list[dict[str, Any]] = [
            {"params": params, **({"weight_decay": self.weight_decay} if decayed else plain)}
            | ({"fused": None} if sharded and kind == "sgd" else {})  # whose kernel torch lets DTensors not use
            for decayed in (True, False) for sharded in (False, True)
            if (params := [p for p, name in first_names.items()
                           if decays(name) is decayed and hasattr(p, "placements") is sharded])]
        # None, not False: torch then still picks its foreach kernels.
        fused = all(p.is_floating_point() and p.device.type in accelerator.FUSED for p in first_names) or None
        match kind:
            case "sgd":
                sgd = torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum, fused=fused)
                if self.momentum:
                    # torch's fused kernel makes the buffers in one go and raises when a parameter gets its first
                    # gradient later than another; from zeros the first step is the same.
                    for parameter in first_names:
                        sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                return sgd
            case "adam":
                return torch.optim.Adam(groups, lr=self.learning_rate, fused=fused)
            case "adamw":
                return torch.optim.AdamW(groups, lr=self.learning_rate, fused=fused)
            case "nadam":
                # beta1 as for asynchronous pipelines in Ajanthan et al. 2025, arXiv:2505.01099.
                return torch.optim.NAdam(groups, lr=self.learning_rate, betas=(0.99, 0.999),
                                         decoupled_weight_decay=True)
            case "muon":
                # The learning rate of AdamW fits: updates are scaled to its size (Liu et al. 2025, arXiv:2502.16982).
                return torch.optim.Muon(groups, lr=self.learning_rate, momentum=0.95, nesterov=True, ns_steps=5,
                                        adjust_lr_fn="match_rms_adamw")
            case _:
                return Lamb(groups, lr=self.learning_rate)


def decays(name: str) -> bool:
    """Return whether weight decay applies to the parameter called ``name``.

    It does not to biases (the name ends with "bias") and norms (it contains "norm", whatever the case, as in
    "LayerNorm"). Source: Devlin et al. 2019 (BERT's own code).
    """
    return not name.endswith("bias") and "norm" not in name.lower()


def hidden_matrices(model: Model) -> frozenset[str]:
    """Return the names, ``"<layer>.<parameter>"``, of the weights that Muon steps.

    A matrix is a parameter with two dimensions, both above 1. It is hidden unless

    - it belongs to an ``nn.Embedding`` or ``nn.EmbeddingBag``, or is tied to a parameter that does;
    - the head uses it: the last layer that has a matrix, its own or a tied one;
    - it belongs to another module than ``nn.Linear``, and its name, or that module's class, contains "embed",
      "position" or "norm".

    The rule knows no stages: it is the same for every partition. Layers are built without values where their
    constructors allow it.
    """
    users: dict[str, set[int]] = {}  # matrix -> numbers of the layers that use it
    tables: set[str] = set()
    for number, layer in enumerate(model.layers):
        module = layer.outline(number)
        first_names = {parameter: name for name, parameter in module.named_parameters()}
        for path, part in module.named_modules(remove_duplicate=False):
            for own, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
                if parameter.ndim != 2 or min(parameter.shape) == 1:
                    continue
                full = f"{layer.name}.{first_names[parameter]}"
                name = model.ties.get(f"{layer.name}.{path}.{own}" if path else f"{layer.name}.{own}",
                                      model.ties.get(full, full))
                users.setdefault(name, set()).add(number)
                words = f"{type(part).__name__} {name}".lower()
                if isinstance(part, nn.Embedding | nn.EmbeddingBag) or (not isinstance(part, nn.Linear) and any(
                        word in words for word in ("embed", "position", "norm"))):
                    tables.add(name)
    head = max((number for numbers in users.values() for number in numbers), default=None)
    return frozenset(name for name, numbers in users.items() if name not in tables and head not in numbers)


@dataclass(frozen=True)
class LearningRatePolicy:
    """A learning-rate policy: map a step (from 0) to a factor in [0, 1].

    The warm-up is a line, ``(step + 1) / warmup_steps`` for ``step < warmup_steps``: no step has rate 0, and its last
    step has the full rate. With T total steps, W warm-up steps and progress ``x = min(1, (step - W) / (T - W))``:

        constant      1
        step          0.1 ^ floor((step - W) / third), third = ceil((T - W) / 3)
        polynomial    1 - x
        cosine        (1 + cos(pi x)) / 2

    Sources: ``polynomial``: Devlin et al. 2019 (BERT). ``step``: PipeDream and VPipe, which decay every 30
    epochs of ImageNet's usual 90. ``cosine``: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5.

    Raises:
        UserError: the warm-up is longer than the run.
    """

    name: str
    total_steps: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.warmup_steps > self.total_steps:
            raise UserError(f"the learning rate warms up over {self.warmup_steps} steps of a run of {self.total_steps}",
                            hint=f"warm up over at most {self.total_steps} steps, or train longer")

    def __call__(self, step: int) -> float:
        """Return the factor of the learning rate at ``step``; past ``total_steps`` the formulas go on."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        after, span = step - self.warmup_steps, max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, after / span)
        match self.name:
            case "constant":
                return 1.0
            case "step":
                return float(0.1 ** (after // math.ceil(span / 3)))
            case "polynomial":
                return 1 - progress
            case _:
                return (1 + math.cos(math.pi * progress)) / 2


class Lamb(Optimizer):
    """LAMB: Adam whose update is scaled, tensor by tensor, to the size of the weights.

    It computes whole lists of tensors at once; the parameters of a group share a device. For a tensor x with gradient g
    at step t (from 1)::

        m = beta1 m + (1 - beta1) g                 v = beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay x
        x = x - lr (|x| / |u|) u                    |x| / |u| is taken as 1 when either norm is 0

    Source: You et al. 2020, "Large Batch Optimization for Deep Learning", arXiv:1904.00962, algorithm 2, phi(z) = z.

    ``trust_ratio=False`` in a parameter group leaves the factor |x| / |u| out there: the authors' code does so for
    biases and norms. State per parameter: ``step`` (scalar on the CPU), ``exp_avg`` and ``exp_avg_sq`` (like the
    parameter).
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-6, weight_decay: float = 0.0, trust_ratio: bool = True) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                  "trust_ratio": trust_ratio})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.grad is not None]:
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Update the parameters of a group together."""
        for parameter in params:
            if not self.state[parameter]:
                self.state[parameter] |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter),
                                          "exp_avg_sq": torch.zeros_like(parameter)}
        states = [self.state[p] for p in params]
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
        if group["trust_ratio"]:  # |x| / |u|, scalars on the parameters' device: no value travels to the host
            weights, sizes = (torch.stack(torch._foreach_norm(tensors)) for tensors in (params, updates))
            ratios = torch.where((weights > 0) & (sizes > 0), weights / sizes, 1.0)
            torch._foreach_mul_(updates, list(ratios.unbind()))
        torch._foreach_add_(params, updates, alpha=-group["lr"])
