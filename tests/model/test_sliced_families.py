"""Sequences in slices: the families' layers compute, slice after slice, what they compute of whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_slices import run_slices
from torch import Tensor, nn

from vpipe import Model
from vpipe.app.families.registry import ModelSettings, family_named

WORDS, HIDDEN, HEADS, LENGTH, SAMPLES, BLOCKS = 40, 16, 4, 12, 3, 2
FAMILIES = ("gpt", "llama", "mistral", "qwen2", "qwen3")
SLICES = (5, 1, 4, 2)


def model(family: str, packed: bool = False, **words: Any) -> Model:
    return family_named(family).factory(ModelSettings(
        WORDS, hidden_size=HIDDEN, num_layers=BLOCKS, num_heads=HEADS, sequence_length=LENGTH, dropout=0.1,
        tie_weights=True, packed=packed, **words))


def batch(packed: bool) -> dict[str, Tensor]:
    """Texts begin in the middle of slices and at their first tokens; labels are missing."""
    generator = torch.Generator().manual_seed(7)
    ids, labels = (torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator) for _ in range(2))
    labels[0, 4:7], labels[2] = Model.NO_LABEL, labels[2]
    begins = torch.tensor([[0] * 12, [0, 0, 2, 2, 2, 5, 6, 6, 6, 6, 10, 10], [0, 1, 1, 1, 1, 1, 1, 1, 8, 8, 8, 8]])
    return {"input_ids": ids, "labels": labels} | ({"positions": torch.arange(LENGTH) - begins} if packed else {})


def whole(model: Model, modules: nn.ModuleDict, fields: dict[str, Tensor]) -> Tensor:
    tensors: dict[str, Any] = dict(fields)
    for index, layer in enumerate(model.layers):
        torch.manual_seed(100 + index)
        result = modules[layer.name](*(tensors[name] for name in layer.inputs))
        tensors |= dict(zip(layer.outputs, result if isinstance(result, tuple) else (result,), strict=True))
    tensors["loss"].backward()
    return tensors["loss"].detach()  # type: ignore[no-any-return]


def apart(model: Model, fields: dict[str, Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """How far loss and gradients are from those of whole sequences, in parts of what rounding may do.

    With the terms of a layer counted as in test_tensor_parallel.py, there and back, and either computation rounds. The
    order of sums differs alone: a masked term adds an exact 0, and what is dropped is the same.
    """
    layer = 4 * HIDDEN + HIDDEN + 4 * HIDDEN + LENGTH
    bound = 2 * 2 * (2 * BLOCKS * layer + WORDS + SAMPLES * LENGTH) * torch.finfo(dtype).eps / 2
    modules = model.materialize(3).to(dtype)
    expected = whole(model, modules, fields)
    gradients = {name: p.grad.clone() for name, p in modules.named_parameters() if p.grad is not None}
    modules.zero_grad()
    found = run_slices(model, modules, fields, SLICES)
    scale = max(1, *(gradient.abs().max().item() for gradient in gradients.values()))
    off = max((gradients[name] - p.grad).abs().max().item() for name, p in modules.named_parameters()
              if p.grad is not None)
    assert gradients.keys() == {name for name, p in modules.named_parameters() if p.grad is not None}
    return abs((found - expected).item()) / (bound * expected.item()), off / (bound * scale)


@pytest.mark.parametrize("packed", [False, True], ids=["one text", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_are_the_whole(family: str, packed: bool) -> None:
    groups = {} if family == "gpt" else {"num_kv_heads": 2}
    for dtype in (torch.float64, torch.float32):
        assert max(apart(model(family, packed, **groups), batch(packed), dtype)) < 1


def test_experts_without_a_loss_of_balance_take_slices() -> None:
    """With one, their layers do not say what they carry: it is of all tokens of a microbatch."""
    sizes: dict[str, Any] = {"experts": 3, "experts_per_token": 2}
    assert {layer.carried for layer in model("mixtral", **sizes).layers if "mlp" in layer.name} == {None}
    assert max(apart(model("mixtral", balance_weight=0.0, **sizes), batch(False), torch.float64)) < 1
