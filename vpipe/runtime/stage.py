"""Run the layers of a stage on one microbatch: forward, backward, and recompute between them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from vpipe.description.cut import StageSpec
from vpipe.description.precision import FP32, Precision
from vpipe.errors import RunError, UserError, VpipeError
from vpipe.model.layer import LOSS, Layer, seed_of
from vpipe.model.model import Model
from vpipe.runtime.activations import (
    Record,
    Span,
    SpanActivations,
    SpanGraph,
    forward_without_activations,
    recompute_span,
)
from vpipe.runtime.label_weights import LossCheck
from vpipe.runtime.layer_errors import backward_error, describe_layers, forward_error, hint_of
from vpipe.runtime.microbatches import ForwardKey
from vpipe.runtime.saved_tensors import SavedTensors, only_ours
from vpipe.runtime.sharded_tensors import DrawnAsOnOneDevice, is_sharded
from vpipe.runtime.side_effects import Aliases, SideEffects, alias, copied_once, put
from vpipe.runtime.slices import SequenceSlice, SliceAware
from vpipe.runtime.split_backward import SplitBackwardMode
from vpipe.runtime.stage_layers import StageLayers
from vpipe.runtime.transport.transport import contiguous
from vpipe.runtime.weight_grad_store import WeightGradStore
from vpipe.runtime.weight_versions import WeightVersions, accumulate_gradient, kept_apart
from vpipe.torch_private import run_backward

NOTHING = nullcontext()
NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


class Stage(StageLayers):
    """The layers of one stage on one device, run forward and backward.

    Args:
        model, spec, seed, device, precision: see :class:`StageLayers`.
        recomputed: the numbers, in the model, of the layers whose activations are dropped in forward and recomputed
            in backward.

    Attributes:
        summed_late: the stage's own parameters whose gradient is not final before the whole backward is done.
        kept_around: inputs that another rank has had before and reads after this stage, so that no layer may change
            them in place.
        measured: whether a layer is measured by itself, before there are cuts.
        offloaded: whether the schedule may offload what a forward saves.
        counted: whether what the next forwards save is held in their records, to be counted.
        loss_checks: of the last layer, one for each of the next microbatches.
    """

    def __init__(self, model: Model, spec: StageSpec, *, seed: int, device: torch.device,
                 recomputed: Collection[int], precision: Precision = FP32) -> None:
        assert set(recomputed) <= set(spec.layers), "they are the stage's own"
        super().__init__(model, spec, seed=seed, device=device, precision=precision)
        self._autocast = None if not precision.autocasts else torch.autocast(
            device.type, precision.dtype, cache_enabled=True)
        # Some modules compute other numbers under a torch function mode: none is active where nothing is trained.
        self._splittable = {i for i, module in self.modules.items()
                            if any(p.requires_grad for p in module.parameters())
                            and not any(map(_sees_its_operation, module.modules()))}
        self._sharded = {i: DrawnAsOnOneDevice()  # type: ignore[no-untyped-call]
                         for i, module in self.modules.items() if any(map(is_sharded, module.parameters()))}
        self._weights_by_owner = {spec.index: self.weights, **self.borrowed}
        self._exact = model.exact
        self._unread: Sequence[str] = spec.fields  # of which no rounding was looked at
        self._slice_aware: dict[int, SliceAware] = {}  # by layer, of those that ran a slice
        self.loss_checks: list[LossCheck] = []
        self.kept_around: set[str] = set()
        self.measured, self.offloaded, self.counted, self._layers = False, False, False, model.layers
        self._running = 0  # the layer whose forward runs
        self._spans = list(self._cut_into_spans(model, recomputed))
        self.recomputes = bool(recomputed)
        self._shared = [(weights, names) for weights in self.all_weights if (names := self._in_several_spans(weights))]
        self.summed_late = [name for weights, names in self._shared if weights is self.weights for name in names]
        self._used_before = {name: slots[0] for weights in self.all_weights for name, slots in weights.slots.items()
                             if weights is not self.weights or name in self.summed_late}

    def use_autocast(self, dtype: torch.dtype | None) -> None:
        """Let every layer run under an autocast as a script has it around its call; that of the precision wins."""
        if not self.precision.autocasts:
            self._autocast = None if dtype is None else torch.autocast(self.device.type, dtype)

    def _cut_into_spans(self, model: Model, recomputed: Collection[int]) -> Iterator[Span]:
        """Yield the longest runs of layers that are all recomputed, or none of them."""
        start, stop = self.spec.layers.start, self.spec.layers.stop
        for dropped, run in groupby(self.spec.layers, lambda layer: layer in recomputed):
            here = list(run)
            modules = {self.layer_names[i]: self.modules[i] for i in here}
            yield Span(tuple((i, model.layers[i], self.modules[i]) for i in here),
                       self.spec.inputs if here[0] == start else model.crossing(here[0]),
                       self.spec.outputs if here[-1] == stop - 1 else model.crossing(here[-1] + 1),
                       dropped, SideEffects(modules, dropped, self.all_weights),
                       {i: tuple(f"{name} of {layer.name}" for name in layer.carried)
                        for i in here if (layer := model.layers[i]).carried})

    def _in_several_spans(self, weights: WeightVersions) -> list[str]:
        """Return the parameters tied across spans: one backward of a whole graph would sum their parts first."""
        spans: dict[nn.Module, set[int]] = defaultdict(set)  # a module may stand in several, too
        for number, span in enumerate(self._spans):
            for _, _, module in span.layers:
                for part in module.modules():
                    spans[part].add(number)
        return [name for name, slots in weights.slots.items()
                if len(set[int]().union(*(spans[part] for part, _ in slots))) > 1]

    @property
    def changes_buffers(self) -> bool:
        """Return whether a forward may change buffers of modules."""
        return any(span.effects.changes_buffers for span in self._spans)

    @property
    def forwards_change_state(self) -> bool:
        """Return whether a forward may leave changed what a later one reads: buffers, random states."""
        return any(span.effects.changes_buffers or span.effects.drawn for span in self._spans)

    def kept_state(self) -> Callable[[], None]:
        """Return a function that puts back the buffers and random states that are there now."""
        copies: dict[int, Tensor] = {}
        tables = [(module._buffers, {name: tensor if tensor is None else copied_once(tensor, copies)
                                     for name, tensor in module._buffers.items()})
                  for layer in self.modules.values() for module in layer.modules()]
        sources = [(source, source.get()) for span in self._spans for source in span.effects.sources]
        return partial(put, tables, sources)

    # -- forward ---------------------------------------------------------------------------------------

    def forward(self, received: Sequence[Tensor], fields: Mapping[str, Tensor], key: ForwardKey,
                pins: dict[int, int], *, past: Mapping[str, Tensor] = NO_TENSORS,
                split: bool = False) -> tuple[list[Tensor], Record]:
        """Run one microbatch forward, or a slice of it.

        Args:
            received: the tensors of ``spec.inputs``; those that want a gradient require it.
            fields: the batch fields this stage reads.
            key: says which forward it is.
            pins: the weight versions in use, for the backward.
            split: whether the backward will come in two halves. Without it the first half computes nearly all.
            past: what the slice before has carried here, its record's ``carried``; none for the first.

        Returns:
            The tensors of ``spec.outputs``, detached, requiring a gradient where backward needs one,
            and the record for :meth:`backward`, or :meth:`backward_input` and :meth:`backward_weight`.
        """
        tensors = dict(zip(self.spec.inputs, received, strict=True))
        record = Record([], self._read_fields(fields), key, pins, split)
        if self.offloaded or self.counted:
            record.saved = self._saved_tensors((*received, *record.fields.values(), *past.values()))
        with _PreserveRandomState(self.generators):
            for span in self._spans:
                inputs = {name: tensors[name] for name in span.inputs}
                if past:
                    inputs |= {name: past[name] for names in span.carried.values() for name in names}
                saved, tensors = self._forward_span(span, inputs, record)
                record.spans.append(saved)
                if key.slice is not None:
                    record.carried |= {name: tensors.pop(name) for name in _carried_on(span, key.slice)}
        return [contiguous(tensors[name]) for name in self.spec.outputs], record

    @torch.no_grad()
    def evaluate(self, received: Sequence[Tensor], fields: Mapping[str, Tensor], key: ForwardKey,
                 also: Sequence[str] = ()) -> list[Tensor]:
        """Run one microbatch forward with the latest weights, keeping nothing. As :meth:`forward` otherwise.

        Args:
            also: names of further tensors to return, which the last layer reads or writes.
        """
        with torch.enable_grad():  # a layer may compute with gradients, too: within its stage, and on no leaves
            tensors = {name: alias(t) if t.requires_grad else t
                       for name, t in zip(self.spec.inputs, received, strict=True)}
        record = Record([], self._read_fields(fields), key, {}, split=False)
        with _PreserveRandomState(self.generators):
            for span in self._spans:
                tensors = self._run(span, {name: tensors[name] for name in span.inputs}, record,
                                    also=also if span is self._spans[-1] else ())
        return [contiguous(t.detach().requires_grad_(name not in also) if (t := tensors[name]).requires_grad else t)
                for name in (*self.spec.outputs, *also)]

    def _saved_tensors(self, given: Iterable[Tensor]) -> SavedTensors:
        if self.offloaded and not only_ours():
            raise UserError(f"stage {self.spec.index} offloads activations within hooks for saved tensors of your own",
                            hint="leave torch.autograd.graph.saved_tensors_hooks, or OFFLOAD, out")
        return SavedTensors((tensor for module in self.modules.values()
                             for tensor in (*module.parameters(), *module.buffers())), given)

    def _read_fields(self, fields: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the fields in the precision of the stage's weights, but for what only a loss in fp32 reads."""
        if self._weight_rounding is None:
            return fields
        read = {name: fields[name] if name in self._exact else self._weight_rounding.rounded(fields[name])
                for name in self.spec.fields}
        for name in self._unread:
            if read[name] is not fields[name] and (fields[name] - read[name]).abs().gt(0.5).any():
                warnings.warn(f"precision 'bf16_pure' rounds the field '{name}' by more than 0.5: give what must stay, "
                              "such as positions, as integers or in float64, or say that it is meant: value.bfloat16()",
                              stacklevel=2)
        self._unread = ()
        return read

    def _forward_span(self, span: Span, inputs: dict[str, Tensor],
                      record: Record) -> tuple[SpanActivations, dict[str, Tensor]]:
        effects = span.effects
        if span.recomputed:
            before, outputs = forward_without_activations(effects, partial(self._run, span, inputs, record))
            saved = SpanActivations(inputs, None, before, [t._version for t in inputs.values()])
        else:
            changed = None if effects.inert else effects.begin_forward()
            graph, outputs = self._with_graph(span, inputs, record)
            saved = SpanActivations(inputs, graph)
            if changed is not None:
                effects.record_changes(changed)
        if not self.kept_around.isdisjoint(effects.inputs):
            raise self._in_place_error(span.layers[0][1].name)
        return saved, {name: t.detach().requires_grad_(t.requires_grad) for name, t in outputs.items()}

    def _with_graph(self, span: Span, inputs: Mapping[str, Tensor], record: Record,
                    again: bool = False) -> tuple[SpanGraph, dict[str, Tensor]]:
        store = WeightGradStore() if record.split else None
        with NOTHING if record.saved is None else record.saved.saving():
            outputs = self._run(span, inputs, record, store, again)
        edges = {name: _edge_of(t) for name, t in outputs.items() if t.requires_grad}
        return SpanGraph(edges, store), outputs

    def _run(self, span: Span, inputs: Mapping[str, Tensor], record: Record,
             store: WeightGradStore | None = None, again: bool = False,
             also: Sequence[str] = ()) -> dict[str, Tensor]:
        """Run one span forward; return its outputs, by name.

        Args:
            inputs: leaves; an evaluation's may be changed in place.
            store: for weight gradients that can wait, if the backward comes in two halves.
            again: whether it ran on these inputs before.
            also: further tensors to return, in an evaluation.

        Raises:
            UserError: a layer changes a field in place, or an input that it did not change at first, or does not return
                its outputs.
            RunError: a layer raised an error.
        """
        training = torch.is_grad_enabled()
        effects, key = span.effects if training and not span.effects.inert else None, record.key
        given = inputs if effects is None else effects.prepare_inputs(inputs, again)
        tensors = {**record.fields, **given}
        before = [(name, t, t._version, t.requires_grad) for name, t in tensors.items()
                  if training or name not in inputs or name in self.kept_around]
        joined, hook = self._join(span, given)
        tensors |= joined
        try:
            for i, layer, module in span.layers:
                self._running = i
                numbers, told = (key[:2], NOTHING) if key.slice is None else self._in_slice(i, module, key, key.slice)
                seed = seed_of(self.seed, *numbers, i)
                for generator in self.generators:
                    generator.manual_seed(seed)
                arguments = [tensors[name] for name in layer.inputs]
                carried = None if key.slice is None else span.carried.get(i)
                if key.slice is None and store is None and not self._sharded:
                    result = self._call(layer, module, arguments)
                else:
                    with (told, self._sharded.get(i, NOTHING),
                          NOTHING if store is None or i not in self._splittable
                          else SplitBackwardMode(store, self._autocast is not None)):
                        result = self._call(layer, module, arguments, None if carried is None else tuple(
                            [tensors[name] for name in carried if name in inputs]))
                if carried is not None:
                    on = list(zip(carried, result[len(layer.outputs):], strict=True))
                    before += [(name, t, t._version, t.requires_grad) for name, t in on]
                    tensors.update(on)
                    result = result[:len(layer.outputs)]
                tensors.update(zip(layer.outputs, result, strict=True))
        except VpipeError:
            raise
        except Exception as error:
            names = [*layer.inputs, *(name for name in span.carried.get(i, ()) if name in inputs)]
            read = {name: tensors[name] for name in names}
            raise forward_error(i, layer, module, read, record.fields, error) from error
        if hook is not None:
            hook.remove()
        wanting, changed = [], []
        for name, tensor, version, wanted in before:
            if tensor.requires_grad and not (wanted and name in inputs):
                wanting.append(name)
            if tensor._version != version:
                changed.append(name)
        self._check_gradients(span, inputs, joined, wanting)
        if changed and any(given.get(name) is inputs.get(name) or sum(
                inputs[name].data_ptr() == other.data_ptr() for other in inputs.values()) > 1 for name in changed):
            raise self._in_place_error(span.layers[0][1].name)
        if effects is not None:
            effects.note_changed_inputs(inputs, given, changed)
        passed_on = (*span.outputs, *(also if key.slice is None else _carried_on(span, key.slice)))
        # Where layers got copies, an input that none of them changed is passed on itself, not one more copy. An alias
        # is passed on, so that gradients from beyond the span are added first, as in one graph.
        for name in passed_on if given is not inputs and span.recomputed else ():
            if (tensors[name] is joined.get(name, given.get(name)) and given[name] is not inputs[name]
                    and name not in span.effects.inputs):
                tensors[name] = inputs[name]
        return {name: tensors[name] for name in passed_on}

    def _in_slice(self, number: int, module: nn.Module, key: ForwardKey,
                  sliced: SequenceSlice) -> tuple[tuple[int, ...], AbstractContextManager[None]]:
        """Return the numbers that fix a layer's random numbers in a slice, and the context that tells it the slice."""
        aware = self._slice_aware.get(number)
        if aware is None:
            aware = self._slice_aware[number] = SliceAware(module)
        return key[:2] if aware.by_element else (*key[:2], sliced.number), aware.told(sliced.start, sliced.length)

    def _call(self, layer: Layer, module: nn.Module, arguments: list[Tensor],
              past: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
        """Call a layer; an autocast, of the precision or around the loop, is one of its own, so that no cast depends on
        the partition.

        Args:
            past: what the slice before has carried to a layer that is called with slices; what it carries on follows
                its outputs, in the precision that it has there, as within a whole sequence.
        """
        call = partial(self.loss_checks.pop(), layer, module) if self.loss_checks and LOSS in layer.outputs else module
        if past is not None:
            call = partial(call, carried=past)
        try:
            if self._autocast is None:
                result = call(*arguments)
            else:
                with self._autocast:
                    result = call(*arguments)
            torch.clear_autocast_cache()  # within an autocast around the loop casts would outlive an update
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise self._in_place_error(layer.name) from error
            raise
        names = layer.outputs if past is None else (*layer.outputs, *(layer.carried or ()))
        if type(result) is Tensor and len(names) == 1 and self.rounding is None:
            return (result,)
        outputs = result if isinstance(result, tuple) else (result,)
        if len(outputs) != len(names) or not all(isinstance(t, Tensor) for t in outputs):
            kinds = ", ".join(type(t).__name__ for t in outputs)
            carried = "" if past is None else f" and the {len(layer.carried or ())} that it carries on"
            raise UserError(f"layer '{layer.name}' returned {len(outputs)} value(s) ({kinds}) for its "
                            f"{len(layer.outputs)} outputs{carried} {list(names)}",
                            hint="forward must return one tensor per name in outputs, as a tuple if there are several"
                            + ("" if past is None else "; behind them those of carried"))
        if (sharded := next((name for name, t in zip(names, outputs, strict=True) if is_sharded(t)), None)):
            raise UserError(f"layer '{layer.name}' returned '{sharded}' as a DTensor, but stages exchange plain "
                            "tensors", hint="return the part of this rank: use_local_output=True in the layer's plan, "
                                            "or to_local()")
        if self.rounding is None:
            return outputs
        count = len(layer.outputs)
        return (*(self.rounding.round_output(name, t) for name, t in zip(layer.outputs, outputs[:count], strict=True)),
                *outputs[count:])

    def _join(self, span: Span, given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], RemovableHandle | None]:
        """Make one node of the tensors that came through the cut before a span; return them and the handle of its hook.

        One of them may be made from another, and each from weights that layers on both sides of the cut use.
        During a forward autograd only comes to the node for a derivative of which the layers before have a part.
        """
        if len(span.inputs) + len(self._used_before) < 2 or self.measured:
            return {}, None
        names = [name for name in span.inputs if given[name].requires_grad]
        weights = [module._parameters[own] for module, own in self._used_before.values()] if names else []
        if len(names) + len(weights) < 2:
            return {}, None
        with torch.enable_grad():  # in an evaluation, too
            tensors = Aliases.apply(len(names), *[given[name] for name in names], *weights)  # type: ignore[no-untyped-call]
        # Torch calls the hook of a tensor where its node is reached for any output, and that of a node where it is
        # passed: a derivative by the only tensor ends there, and is whole.
        hook = tensors[0].register_hook if len(names) > 1 else tensors[0].grad_fn.register_prehook
        return dict(zip(names, tensors, strict=True)), hook(partial(self._refuse_derivative, span, names))

    def _refuse_derivative(self, span: Span, joined: Collection[str], _: object) -> NoReturn:
        """Refuse a derivative that a layer takes in its forward, and of which layers before the span have a part."""
        layers, start, names, number = self._layers, span.layers[0][0], joined if len(joined) > 1 else (), self._running
        first = min(start, *(self._writer(name, start) for name in names), *(
            i for i in range(start) for name in self._used_before if name.startswith(f"{layers[i].name}.")))
        sizes = [size for size in (first, number + 1 - first, len(layers) - number - 1) if size]
        raise UserError(
            f"layer '{layers[number].name}' of stage {self.spec.index} takes a derivative in its forward by "
            f"{' or '.join(map(repr, (*names, *self._used_before)))}, but more that depends on it came through the cut "
            f"before layer '{layers[start].name}': the part through the layers before the cut would be missing",
            hint=f"keep the layers from '{layers[first].name}' to '{layers[number].name}' in one stage"
                 f"{', and recompute all of them or none' * self.recomputes}: stages={sizes}")

    def _writer(self, name: str, start: int) -> int:
        return max(i for i in range(start) if name in self._layers[i].outputs)

    def _check_gradients(self, span: Span, inputs: Mapping[str, Tensor], joined: Mapping[str, Tensor],
                         wanting: Iterable[str]) -> None:
        """Refuse what a forward did to gradients of which layers beyond a cut have a part."""
        start, stop = span.layers[0][0], span.layers[-1][0] + 1
        for name in wanting:
            if not self.measured and (name in inputs or any(
                    name in layer.inputs for layer in (*self._layers[:start], *self._layers[stop:]))):
                raise UserError(f"'{name}' was made to require a gradient, by a layer of stage {self.spec.index} or in "
                                "the batch, but layers beyond a cut are given it, too",
                                hint="leave that out; a layer that takes derivatives by it begins with "
                                     f"{name} = {name}.detach().requires_grad_()")
        for name, tensor in inputs.items():
            if tensor.is_leaf and tensor.grad is not None:
                raise UserError(f"'{name}' got a gradient in a forward: a layer of stage {self.spec.index} calls "
                                "backward() there", hint="take gradients in a forward with torch.autograd.grad")
        for name, tensor in joined.items() if len(joined) > 1 else ():
            if (tensor._backward_hooks or tensor.retains_grad) and any(
                    name in layer.inputs for layer in self._layers[self._writer(name, start) + 1:start]):
                raise UserError(f"a layer of stage {self.spec.index} puts a hook on the gradient of '{name}', or "
                                "retains it, but layers before the cut use the tensor, too, and have a part of it",
                                hint=f"do so in layer '{self._layers[self._writer(name, start)].name}', which makes it")

    def _in_place_error(self, layer: str) -> UserError:
        return UserError(f"stage {self.spec.index}, which starts at layer '{layer}', changes its input in place",
                         hint="use the operation that is not in place there (inplace=False): "
                              "the input is needed again, by recompute or by another layer")

    # -- backward --------------------------------------------------------------------------------------

    def backward(self, record: Record, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Run one microbatch backward, or a slice of it: the last slice first.

        Args:
            record: what :meth:`forward` returned; used up. Of a slice its ``carried`` are the gradients that the slice
                after it has left in its own.
            gradients: of the outputs that require one.

        Returns:
            The gradients of the inputs that require one, in order. Parameters accumulate theirs.
        """
        if record.split:
            returned = self.backward_input(record, gradients)
            self.backward_weight(record)
            return returned
        with self._added_at_once(record.weightless) if self._shared or record.weightless else NOTHING:
            for span in reversed(self._spans):
                gradients, _ = self._backward_span(span, record, gradients)
        return self._input_gradients(gradients, record)

    def backward_input(self, record: Record, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Run the input half of a backward: as :meth:`backward`, but without the parameters' gradients.

        Args:
            record: what :meth:`forward` returned; holds only what the weight half needs afterwards.
            gradients: of the outputs that require one; not to be changed before the weight half is done.
        """
        for span in reversed(self._spans):
            now: list[tuple[nn.Parameter, Tensor]] = []
            with ExitStack() as stack:
                for weights in self.all_weights:
                    stack.enter_context(kept_apart(weights.graded(), now))
                gradients, store = self._backward_span(span, record, gradients)
            store = WeightGradStore() if store is None else store
            store.end(now)
            record.weight_grads.append(store)
        record.fields = {}
        return self._input_gradients(gradients, record)

    def backward_weight(self, record: Record) -> None:
        """Run the weight half of a backward, after :meth:`backward_input`: parameters accumulate their gradients.

        The gradients are those of a whole backward at this place. The record is used up.
        """
        with self._added_at_once(record.weightless):
            while record.weight_grads:
                try:
                    record.weight_grads.pop(0).accumulate()
                except Exception as error:
                    layers = describe_layers((i, layer) for span in self._spans for i, layer, _ in span.layers)
                    raise RunError(f"the weight gradients of {layers} raised {type(error).__name__}: {error}",
                                   hint=hint_of(error)) from error

    def recompute(self, record: Record) -> None:
        """Recompute dropped activations ahead of the backward, which does it otherwise."""
        if not self.recomputes:
            return
        for owner, version in record.pins.items():
            self._weights_by_owner[owner].use(version)
        for span, saved in zip(self._spans, record.spans, strict=True):
            if saved.graph is None:
                saved.graph = self._recompute_span(span, saved, record)

    @contextmanager
    def _added_at_once(self, weightless: bool) -> Iterator[None]:
        """Add the sum of several spans' gradients of a parameter at once, as one backward of a whole graph does; zeros
        for all parameters where a loss counts for nothing."""
        sums: list[tuple[nn.Parameter, Tensor]] = []
        with ExitStack() as stack:
            for weights, names in ((each, each.names) for each in self.all_weights) if weightless else self._shared:
                leaves = dict(zip(weights.names, weights.graded(), strict=True))
                stack.enter_context(kept_apart([leaves[name] for name in names], sums))
            yield
        for leaf, total in sums:
            accumulate_gradient(leaf, torch.zeros_like(total) if weightless else total)

    def _input_gradients(self, gradients: Mapping[str, Tensor], record: Record) -> list[Tensor]:
        returned = [contiguous(gradients[name]) for name in self.spec.inputs if name in gradients]
        if record.weightless:
            record.carried = {name: torch.zeros_like(t) for name, t in record.carried.items()}
            return list(map(torch.zeros_like, returned))
        return returned

    def _backward_span(self, span: Span, record: Record,
                       gradients: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], WeightGradStore | None]:
        saved = record.spans.pop()
        graph = saved.graph or self._recompute_span(span, saved, record)
        if (sliced := record.key.slice) is not None:
            gradients = {**gradients, **{name: record.carried.pop(name) for name in _carried_on(span, sliced)
                                         if name in record.carried}}
        names = [name for name in graph.edges if name in gradients]
        if names:
            if graph.weight_grads is not None:
                graph.weight_grads.begin()
            try:
                with self._forward_contexts(span, record) if self._sharded or sliced is not None else NOTHING:
                    # torch.autograd.backward, without its checks of each shape and dtype
                    run_backward(tuple([graph.edges[name] for name in names]),
                                 tuple([gradients[name] for name in names]), False, False, (),
                                 allow_unreachable=True, accumulate_grad=True)
            except VpipeError:
                raise
            except Exception as error:
                raise backward_error(span, gradients, error) from error
            finally:
                torch.clear_autocast_cache()  # casts of weights in layers that checkpoint themselves, as in _call
        returned = {name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
                    for name, leaf in saved.inputs.items() if leaf.requires_grad}
        if sliced is not None:
            record.carried |= {name: returned.pop(name) for names in span.carried.values()
                               for name in names if name in returned}
        return returned, graph.weight_grads

    @contextmanager
    def _forward_contexts(self, span: Span, record: Record) -> Iterator[None]:
        """Enter the contexts of the span's forward for a part of it which the backward runs again, as
        :mod:`torch.utils.checkpoint` does: it draws the same random numbers."""
        with ExitStack() as stack:
            for drawn in [drawn for i, *_ in span.layers if (drawn := self._sharded.get(i)) and drawn.drew][:1]:
                stack.enter_context(drawn)
            if (sliced := record.key.slice) is not None:
                for i, _, module in span.layers:
                    stack.enter_context(self._in_slice(i, module, record.key, sliced)[1])
            yield

    def _recompute_span(self, span: Span, saved: SpanActivations, record: Record) -> SpanGraph:
        with _PreserveRandomState(self.generators):
            return recompute_span(span, saved, partial(self._with_graph, span, saved.inputs, record, again=True))

    # -- weight versions -------------------------------------------------------------------------------

    def pin(self, borrowed: Mapping[int, int]) -> dict[int, int]:
        """Pin the stage's own weights and the given versions of borrowed ones; return the versions by owner."""
        return {self.spec.index: self.weights.pin(),
                **{owner: self.borrowed[owner].pin(version) for owner, version in borrowed.items()}}

    def prepare_backward(self, pins: Mapping[int, int]) -> None:
        """Prepare the pinned versions for a backward: gradients accumulate there, and recompute runs with them."""
        for owner, version in pins.items():
            weights = self._weights_by_owner[owner]
            weights.begin_backward(version)
            weights.use(version)

    def unpin(self, pins: Mapping[int, int]) -> None:
        """Release the pinned versions."""
        for owner, version in pins.items():
            self._weights_by_owner[owner].unpin(version)


class _PreserveRandomState:
    """Context that leaves the random state of the process as it was: data loading must not depend on the partition."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators

    def __enter__(self) -> None:
        self._states = [generator.get_state() for generator in self._generators]

    def __exit__(self, *_: object) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


def _carried_on(span: Span, sliced: SequenceSlice) -> list[str]:
    """Return the names of what the layers of a span carry to the next slice; of the last one none."""
    return [name for names in span.carried.values() for name in names] if sliced.number < sliced.slices - 1 else []


def _edge_of(tensor: Tensor) -> GradientEdge:
    """Return the edge that made a tensor. A node of a custom Function needs torch's own, which keeps its graph."""
    node = tensor.grad_fn
    return (get_gradient_edge(tensor) if node is None or isinstance(node, BackwardCFunction)
            else GradientEdge(node, tensor.output_nr))


def _sees_its_operation(module: nn.Module) -> bool:
    """Return whether hooks get all gradients of a module's last operation (``register_backward_hook``, deprecated)."""
    return bool(module._backward_hooks) and module._is_full_backward_hook is False
