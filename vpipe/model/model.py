"""A model is an ordered list of layers that pass named tensors on.

A :class:`~vpipe.model.layer.Layer` holds a function that builds its module, and the names of the tensors that it reads
and writes; nothing is built until a rank needs it. Names work like variables in a program: a later layer may write a
name again (``h`` in, ``h`` out), and a name stays readable until then, so a tensor may skip any number of layers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.arguments import Arguments, shown
from vpipe.description.cut import LayerNames, StageSpec, balanced, stage_specs
from vpipe.errors import Problem, UserError, counted, nearest
from vpipe.model.layer import (
    LOSS,
    Layer,
    check_alike,
    check_module,
    kind_of,
    parameter_of,
    set_parameter,
    share_modules,
    split_target,
    without_random_values,
    without_values,
)
from vpipe.model.sequential import (
    Loss,
    check_children,
    check_sequential,
    check_unchanged,
    copy_module,
    is_mean_of_labels,
    shared_modules,
    shared_parameters,
)
from vpipe.model.structure import ADDRESS, structure


class Model:
    """Layers in order, and the names of the fields of a batch (a dict of tensors, dimension 0 = samples).

    The last layer must write the tensor called ``loss``: the mean loss of the samples it was given, a scalar.

    Args:
        labels: a field that the last layer reads, if the loss is a mean over its entries, of which samples have
            different numbers. An evaluation is then the mean over all of them. In training an update weights its
            microbatches alike, unless :class:`~vpipe.Update` says ``per_token_loss``.
        label_weights: labels of a microbatch -> the weight of each in that mean, 0 where it is left out. None: as
            torch's loss in the last layer has them, which is looked at; any other loss is refused then.
    """

    exact: frozenset[str] = frozenset()
    """Fields that only a loss in fp32 reads: ``bf16_pure`` does not round them."""

    unread: frozenset[str] = frozenset()
    """Fields that a batch may not have: its layers, made for batches without them, would ignore them."""

    NO_LABEL = -100
    """Label of a token after which there is none to learn."""

    def __init__(self, layers: Iterable[Layer], batch: Sequence[str], labels: str | None = None,
                 label_weights: Callable[[Tensor], Tensor] | None = None) -> None:
        self.layers, self.batch = _checked(layers, batch)
        self.labels, self.label_weights = labels, label_weights
        self._check: Callable[[], object] = tuple  # that what the layers copy is what it was when they were made
        problems = list(_problems(self.layers, self.batch))
        if (labels is not None or label_weights is not None) and (
                labels not in self.batch or labels not in self.layers[-1].inputs):
            problems.append(Problem(f"the labels of the model are {shown(labels)}, which is no field of the batch that "
                                    "the last layer reads", nearest(str(labels), list(self.batch))))
        if problems:
            raise UserError.all_of(problems)

    def __len__(self) -> int:
        return len(self.layers)

    @classmethod
    def sequential(cls, modules: nn.Sequential, loss: Loss) -> Model:
        """Return an ``nn.Sequential`` as a model of one layer per child; a batch is ``input`` and ``target``.

        A pipeline trains copies of the children and of the loss, as they are when it is built; ``modules`` stays
        untrained: ``modules.load_state_dict(pipe.state_dict())``. ``loss(output, target)`` joins the last child; a
        function is not copied (docs/given.md). The targets are the labels of the model, if the loss is
        ``nn.CrossEntropyLoss`` or ``nn.NLLLoss``.
        A parameter that several children share, or a child that stands in several places, becomes tied. A module with
        buffers that stands in several places (a batch normalisation) must have them all in one stage. Raises UserError
        when they are something else; there is no child; one is lazy or scripted; a function in it, or the loss, holds a
        module or a tensor of the ``nn.Sequential``; the loss has parameters to train.
        """
        check_sequential(modules, loss)
        children = {name: child for name, child in modules._modules.items() if child is not None}  # repeated ones too
        if not children:
            raise UserError("the nn.Sequential has no children", hint="give it at least one module")
        for name, child in children.items():
            check_module(name, child)
        check_children(modules, children, loss)
        *front, last = children
        ties, shared = shared_parameters(children), shared_modules(children)
        sources = dict(zip(children, ("input", *["h"] * len(front)), strict=True))
        layers = [Layer(name, partial(copy_module, children[name]), (sources[name],), ("h",), ties[name], shared[name])
                  for name in front]
        layers.append(Layer(last, partial(copy_module, children[last], loss), (sources[last], "target"),
                            (LOSS, "output"), ties[last], shared[last]))
        model = cls(layers, batch=("input", "target"), labels="target" if is_mean_of_labels(loss) else None)
        model.exact = frozenset({"target"})
        model._check = partial(check_unchanged, modules, children, ties, shared)
        return model

    def materialize(self, seed: int = 0) -> nn.ModuleDict:
        """Return the whole model on one device, tied parameters shared: for references, export, inference."""
        given = Arguments()
        seed = given.integer("seed", seed, least=0)
        given.check()
        modules = {layer.name: layer.materialize(i, seed) for i, layer in enumerate(self.layers)}
        share_modules(modules, {layer.name: layer.shared for layer in self.layers})
        for layer in self.layers:
            for own, target in layer.ties.items():
                owner, parameter = split_target(target, self.layers)
                before = parameter_of(layer.name, modules[layer.name], own)
                shared = parameter_of(owner, modules[owner], parameter)
                check_alike({f"{layer.name}.{own}": kind_of(before), target: kind_of(shared)})
                set_parameter(modules[layer.name], own, shared)
        return _module_dict(modules)

    def with_weights(self, weights: Mapping[str, Tensor], seed: int, draw: bool = False,
                     layers: range | None = None) -> nn.ModuleDict:
        """Return layers of the model with these weights, in eval mode.

        Args:
            weights: of all their parameters and buffers, ``<layer>.<parameter>``, tied ones under their owner's name.
            seed: of the run, for what its layers draw beside the weights.
            draw: whether they draw at all; without, building is faster.
            layers: their numbers; None for all.
        """
        here = {number: self.layers[number] for number in (range(len(self)) if layers is None else layers)}
        with nullcontext() if draw else without_random_values():
            modules = {layer.name: layer.materialize(number, seed) for number, layer in here.items()}
        share_modules(modules, {layer.name: layer.shared for layer in here.values()})
        parameters: dict[str, nn.Parameter] = {}
        for layer in here.values():
            module = modules[layer.name]
            module.load_state_dict({name: weights[f"{layer.name}.{name}"] for name in module.state_dict()
                                    if name not in layer.ties}, strict=False)
            for own in layer.ties:
                owner = self.ties[f"{layer.name}.{own}"]
                if owner not in parameters:  # its layer is not here
                    parameters[owner] = nn.Parameter(weights[owner])
                set_parameter(module, own, parameters[owner])
            parameters |= {f"{layer.name}.{name}": parameter for name, parameter in module.named_parameters()}
        return _module_dict(modules).eval()

    def outline(self) -> dict[str, Tensor]:
        """Return the tensors of the state by ``<layer>.<parameter or buffer>``, tied ones once: for shapes and dtypes.

        They have no values, unless a layer reads some when it is built.
        """
        return {f"{layer.name}.{name}": tensor for number, layer in enumerate(self.layers)
                for name, tensor in layer.outline(number).state_dict().items() if name not in layer.ties}

    def digest(self, batch: Mapping[str, Tensor], structures: Sequence[str] | None = None) -> str:
        """Return sixteen characters that identify the model and the fields of its samples, whatever their number.

        Args:
            batch: a microbatch; dimension 0 counts samples. An empty one: only the layers count.
            structures: of the layers (:func:`~vpipe.model.structure.structure`), where they are known already.
        """
        structures = [structure(layer) for layer in self.layers] if structures is None else structures
        text = [f"{layer.name}: {layer.inputs} -> {layer.outputs}, {dict(layer.ties)}\n{ADDRESS.sub('', what)}"
                for layer, what in zip(self.layers, structures, strict=True)]
        text += [f"{name}: {batch[name].dtype} {tuple(batch[name].shape[1:])}" for name in self.batch if batch]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def index(self, name: str) -> int:
        """Return the position of the layer called ``name``. Raises UserError when there is none."""
        names = [layer.name for layer in self.layers]
        if name not in names:
            raise UserError(f"no layer is called {shown(name)}", hint=nearest(str(name), names))
        return names.index(name)

    @cached_property
    def names(self) -> tuple[LayerNames, ...]:
        """What every layer reads, writes and borrows; of ties of ties the owner at the end."""
        ties = {f"{layer.name}.{own}": target for layer in self.layers for own, target in layer.ties.items()}

        def owner_of(target: str) -> tuple[int, str]:
            while target in ties:
                target = ties[target]
            return self.index(split_target(target, self.layers)[0]), target

        return tuple(LayerNames(layer.inputs, layer.outputs, {
            f"{layer.name}.{own}": owner_of(target) for own, target in layer.ties.items()}) for layer in self.layers)

    @cached_property
    def ties(self) -> Mapping[str, str]:
        """Tied parameters: ``<layer>.<parameter>`` -> that of the layer that owns it, at the end of ties of ties."""
        return {own: target for layer in self.names for own, (_, target) in layer.borrows.items()}

    # -- stages ----------------------------------------------------------------------------------------

    def split(self, partition: Sequence[int]) -> tuple[StageSpec, ...]:
        """Return the stages when stage s takes ``partition[s]`` layers.

        Raises UserError for a partition that does not fit the model, or separates layers that share a module.
        """
        self._check()
        if len(partition) > len(self):
            raise UserError(f"{len(partition)} stages, but the model has only {counted(len(self), 'layer')}",
                            hint=f"use at most {counted(len(self), 'stage')}")
        if any(n < 1 for n in partition):
            raise UserError(f"partition {list(partition)} has an empty stage",
                            hint="give every stage at least one layer")
        if (left := len(self) - sum(partition)) != 0:
            raise UserError(f"partition {list(partition)} adds up to {counted(sum(partition), 'layer')}, but the model "
                            f"has {len(self)}",
                            hint=f"change an entry by {left:+d}, so that they add up to {len(self)}")
        specs = stage_specs(self.names, self.batch, partition)
        stage_of = {self.layers[number].name: spec.index for spec in specs for number in spec.layers}
        for name, path, target in ((layer.name, *shared) for layer in self.layers for shared in layer.shared.items()):
            owner = next(other for other in stage_of if f"{target}.".startswith(f"{other}."))
            if stage_of[owner] != stage_of[name]:
                mine = f"'{name}.{path}'" if path else f"layer '{name}'"
                raise UserError(f"{mine} (stage {stage_of[name]}) is the same module as '{target}' (stage "
                                f"{stage_of[owner]}) and has buffers, which two stages cannot share",
                                hint=f"choose a partition that has the layers from '{owner}' to '{name}' in one "
                                     "stage, or give each place a module of its own")
        return specs

    @cached_property
    def layer_specs(self) -> tuple[StageSpec, ...]:
        """Every layer as a stage of its own, whatever modules layers share."""
        return stage_specs(self.names, self.batch, [1] * len(self))

    def crossing(self, cut: int) -> tuple[str, ...]:
        """Return the tensors that cross the cut before layer ``cut``: written before it, and read next after it."""
        return self.layer_specs[cut].inputs if cut < len(self) else ()

    def parameter_counts(self) -> list[int]:
        """Count the parameters of each layer, a tied one once, where it is owned, without memory for them."""
        return [sum(p.numel() for name, p in module.named_parameters() if name not in layer.ties)
                for layer, module in self._without_values()]

    def _without_values(self) -> Iterable[tuple[Layer, nn.Module]]:
        for layer in self.layers:
            with without_values():
                module = layer.make()
            yield layer, module

    def _passes(self) -> list[int]:
        """Count each layer's parameters once per pass of a microbatch: forward; back to the input, unless nothing up to
        there is trained; and for the gradients of those that are."""
        passes, trains = [], False
        for layer, module in self._without_values():
            parameters = dict(module.named_parameters())
            trains = trains or any(p.requires_grad for p in parameters.values())
            passes.append(sum(p.numel() * (1 + trains + p.requires_grad) for name, p in parameters.items()
                              if name not in layer.ties))
        return passes

    def parameter_count(self) -> int | None:
        """Return the number of parameters; None where a layer cannot be built without values (it reads them)."""
        try:
            with torch.random.fork_rng(devices=[]):
                return sum(self.parameter_counts())
        except Exception:  # of a user's layer; where it is an error with values, too, building the pipeline reports it
            return None

    def balanced(self, stages: int, costs: Sequence[float] | None = None) -> tuple[int, ...]:
        """Return the partition into so many stages with the smallest possible heaviest stage.

        Args:
            costs: of the layers; when None their parameters, of which one that is not trained counts two thirds,
                and a third where nothing before it is, because it needs fewer passes.

        Raises:
            UserError: there are more stages than layers.
        """
        return tuple(balanced(self._passes() if costs is None else costs, stages))


def _module_dict(modules: Mapping[str, nn.Module]) -> nn.ModuleDict:
    whole = nn.ModuleDict()
    whole._modules.update(modules)  # layer names may hold dots, which add_module refuses
    return whole


def _checked(layers: Any, batch: Any) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """Return both arguments of a model, each as a tuple. Raises UserError when they are something else."""
    given = Arguments()
    hint = "give a list of layers: Model([Layer('embed', lambda: Embed(), ...), ...], batch=('ids', 'labels'))"
    if isinstance(layers, nn.Sequential):
        given.refuse("the layers of the model are an nn.Sequential", "write Model.sequential(modules, loss)")
    elif isinstance(layers, (nn.Module, Tensor, str)) or not isinstance(layers, Iterable):
        given.refuse(f"the layers of the model are {shown(layers)}", hint)
    else:
        layers = tuple(layers)
        for i, layer in enumerate(layers):
            if not isinstance(layer, Layer):
                given.refuse(f"layer {i} of the model is {shown(layer)}, not a Layer", hint)
    names = given.names("the batch fields of the model", batch, "('ids', 'labels')")
    given.check()
    return layers, names


def _problems(layers: tuple[Layer, ...], batch: tuple[str, ...]) -> Iterable[Problem]:
    if not layers:
        yield Problem("the model has no layers", "give Model at least one Layer")
        return
    names = [layer.name for layer in layers]
    for name in sorted(n for n, times in Counter(names).items() if times > 1):
        yield Problem(f"two layers are called '{name}'", "give every layer a name of its own")
    taken = set(names)
    for name in names:
        for other in (name[:place] for place, sign in enumerate(name) if sign == "."):
            if other in taken:
                yield Problem(f"the name of layer '{name}' begins with that of layer '{other}' and a dot",
                              "rename one of them: '<layer>.<parameter>' must name one parameter alone")
    known = set(batch)
    unread: dict[str, str] = {}  # tensor: the layer that wrote it last
    if LOSS in known:
        yield Problem("a batch field is called 'loss'", "rename the field: 'loss' is the tensor that is minimised")
    for i, layer in enumerate(layers):
        for name in layer.inputs:
            if name not in known:
                yield Problem(f"layer '{layer.name}' reads '{name}', which no earlier layer writes and no batch holds",
                              nearest(name, sorted(known)))
            unread.pop(name, None)
        for name in layer.outputs:
            if name in unread:
                yield Problem(f"layer '{layer.name}' writes '{name}' again, and no layer reads that of "
                              f"'{unread[name]}'",
                              "give each a name of its own, or let the later layer read the one that it adds to")
            unread[name] = layer.name
            if name in batch:
                yield Problem(f"layer '{layer.name}' writes '{name}', which is a field of the batch",
                              "give the output another name")
            if name == LOSS and i != len(layers) - 1:
                yield Problem(f"layer '{layer.name}' writes 'loss' but is not the last layer",
                              "let the last layer write the loss: a pipeline starts its backward there")
        known.update(layer.outputs)
        for own, target in layer.shared.items():
            if not any(f"{target}.".startswith(earlier + ".") for earlier in names[:i]):
                yield Problem(f"layer '{layer.name}' shares '{own}' with '{target}', which is in no earlier layer",
                              "what is shared is '<earlier layer>' or '<earlier layer>.<submodule>'")
        for own, target in layer.ties.items():
            if not any(target.startswith(earlier + ".") for earlier in names[:i]):
                yield Problem(f"layer '{layer.name}' ties '{own}' to '{target}', which is in no earlier layer",
                              "a tie points to '<earlier layer>.<parameter>'")
    if LOSS not in layers[-1].outputs:
        yield Problem(f"the last layer '{layers[-1].name}' does not write 'loss'",
                      f"the layer writes {list(layers[-1].outputs)}: name one of its outputs 'loss'")
    fields = {name for layer in layers for name in layer.inputs}
    for name in batch:
        if name not in fields:
            yield Problem(f"no layer reads the batch field '{name}'", "leave it out of batch=...")
