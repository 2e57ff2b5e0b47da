"""Run one layer as a stage of its own, with the code of the runtime, and count the bytes and operations that it takes.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from vpipe import accelerator
from vpipe.description.precision import FP32, Precision
from vpipe.model.layer import LOSS
from vpipe.model.model import Model
from vpipe.plan.profile import TensorBytes
from vpipe.runtime.activations import Record
from vpipe.runtime.microbatches import ForwardKey
from vpipe.runtime.sharded_tensors import is_sharded, local
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import MakeOptimizer, StageOptimizer
from vpipe.runtime.values import alive, bytes_of, sizes_of
from vpipe.torch_private import TorchDispatchMode, flash_attention_on_cpu, tree_leaves


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of a layer, as a run would have them."""

    # the tensors that it reads, by name; requires_grad is set on those that need a gradient
    inputs: Mapping[str, Tensor]
    fields: Mapping[str, Tensor]  # the batch fields that it reads
    gradients: Mapping[str, Tensor]  # of the tensors that it writes and a later layer reads, where they need one


class LayerRunner:
    """Run a layer on its device.

    Args:
        number: of the layer in the model.
        precision: in which it computes.
    """

    def __init__(self, model: Model, number: int, device: torch.device, seed: int,
                 precision: Precision = FP32) -> None:
        layer = model.layers[number]
        self._carries = bool(layer.carried)
        self.reads = tuple(dict.fromkeys(name for name in layer.inputs if name not in model.batch))
        self.fields = tuple(dict.fromkeys(name for name in layer.inputs if name in model.batch))
        self.writes = tuple(dict.fromkeys(layer.outputs))
        spec = replace(model.layer_specs[number], inputs=self.reads, outputs=self.writes, fields=self.fields)
        self.stage = Stage(model, spec, seed=seed, device=device, recomputed=(), precision=precision)
        self.stage.measured = True
        self.tied_bytes, self.frozen_tied_bytes = ({
            own: local(parameter).nbytes for own in layer.ties
            if (parameter := self.stage.modules[number].get_parameter(own)).requires_grad == trained}
            for trained in (True, False))

    def forward(self, given: LayerInputs, *, split: bool = False,
                counted: bool = False) -> tuple[dict[str, Tensor], Record]:
        """Run one forward; return the layer's outputs and the record for its backward, with what the graph saves where
        it is counted."""
        self.stage.counted = counted
        outputs, record = self.stage.forward(self._received(given), given.fields, ForwardKey(0, 0), {}, split=split)
        return dict(zip(self.writes, outputs, strict=True)), record

    def carried(self, given: LayerInputs, tokens: int) -> Collection[Tensor]:
        """Return what a slice of all ``tokens``, of which a rank may get a part, would hand on to the next one."""
        if not self._carries:
            return ()
        key = ForwardKey.of_first_slice(tokens)
        return self.stage.forward(self._received(given), given.fields, key, {})[1].carried.values()

    def _received(self, given: LayerInputs) -> list[Tensor]:
        """Return the inputs as they arrive from another stage: leaves without a gradient."""
        return [given.inputs[name].detach().requires_grad_(given.inputs[name].requires_grad) for name in self.reads]

    def recompute(self, record: Record) -> None:
        """Run the forward again."""
        self.stage.recomputes = True
        self.stage.recompute(record)

    def backward(self, record: Record, gradients: Mapping[str, Tensor], *, split: bool = False) -> dict[str, Tensor]:
        """Run one backward, or its input half; return the gradients of the layer's inputs."""
        names = [name for name, leaf in record.spans[0].inputs.items() if leaf.requires_grad]
        backward = self.stage.backward_input if split else self.stage.backward
        return dict(zip(names, backward(record, gradients), strict=True))

    def step(self, optimizer: StageOptimizer) -> None:
        """Make one update of the layer's own weights; their gradients are there again afterwards."""
        weights = self.stage.weights
        gradients = weights.gradients
        weights.complete_gradients()
        weights.widen_gradients()
        weights.step(optimizer.step)
        for leaf, gradient in zip(weights.graded(), gradients, strict=True):
            leaf.grad = gradient


def gradients_for(outputs: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return a gradient for each of the outputs that needs one."""
    return {name: torch.full_like(outputs[name], 1.0 if name == LOSS else 1e-3)
            for name in names if outputs[name].requires_grad}


@dataclass(frozen=True)
class LayerCounts:
    """The bytes and operations of a layer for one microbatch; see :class:`vpipe.plan.profile.LayerProfile`."""

    parameter_bytes: int
    frozen_bytes: int
    optimizer_bytes: int
    writes: tuple[TensorBytes, ...]
    saved_bytes: int
    # the places of the tensors among those that the layer reads and writes: ("in", 0)
    saves: tuple[tuple[str, int], ...]
    weight_half_bytes: int
    working_bytes: int
    forward_flops: int
    tied_bytes: Mapping[str, int]  # of every borrowed parameter that is trained, by the layer's own name for it
    frozen_tied_bytes: Mapping[str, int]  # and of the others
    largest_bytes: int
    carried_bytes: int


def count_layer(runner: LayerRunner, given: LayerInputs, make_optimizer: MakeOptimizer, tokens: int = 0) -> LayerCounts:
    """Run a layer a few times on samples of so many tokens, and count. Its weights stay as they are."""
    given = _copied(given)
    shared = [t for module in runner.stage.modules.values() for t in (*module.parameters(), *module.buffers())]
    own = runner.stage.weights.values(runner.stage.weights.names)
    borrowed = [t for weights in runner.stage.borrowed.values() for t in weights.values(weights.names)]
    written, saves, saved_bytes = _saved(runner, given)
    return LayerCounts(
        parameter_bytes=bytes_of(own),
        frozen_bytes=bytes_of(shared) - bytes_of([*own, *borrowed]) - bytes_of(runner.stage.frozen_ties.values()),
        working_bytes=_working(runner, given, shared), weight_half_bytes=_between_halves(runner, given),
        optimizer_bytes=_optimizer_bytes(runner, given, make_optimizer), writes=written, saved_bytes=saved_bytes,
        saves=saves, forward_flops=_flops(runner, given),
        tied_bytes=runner.tied_bytes, frozen_tied_bytes=runner.frozen_tied_bytes,
        largest_bytes=max((parameter.nbytes for parameter in own), default=0),
        carried_bytes=bytes_of(runner.carried(given, tokens)))


def _saved(runner: LayerRunner, given: LayerInputs) -> tuple[tuple[TensorBytes, ...], tuple[tuple[str, int], ...], int]:
    """Return the layer's outputs, the inputs and outputs that its graph keeps, and the bytes besides."""
    outputs, record = runner.forward(given, counted=True)
    saved = sizes_of(record.saved.tensors() if record.saved else ())
    saves: dict[tuple[str, int], None] = {}
    places = [("in", [*(given.inputs[name] for name in runner.reads), *(given.fields[name] for name in runner.fields)]),
              ("out", [outputs[name] for name in runner.writes])]
    for way, tensors in places:
        for place, tensor in enumerate(tensors):
            for storage in sizes_of([tensor]):
                if saved.pop(storage, None) is not None:
                    saves[way, place] = None
    written = tuple(TensorBytes(name, max(t.nbytes, bytes_of([t])), t.requires_grad) for name, t in outputs.items())
    return written, tuple(saves), sum(saved.values())


def _working(runner: LayerRunner, given: LayerInputs, shared: Sequence[Tensor]) -> int:
    """Return the most bytes that a backward takes beyond what the forward left; weights have gradients already."""
    runner.backward(runner.forward(given)[1], given.gradients)
    weights = (runner.stage.weights, *runner.stage.borrowed.values())
    gradients = [g for owned in weights for g in owned.gradients if g is not None]
    coming = bytes_of(given.gradients.values())
    record = runner.forward(given, counted=True)[1]
    if (device := runner.stage.device).type != "cpu" and accelerator.counts_memory(device):
        accelerator.reset_peak(device)
        before = accelerator.held_bytes(device)
        runner.backward(record, given.gradients)
        return max(0, accelerator.peak_bytes(device) - before) + coming
    peak = _PeakMemory(sizes_of(record.saved.tensors() if record.saved else ()),
                       sizes_of([*shared, *gradients, *given.gradients.values()]))
    with peak:
        runner.backward(record, given.gradients)
    return peak.bytes + coming


def _between_halves(runner: LayerRunner, given: LayerInputs) -> int:
    """Return the bytes that the input half leaves for the weight half, where nobody else holds inputs and outputs."""
    record = runner.forward(_copied(given), split=True, counted=True)[1]
    runner.backward(record, given.gradients, split=True)
    size = sum(record.storages().values())
    runner.stage.backward_weight(record)
    return size


def _optimizer_bytes(runner: LayerRunner, given: LayerInputs, make_optimizer: MakeOptimizer) -> int:
    optimizer = zero_rate_optimizer(make_optimizer, runner.stage)
    runner.backward(runner.forward(given)[1], given.gradients)
    runner.step(optimizer)
    weights = runner.stage.weights
    masters = list(weights.masters.values())  # of rounded weights they have memory of their own
    own = sizes_of([*masters, *optimizer.state_tensors()])
    return sum(size for storage, size in own.items() if storage not in sizes_of(weights.values(weights.names)))


def zero_rate_optimizer(make_optimizer: MakeOptimizer, stage: Stage) -> StageOptimizer:
    """Return an optimizer whose steps do all the work at a learning rate of 0: weights stay as they were."""
    optimizer = StageOptimizer.build(make_optimizer, stage.weights.masters, stage.spec.index)
    for group in optimizer.groups:
        group["lr"] = group["lr"] * 0
    return optimizer


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


_attention_flops._get_raw = True  # type: ignore[attr-defined]


def _flops(runner: LayerRunner, given: LayerInputs) -> int:
    counter = FlopCounterMode(display=False, custom_mapping={flash_attention_on_cpu: _attention_flops})
    # The counter watches modules for gradients, which it cannot where one is given a part of another's parameter.
    trained = [p for module in runner.stage.modules.values() for p in module.parameters() if p.requires_grad]
    with counter, _OfShards(), ExitStack() as after:  # type: ignore[no-untyped-call]
        for parameter in trained:
            parameter.requires_grad_(False)
            after.callback(parameter.requires_grad_)
        runner.stage.evaluate([given.inputs[name].detach() for name in runner.reads], given.fields, ForwardKey(0, 0))
    return int(counter.get_total_flops())


class _OfShards(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Let modes see what this process does for an operation on DTensors, in place of the operation on whole tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_sharded, tree_leaves((args, kwargs)))):
            return NotImplemented  # DTensor goes on, with operations on shards
        return func(*args, **(kwargs or {}))


class _PeakMemory(_OfShards):
    """Track the peak of bytes beyond those at the beginning: what operations allocated, less what was freed."""

    def __init__(self, saved: Mapping[StorageWeakRef, int], ignored: Collection[StorageWeakRef]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ignored, self._before = ignored, saved
        self._made: dict[StorageWeakRef, int] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        self._made |= {storage: size for storage, size in sizes_of(t for t in tree_leaves(result)
                                                                 if isinstance(t, Tensor)).items()
                       if storage not in self._ignored and storage not in self._before}
        self._made = alive(self._made)
        freed = sum(self._before.values()) - sum(alive(self._before).values())
        self.bytes = max(self.bytes, sum(self._made.values()) - freed)
        return result


def live_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors of this process on a device."""
    plain = (each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter))  # others hold such, or nothing
    return bytes_of(tensor for tensor in plain if tensor.device.type == device.type)


def _copied(given: LayerInputs) -> LayerInputs:
    inputs, fields = ({name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in tensors.items()}
                      for tensors in (given.inputs, given.fields))
    return replace(given, inputs=inputs, fields=fields)
