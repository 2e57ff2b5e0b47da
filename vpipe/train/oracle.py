"""The oracle: what a run must compute, as a plain sequential program.

It shares with the engine the model, the seeds and the cut, and nothing else: no actions, no stages at
work, no transfers. With a flush it is plain PyTorch with gradient accumulation. Without one, the weights
that each stage gives a microbatch follow from its number alone: see :data:`~vpipe.train.versions.VERSIONS`; gradients
go to the latest version.

In fp32 on one CPU thread the pipeline's losses and weights equal the oracle's bit for bit. Two things need a word,
because a pipeline adds up the gradients of an update in another order than plain PyTorch, which takes one
microbatch after the other. A stage of several replicas sums those of each replica, then the sums. A weight tied across
two stages sums those of each side, then the sums. The order of a sum of m numbers (2m with a tie, for m microbatches)
is all that differs, at most as many rounding errors of the gradient, none for m = 1. The asynchronous oracle sums
in the pipeline's order; the flush oracle does when given ``sides_apart``, and is plain PyTorch to the letter otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vpipe.model.layer import LOSS, Model, seed_of
from vpipe.train.start import Start, kept
from vpipe.train.sums import GradientSums
from vpipe.train.trail import Trail
from vpipe.train.training import Training
from vpipe.train.versions import VERSIONS, VersionRule, Versions
from vpipe.train.whole import Whole

Batch = Mapping[str, Tensor]

NOTHING = Start()
"""A run from its beginning."""


@dataclass
class Run:
    """What an oracle computed: the loss of every step, the gradient norms where clipped, the weights at the end.

    ``kept`` is what a checkpoint there holds, by its names there; less what coding gradients lost.
    """

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)

    def ends_step(self, losses: Sequence[Tensor], trail: Trail | None) -> None:
        """Note the mean loss of a step, whose updates are made."""
        self.losses.append(float(torch.stack(list(losses)).double().mean()))
        if trail is not None:
            trail.ends_step(self.losses[-1])


def flush_oracle(model: Model, batches: Iterable[Batch], recipe: Training, sides_apart: Sequence[int] | None = None,
                 widths: Sequence[int] | None = None, start: Start = NOTHING) -> Run:
    """Plain PyTorch on one device: the microbatches' gradients accumulate, then one step.

    Args:
        sides_apart: a partition. Tied weights that it puts on two stages get a gradient per side, summed
            before the step; see above.
        widths: replicas of each of its stages; one of each when not given. A gradient per replica, summed in the
            order of the replicas before the step; see above.
        start: what was done before; at the end of a batch.
    """
    partition = [len(model)] if sides_apart is None else sides_apart
    whole = Whole(model, recipe.seed, partition, widths or [1] * len(partition))
    whole.fill(start.tensors)
    sides, parameters = whole.split_sides(), whole.parameters
    sums = GradientSums(whole.stage_of, whole.owners, whole.widths)
    optimizer = recipe.optimizer(parameters)
    start.fill(optimizer, parameters)
    run = Run()
    for update, batch in enumerate(batches):
        losses, number = [], update + start.microbatches // recipe.microbatches
        for m, fields in enumerate(_microbatches(batch, recipe.microbatches)):
            with whole.replica(m):
                loss = _forward(model, fields, lambda i, arguments: whole.layers[i](*arguments),
                                (recipe.seed, number, m), partial(recipe.cross, number * recipe.microbatches + m, m))
                recipe.backward(loss, recipe.microbatches)
            losses.append(loss.detach())
            sums.add(m, _taken(parameters | sides))
        norm = recipe.apply(sums.take(parameters), parameters, optimizer, update, recipe.factor(start.steps + update))
        if norm is not None:
            run.gradient_norms.append(norm)
        with torch.no_grad():
            for side, value in sides.items():
                value.copy_(parameters[whole.owners[side]])
        run.ends_step(losses, recipe.trail)
    run.state, run.kept = whole.state(), whole.kept() | kept([(optimizer, parameters)])
    return run


def asynchronous_oracle(model: Model, batches: Iterable[Batch], recipe: Training, partition: Sequence[int],
                        update_every: int = 1, drained_at: Sequence[int] = (),
                        version_of: VersionRule = VERSIONS["pipedream"], widths: Sequence[int] | None = None,
                        start: Start = NOTHING) -> Run:
    """An asynchronous run in one sequential program.

    An update of a stage takes ``update_every`` microbatches on each of its replicas and the mean of their gradients. A
    step, which has one loss, ends when that comes out even for all stages. A tied weight follows the stage
    that owns it: its versions, and which microbatches make an update.

    Args:
        update_every: k, microbatches per update and replica.
        drained_at: microbatches, counted over the whole run, before which the pipeline was empty (evaluation, a
            checkpoint, a new call of ``train``): updates and the step that were incomplete are made from what there
            is, the microbatches from there on see the latest version at every stage, and the pipeline fills anew.
        version_of: one of :data:`~vpipe.train.versions.VERSIONS`.
        widths: replicas per stage; one of each when not given.
        start: what was done before.
    """
    whole = Whole(model, recipe.seed, partition, widths or [1] * len(partition))
    whole.fill(start.tensors)
    sums, work = GradientSums(whole.stage_of, whole.owners, whole.widths), _Work(whole.layers)
    stages = [Versions(whole.of_stage(s), recipe, update_every, width, width / whole.widths[0], start)
              for s, width in enumerate(whole.widths)]
    round_of_all = update_every * math.lcm(*whole.widths)
    run, empty = Run(), start.microbatches  # the microbatch before which the pipeline was last empty
    losses: list[Tensor] = []  # of the step that is not complete yet

    def complete(ending: bool = False) -> None:
        """Make the updates and the step for which the microbatches are there; at the end from those there are."""
        for stage in stages:
            if stage.seen == stage.span or (ending and stage.seen):
                stage.update(sums.take(stage.parameters), step=start.steps + len(run.losses))
        if len(losses) == round_of_all or (ending and losses):
            run.ends_step(losses, recipe.trail)
            losses.clear()

    stream = (fields for batch in batches for fields in _microbatches(batch, recipe.microbatches))
    for i, fields in enumerate(islice(stream, start.begun, None), start.microbatches):
        if i in drained_at:
            complete(ending=True)
            empty = i
            for stage in stages:
                stage.first = stage.latest
        leaves: dict[str, Tensor] = {}
        for s, stage in enumerate(stages):
            leaves |= stage.leaves(version_of(i - empty, s, whole.widths, update_every))
        leaves |= {side: leaves[owner].detach().clone().requires_grad_() for side, owner in whole.owners.items()}
        weights = {f"layers.{layer}.{own}": leaves[name] for layer, used in enumerate(whole.names)
                   for own, name in used.items()}
        key = (recipe.seed, i // update_every, i % update_every)

        def microbatch(fields: Batch = fields, key: tuple[int, int, int] = key, number: int = i,
                       since: int = i - empty) -> Tensor:
            loss = _forward(model, fields, lambda at, arguments: work.layers[at](*arguments), key,
                            partial(recipe.cross, number, since))
            recipe.backward(loss, update_every)
            return loss.detach()

        with whole.replica(i - empty):
            losses.append(functional_call(work, weights, (microbatch,), tie_weights=False))
        sums.add(i - empty, {name: leaf.grad for name, leaf in leaves.items()})
        for stage in stages:
            stage.seen += 1
        complete()
    complete(ending=True)
    run.state = whole.state()
    run.kept = whole.kept() | kept((stage.optimizer, stage.parameters) for stage in stages)
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
             key: tuple[int, int, int], cross: Callable[[int, dict[str, Tensor]], None] = lambda *_: None) -> Tensor:
    """All layers in order, each under its own seed."""
    tensors = dict(fields)
    for i, layer in enumerate(model.layers):
        cross(i, tensors)
        torch.manual_seed(seed_of(*key, i))
        result = call(i, [tensors[name] for name in layer.inputs])
        tensors.update(zip(layer.outputs, result if isinstance(result, tuple) else (result,), strict=True))
    return tensors[LOSS]


def _microbatches(batch: Batch, microbatches: int) -> Iterator[dict[str, Tensor]]:
    parts = {name: tensor.chunk(microbatches) for name, tensor in batch.items()}
    for m in range(microbatches):
        yield {name: part[m] for name, part in parts.items()}


def _taken(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """The gradients, which start from nothing again."""
    gradients = {name: p.grad for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients
