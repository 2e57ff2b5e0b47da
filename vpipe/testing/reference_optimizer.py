"""Make an update of the oracle: sum gradients in the pipeline's order, unscale, clip, step, keep weight versions.

Like the rest of the reference it shares no code with the engine: optimizers are filled and read by torch's own
``load_state_dict`` and ``state_dict``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vpipe.runtime.sharded_tensors import is_sharded
from vpipe.schedules.assignment import Assignment, default_warmup
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.testing.reference_model import FP32, ReferencePrecision
from vpipe.testing.trajectory import Trajectory, norm_of

MakeOptimizer = Callable[[Mapping[str, nn.Parameter]],
                         torch.optim.Optimizer | Sequence[torch.optim.Optimizer | None] | None]

CompressAtCut = Callable[[int, int, int, dict[str, Tensor]], None]
"""(microbatch of the run, microbatch since the pipeline was empty, layer, tensors): replace the inputs of that layer
by what compression makes of them."""

Turn = Callable[[int, int, int], int]
"""(stage, microbatch, slice) -> the place of its gradient among those that a replica of the stage adds up."""


_NUMBERS = {int: ("int", torch.int64), float: ("float", torch.float64)}
"""Type of a number in an optimizer's state -> its suffix and dtype in a checkpoint."""


@dataclass(frozen=True)
class InitialState:
    """The state in which a reference begins: of a checkpoint, whoever wrote it, or nothing done.

    Attributes:
        steps, microbatches: done before, in total.
        begun: how many of these microbatches belong to the first batch that is given.
        tensors: of the checkpoint, by name.
    """

    steps: int = 0
    microbatches: int = 0
    begun: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Load the state of an optimizer that was just created for some of these parameters."""
        content = optimizer.state_dict()
        for index, name in _numbered(optimizer, parameters).items():
            prefix = f"optim.{name}."
            for full, tensor in self.tensors.items():
                if full.startswith(prefix):
                    key, _, kind = full.removeprefix(prefix).partition("#")
                    content["state"].setdefault(index, {})[key] = tensor.item() if kind else tensor.clone()
        optimizer.load_state_dict(content)


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer],
                      parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return copies of the state of optimizers of these parameters, by their names in a checkpoint."""
    tensors: dict[str, Tensor] = {}
    for optimizer in optimizers:
        names = _numbered(optimizer, parameters)
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                full = f"optim.{names[index]}.{key}"
                if isinstance(value, Tensor):
                    tensors[full] = value.clone()
                else:
                    kind, dtype = _NUMBERS[type(value)]
                    tensors[f"{full}#{kind}"] = torch.tensor(value, dtype=dtype)
    return tensors


def _numbered(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """Map the indices that torch gives parameters, in the order of their groups, to their names."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    in_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: names[id(parameter)] for index, parameter in enumerate(in_order)}


FIRST, LEAST, MOST = 65536.0, 1.0, 2.0**24
GROWS_AFTER = 2000
"""Finite updates in a row after which the scale doubles."""


@dataclass
class ReferenceLossScale:
    """The factor of fp16 losses: halved by an update with a non-finite gradient, doubled after many without; or fixed.

    Source: Micikevicius et al., Mixed Precision Training (arXiv:1710.03740), section 3.2; the constants are those of
    ``torch.amp.GradScaler``, except that it grows to 2**24 at most.

    Attributes:
        good: finite updates in a row; None where the scale is fixed.
    """

    value: float
    good: int | None

    @classmethod
    def create(cls, precision: ReferencePrecision, tensors: Mapping[str, Tensor]) -> ReferenceLossScale | None:
        """Create the scale of a precision, that of a checkpoint if it has one; None where losses are not scaled."""
        if precision.loss_scale is not None:
            return cls(precision.loss_scale, None)
        return cls(float(tensors.get("loss_scale.0.value", FIRST)), int(tensors.get("loss_scale.0.good", 0))
                   ) if precision.dynamic else None

    def update(self, overflow: bool) -> None:
        """Adjust the scale after an update that was made, or skipped because of an overflow."""
        if self.good is None:
            return
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.value = max(LEAST, self.value / 2)
        elif self.good == GROWS_AFTER:
            self.value, self.good = min(MOST, 2 * self.value), 0

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return value and count by their names in a checkpoint."""
        return {} if self.good is None else {
            "loss_scale.0.value": torch.tensor(self.value, dtype=torch.float64),
            "loss_scale.0.good": torch.tensor(self.good)}


class GradientSums:
    """Sums of the gradients of an update, added in the order of a pipeline.

    Replica ``i mod width`` of a stage processes microbatch i. Each replica adds its own microbatches in order, and of a
    DTensor after them what ranks have parts of; then the sums of the replicas are added, replica 0 first. A stage that
    borrows a tied weight does the same with its copy; the sums of the copies are added, the last stage first
    (autograd's order), and then to the owner's sum.

    Args:
        stage_of: the stage of every parameter and of every copy of one.
        owners: copy -> its parameter, in the order of the stages.
        widths: replicas per stage.
        turn: the order of a replica's microbatches; None: that in which they come. With another order the gradients of
            all microbatches of an update are kept.
        measured: whether :meth:`pop_roundings` will be asked.
    """

    def __init__(self, stage_of: Mapping[str, int], owners: dict[str, str], widths: Sequence[int],
                 turn: Turn | None = None, measured: bool = False) -> None:
        self._stage_of, self._widths, self._owners = stage_of, widths, owners
        self._turn, self._measured = turn or (lambda stage, microbatch, part: 0), measured
        self._shares: dict[str, dict[tuple[int, int], Tensor]] = defaultdict(dict)  # by replica and turn
        self._terms: Counter[str] = Counter()
        self._sizes: dict[str, Tensor] = {}  # the sums of their absolute values

    def add(self, microbatch: int, gradients: Mapping[str, Tensor | None], part: int = 0) -> None:
        """Add the gradients of a microbatch, or of a slice of it."""
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            stage, shares = self._stage_of[name], self._shares[name]
            key = Assignment.replica_of(microbatch, self._widths[stage]), self._turn(stage, microbatch, part)
            shares[key] = shares[key] + gradient if key in shares else gradient
            if self._measured:
                owner, (size, terms) = self._owners.get(name, name), _sizes(gradient)
                self._terms[owner] += terms
                self._sizes[owner] = self._sizes[owner] + size if owner in self._sizes else size

    def pop(self, names: Iterable[str]) -> dict[str, Tensor | None]:
        """Return and reset the sums of some parameters; None where there was no gradient."""
        return {name: _added([self._reduced(name),
                              _added([self._reduced(copy) for copy in reversed(self._owners)
                                      if self._owners[copy] == name])]) for name in names}

    def pop_roundings(self) -> float:
        """Return how far two norms of the gradients of an update may be apart if each adds in an order of its own.

        A sum of n numbers is off by at most k u / (1 - k u) times the sum of their absolute values, whatever the order,
        with k = n - 1 and u half of the eps of its dtype (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
        edition, section 4.2). Here k = n, for what divides by a loss scale. What a layer adds of several uses of one
        weight is one number. The sums of absolute values are rounded, too, which changes the result in its last digits.
        """
        found = []
        for name, size in self._sizes.items():
            off = self._terms[name] * torch.finfo(size.dtype).eps / 2
            found.append(2 * off / (1 - off) * norm_of(_completed(size)) if off < 1 else math.inf)
        self._terms.clear()
        self._sizes.clear()
        return math.hypot(*found)

    def _reduced(self, name: str) -> Tensor | None:
        shares = sorted(self._shares.pop(name, {}).items(), key=itemgetter(0))
        return _added(_completed(_added(share for _, share in own))
                      for _, own in groupby(shares, lambda share: share[0][0]))


def _added(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Add the parts from the first to the last, without those that are None."""
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


class ReferenceExtrapolation:
    """Extrapolation of every step over the delay of a stage: p <- p + factor (change - previous change).

    Args:
        factor: strength times mean delay.
        parameters: those that an optimizer steps, by name.
        tensors: of a checkpoint.
    """

    def __init__(self, factor: float, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
        self.factors, self._parameters = dict.fromkeys(parameters, factor), parameters
        self._previous = {name: tensors.get(f"delay_correction.{name}.last_change", torch.zeros_like(p)).clone()
                          for name, p in parameters.items()}

    @contextmanager
    def extrapolating(self) -> Iterator[None]:
        """Extrapolate what a step changes."""
        before = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        yield
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                change = parameter - before[name]
                parameter.add_(change - self._previous[name], alpha=self.factors[name])
                self._previous[name] = change

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return changes and factors by their names in a checkpoint."""
        changes = {f"delay_correction.{name}.last_change": change for name, change in self._previous.items()}
        return changes | {f"delay_correction.{name}.factor": torch.tensor(factor, dtype=torch.float64)
                          for name, factor in self.factors.items()}


def mean_delay(version_of: Versions, stage: int, widths: Sequence[int], update_every: int,
               known: int | None = None) -> float:
    """Return by how many updates of a stage a gradient is late, on average over microbatches in the steady state.

    A microbatch's gradient is in the update with as many updates before it as the microbatches before it fill. The
    delay is that number less the updates that made the weights which it used.

    Args:
        known: microbatches of which ``version_of`` knows the version: the last complete step of them counts. None: it
            knows that of all.
    """
    span = update_every * widths[stage]
    period = update_every * math.lcm(*widths)
    first = 1000 * period if known is None else max(0, known // period - 1) * period
    late = sum(i // span - version_of(i, stage, widths, update_every) for i in range(first, first + period))
    return late / period


@dataclass(frozen=True)
class TrainingRecipe:
    """Settings of a training, as :class:`vpipe.Pipeline` takes them, and the update that follows from them.

    Attributes:
        factor: step -> factor of the learning rate.
        clip: largest norm of the gradients.
        trajectory: records every update.
        skip: whether to skip an update whose loss or gradient norms are not all finite.
        device: of the layers; batches are moved there.
        extrapolation: strength of the extrapolation over the delay of a stage; None without one.
        labels: the field whose labels say how much each microbatch of an update counts; None: all count the same.
        slices: into how many parts the sequences of a microbatch are cut.
    """

    optimizer: MakeOptimizer
    microbatches: int
    seed: int = 0
    factor: Callable[[int], float] = lambda update: 1.0
    clip: float | None = None
    trajectory: Trajectory | None = None
    compress: CompressAtCut = lambda number, microbatch, layer, tensors: None
    skip: bool = False
    precision: ReferencePrecision = FP32
    device: torch.device | str = "cpu"
    extrapolation: float | None = None
    labels: str | None = None
    slices: int = 1

    def optimizers(self, parameters: Mapping[str, nn.Parameter], start: InitialState) -> list[torch.optim.Optimizer]:
        """Create the optimizers of some parameters, in their initial state."""
        made = self.optimizer(parameters)
        entries: Sequence[object] = made if isinstance(made, (list, tuple)) else [made]
        optimizers = [each for each in entries if isinstance(each, torch.optim.Optimizer)]
        for optimizer in optimizers:
            start.load_optimizer(optimizer, parameters)
        return optimizers

    def backward(self, loss: Tensor, leaves: Iterable[Tensor], parts: float, scale: ReferenceLossScale | None = None,
                 weight: float | None = None, carried: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Run backward of a share of the mean loss; with ``skip`` a non-finite loss makes every gradient NaN.

        Args:
            leaves: which had no gradients before; they get zeros where the loss has the weight 0, and may be NaN.
            weight: how many of the ``parts`` a microbatch is; None: one.
            carried: what a slice has given to the next one, with the gradients.
        """
        factor = 1.0 if scale is None else scale.value
        share = factor / parts if weight is None else factor * (weight / parts)
        if self.skip and weight != 0 and not loss.isfinite():
            share = math.nan
        roots = [*([] if weight == 0 and carried else [(loss, torch.full_like(loss, share))]), *carried]
        torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])
        for leaf in leaves if weight == 0 and not carried else ():
            leaf.grad = None if leaf.grad is None else torch.zeros_like(leaf.grad)

    def apply(self, gradients: Mapping[str, Tensor | None], parameters: Mapping[str, nn.Parameter],
              optimizers: Sequence[torch.optim.Optimizer], update: int, factor: float,
              scale: ReferenceLossScale | None = None,
              extrapolation: ReferenceExtrapolation | None = None) -> tuple[float | None, bool]:
        """Update these parameters, or skip the update; return the norm before clipping, if any, and whether it skipped.

        Args:
            gradients: by name of the parameter, multiplied by the scale; their dtype may be narrower than the
                parameter's. Those of parameters that no optimizer steps are ignored.
            update: its number in the trajectory.
            factor: of the learning rate.
        """
        trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        gradients = {name: None if gradient is None or id(parameters[name]) not in trained
                     else gradient.to(parameters[name].dtype) for name, gradient in gradients.items()}
        for name, gradient in gradients.items():
            parameter: Any = parameters[name]
            if is_sharded(gradient):
                gradients[name] = gradient = gradient.redistribute(placements=parameter.placements)
            if scale is not None and gradient is not None:
                gradients[name] = gradient * (1.0 / scale.value)
            parameter.grad = gradients[name]
        if self.trajectory is not None:
            self.trajectory.gradients(update, gradients)
        overflow = not all(bool(_norm(gradient).isfinite()) for gradient in gradients.values() if gradient is not None)
        skipped = overflow and (self.skip or scale is not None)
        norm = None if self.clip is None else self._clip(list(parameters.values()), self.clip)
        with nullcontext() if extrapolation is None or skipped else extrapolation.extrapolating():
            for optimizer in () if skipped else optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
                optimizer.step()
        for parameter in parameters.values():
            parameter.grad = None
        if self.trajectory is not None:
            self.trajectory.weights(update, parameters)
        if scale is not None:
            scale.update(overflow)
        return norm, skipped

    @staticmethod
    def _clip(parameters: list[Tensor], clip: float) -> float:
        """Clip as plain PyTorch does, and return the norm; add up the norms of gradients on the host, in their order.

        A pipeline adds them up so, as they come from several devices. A device has another order of its own, and torch
        has one for parameters of several dtypes, with another last bit.
        """
        norms, plain = [_norm(p.grad) for p in parameters if p.grad is not None], not any(map(is_sharded, parameters))
        if not norms or (plain and norms[0].device.type == "cpu" and len({norm.dtype for norm in norms}) == 1):
            return float(nn.utils.clip_grad_norm_(parameters, clip))
        norm = torch.linalg.vector_norm(torch.stack(norms).cpu())
        nn.utils.clip_grads_with_norm_(parameters, clip, norm, foreach=None if plain else False)
        return float(norm)


def _completed(gradient: Any) -> Any:
    """Return the sum of what ranks have parts of, in their order; a reduction of torch's has an order of its own."""
    if not is_sharded(gradient):
        return gradient
    from torch.distributed.tensor import DTensor, Replicate
    sums, places = gradient.to_local(), list(gradient.placements)
    for dim, place in enumerate(places):
        if place.is_partial():
            parts = [torch.empty_like(sums) for _ in range(gradient.device_mesh.size(dim))]
            dist.all_gather(parts, sums.contiguous(), group=gradient.device_mesh.get_group(dim))
            sums, places[dim] = _added(parts), Replicate()
    return DTensor.from_local(sums, gradient.device_mesh, places, run_check=False, shape=gradient.shape,
                              stride=gradient.stride())


def _sizes(gradient: Any) -> tuple[Any, int]:
    """Return absolute values of a gradient, or of the parts of it that ranks add, and how many these are."""
    if not is_sharded(gradient):
        return gradient.abs(), 1
    from torch.distributed.tensor import DTensor
    mesh, places = gradient.device_mesh, gradient.placements
    return (DTensor.from_local(gradient.to_local().abs(), mesh, places, run_check=False, shape=gradient.shape,
                               stride=gradient.stride()),
            math.prod(mesh.size(dim) for dim, place in enumerate(places) if place.is_partial()))


def _norm(gradient: Any) -> Tensor:
    """Return the norm of a gradient, of a DTensor from those of all shards, which double precision holds exactly."""
    if not is_sharded(gradient):
        plain: Tensor = torch.linalg.vector_norm(gradient)
        return plain
    from torch.distributed.tensor import DTensor, Partial, Replicate
    places = [Replicate() if place.is_replicate() else Partial() for place in gradient.placements]
    squares = torch.linalg.vector_norm(gradient.to_local()).double().square()
    total: Tensor = DTensor.from_local(squares, gradient.device_mesh, places, run_check=False).full_tensor()
    return total.sqrt().to(gradient.dtype)


Versions = Callable[[int, int, Sequence[int], int], int]
"""A :data:`~vpipe.schedules.registry.VersionRule` with its ``warmup``."""


def version_rule(schedule: str, warmup: Sequence[int] = ()) -> Versions:
    """Return the closed form of the weight versions that an asynchronous schedule is registered with.

    Args:
        warmup: forwards of a replica of every stage before its first backward; those of 1F1B by default.
    """
    rule = RegisteredSchedule.named(schedule).version_rule
    assert rule is not None, f"'{schedule}' is registered without version_of"
    return lambda microbatch, stage, widths, update_every: rule(microbatch, stage, widths, update_every,
                                                                warmup or default_warmup(widths))


class StageVersions:
    """The weight versions of one stage, and its optimizer.

    Args:
        parameters: those that its optimizer steps.
        every: microbatches of an update per replica.
        width: replicas.
        rate: learning rate relative to that of the first stage.
        dtypes: of the weights that layers compute with, by parameter.
        delay: mean delay of its gradients, in updates.

    Attributes:
        span: microbatches of an update, over all replicas.
        seen, labels: microbatches since the last update, and the weight of their labels where they are counted.
        first: the latest version when the pipeline began to fill.
        scale: the factor of its gradients; None where losses are not scaled.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], registered: TrainingRecipe, every: int, width: int,
                 rate: float, start: InitialState, dtypes: Mapping[str, torch.dtype], delay: float = 0.0) -> None:
        self.parameters, self.span, self.seen, self.labels, self.first = parameters, every * width, 0, 0.0, 0
        self._recipe, self._every, self._rate, self._dtypes = registered, every, rate, dtypes
        self.optimizers = registered.optimizers(parameters, start)
        self.scale = ReferenceLossScale.create(registered.precision, start.tensors)
        self._versions: list[dict[str, Tensor]] = []
        trained = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        self.extrapolation = None if registered.extrapolation is None or not delay else ReferenceExtrapolation(
            registered.extrapolation * delay, {name: p for name, p in parameters.items() if id(p) in trained},
            start.tensors)

    @property
    def latest(self) -> int:
        """Return the number of updates made."""
        return len(self._versions) - 1

    def leaves(self, version: int) -> dict[str, Tensor]:
        """Return copies of the parameters for one microbatch, ``version`` updates after the first."""
        return {name: value.clone().requires_grad_() for name, value in self._versions[self.first + version].items()}

    def update(self, gradients: Mapping[str, Tensor | None], step: int) -> bool:
        """Apply the mean of gradients that are sums divided by ``every``; return False if the update is skipped."""
        there = self.seen if self._recipe.labels is None else self.labels or 1
        if there != self._every:
            share = self._every / there
            gradients = {name: None if each is None else each.to(self.parameters[name].dtype) * share
                         for name, each in gradients.items()}
        _, skipped = self._recipe.apply(gradients, self.parameters, self.optimizers, self.latest,
                                        self._recipe.factor(step) * self._rate, self.scale, self.extrapolation)
        self.keep_version()
        self.seen, self.labels = 0, 0.0
        return not skipped

    def keep_version(self) -> None:
        """Keep the weights as the latest version; at first those that training begins with."""
        self._versions.append({name: p.detach().to(self._dtypes[name], copy=True)
                               for name, p in self.parameters.items()})
