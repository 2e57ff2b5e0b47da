"""A first look at all layers: what they are given, which are equal, what they keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vpipe.errors import RunError, VpipeError
from vpipe.model.layer import Model
from vpipe.profiling.bench import Bench, Given, gradients_for, read_later
from vpipe.profiling.counts import Counts, count
from vpipe.runtime.layers import Rounding
from vpipe.runtime.precision import FP32, Precision
from vpipe.runtime.stage_optimizer import MakeOptimizer

INSTANCES = 2
"""Layers of a kind that are timed: one, and another to see whether equal layers are equal."""


@dataclass(frozen=True)
class Survey:
    """What one microbatch meets.

    Attributes:
        like: per layer the number of the first that is equal to it.
        sampled: the layers to be timed, in order; of every kind at most :data:`INSTANCES`.
        given: by sampled layer.
        counts: by the first layer of a kind.
        fields: bytes of the batch fields.
    """

    like: Sequence[int]
    sampled: Sequence[int]
    given: Mapping[int, Given]
    counts: Mapping[int, Counts]
    fields: Mapping[str, int]


def survey(model: Model, structures: Sequence[str], microbatch: Mapping[str, Tensor],
           bench_of: Callable[[int], Bench], device: torch.device, make_optimizer: MakeOptimizer,
           precision: Precision = FP32) -> Survey:
    """Send a microbatch through the model, running one layer of each kind; the others hand on what that one made.

    Args:
        structures: of the layers.
        bench_of: builds a layer.
        precision: in which layers compute.

    Raises:
        RunError: a layer fails on the microbatch.
    """
    fields = {name: microbatch[name].to(device) for name in model.batch}
    if precision.pure and precision.dtype is not None:
        fields = {name: Rounding(precision.dtype).rounded(tensor) for name, tensor in fields.items()}
    tensors: dict[str, Tensor] = {}
    firsts: dict[tuple[object, ...], int] = {}
    made: dict[int, list[Tensor]] = {}
    like, given, counts = [], {}, {}
    for number, layer in enumerate(model.layers):
        later = read_later(model, number)
        key = (structures[number], tuple(_kind((fields | tensors)[name]) for name in layer.inputs),
               tuple(layer.inputs.index(name) for name in layer.inputs), len(layer.outputs),
               tuple(name in later for name in layer.outputs))
        first = firsts.setdefault(key, number)
        like.append(first)
        inputs = {name: tensors[name] for name in layer.inputs if name not in fields}
        read = {name: fields[name] for name in layer.inputs if name in fields}
        if first == number:
            try:
                bench = bench_of(number)
                outputs, _ = bench.forward(Given(inputs, read, {}))
                here = Given(inputs, read, gradients_for(outputs, later))
                counts[number] = count(bench, here, make_optimizer)
            except VpipeError:
                raise
            except Exception as error:
                raise RunError(f"layer '{layer.name}' fails on a microbatch of {_shapes(fields)}: "
                               f"{type(error).__name__}: {error}",
                               hint="a layer that does not fit into memory needs smaller microbatches") from error
            made[number] = [outputs[name] for name in layer.outputs]
        tensors.update(zip(layer.outputs, made[first], strict=True))
        if like.count(first) <= INSTANCES:
            given[number] = Given(inputs, read, gradients_for(tensors, later))
    return Survey(like, sorted(given), given, counts, {name: tensor.nbytes for name, tensor in fields.items()})


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _shapes(fields: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in fields.items())
