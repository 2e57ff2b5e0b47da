"""The oracle: what a run must compute, as a plain sequential program.

It shares with the engine the model, the seeds and the cut, and nothing else: no actions, no stages at
work, no transfers. With a flush it is plain PyTorch with gradient accumulation. Without one, the weights
that each stage gives a microbatch follow from its number alone: see
:data:`~vpipe.verify.reference_versions.VERSIONS`; gradients go to the latest version.

On one CPU thread the pipeline's losses and weights equal the oracle's bit for bit, in any precision. Two
things need a word, because a pipeline adds up the gradients of an update in another order than plain PyTorch, which
takes one microbatch after the other. A stage of several replicas sums those of each replica, then the sums. A weight
tied across two stages sums those of each side, then the sums. The order of a sum of m numbers (2m with a tie,
for m microbatches) is all that differs, at most as many rounding errors of the gradient, none for m = 1. The
asynchronous oracle sums in the pipeline's order; the flush oracle does when given ``sides_apart``, and is plain PyTorch
to the letter otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vpipe.model.layer import LOSS, Model, seed_of
from vpipe.verify.arithmetic import FP32, Arithmetic
from vpipe.verify.handover import hand_over, handed_over
from vpipe.verify.initial_state import Start, kept
from vpipe.verify.loss_scale import LossScale
from vpipe.verify.reference_model import Whole
from vpipe.verify.reference_optimizer import Training
from vpipe.verify.reference_versions import VERSIONS, VersionRule, Versions
from vpipe.verify.summation_order import GradientSums
from vpipe.verify.trajectory import Trail

Batch = Mapping[str, Tensor]

NOTHING = Start()
"""A run from its beginning."""


@dataclass
class Run:
    """What an oracle computed: the loss of every step, the gradient norms where clipped, the weights at the end.

    ``skipped`` are the steps in which an update was left out. ``kept`` is what a checkpoint there holds, by its names
    there; less what coding gradients lost.
    """

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
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
    arithmetic = recipe.arithmetic
    whole = Whole(model, recipe.seed, partition, widths or [1] * len(partition), arithmetic)
    whole.fill(start.tensors)
    sides, parameters, masters = whole.split_sides(), whole.parameters, whole.masters
    sums = GradientSums(whole.stage_of, whole.owners, whole.widths)
    optimizers = recipe.optimizers(masters, start)
    run, scale = Run(), LossScale.of(arithmetic, 0, start.tensors)
    for update, batch in enumerate(batches):
        losses, number = [], update + start.microbatches // recipe.microbatches
        for m, fields in enumerate(_microbatches(batch, recipe.microbatches)):
            with whole.replica(m):
                loss = _forward(model, fields, lambda i, arguments: whole.layers[i](*arguments),
                                (recipe.seed, number, m), partial(recipe.cross, number * recipe.microbatches + m, m),
                                arithmetic)
                recipe.backward(loss, recipe.microbatches, scale)
            losses.append(loss.detach())
            sums.add(m, _taken(parameters | sides))
        made = recipe.apply(sums.take(parameters), masters, optimizers, update, recipe.factor(start.steps + update),
                            scale)
        if made.norm is not None:
            run.gradient_norms.append(made.norm)
        if made.skipped:
            run.skipped.add(start.steps + update)
        whole.take_over()
        with torch.no_grad():
            for side, value in sides.items():
                value.copy_(parameters[whole.owners[side]])
        run.ends_step(losses, recipe.trail)
    run.state, run.kept = whole.state(), whole.kept() | kept(optimizers, masters) | _kept([scale])
    return run


def asynchronous_oracle(model: Model, batches: Iterable[Batch], recipe: Training, partition: Sequence[int],
                        update_every: int = 1, drained_at: Sequence[int] = (),
                        version_of: VersionRule = VERSIONS["pipedream"], widths: Sequence[int] | None = None,
                        start: Start = NOTHING) -> Run:
    """An asynchronous run in one sequential program.

    An update of a stage takes ``update_every`` microbatches on each of its replicas and the mean of their gradients. A
    step, which has one loss, ends when that comes out even for all stages. A tied weight follows the stage
    that owns it: its versions, and which microbatches make an update.

    In fp16 every stage has a loss scale of its own. What comes back through a cut is multiplied with that of the stage
    that it comes to, and divided by that of the one it comes from. A stage that hands on a gradient that is not finite,
    through a cut or of a tied weight, skips its update and halves its scale like one whose weights got it.

    Args:
        update_every: k, microbatches per update and replica.
        drained_at: microbatches, counted over the whole run, before which the pipeline was empty (evaluation, a
            checkpoint, a new call of ``train``): updates and the step that were incomplete are made from what there
            is, the microbatches from there on see the latest version at every stage, and the pipeline fills anew.
        version_of: one of :data:`~vpipe.verify.reference_versions.VERSIONS`.
        widths: replicas per stage; one of each when not given.
        start: what was done before.
    """
    arithmetic = recipe.arithmetic
    whole = Whole(model, recipe.seed, partition, widths or [1] * len(partition), arithmetic)
    whole.fill(start.tensors)
    sums, work = GradientSums(whole.stage_of, whole.owners, whole.widths), _Work(whole.layers)
    first = [0, *accumulate(partition)]  # layers
    stages = [Versions(whole.of_stage(s), recipe, update_every, width, width / whole.widths[0], start, first[s])
              for s, width in enumerate(whole.widths)]
    cuts = {first[s]: (stages[s - 1], stages[s]) for s in range(1, len(stages))} if arithmetic.dynamic else {}
    round_of_all = update_every * math.lcm(*whole.widths)
    run, empty = Run(), start.microbatches  # the microbatch before which the pipeline was last empty
    losses: list[Tensor] = []  # of the step that is not complete yet

    def complete(ending: bool = False) -> None:
        """Make the updates and the step for which the microbatches are there; at the end from those there are."""
        for stage in stages:
            if stage.seen == stage.span or (ending and stage.seen):
                step = start.steps + len(run.losses)
                if not stage.update(sums.take(stage.parameters), step):
                    run.skipped.add(step)
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
            def cross(before: int, tensors: dict[str, Tensor]) -> None:
                if before in cuts:
                    hand_over(tensors, *cuts[before])
                recipe.cross(number, since, before, tensors)

            loss = _forward(model, fields, lambda at, arguments: work.layers[at](*arguments), key, cross, arithmetic)
            recipe.backward(loss, update_every, stages[-1].scale)
            return loss.detach()

        with whole.replica(i - empty):
            losses.append(functional_call(work, weights, (microbatch,), tie_weights=False))
        gradients = {name: leaf.grad for name, leaf in leaves.items()}
        if arithmetic.dynamic:
            for side, owner in whole.owners.items():
                gradients[side] = handed_over(gradients[side], stages[whole.stage_of[owner]],
                                              stages[whole.stage_of[side]])
        sums.add(i - empty, gradients)
        for stage in stages:
            stage.seen += 1
        complete()
    complete(ending=True)
    run.state = whole.state()
    run.kept = whole.kept() | _kept(stage.scale for stage in stages)
    for stage in stages:
        run.kept |= kept(stage.optimizers, stage.parameters)
    return run


def evaluate_oracle(model: Model, state: Mapping[str, Tensor], batches: Iterable[Batch], microbatches: int,
                    arithmetic: Arithmetic = FP32) -> float:
    """Mean loss of a model with the given weights over all samples, in evaluation mode."""
    whole = model.materialize(0)
    arithmetic.round(whole.values())
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
                loss = _forward(model, fields, lambda i, arguments: whole[model.layers[i].name](*arguments), (0, 0, 0),
                                arithmetic=arithmetic)
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
             key: tuple[int, int, int], cross: Callable[[int, dict[str, Tensor]], None] = lambda *_: None,
             arithmetic: Arithmetic = FP32) -> Tensor:
    """All layers in order, each under its own seed."""
    tensors = arithmetic.fields(fields)
    for i, layer in enumerate(model.layers):
        cross(i, tensors)
        _seed(seed_of(*key, i))
        arguments = [tensors[name] for name in layer.inputs]
        tensors |= arithmetic.outputs(layer.outputs, partial(call, i, arguments))
    return tensors[LOSS]


def _seed(seed: int) -> None:
    """As ``torch.manual_seed``, which formats the stack of its caller, too, for a CUDA that is not there: a quarter of
    an oracle's time on a small model."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _kept(scales: Iterable[LossScale | None]) -> dict[str, Tensor]:
    return {name: tensor for scale in scales if scale is not None for name, tensor in scale.kept().items()}


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
