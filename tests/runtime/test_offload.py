"""Activations that a schedule copies to the host leave the device."""

from __future__ import annotations

import torch
from torch import nn

from vpipe.runtime.activations import storage_of
from vpipe.runtime.offload import SavedTensors


def test_offloaded_tensors_leave_the_device_and_weights_stay() -> None:
    """What autograd saves is copied, each storage once; weights and inputs are no activations."""
    linear = nn.Linear(3, 3)
    given = torch.randn(2, 3)
    saved = SavedTensors({storage_of(tensor) for tensor in (linear.weight, linear.bias, given)})
    with saved.saving():
        hidden = linear(given).sigmoid()
        loss = (hidden * hidden).sum()
    holders = list(saved._holders)
    assert loss.requires_grad
    assert [storage_of(holder.tensor) for holder in holders] == [storage_of(hidden)] * 3
    saved.offload()
    assert [holder.tensor for holder in holders] == [None] * 3
    assert len({holder.on_host.data_ptr() for holder in holders}) == 1
