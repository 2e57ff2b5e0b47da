"""Name the layer that raised an error in a forward, or the layers of a backward, and what they were given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from vpipe.errors import RunError, hint_if_exhausted
from vpipe.model.layer import Layer
from vpipe.runtime.activations import Span
from vpipe.runtime.sharded_tensors import is_sharded
from vpipe.runtime.transport.transport import TensorSpec


def hint_of(error: Exception, otherwise: str = "fix what raised it") -> str:
    """Return the remedy for an error that is not vpipe's own."""
    if (raised := hint_if_exhausted(error)) is not None:
        return raised
    if type(error).__module__.startswith("torch._dynamo"):
        return ("choose another backend as compile, such as aot_eager, or do not compile; a layer that is compiled "
                "again for every call, since a number that it reads changes, cannot be compiled")
    return otherwise


def forward_error(number: int, layer: Layer, module: nn.Module, inputs: Mapping[str, Tensor],
                  fields: Mapping[str, Tensor], error: Exception) -> RunError:
    """Return the error of the forward of a layer, the model's ``number``; ``fields`` are the batch's."""
    made = [name for name, tensor in inputs.items() if tensor is not fields.get(name)]
    hint = "make the layer accept these inputs, or change " + " or ".join(
        [*["the outputs of the layers before it"] * bool(made),
         *(f"the batch's field '{name}'" for name in inputs if name not in made)])
    if layer.carried and "got an unexpected keyword argument 'carried'" in str(error):
        hint = layer.carrying
    if "got mixed torch.Tensor and DTensor" in str(error):  # torch says neither which nor what to do
        plain = [f"'{name}'" for name, tensor in module.named_parameters() if not is_sharded(tensor)]
        hint = (f"of the layer {', '.join(plain[:4])}{' and others' * (len(plain) > 4)} are plain tensors" if plain else
                "all parameters of the layer are DTensors, and an input or a buffer is not") + (
            ": name every module that meets DTensors in the plan of parallelize_module, or let those before it return "
            "plain tensors (use_local_output=True)")
    if "BFloat16" in str(error) and any(buffer.dtype is torch.float32 for buffer in module.buffers()):
        hint = ("buffers are not rounded: cast what meets a weight, as in (h + self.table).to(h.dtype), or use "
                "precision='bf16', whose autocast casts")
    return RunError(f"the forward of layer {number} '{layer.name}' on {describe_tensors(inputs)} raised "
                    f"{type(error).__name__}: {error}", hint=hint_of(error, hint))


def backward_error(span: Span, gradients: Mapping[str, Tensor], error: Exception) -> RunError:
    """Return the error of a backward through consecutive layers; ``gradients``: of the outputs of the last one."""
    which = describe_layers((number, layer) for number, layer, _ in span.layers)
    hint = "torch.autograd.set_detect_anomaly(True) prints the line of the forward that it belongs to"
    return RunError(f"the backward of {which} on the gradient of {describe_tensors(gradients)} raised "
                    f"{type(error).__name__}: {error}", hint=hint_of(error, hint))


def describe_layers(layers: Iterable[tuple[int, Layer]]) -> str:
    """Return ``layer 5 'head'``, or of several ``one of the layers 3 'mlp' to 5 'head'``."""
    names = [f"{number} '{layer.name}'" for number, layer in layers]
    return f"layer {names[0]}" if len(names) == 1 else f"one of the layers {names[0]} to {names[-1]}"


def describe_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return ``h float32[2, 16], target int64[2] on cuda:0``: names, dtypes, shapes, and devices other than the CPU."""
    return ", ".join(f"{name} {TensorSpec.from_tensor(t)}" + (f" on {t.device}" if t.device.type != "cpu" else "")
                     for name, t in tensors.items())
