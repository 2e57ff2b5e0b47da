"""Activations that a schedule copies to the host leave the device."""

from __future__ import annotations

import torch
from torch import nn

from vpipe.runtime.activations import storage_of
from vpipe.runtime.offload import SavedTensors


def test_offloaded_tensors_leave_the_device_and_weights_stay() -> None:
    """What autograd saves is copied, each tensor once; the weight is no activation."""
    linear = nn.Linear(3, 3)
    given = torch.randn(2, 3)
    saved = SavedTensors({storage_of(linear.weight), storage_of(linear.bias)})
    with saved.saving():
        hidden = linear(given).sigmoid()
        loss = (hidden * hidden).sum()
    holders = list(saved._holders)
    assert loss.requires_grad
    assert len(holders) == 4, "the input, and the result of the sigmoid for three operations"
    assert {storage_of(holder.on_device) for holder in holders} == {storage_of(given), storage_of(hidden)}
    saved.offload()
    assert [holder.on_device for holder in holders] == [None] * 4
    assert len({holder.on_host.data_ptr() for holder in holders}) == 2
