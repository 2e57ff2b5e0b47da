"""Several texts in a sample: each is computed as if it were alone, in every family that can, through any pipeline."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pipelines import parts
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.app.data.epoch import TokenDataset
from vpipe.app.data.synthetic import synthetic_tokens
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.model.model import Model
from vpipe.testing import assert_equals_oracle

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


def losses(model: Model, modules: nn.ModuleDict, fields: dict[str, Tensor]) -> Tensor:
    """The sum over the labels."""
    tensors: dict[str, Any] = dict(fields)
    for layer in model.layers:
        tensors[layer.outputs[0]] = modules[layer.name](*(tensors[name] for name in layer.inputs))
    return tensors["loss"] * (fields["labels"] != Model.NO_LABEL).sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_text_is_computed_as_if_it_were_alone(family: str) -> None:
    """In fp64. A masked term adds an exact 0 to a sum, so that only the order of sums differs: with the terms of a
    layer counted as in test_tensor_parallel.py, there and back."""
    layer = 4 * HIDDEN + HIDDEN + 4 * HIDDEN + LENGTH
    bound = 2 * 2 * (2 * BLOCKS * layer + WORDS + len(LENGTHS) * LENGTH) * 2.0 ** -53
    packed, alone, fields = model(family, True), model(family, False), batch()
    modules = packed.materialize(3).double()
    found = losses(packed, modules, fields)
    found.backward()
    gradients = {name: p.grad.clone() for name, p in modules.named_parameters() if p.grad is not None}
    modules.zero_grad()
    expected = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(LENGTHS):
        for ids, labels in zip(fields["input_ids"][row].split(lengths), fields["labels"][row].split(lengths),
                               strict=True):
            if len(ids) > 1:
                expected = expected + losses(alone, modules, {"input_ids": ids[None], "labels": labels[None]})
    expected.backward()
    assert abs((found - expected).item()) < bound * expected.item()
    scale = max(gradient.abs().max().item() for gradient in gradients.values())
    for name, parameter in modules.named_parameters():
        assert parameter.grad is not None
        assert (gradients[name] - parameter.grad).abs().max().item() < bound * max(1, scale), name


@pytest.mark.parametrize("words", [{"schedule": "1f1b", "recompute": 0.5}, {"schedule": "zb_h1"},
                                   {"schedule": "pipedream", "update_every": 1}], ids=lambda words: words["schedule"])
def test_a_pipeline_is_its_oracle(words: dict[str, Any]) -> None:
    pipe = Pipeline(model("qwen3", True, dropout=0.1),
                    **parts(stages=3, microbatches=2, optimizer=partial(torch.optim.AdamW, lr=1e-2), **words))
    assert_equals_oracle(pipe, [batch(seed) for seed in range(3)])


def test_samples_of_texts() -> None:
    """Cut from a row in which 0 ends each text; the first and the last of a sample may be parts of texts."""
    row = torch.tensor([5, 6, 0, 7, 8, 9, 0, 0, 4, 4, 4, 4, 3]).numpy()
    data = TokenDataset(10, 4, {"train": 3, "test": 3}, lambda split: row, end=0)
    taken = next(data.batches("test", 3, seed=0))
    assert taken["input_ids"].tolist() == [[5, 6, 0, 7], [8, 9, 0, 0], [4, 4, 4, 4]]
    assert taken["positions"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 3]]
    assert taken["labels"].tolist() == [[6, 0, -100, 8], [9, 0, -100, -100], [4, 4, 4, 3]]
    for field in ("positions", "labels"):
        alone = next(data.batches("test", 3, seed=0, fields=(field,)))
        assert torch.equal(alone[field], taken[field])
        assert alone["input_ids"].is_meta
    made = next(synthetic_tokens(3, 64, 8, 8, end=0).batches("train", 8, seed=0))
    assert 0 < int((made["labels"] == Model.NO_LABEL).sum()) == int((made["input_ids"] == 0).sum())
