"""Several texts in a sample: each is computed as if it were alone, in every family that can, through any pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vpipe.app.data.epoch import TokenDataset
from vpipe.app.data.synthetic import synthetic_tokens
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.model.model import Model

WORDS, HIDDEN, HEADS, LENGTH, BLOCKS = 40, 16, 4, 12, 2
FAMILIES = ("gpt", "llama", "mistral", "qwen2", "qwen3")
LENGTHS = ([5, 4, 3], [12], [1, 10, 1], [6, 6])
"""Of the texts of each sample."""


def model(family: str, packed: bool, dropout: float = 0.0) -> Model:
    return family_named(family).factory(ModelSettings(
        WORDS, hidden_size=HIDDEN, num_layers=BLOCKS, num_heads=HEADS, sequence_length=LENGTH, dropout=dropout,
        tie_weights=True, packed=packed))


def batch(seed: int = 7) -> dict[str, Tensor]:
    """The last token of a text has no label."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, WORDS, (len(LENGTHS), LENGTH), generator=generator) for _ in range(2))
    for row, lengths in enumerate(LENGTHS):
        labels[row, torch.tensor(lengths).cumsum(0) - 1] = Model.NO_LABEL
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS])
    return {"input_ids": ids, "positions": positions, "labels": labels}


def texts(fields: dict[str, Tensor]) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Every text as a batch of its own, and what its loss counts."""
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            yield length - 1, {name: tensor[row:row + 1, part] for name, tensor in fields.items()}
            start += length


def loss(model: Model, modules: nn.ModuleDict, fields: dict[str, Tensor]) -> Tensor:
    tensors: dict[str, Any] = dict(fields)
    for layer in model.layers:
        tensors[layer.outputs[0]] = modules[layer.name](*(tensors[name] for name in layer.inputs))
    return tensors["loss"]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_text_is_computed_as_if_it_were_alone(family: str) -> None:
    """In fp64. A masked term adds an exact 0 to a sum, so that only the order of sums differs: with the terms of a
    layer counted as in test_tensor_parallel.py, there and back."""
    layer = 4 * HIDDEN + HIDDEN + 4 * HIDDEN + LENGTH
    bound = 2 * 2 * (2 * BLOCKS * layer + WORDS + len(LENGTHS) * LENGTH) * 2.0 ** -53
    packed, alone, fields = model(family, True), model(family, False), batch()
    modules, others = (one.materialize(3).double() for one in (packed, alone))
    found = loss(packed, modules, fields)
    found.backward()
    gradients = {name: p.grad for name, p in modules.named_parameters() if p.grad is not None}
    each = [(count, loss(alone, others, text)) for count, text in texts(fields) if count]
    expected = torch.stack([count * one for count, one in each]).sum() / sum(count for count, _ in each)
    expected.backward()
    assert abs((found - expected).item()) < bound * expected.item()
    scale = max(gradient.abs().max().item() for gradient in gradients.values())
    for name, parameter in others.named_parameters():
        assert parameter.grad is not None
        assert (gradients[name] - parameter.grad).abs().max().item() < bound * max(1, scale), name


def test_samples_of_texts() -> None:
    """Cut from a row in which 0 ends each text; the first and the last of a sample may be parts of texts."""
    row = np.array([5, 6, 0, 7, 8, 9, 0, 0, 4, 4, 4, 4, 3])
    data = TokenDataset(10, 4, {"train": 3, "test": 3}, lambda split: row, end=0)
    taken = next(data.batches("test", 3, seed=0))
    assert taken["input_ids"].tolist() == [[5, 6, 0, 7], [8, 9, 0, 0], [4, 4, 4, 4]]
    assert taken["positions"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 3]]
    assert taken["labels"].tolist() == [[6, 0, -100, 8], [9, 0, -100, -100], [4, 4, 4, 3]]
    for field in ("positions", "labels"):
        alone = next(data.batches("test", 3, seed=0, fields=(field,)))
        assert torch.equal(alone[field], taken[field])
        assert alone["input_ids"].is_meta
    long = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 0, 2, 2])
    taken = next(TokenDataset(10, 4, {"train": 3, "test": 3}, lambda split: long, end=0).batches("test", 3, seed=0))
    assert taken["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 0]], "a part in each sample"
    assert taken["labels"].tolist() == [[2, 3, 4, 5], [6, 7, 8, 9], [1, 0, -100, 2]]
    made = next(synthetic_tokens(3, 64, 8, 8, end=0).batches("train", 8, seed=0))
    assert 0 < int((made["labels"] == Model.NO_LABEL).sum()) == int((made["input_ids"] == 0).sum())
