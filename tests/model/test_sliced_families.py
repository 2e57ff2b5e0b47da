"""Sequences in slices: the families' layers compute, slice after slice, what they compute of whole sequences."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from by_slices import run_slices
from pipelines import parts
from torch import Tensor, nn

from vpipe import Model, Order, Pipeline
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.runtime.slices import SliceAware
from vpipe.testing import assert_equals_oracle

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


def bound_of(dtype: torch.dtype) -> float:
    """What rounding may do, with the terms of a layer counted as in test_tensor_parallel.py, there and back, in either
    computation. The order of sums differs alone: a masked term adds an exact 0, and what is dropped is the same."""
    layer = 4 * HIDDEN + HIDDEN + 4 * HIDDEN + LENGTH
    return 2 * 2 * (2 * BLOCKS * layer + WORDS + SAMPLES * LENGTH) * torch.finfo(dtype).eps / 2


def apart(model: Model, fields: dict[str, Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """How far loss and gradients are from those of whole sequences, in parts of what rounding may do."""
    bound = bound_of(dtype)
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


def test_keys_of_all_slices_are_in_one_memory_but_may_be_copied() -> None:
    """As recomputation and offloading do; of one sample and one head a copy has the strides of the whole."""
    layer = model("llama", num_kv_heads=1).layers[2]
    attention, h = layer.build().double(), torch.randn(1, LENGTH, HIDDEN, dtype=torch.float64)
    torch.manual_seed(1)
    attention.eval()
    expected, memories = attention(h), set()
    for copied in (False, True):
        carried: tuple[Tensor, ...] = ()
        for start in range(0, LENGTH, 4):
            with SliceAware(attention).told(start, LENGTH):
                output, *kept = attention(h[:, start:start + 4], carried=carried)
            assert torch.allclose(output, expected[:, start:start + 4], rtol=1e-12)
            carried = tuple(tensor.clone() if copied else tensor.detach() for tensor in kept)
            if not copied:
                memories |= {tensor.untyped_storage().data_ptr() for tensor in carried}
    assert len(memories) == 2


@pytest.mark.parametrize(("family", "words"), [
    ("gpt", {"recompute": 0.5, "replicas": 2}), ("qwen3", {"recompute": 1.0}),
    ("llama", {"schedule": "gpipe", "per_token_loss": True})], ids=str)
def test_a_pipeline_is_its_oracle_and_that_of_whole_sequences(family: str, words: dict[str, Any]) -> None:
    """The latter in the first update, which moves weights by their gradients, to the bound of those; as in it, a
    stage's sums of microbatches and replicas have as many terms more as there are slices of them."""
    def pipeline(order: Order) -> Pipeline:
        return Pipeline(model(family, packed=True), **parts(**{**words, "schedule": order}, stages=2, microbatches=4,
                                                            optimizer=partial(torch.optim.SGD, lr=1.0)))

    fields = {name: torch.cat((field, field.flip(0), field[:2])) for name, field in batch(packed=True).items()}
    sliced, whole = pipeline(Order(words.get("schedule", "seq1f1b"), slices=5)), pipeline(Order("1f1b"))
    before = whole.state_dict()
    losses = [next(pipe.train([fields])).loss for pipe in (sliced, whole)]
    assert abs(losses[0] - losses[1]) < bound_of(torch.float32) * losses[1]
    moved = {name: (tensor - before[name]).abs().max().item() for name, tensor in whole.state_dict().items()}
    for name, tensor in sliced.state_dict().items():
        off = (tensor - whole.state_dict()[name]).abs().max().item()
        assert off < (bound_of(torch.float32) + 2 * 4 * 5 * 2.0 ** -24) * max(1, *moved.values()), name
    assert_equals_oracle(pipeline(Order(words.get("schedule", "seq1f1b"), slices=5)), [fields] * 2)
