"""Call the modules of a model slice after slice of the sequences, as a stage does, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from vpipe import Model
from vpipe.runtime.slices import SliceAware


def run_slices(model: Model, modules: Mapping[str, nn.Module], fields: Mapping[str, Tensor],
               lengths: Sequence[int]) -> Tensor:
    """Return the mean loss over all labels, after the backwards. Every layer begins every slice under its own seed."""
    assert model.labels is not None
    labels = (fields[model.labels] != Model.NO_LABEL).sum().item()
    past: dict[str, tuple[Tensor, ...]] = {layer.name: () for layer in model.layers}
    total, slices = torch.zeros(()), []
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        tensors = {name: field[:, end - length:end] for name, field in fields.items()}
        leaves = {name: tuple(t.detach().requires_grad_(t.requires_grad) for t in carried)
                  for name, carried in past.items()}
        for index, layer in enumerate(model.layers):
            torch.manual_seed(100 + index)
            assert layer.carried is not None
            arguments = [tensors[name] for name in layer.inputs]
            with SliceAware(modules[layer.name]).told(end - length, sum(lengths)):
                result = modules[layer.name](*arguments, **({"carried": leaves[layer.name]} if layer.carried else {}))
            outputs = result if isinstance(result, tuple) else (result,)
            tensors |= dict(zip(layer.outputs, outputs, strict=False))
            past[layer.name] = outputs[len(layer.outputs):]
            assert len(past[layer.name]) == len(layer.carried)
        share = (tensors[model.labels] != Model.NO_LABEL).sum().item() / labels
        total = total + tensors["loss"].detach() * share
        slices.append((tensors["loss"], share, leaves, dict(past)))
    gradients: dict[str, list[Tensor | None]] = {}
    for loss, share, leaves, carried in reversed(slices):
        ends = [(t, g) for name, given in gradients.items() for t, g in zip(carried[name], given, strict=True)
                if g is not None]
        torch.autograd.backward([loss, *(t for t, _ in ends)], [torch.full_like(loss, share), *(g for _, g in ends)])
        gradients = {name: [t.grad for t in each] for name, each in leaves.items() if each}
    return total
