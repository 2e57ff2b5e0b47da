"""Find and name the layer that raised an error, and its input tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from vpipe.errors import RunError, hint_if_no_descriptor
from vpipe.model.layer import Layer
from vpipe.runtime.activations import Span
from vpipe.runtime.sharded_tensors import is_sharded
from vpipe.runtime.transport.transport import TensorSpec


class LayerOutputs(NamedTuple):
    """The outputs of a layer's forward, with its number in the model."""

    number: int
    layer: Layer
    outputs: Sequence[Tensor]


def hint_of(error: Exception, otherwise: str = "fix what raised it") -> str:
    """Return the remedy for an error that is not vpipe's own."""
    if isinstance(error, torch.OutOfMemoryError):
        return "smaller microbatches, more recompute, or fewer layers in this stage take less memory"
    if (raised := hint_if_no_descriptor(error)) is not None:
        return raised
    if type(error).__module__.startswith("torch._dynamo"):
        return ("choose another backend as compile, such as aot_eager, or do not compile; a layer that is compiled "
                "again for every call, since a number that it reads changes, cannot be compiled")
    return otherwise


def forward_error(number: int, layer: Layer, module: nn.Module, inputs: Mapping[str, Tensor],
                  error: Exception) -> RunError:
    """Return the error of the forward of a layer; ``number`` is the layer's in the model."""
    hint = "make the layer accept these inputs, or change the outputs of the layers before it"
    if layer.carried and "got an unexpected keyword argument 'carried'" in str(error):
        hint = (f"Layer(carried={layer.carried}) asks for a forward with carried=None: given a tuple of what the slice "
                "before carried, empty for the first one, it returns what it carries on behind its outputs; None, "
                "without slices, it returns its outputs alone")
    if "got mixed torch.Tensor and DTensor" in str(error):  # torch says neither which nor what to do
        plain = [f"'{name}'" for name, tensor in module.named_parameters() if not is_sharded(tensor)]
        hint = (f"of the layer {', '.join(plain[:4])}{' and others' * (len(plain) > 4)} are plain tensors" if plain else
                "all parameters of the layer are DTensors, and an input or a buffer is not") + (
            ": name every module that meets DTensors in the plan of parallelize_module, or let those before it return "
            "plain tensors (use_local_output=True)")
    return RunError(f"the forward of layer {number} '{layer.name}' on {describe_tensors(inputs)} raised "
                    f"{_raised(error)}", hint=hint_of(error, hint))


def backward_error(span: Span, gradients: Mapping[str, Tensor], error: Exception,
                   found: LayerOutputs | None) -> RunError:
    """Return the error of a backward through consecutive layers.

    Args:
        gradients: of the outputs of the last one.
        found: the layer at fault, of :func:`find_layer`.
    """
    if found is not None:
        gradients = {name: t for name, t in zip(found.layer.outputs, found.outputs, strict=True) if t.requires_grad}
        which = f"layer {found.number} '{found.layer.name}'"
    else:
        which = describe_layers((number, layer) for number, layer, _ in span.layers)
    hint = "torch.autograd.set_detect_anomaly(True) prints the line of the forward that it belongs to"
    return RunError(f"the backward of {which} on the gradient of {describe_tensors(gradients)} raised {_raised(error)}",
                    hint=hint_of(error, hint))


def find_layer(computed: Sequence[LayerOutputs], edges: Mapping[str, GradientEdge], gradients: Mapping[str, Tensor],
               leaves: Iterable[Tensor], error: Exception) -> LayerOutputs | None:
    """Repeat a failed backward; return the layer that it has reached when it raises an error of the same type again.

    Autograd takes operations in the reverse order of the forward, so the layer whose output was reached last is at
    fault. No gradient of a parameter is changed.

    Args:
        computed: of the repeated forward, in order.
        edges: of that forward's outputs.
        leaves: inputs and parameters of the original backward.
    """
    makers: dict[Node, LayerOutputs] = {}  # a layer that returns its input did not make it
    for one in computed:
        for output in one.outputs:
            if output.grad_fn is not None:
                makers.setdefault(output.grad_fn, one)
    reached: list[LayerOutputs] = []
    for node, one in makers.items():
        node.register_prehook(lambda _, one=one: reached.append(one))
    names = [name for name in edges if name in gradients]
    try:
        torch.autograd.grad([edges[name] for name in names], [leaf for leaf in leaves if leaf.requires_grad],
                            [gradients[name] for name in names], allow_unused=True)
    except Exception as again:
        if type(again) is type(error) and reached:
            return reached[-1]
    return None


def may_repeat(error: Exception) -> bool:
    """Return whether a computation that raised this may be repeated: not after a lack of memory or a device error."""
    return not isinstance(error, (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", ())))


def describe_layers(layers: Iterable[tuple[int, Layer]]) -> str:
    """Return ``layer 5 'head'``, or of several ``one of the layers 3 'mlp' to 5 'head'``."""
    names = [f"{number} '{layer.name}'" for number, layer in layers]
    return f"layer {names[0]}" if len(names) == 1 else f"one of the layers {names[0]} to {names[-1]}"


def describe_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return ``h float32[2, 16], target int64[2] on cuda:0``: names, dtypes, shapes, and devices other than the CPU."""
    return ", ".join(f"{name} {TensorSpec.from_tensor(t)}" + (f" on {t.device}" if t.device.type != "cpu" else "")
                     for name, t in tensors.items())


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
