"""Compute what a pipeline must compute, in a plain sequential program: the oracle.

It shares the model, the seeds and the cut with the engine, and nothing else: no actions, no stage workers, no
transfers. With a flush it is plain PyTorch with gradient accumulation. Without one, the weight version that each stage
uses for a microbatch follows from the microbatch's number: see :data:`vpipe.schedules.registry.VersionRule`;
gradients are applied to the latest version.

The asynchronous oracle adds gradients in the pipeline's order (:class:`GradientSums`). The flush oracle does so if
``partition`` is given; otherwise it is exactly plain PyTorch, which adds microbatch by microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vpipe import accelerator
from vpipe.model.layer import LOSS, seed_of
from vpipe.model.model import Model
from vpipe.runtime.slices import SliceAware
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.testing.reference_model import FP32, ReferenceModel, ReferencePrecision
from vpipe.testing.reference_optimizer import (
    GradientSums,
    InitialState,
    ReferenceLossScale,
    StageVersions,
    TrainingRecipe,
    Turn,
    Versions,
    mean_delay,
    optimizer_tensors,
    version_rule,
)
from vpipe.testing.trajectory import Trajectory

Batch = Mapping[str, Tensor]

FROM_SCRATCH = InitialState()


@dataclass
class ReferenceRun:
    """The result of an oracle.

    Attributes:
        losses: of every step.
        gradient_norms: of every update, if gradients are clipped.
        skipped: steps in which an update was skipped.
        state: the weights at the end, named as in ``Pipeline.state_dict``.
        tensors: of a checkpoint at the end, by their names there.
        states: in which every update began, if the run was ``measured``.
        roundings: of every update, if so: see :meth:`~vpipe.testing.reference_optimizer.GradientSums.pop_roundings`.
    """

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    state: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    states: list[InitialState] = field(default_factory=list)
    roundings: list[float] = field(default_factory=list)

    def end_step(self, losses: Sequence[Tensor], weights: Sequence[float | None], trajectory: Trajectory | None,
                 whole: float | None = None) -> None:
        """Record the mean loss of a step after its updates, over labels where the weights of microbatches are these.

        Args:
            whole: what the weights add up to, but for rounding.
        """
        counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight is not None]
        self.losses.append(float(torch.stack(list(losses)).double().mean()) if not counted else
                           sum(float(loss) * weight for loss, weight in counted if weight)
                           / (whole or sum(weight for _, weight in counted) or 1))
        if trajectory is not None:
            trajectory.end_step(self.losses[-1])


def flush_oracle(model: Model, batches: Iterable[Batch], recipe: TrainingRecipe, partition: Sequence[int] | None = None,
                 widths: Sequence[int] | None = None, start: InitialState = FROM_SCRATCH, turn: Turn | None = None,
                 measured: bool = False) -> ReferenceRun:
    """Train on one device with plain PyTorch: accumulate the gradients of the microbatches, then step the optimizer.

    Args:
        partition: layers per stage. Weights tied across its stages get a gradient per copy, summed before the step.
        widths: replicas per stage, one by default. Gradients are summed per replica, then in the order of the replicas.
        start: the state at the end of a batch.
        turn: the order in which a replica adds the gradients of its microbatches, if it is another than theirs.
        measured: whether to keep the state in which every update begins, and how much the order of sums may matter.
    """
    partition = [len(model)] if partition is None else partition
    precision = recipe.precision
    reference = ReferenceModel(model, recipe.seed, partition, widths or [1] * len(partition), precision, recipe.device)
    reference.load(start.tensors)
    copies = reference.separate_tied_weights()
    parameters, masters = reference.parameters, reference.masters
    leaves = parameters | copies
    sums = GradientSums(reference.stage_of, reference.owners, reference.widths, turn, measured)
    optimizers = recipe.optimizers(masters, start)
    run, scale = ReferenceRun(), ReferenceLossScale.create(precision, start.tensors)

    def tensors() -> dict[str, Tensor]:
        return reference.checkpoint_tensors() | optimizer_tensors(optimizers, masters) | (
            {} if scale is None else scale.checkpoint_tensors())

    for update, batch in enumerate(batches):
        losses, shares, number = [], [], update + start.microbatches // recipe.microbatches
        parts = list(_microbatches(batch, recipe.microbatches, recipe.device))
        weights = [_weigh(model, reference.layers[-1], fields, recipe.labels) for fields in parts]
        whole: float = recipe.microbatches if recipe.labels is None else sum(filter(None, weights)) or 1
        if measured:
            run.states.append(InitialState(start.steps + update, start.microbatches + update * recipe.microbatches,
                                           tensors=tensors()))
        for m, fields in enumerate(parts):
            key = recipe.seed, number, m
            with reference.replica(m):
                made = _run_slices(model, reference, fields, key, recipe) if recipe.slices > 1 else [
                    _Run(_forward(model, fields, lambda i, arguments: reference.layers[i](*arguments), key, partial(
                        recipe.compress, number * recipe.microbatches + m, m), precision), weights[m])]
                after: Mapping[str, Tensor] = {}  # what the next slice began with
                for j, one in reversed([*enumerate(made)]):
                    carried = [(one.made[name], t.grad) for name, t in after.items() if t.grad is not None]
                    with one.told():  # as _CallInside says
                        recipe.backward(one.loss, (*leaves.values(), *one.past.values()), whole, scale, one.weight,
                                        carried)
                    sums.add(m, {name: leaf.grad for name, leaf in leaves.items()}, j)
                    after = one.past
                    for leaf in leaves.values():
                        leaf.grad = None
            losses += [one.loss.detach() for one in made]
            shares += [one.weight for one in made]
        if measured:
            run.roundings.append(sums.pop_roundings() / (1.0 if scale is None else scale.value))
        norm, skipped = recipe.apply(sums.pop(parameters), masters, optimizers, update,
                                     recipe.factor(start.steps + update), scale)
        if norm is not None:
            run.gradient_norms.append(norm)
        if skipped:
            run.skipped.add(start.steps + update)
        reference.copy_masters()
        with torch.no_grad():
            for name, copy in copies.items():
                copy.copy_(parameters[reference.owners[name]])
        run.end_step(losses, shares, recipe.trajectory, whole)
    run.state = reference.state()
    run.tensors = tensors()
    return run


def asynchronous_oracle(model: Model, batches: Iterable[Batch], recipe: TrainingRecipe, partition: Sequence[int],
                        update_every: int = 1, drained_at: Collection[int] = (),
                        version_of: Versions | None = None, widths: Sequence[int] | None = None,
                        start: InitialState = FROM_SCRATCH, known: int | None = None,
                        turn: Turn | None = None) -> ReferenceRun:
    """Train as an asynchronous pipeline does, in one sequential program.

    An update of a stage applies the mean gradient of ``update_every`` microbatches on each of its replicas. A step,
    which has one loss, ends with the microbatch at which every stage has just made an update. A tied weight follows the
    stage that owns it: its versions, and which microbatches make an update.

    Args:
        update_every: k, microbatches per update and replica.
        drained_at: microbatches, counted over all of the run, before which the pipeline was empty (evaluation, a
            checkpoint, a new call of ``train``). Incomplete updates and the incomplete step are made from the
            microbatches there are; later microbatches see the latest version at every stage, as the pipeline fills.
        version_of: the version of every microbatch; that of PipeDream by default.
        widths: replicas per stage, one by default.
        start: the state to begin with.
        known: microbatches of which ``version_of`` knows the version; None: it knows that of all.
        turn: the order in which a replica adds the gradients of its microbatches, if it is another than theirs.
    """
    version_of = version_of or version_rule(RegisteredSchedule.DEFAULT_ASYNCHRONOUS)
    precision = recipe.precision
    assert not precision.dynamic, "without a flush a loss scale is fixed"
    reference = ReferenceModel(model, recipe.seed, partition, widths or [1] * len(partition), precision, recipe.device)
    sums = GradientSums(reference.stage_of, reference.owners, reference.widths, turn)
    layers = _CallInside(reference.layers)
    stages = [StageVersions({name: p for name, p in reference.masters.items() if reference.stage_of[name] == s},
                            recipe, update_every, width, width / reference.widths[0], start,
                            {name: p.dtype for name, p in reference.parameters.items()},
                            0.0 if recipe.extrapolation is None else
                            mean_delay(version_of, s, reference.widths, update_every, known))
              for s, width in enumerate(reference.widths)]
    reference.load(start.tensors, {name: factor for stage in stages if stage.extrapolation is not None
                                   for name, factor in stage.extrapolation.factors.items()})
    for stage in stages:
        stage.keep_version()
    round_of_all = update_every * math.lcm(*reference.widths)
    run, empty = ReferenceRun(), start.microbatches  # the microbatch before which the pipeline was last empty
    losses: list[Tensor] = []  # of the step that is not complete yet
    weights: list[float | None] = []  # likewise

    def complete(ending: bool = False) -> None:
        """Make the updates and the step that have all their microbatches; with ``ending``, also incomplete ones."""
        for stage in stages:
            if stage.seen == stage.span or (ending and stage.seen):
                step = start.steps + len(run.losses)
                if not stage.update(sums.pop(stage.parameters), step):
                    run.skipped.add(step)
        if len(losses) == round_of_all or (ending and losses):
            run.end_step(losses, weights, recipe.trajectory)
            losses.clear()
            weights.clear()

    stream = (fields for batch in batches for fields in _microbatches(batch, recipe.microbatches, recipe.device))
    for i, fields in enumerate(islice(stream, start.begun, None), start.microbatches):
        if i in drained_at:
            complete(ending=True)
            empty = i
            for stage in stages:
                stage.first = stage.latest
        leaves: dict[str, Tensor] = {}
        for s, stage in enumerate(stages):
            leaves |= stage.leaves(version_of(i - empty, s, reference.widths, update_every))
        leaves |= {copy: leaves[owner].detach().clone().requires_grad_() for copy, owner in reference.owners.items()}
        used_weights = {f"layers.{layer}.{own}": leaves[name] for layer, used in enumerate(reference.names)
                   for own, name in used.items()}
        key = (recipe.seed, i // update_every, i % update_every)
        weights.append(_weigh(model, reference.layers[-1], fields, recipe.labels))

        def microbatch(fields: Batch = fields, key: tuple[int, int, int] = key, number: int = i,
                       since: int = i - empty, leaves: Mapping[str, Tensor] = leaves) -> Tensor:
            loss = _forward(model, fields, lambda at, inputs: layers.layers[at](*inputs), key,
                            partial(recipe.compress, number, since), precision)
            recipe.backward(loss, leaves.values(), update_every, stages[-1].scale, weights[-1])
            return loss.detach()

        with reference.replica(i - empty):
            losses.append(functional_call(layers, used_weights, (microbatch,), tie_weights=False))
        sums.add(i - empty, {name: leaf.grad for name, leaf in leaves.items()})
        for stage in stages:
            stage.seen += 1
            stage.labels += weights[-1] or 0
        complete()
    complete(ending=True)
    run.state = reference.state()
    run.tensors = reference.checkpoint_tensors()
    for stage in stages:
        run.tensors |= optimizer_tensors(stage.optimizers, stage.parameters)
        if stage.extrapolation is not None:
            run.tensors |= stage.extrapolation.checkpoint_tensors()
    return run


def evaluate_oracle(model: Model, state: Mapping[str, Tensor], batches: Iterable[Batch], microbatches: int,
                    precision: ReferencePrecision = FP32) -> float:
    """Return the mean loss of a model with the given weights over all samples, or labels, in evaluation mode."""
    reference = ReferenceModel(model, 0, [len(model)], [1], precision)
    reference.load({f"model.{name}": value for name, value in state.items()})
    layers = [layer.eval() for layer in reference.layers]
    total, samples = 0.0, 0.0
    with torch.no_grad():
        for batch in batches:
            for fields in _microbatches(batch, microbatches):
                size = _weigh(model, layers[-1], fields, model.labels)
                size = len(next(iter(fields.values()))) if size is None else size
                loss = _forward(model, fields, lambda i, inputs: layers[i](*inputs), (0, 0, 0), precision=precision)
                total, samples = total + (float(loss) * size if size else 0.0), samples + size
    return total / (samples or 1)


class _CallInside(nn.Module):
    """A module that calls its argument, so that ``functional_call`` holds other weights in the layers meanwhile.

    Backward must run inside the call, too: a layer that checkpoints itself recomputes its forward there.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, function: Callable[[], Tensor]) -> Tensor:
        return function()


@dataclass
class _Run:
    """The forward of a microbatch, or of a slice of it: its loss, how much that counts; of a slice the leaves that it
    began with, and what it has carried on.

    ``told`` tells the layers of the slice, as in its forward.
    """

    loss: Tensor
    weight: float | None
    past: dict[str, Tensor] = field(default_factory=dict)
    made: dict[str, Tensor] = field(default_factory=dict)
    told: Callable[[], AbstractContextManager[None]] = nullcontext


def _run_slices(model: Model, reference: ReferenceModel, fields: Batch, key: tuple[int, int, int],
                recipe: TrainingRecipe) -> list[_Run]:
    """Run the slices of a microbatch forward, in order, each as a graph of its own. They count by their labels, or
    share one microbatch's loss."""
    cut = {name: tensor.tensor_split(recipe.slices, dim=1) for name, tensor in fields.items()}
    device = next(iter(fields.values())).device.type
    assert model.labels is not None, "slices count by their labels"
    counts = [_weigh(model, reference.layers[-1], {model.labels: part}, model.labels) or 0.0
              for part in cut[model.labels]]
    whole = 1.0 if recipe.labels is not None else sum(counts) or 1.0
    runs: list[_Run] = []
    lengths = [part.shape[1] for part in cut[model.labels]]
    for j, start in enumerate(accumulate(lengths[:-1], initial=0)):
        past = {name: tensor.detach().requires_grad_(tensor.requires_grad)
                for name, tensor in (runs[-1].made if runs else {}).items()}
        made: dict[str, Tensor] = {}
        tensors = recipe.precision.fields({name: parts[j] for name, parts in cut.items()})
        for i, layer in enumerate(model.layers):
            aware = SliceAware(reference.layers[i])
            _seed(seed_of(*key, i) if aware.by_element else seed_of(*key, j, i))
            names = [f"{layer.name}/{name}" for name in layer.carried or ()]
            keywords = {"carried": tuple(past[name] for name in names if j)} if names else {}
            with aware.told(start, sum(lengths)):
                tensors |= recipe.precision.outputs(layer.outputs, partial(
                    reference.layers[i], *(tensors[name] for name in layer.inputs), **keywords), device, names)
            made |= {name: tensors.pop(name) for name in names}
        runs.append(_Run(tensors[LOSS], counts[j] / whole, past, made, partial(
            SliceAware(nn.ModuleList(reference.layers)).told, start, sum(lengths))))
    return runs


def _forward(model: Model, fields: Batch, call: Callable[[int, list[Tensor]], object],
             key: tuple[int, int, int], compress: Callable[[int, dict[str, Tensor]], None] = lambda *_: None,
             precision: ReferencePrecision = FP32) -> Tensor:
    """Run all layers in order, each under its own seed, and return the loss."""
    tensors, device = precision.fields(fields, model.exact), next(iter(fields.values())).device.type
    for i, layer in enumerate(model.layers):
        compress(i, tensors)
        _seed(seed_of(*key, i))
        arguments = [tensors[name] for name in layer.inputs]
        tensors |= precision.outputs(layer.outputs, partial(call, i, arguments), device)
    return tensors[LOSS]


def _seed(seed: int) -> None:
    """Seed the default generators.

    Without CUDA ``torch.manual_seed`` also formats the caller's stack: a quarter of an oracle's time on a small model.
    """
    torch.default_generator.manual_seed(seed)
    accelerator.seed_all(seed)


def _microbatches(batch: Batch, microbatches: int, device: torch.device | str = "cpu") -> Iterator[dict[str, Tensor]]:
    """Cut a batch; in an evaluation it may have fewer samples, or some microbatches a sample more than others."""
    parts = {name: tensor.to(device).tensor_split(min(microbatches, len(tensor))) for name, tensor in batch.items()}
    for part in zip(*parts.values(), strict=True):
        yield dict(zip(parts, part, strict=True))


def _weigh(model: Model, last: nn.Module, fields: Batch, name: str | None) -> float | None:
    """Return how much the labels in a field of a microbatch count in the loss of the last layer; None without."""
    if name is None:
        return None
    loss = next((part for part in last.modules() if isinstance(part, (nn.CrossEntropyLoss, nn.NLLLoss))),
                nn.CrossEntropyLoss())
    counts = (labels := fields[name]) != loss.ignore_index
    if model.label_weights is not None:
        counts = model.label_weights(labels)
    elif loss.weight is not None and not labels.is_floating_point():
        counts = counts * loss.weight.double()[labels * counts]
    return float(counts.sum(dtype=torch.float64))
