"""Several pairs in a sample: each is computed as if it were alone, and is in a batch as it is in one of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pipelines import parts
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.app.data.dataset import DatasetSettings
from vpipe.app.families.registry import ModelSettings
from vpipe.app.families.transformer import attention
from vpipe.extras.translation.length_buckets import PairDataset, TokenPairs, packed_borders
from vpipe.extras.translation.model import TranslationOptions, translation_from_settings
from vpipe.extras.translation.synthetic import synthetic
from vpipe.model.model import Model
from vpipe.testing import assert_equals_oracle

WORDS, HIDDEN, LENGTH, BLOCKS = 19, 8, 12, 2
LENGTHS = [(3, 1), (2, 5), (1, 2), (7, 3), (4, 11), (2, 2), (2, 2), (5, 1)]
"""Tokens of source and target without their ends: in samples of 12, borders 0, 3, 4, 5, 8."""


def model(packed: bool, dropout: float = 0.0) -> Model:
    return translation_from_settings(ModelSettings(
        WORDS, "tiny", hidden_size=HIDDEN, num_layers=BLOCKS, num_heads=2, sequence_length=LENGTH, dropout=dropout,
        packed=packed, options=TranslationOptions()))


def pairs(seed: int = 3) -> PairDataset:
    rng, lengths = np.random.default_rng(seed), np.array(LENGTHS)
    source, target = (rng.integers(2, WORDS, size=int(total)) for total in lengths.sum(0))
    found = TokenPairs.from_lengths(source, target, lengths)
    return PairDataset(WORDS, LENGTH, {"train": found, "test": found}, 0, 1,
                       borders=packed_borders({"train": found, "test": found}, LENGTH))


def batch(seed: int = 3) -> dict[str, Tensor]:
    return next(pairs(seed).batches("test", 4, seed=0))


def test_every_pair_is_in_a_sample_as_it_is() -> None:
    data, packed = pairs(), batch()
    assert data.lines == ("packed: 8 pairs in 4 samples",)
    alone = list(data.one_each().batches("test", 1, seed=0))
    assert [len(batch["labels"]) for batch in alone] == [1] * 8
    number = 0
    for row, texts in enumerate((3, 1, 1, 3)):
        for side in ("source", "target"):
            places = packed[f"{side}_positions"][row].tolist()
            expected = [place for own in alone[number:number + texts] for place in range(own[f"{side}_ids"].shape[1])]
            assert places == expected + list(range(len(places) - len(expected)))
        for name, empty in (("source_ids", 0), ("target_ids", 0), ("labels", -100)):
            expected = [token for own in alone[number:number + texts] for token in own[name][0].tolist()]
            assert packed[name][row].tolist() == expected + [empty] * (packed[name].shape[1] - len(expected))
        number += texts
    assert data.padding_share(4) == pytest.approx(1 - (sum(map(sum, LENGTHS)) + 16) / (4 * (12 + 12)))
    only = next(data.batches("test", 4, seed=0, fields=("target_positions",)))
    assert torch.equal(only["target_positions"], packed["target_positions"])
    assert only["labels"].is_meta


def test_random_pairs_are_as_many_samples_as_asked_for() -> None:
    data = synthetic(DatasetSettings(sequence_length=16, vocab_size=30, samples=40, batch_size=4,
                                     fields=tuple(batch())))
    assert data is not None
    assert (data.samples("train"), data.samples("test")) == (40, 5)
    assert next(data.batches("train", 40, seed=0))["labels"].eq(1).sum() >= 80, "two pairs at least"


def loss(model: Model, modules: nn.ModuleDict, fields: dict[str, Tensor]) -> Tensor:
    tensors: dict[str, Any] = dict(fields)
    for layer in model.layers:
        tensors[layer.outputs[0]] = modules[layer.name](*(tensors[name] for name in layer.inputs))
    return tensors["loss"]


def test_each_pair_is_computed_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, smoothed labels included. A masked term adds an exact 0 to a sum, so that only the order of sums
    differs: with the terms of a layer counted as in test_tensor_parallel.py, there and back."""
    layer = 4 * HIDDEN + HIDDEN + 4 * HIDDEN + LENGTH
    bound = 2 * 2 * ((5 * BLOCKS + 1) * layer + WORDS + len(LENGTHS) * LENGTH) * 2.0 ** -53
    fields = batch()
    assert [int((fields[name][3] == 0).sum()) for name in ("source_positions", "target_positions")] == [3, 4], (
        "the last sample has padding of its target alone")
    packed, alone = model(True), model(False)
    modules, others = (one.materialize(3).double() for one in (packed, alone))

    def seeing(*arguments: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        assert mask is None or mask.any(-1).all(), "a token that sees none is nan in some kernels"
        return attention(*arguments, mask=mask, **options)

    monkeypatch.setattr("vpipe.extras.translation.model.attention", seeing)
    found = loss(packed, modules, fields)
    found.backward()
    each = [(int((own["labels"] != Model.NO_LABEL).sum()), loss(alone, others, own))
            for own in pairs().one_each().batches("test", 1, seed=0)]
    expected = torch.stack([count * one for count, one in each]).sum() / sum(count for count, _ in each)
    expected.backward()
    assert abs((found - expected).item()) < bound * expected.item()
    gradients = dict(modules.named_parameters())
    scale = max(p.grad.abs().max().item() for p in others.parameters() if p.grad is not None)
    for name, parameter in others.named_parameters():
        assert parameter.grad is not None
        assert (gradients[name].grad - parameter.grad).abs().max().item() < bound * max(1, scale), name


@pytest.mark.parametrize("words", [{"schedule": "1f1b", "recompute": 0.5},
                                   {"schedule": "pipedream", "update_every": 1}], ids=lambda words: words["schedule"])
def test_a_pipeline_is_its_oracle(words: dict[str, Any]) -> None:
    pipe = Pipeline(model(True, dropout=0.1),
                    **parts(stages=3, microbatches=2, optimizer=partial(torch.optim.AdamW, lr=1e-2), **words))
    assert_equals_oracle(pipe, [batch(seed) for seed in range(3)])
