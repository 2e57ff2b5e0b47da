"""A stage: runs its layers forward and backward on one microbatch."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from vpipe.errors import RunError, UserError, VpipeError
from vpipe.model.layer import Model
from vpipe.model.split import StageSpec, alive
from vpipe.runtime.activations import DropoutKey, Graph, Held, Record, Span
from vpipe.runtime.layer_errors import Computed, backward_error, find_layer, hint_of, may_repeat, one_of
from vpipe.runtime.layers import Layers, collect
from vpipe.runtime.precision import FP32, Precision
from vpipe.runtime.side_effects import Before, SideEffects
from vpipe.runtime.weight_grad_store import WeightHalf
from vpipe.runtime.weight_versions import Weights


class Stage:
    """The layers of one stage on one device.

    Args:
        model: the whole model; only this stage's layers are built.
        spec: which layers, which tensors come and go.
        seed: the run's seed.
        device: where to compute.
        recomputed: the numbers, in the model, of the layers whose activations are dropped in forward and recomputed
            in backward.
        precision: in which numbers they compute.
    """

    def __init__(self, model: Model, spec: StageSpec, *, seed: int, device: torch.device,
                 recomputed: Collection[int], precision: Precision = FP32) -> None:
        assert set(recomputed) <= set(spec.layers), "they are the stage's own"
        self.spec, self.device, self.precision = spec, device, precision
        self._layers = Layers(model, spec, seed=seed, device=device, precision=precision)
        self.modules, self.layer_names = self._layers.modules, self._layers.names
        self.weights, self.borrowed = collect(self.modules, self.layer_names, spec.borrowed,
                                              self._layers.round_weights())
        self._frozen = [(f"{self.layer_names[i]}.{name}", parameter) for i, module in self.modules.items()
                        for name, parameter in module.named_parameters() if not parameter.requires_grad]
        self._spans = list(self._cut(model, recomputed))
        self.recomputes = bool(recomputed)
        self._shared = [(weights, names) for weights in (self.weights, *self.borrowed.values())
                        if (names := self._in_several_spans(weights))]

    def _cut(self, model: Model, recomputed: Collection[int]) -> Iterator[Span]:
        """The longest runs of layers that are all kept, or all recomputed."""
        start, stop = self.spec.layers.start, self.spec.layers.stop
        for again, run in groupby(self.spec.layers, lambda layer: layer in recomputed):
            here = list(run)
            modules = {self.layer_names[i]: self.modules[i] for i in here}
            yield Span(tuple((i, model.layers[i], self.modules[i]) for i in here),
                       self.spec.inputs if here[0] == start else alive(model, here[0]),
                       self.spec.outputs if here[-1] == stop - 1 else alive(model, here[-1] + 1),
                       again, SideEffects(modules, again, (self.weights, *self.borrowed.values())))

    def _in_several_spans(self, weights: Weights) -> list[str]:
        """Parameters tied across spans: one backward of a whole graph would sum their parts first."""
        spans: dict[nn.Module, set[int]] = defaultdict(set)  # a module may stand in several, too
        for number, span in enumerate(self._spans):
            for _, _, module in span.layers:
                for part in module.modules():
                    spans[part].add(number)
        return [name for name, slots in weights.slots.items()
                if len(set[int]().union(*(spans[part] for part, _ in slots))) > 1]

    @property
    def changes_modules(self) -> bool:
        """Whether a forward may change what modules keep: one of the first, which show it, or a later one."""
        return any(span.effects.may_share for span in self._spans)

    @property
    def summed_late(self) -> list[str]:
        """Own parameters whose gradient is not there before a whole backward is done."""
        return [name for weights, names in self._shared if weights is self.weights for name in names]

    def forward(self, received: Sequence[Tensor], fields: Mapping[str, Tensor], key: DropoutKey,
                pins: dict[int, int], *, split: bool = False) -> tuple[list[Tensor], Record]:
        """One microbatch forward.

        Args:
            received: the tensors of ``spec.inputs``; those that want a gradient require it.
            fields: the batch fields this stage reads.
            key: what dropout depends on.
            pins: the weight versions in use, kept for the backward.
            split: whether the backward will come in two halves. Without it they work, but little can wait.

        Returns:
            The tensors of ``spec.outputs``, detached, requiring a gradient where backward needs one,
            and the record for :meth:`backward`, or :meth:`backward_input` and :meth:`backward_weight`.
        """
        tensors = dict(zip(self.spec.inputs, received, strict=True))
        record = Record([], self._layers.fields_read(fields), key, pins, split)
        with self._layers.undisturbed():
            for span in self._spans:
                held, tensors = self._forward_span(span, {name: tensors[name] for name in span.inputs}, record)
                record.held.append(held)
        return [_in_memory(tensors[name]) for name in self.spec.outputs], record

    @torch.no_grad()
    def evaluate(self, received: Sequence[Tensor], fields: Mapping[str, Tensor], key: DropoutKey) -> list[Tensor]:
        """One microbatch forward with the latest weights; nothing is kept. As :meth:`forward` otherwise."""
        tensors = dict(zip(self.spec.inputs, received, strict=True))
        record = Record([], self._layers.fields_read(fields), key, {}, split=False)
        with self._layers.undisturbed():
            for span in self._spans:
                tensors = self._layers.run(span, {name: tensors[name] for name in span.inputs}, record)
        return [_in_memory(tensors[name]) for name in self.spec.outputs]

    def _forward_span(self, span: Span, inputs: dict[str, Tensor], record: Record) -> tuple[Held, dict[str, Tensor]]:
        with span.effects.watched():
            if span.recomputed:
                before = span.effects.before()
                outputs = self._without_graph(span, inputs, record, before)
                held = Held(inputs, None, span.effects.after(before), [t._version for t in inputs.values()])
            else:
                graph, outputs = self._with_graph(span, inputs, record)
                held = Held(inputs, graph)
            if span.effects.may_share:
                outputs = {name: span.effects.apart(t) for name, t in outputs.items()}
        return held, {name: t.detach().requires_grad_(t.requires_grad) for name, t in outputs.items()}

    def _without_graph(self, span: Span, inputs: Mapping[str, Tensor], record: Record,
                       before: Before) -> dict[str, Tensor]:
        """The outputs of a span that is recomputed.

        With a graph that saves nothing, not without one: some layers compute other numbers then (nn.LSTM does). A layer
        that walks it within its forward, for gradients of its own, gets one that saves what it needs.
        """
        if not span.effects.walks_its_graph:
            try:
                with saved_tensors_hooks(_save_nothing, _unused):
                    return self._layers.run(span, inputs, record)
            except RunError as error:
                if not isinstance(error.__cause__, _NothingSavedError):
                    raise
            span.effects.walks_its_graph = True
            span.effects.undo(before)
        return self._layers.run(span, inputs, record)

    def _with_graph(self, span: Span, inputs: Mapping[str, Tensor], record: Record,
                    again: bool = False) -> tuple[Graph, dict[str, Tensor]]:
        half = WeightHalf() if record.split else None
        first = None if again else span.effects.first(inputs)
        outputs = self._layers.run(span, inputs, record, half, again)
        if first is not None:
            if span.effects.undone(first):
                half = WeightHalf() if record.split else None
                outputs = self._layers.run(span, inputs, record, half, again=True)
            span.effects.after(first.before)
        return Graph({name: get_gradient_edge(t) for name, t in outputs.items() if t.requires_grad}, half), outputs

    def backward(self, record: Record, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """One microbatch backward.

        Args:
            record: what :meth:`forward` returned; used up.
            gradients: of the outputs that require one.

        Returns:
            The gradients of the inputs that require one, in order. Parameters accumulate theirs.
        """
        if record.split:
            returned = self.backward_input(record, gradients)
            self.backward_weight(record)
            return returned
        with self._added_at_once():
            for span in reversed(self._spans):
                gradients, _ = self._backward_span(span, record, gradients)
        return self._returned(gradients)

    def backward_input(self, record: Record, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """The first half of a backward: as :meth:`backward`, but no parameter's gradient is touched.

        Args:
            record: what :meth:`forward` returned. Holds afterwards what the weight half needs and nothing else.
            gradients: of the outputs that require one; not to be changed before the weight half is done.
        """
        for span in reversed(self._spans):
            now: list[tuple[nn.Parameter, Tensor]] = []
            with ExitStack() as stack:
                for weights in (self.weights, *self.borrowed.values()):
                    stack.enter_context(weights.kept_apart(now))
                gradients, half = self._backward_span(span, record, gradients)
            half = WeightHalf() if half is None else half
            half.end(now)
            record.halves.append(half)
        record.fields = {}
        return self._returned(gradients)

    def backward_weight(self, record: Record) -> None:
        """The second half: parameters accumulate their gradients, as a whole backward at this place would have it.

        Args:
            record: after :meth:`backward_input`; used up.
        """
        with self._added_at_once(halves=True):
            while record.halves:
                try:
                    record.halves.pop(0).accumulate()
                except Exception as error:
                    layers = one_of((i, layer) for span in self._spans for i, layer, _ in span.layers)
                    raise RunError(f"the weight gradients of {layers} raised {type(error).__name__}: {error}",
                                   hint=hint_of(error)) from error

    @contextmanager
    def _added_at_once(self, halves: bool = False) -> Iterator[None]:
        """Add what spans and halves contribute to a parameter once, as one backward of a whole graph does."""
        with ExitStack() as stack:
            for weights, names in self._shared:
                stack.enter_context(weights.added_at_once(names))
            if halves:
                stack.enter_context(self.weights.with_hooks())
            yield

    def renew_leaves(self, versions: bool) -> None:
        """Part the parameters in use from those that the modules were built with, where others will take their place.

        Args:
            versions: whether the stage will have several. Borrowed weights are always replaced.
        """
        for weights in (*([self.weights] if versions else []), *self.borrowed.values()):
            weights.renew()

    def check_frozen(self) -> None:
        """Refuse to train on when a parameter wants a gradient that did not when the stage was built."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UserError(f"'{name}' requires a gradient now, but did not when the pipeline was built: no "
                                "optimizer steps it",
                                hint="save, and load into a pipeline that is built with what is trained from here on")

    def recompute(self, record: Record) -> None:
        """What was dropped, ahead of the backward; without this, the backward recomputes."""
        if not self.recomputes:
            return
        self._use(record.pins)
        for span, held in zip(self._spans, record.held, strict=True):
            if held.graph is None:
                held.graph = self._again(span, held, record)

    def _returned(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        return [_in_memory(gradients[name]) for name in self.spec.inputs if name in gradients]

    def _backward_span(self, span: Span, record: Record,
                       gradients: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], WeightHalf | None]:
        held = record.held.pop()
        graph = held.graph or self._again(span, held, record)
        names = [name for name in graph.edges if name in gradients]
        if names:
            if graph.half is not None:
                graph.half.begin()
            try:
                with span.effects.watched_backward(self.weights.pinned):
                    torch.autograd.backward([graph.edges[name] for name in names], [gradients[name] for name in names])
            except VpipeError:
                raise
            except Exception as error:
                found = self._at_fault(span, held, record, gradients, error) if may_repeat(error) else None
                raise backward_error(span, gradients, error, found) from error
        return {name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
                for name, leaf in held.inputs.items() if leaf.requires_grad}, graph.half

    def _at_fault(self, span: Span, held: Held, record: Record, gradients: Mapping[str, Tensor],
                  error: Exception) -> Computed | None:
        """Return the layer whose backward raised an error, found by repeating the span's forward and backward."""
        computed: list[Computed] = []
        leaves = [*held.inputs.values(), *(p for _, _, module in span.layers for p in module.parameters())]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were shown
            try:
                with self._layers.noting(computed), span.effects.unchanged():
                    graph = self._again(span, held, record)
            except Exception:
                return None  # it raises an error of its own now, so what it depends on has changed
            return find_layer(computed, graph.edges, gradients, leaves, error)

    def _again(self, span: Span, held: Held, record: Record) -> Graph:
        """The span's forward again, with a graph: same inputs, weights, random numbers and buffers."""
        if held.versions and held.versions != [t._version for t in held.inputs.values()]:
            raise UserError(f"layer '{span.layers[0][1].name}' is recomputed, but its input was changed in place by a "
                            "later layer, to which it was passed on",
                            hint="use the operation that is not in place there (inplace=False)")
        for leaf in held.inputs.values():
            leaf._backward_hooks = None  # of the graph that was dropped; the layers register theirs again
        try:
            with self._layers.undisturbed(), span.effects.as_before(held.before):
                graph, _ = self._with_graph(span, held.inputs, record, again=True)
        except RunError as error:
            error.what = f"recomputing for a backward, {error.what}"
            raise
        return graph

    def evaluating(self) -> AbstractContextManager[None]:
        """Every module in evaluation mode, and back to the mode it was in."""
        return self._layers.evaluating()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of the stage's layers, as ``"<layer>.<parameter>"``; a shared one under each of its names."""
        for i, module in self.modules.items():
            yield from module.named_parameters(self.layer_names[i], remove_duplicate=False)

    def state(self) -> dict[str, Tensor]:
        """Parameters (latest version) and buffers of the stage's layers; a tied parameter only where it is owned.

        Of rounded weights the masters; what else was rounded is given in fp32.
        """
        self.use_latest()
        state = {f"{self.layer_names[i]}.{name}": value for i, module in self.modules.items()
                 for name, value in module.state_dict(keep_vars=True).items() if name not in self._layers.ties[i]}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise UserError(f"'{name}' in the state of its layer is {type(value).__name__}, not a tensor",
                                hint="let the layer keep a buffer instead of an extra state")
        rounding = self._layers.rounds_weights
        if rounding is not None:
            masters = dict(zip(map(id, self.weights.leaves()), self.weights.masters.values(), strict=True))
            state = {name: masters.get(id(value), rounding.widened(value)) for name, value in state.items()}
        return {name: value.detach() for name, value in state.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy in what :meth:`state` gave, perhaps of another stage; to be called while nothing is in flight."""
        self.use_latest()
        for i, module in self.modules.items():
            prefix = f"{self.layer_names[i]}."
            module.load_state_dict({name.removeprefix(prefix): value for name, value in state.items()
                                    if name.startswith(prefix)}, strict=False)  # ties are their owner's
        if self._layers.rounds_weights is not None:
            for name, value in self.state().items():
                value.copy_(state[name])

    def use_latest(self) -> None:
        """Point the modules to the latest weights."""
        for weights in (self.weights, *self.borrowed.values()):
            weights.use(weights.latest)

    def pin(self, borrowed: Mapping[int, int]) -> dict[int, int]:
        """Hold the own weights in use and the given versions of borrowed ones; what :attr:`Record.pins` keeps."""
        return {self.spec.index: self.weights.pin(),
                **{owner: weights.pin(borrowed[owner]) for owner, weights in self.borrowed.items()}}

    def prepare_backward(self, pins: Mapping[int, int]) -> None:
        """Let gradients accumulate for the pinned versions, and recompute (ours or a layer's own) run with them."""
        for owner, version in pins.items():
            self._weights_of(owner).begin_backward(version)
        self._use(pins)

    def _use(self, pins: Mapping[int, int]) -> None:
        for owner, version in pins.items():
            self._weights_of(owner).use(version)

    def unpin(self, pins: Mapping[int, int]) -> None:
        """Give the pinned versions back."""
        for owner, version in pins.items():
            self._weights_of(owner).unpin(version)

    def _weights_of(self, owner: int) -> Weights:
        return self.weights if owner == self.spec.index else self.borrowed[owner]


def _save_nothing(saved: Tensor) -> None:
    """What a graph that nobody will walk would keep is dropped."""


class _NothingSavedError(Exception):
    """Somebody walks a graph that has saved nothing."""


def _unused(saved: None) -> Tensor:
    raise _NothingSavedError


def _in_memory(tensor: Tensor) -> Tensor:
    """The tensor as a transfer needs it: contiguous, a lazy conjugate or negation carried out.

    Within one process tensors get the same layout, hence the same numbers.
    """
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous().requires_grad_(tensor.requires_grad)
