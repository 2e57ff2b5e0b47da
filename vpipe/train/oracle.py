"""The oracle: what a run must compute, as a plain sequential program.

It shares with the engine the model, the seeds and the cut, and nothing else: no actions, no stages at
work, no transfers. With a flush it is plain PyTorch with gradient accumulation. Without one, the weights
that each stage gives a microbatch follow from its number alone: see :data:`VERSIONS`; gradients go to the latest
version.

In fp32 on one CPU thread the pipeline's losses and weights equal the oracle's bit for bit. A weight tied
across two stages needs a word: the pipeline sums the gradients of each side over the m microbatches of an
update and then the two sums; plain PyTorch adds the two sides microbatch by microbatch. The order of a sum
of 2m numbers is all that differs, at most 2m rounding errors of the gradient (none for m = 1). The
asynchronous oracle sums in the pipeline's order; the flush oracle does when given ``sides_apart``, and is
plain PyTorch to the letter otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vpipe.model.layer import LOSS, Model, seed_of, set_parameter, split_target
from vpipe.model.split import resolve_tie, split
from vpipe.train.trail import Trail

Batch = Mapping[str, Tensor]
MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer | None]


VersionRule = Callable[[int, int, int, int], int]
"""(microbatch, stage, stages, microbatches per update) -> version: how many updates made the weights it uses."""

VERSIONS: Mapping[str, VersionRule] = {
    "pipedream": lambda i, s, p, k: max(0, (i - (p - 1 - s)) // k),
    "pipedream_vertical_sync": lambda i, s, p, k: max(0, (i - (p - 1)) // k),
    "2bw": lambda i, s, p, k: max(0, i // k - 1),
}
"""What each asynchronous schedule gives microbatch i (from 0) at stage s of p when every k-th microbatch updates.

Sources: PipeDream (SOSP 2019), section 3.3, weight stashing and vertical sync; PipeDream-2BW (arXiv:2006.09503),
section 3.1.
"""


@dataclass
class Run:
    """What an oracle computed: the loss of every update, the gradient norms where clipped, the weights at the end."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """How to train, as :class:`vpipe.Pipeline` takes it."""

    optimizer: MakeOptimizer
    microbatches: int
    seed: int = 0
    factor: Callable[[int], float] = lambda update: 1.0
    clip: float | None = None
    trail: Trail | None = None  # where to note every update


def flush_oracle(model: Model, batches: Iterable[Batch], recipe: Training,
                 sides_apart: Sequence[int] | None = None) -> Run:
    """Plain PyTorch on one device: the microbatches' gradients accumulate, then one step.

    Args:
        sides_apart: a partition. Tied weights that it puts on two stages get a gradient per side, summed
            before the step; see above.
    """
    whole = model.materialize(recipe.seed)
    apart = _split_sides(model, whole, sides_apart) if sides_apart is not None else {}
    borrowed = {id(p) for p in apart}
    parameters = {name: p for name, p in _named(model, whole) if id(p) not in borrowed}
    optimizer = recipe.optimizer(parameters)
    run = Run()
    for update, batch in enumerate(batches):
        losses = []
        for m, fields in enumerate(_microbatches(batch, recipe.microbatches)):
            loss = _forward(model, fields, lambda i, arguments: whole[model.layers[i].name](*arguments),
                            (recipe.seed, update, m))
            torch.autograd.backward(loss / recipe.microbatches)
            losses.append(loss.detach())
        parts: dict[nn.Parameter, Tensor] = {}
        for side, owner in reversed(apart.items()):  # the last stage's part first, as autograd sums
            if side.grad is not None:
                parts[owner] = parts[owner] + side.grad if owner in parts else side.grad
                side.grad = None
        for owner, part in parts.items():
            owner.grad = part if owner.grad is None else owner.grad + part
        if recipe.trail is not None:
            recipe.trail.gradients(update, {name: p.grad for name, p in parameters.items()})
        if recipe.clip is not None:
            norm = nn.utils.clip_grad_norm_(parameters.values(), recipe.clip)
            run.gradient_norms.append(float(norm))
        _step(optimizer, recipe.factor(update))
        if recipe.trail is not None:
            recipe.trail.weights(update, parameters)
            recipe.trail.losses.append(_mean(losses))
        with torch.no_grad():
            for side, owner in apart.items():
                side.copy_(owner)
        run.losses.append(_mean(losses))
    run.state = _state(model, whole)
    return run


def asynchronous_oracle(model: Model, batches: Iterable[Batch], recipe: Training, partition: Sequence[int],
                        update_every: int = 1, drained_at: Sequence[int] = (),
                        version_of: VersionRule = VERSIONS["pipedream"]) -> Run:
    """An asynchronous run in one sequential program; a tied weight follows the versions of the stage that owns it.

    Args:
        version_of: one of :data:`VERSIONS`.
        drained_at: microbatches before which the pipeline was empty (evaluation, a new call of ``train``):
            they see the latest version at every stage, and the pipeline fills anew.
    """
    whole = model.materialize(recipe.seed)
    specs = split(model, partition)
    stage_of = {i: spec.index for spec in specs for i in spec.layers}
    owned = [{name: p for name, p in _named(model, whole) if stage_of[_layer(model, name)] == spec.index}
             for spec in specs]
    optimizers = [recipe.optimizer(parameters) for parameters in owned]
    history = [[_snapshot(parameters)] for parameters in owned]  # versions per stage
    # The far side of a tie goes by "<owner's name>@<stage>": all its uses there are one value.
    sides = {own: f"{target}@{spec.index}" for spec in specs for own, (_, target) in spec.borrowed.items()}
    owners = {side: side.rpartition("@")[0] for side in sides.values()}
    names = _names_used(model, whole, sides)
    sums: dict[str, Tensor] = {}  # gradients since the last step, one per side of a tied weight
    run, losses, start, work = Run(), [], 0, _Work([whole[layer.name] for layer in model.layers])
    stream = (fields for batch in batches for fields in _microbatches(batch, recipe.microbatches))
    for i, fields in enumerate(stream):
        if i in drained_at:
            start = i
        leaves: dict[str, Tensor] = {}
        for spec, versions in zip(specs, history, strict=True):
            version = start // update_every + version_of(i - start, spec.index, len(specs), update_every)
            leaves.update({name: value.clone().requires_grad_() for name, value in versions[version].items()})
        leaves.update({side: leaves[owner].detach().clone().requires_grad_() for side, owner in owners.items()})

        weights = {f"layers.{layer}.{own}": leaves[name] for layer, used in enumerate(names)
                   for own, name in used.items()}
        key = (recipe.seed, i // update_every, i % update_every)

        def microbatch(fields: Batch = fields, key: tuple[int, int, int] = key) -> Tensor:
            loss = _forward(model, fields, lambda number, arguments: work.layers[number](*arguments), key)
            torch.autograd.backward(loss / update_every)
            return loss.detach()

        losses.append(functional_call(work, weights, (microbatch,), tie_weights=False))
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                sums[name] = sums[name] + leaf.grad if name in sums else leaf.grad
        if (i + 1) % update_every == 0:
            parts: dict[str, Tensor] = {}
            for side, owner in reversed(owners.items()):  # the last stage's part first, as autograd sums
                if side in sums:
                    parts[owner] = parts[owner] + sums.pop(side) if owner in parts else sums.pop(side)
            for owner, part in parts.items():
                sums[owner] = sums[owner] + part if owner in sums else part
            for stage, parameters in enumerate(owned):
                for name, parameter in parameters.items():
                    parameter.grad = sums.pop(name, None)
                if recipe.trail is not None:
                    recipe.trail.gradients(i // update_every, {name: p.grad for name, p in parameters.items()})
                if recipe.clip is not None:
                    nn.utils.clip_grad_norm_(parameters.values(), recipe.clip)
                _step(optimizers[stage], recipe.factor(i // update_every))
                history[stage].append(_snapshot(parameters))
                if recipe.trail is not None:
                    recipe.trail.weights(i // update_every, parameters)
            if recipe.trail is not None:
                recipe.trail.losses.append(_mean(losses))
            run.losses.append(_mean(losses))
            losses = []
    run.state = _state(model, whole)
    return run


def evaluate_oracle(model: Model, state: Mapping[str, Tensor], batches: Iterable[Batch], microbatches: int) -> float:
    """Mean loss of a model with the given weights over all samples, in evaluation mode."""
    whole = model.materialize(0)
    for i, layer in enumerate(model.layers):
        prefix = model.layers[i].name + "."
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        whole[layer.name].load_state_dict(own, strict=False)
    whole.eval()
    total, samples = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            for fields in _microbatches(batch, microbatches):
                size = len(next(iter(fields.values())))
                loss = _forward(model, fields, lambda i, arguments: whole[model.layers[i].name](*arguments), (0, 0, 0))
                total, samples = total + float(loss) * size, samples + size
    return total / samples


class _Work(nn.Module):
    """Calls what it is given; under ``functional_call`` other weights stand in the layers meanwhile.

    The backward must run there, too: a layer that checkpoints itself computes its forward again in it.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        return work()


def _forward(model: Model, fields: Batch, call: Callable[[int, list[Tensor]], object],
             key: tuple[int, int, int]) -> Tensor:
    """All layers in order, each under its own seed."""
    tensors = dict(fields)
    for i, layer in enumerate(model.layers):
        torch.manual_seed(seed_of(*key, i))
        result = call(i, [tensors[name] for name in layer.inputs])
        tensors.update(zip(layer.outputs, result if isinstance(result, tuple) else (result,), strict=True))
    return tensors[LOSS]


def _microbatches(batch: Batch, microbatches: int) -> Iterator[dict[str, Tensor]]:
    parts = {name: tensor.chunk(microbatches) for name, tensor in batch.items()}
    for m in range(microbatches):
        yield {name: part[m] for name, part in parts.items()}


def _named(model: Model, whole: nn.ModuleDict) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters by ``"<layer>.<parameter>"``, tied ones once, under the first name."""
    seen: set[int] = set()
    named = []
    for layer in model.layers:
        for name, parameter in whole[layer.name].named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                named.append((f"{layer.name}.{name}", parameter))
    return named


def _layer(model: Model, name: str) -> int:
    return model.index(split_target(name, model.layers)[0])


def _names_used(model: Model, whole: nn.ModuleDict, sides: Mapping[str, str]) -> list[dict[str, str]]:
    """Per layer, its own names of trainable parameters -> the name each value goes by: a side's, or the owner's."""
    canonical = {id(p): name for name, p in _named(model, whole)}
    used = []
    for layer in model.layers:
        named = whole[layer.name].named_parameters(remove_duplicate=False)
        full = {name: f"{layer.name}.{name}" for name, p in named if id(p) in canonical}
        used.append({name: sides[own] if own in sides else canonical[id(whole[layer.name].get_parameter(name))]
                     for name, own in full.items()})
    return used


def _split_sides(model: Model, whole: nn.ModuleDict, partition: Sequence[int]) -> dict[nn.Parameter, nn.Parameter]:
    """Give every stage that borrows a weight a parameter of its own for all its uses there: it -> the owner's."""
    apart = {}
    for spec in split(model, partition):
        sides: dict[str, nn.Parameter] = {}
        for own, (_, target) in spec.borrowed.items():
            layer, name = split_target(own, model.layers)
            owner_layer, owner_name = split_target(resolve_tie(model, target), model.layers)
            owner = whole[owner_layer].get_parameter(owner_name)
            side = sides.setdefault(target, nn.Parameter(owner.detach().clone()))
            set_parameter(whole[layer], name, side)
            apart[side] = owner
    return apart


def _snapshot(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


def _step(optimizer: torch.optim.Optimizer | None, factor: float) -> None:
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        optimizer.step()
        optimizer.zero_grad()


def _mean(losses: Sequence[Tensor]) -> float:
    return float(torch.stack(list(losses)).double().mean())


def _state(model: Model, whole: nn.ModuleDict) -> dict[str, Tensor]:
    """Parameters and buffers as ``Pipeline.state_dict`` names them."""
    return {f"{layer.name}.{name}": value.detach().clone() for layer in model.layers
            for name, value in whole[layer.name].state_dict().items() if name not in layer.ties}
