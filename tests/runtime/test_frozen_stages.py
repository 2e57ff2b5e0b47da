"""Stages in front that train nothing: the bits of the oracles, without backwards, records and gradients there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import WIDTH, Frozen, Head, Normed, RawMatmul, between, rich_batches, thrice_tied_model
from oracles import equals_its_oracle, pipeline_of
from torch import Tensor, nn

from vpipe import Layer, Model
from vpipe.errors import UserError
from vpipe.runtime.microbatches import Batch
from vpipe.testing import references


class FrozenNorm(Normed):
    """Not trained, but its running statistics change."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Dropped(nn.Dropout):
    """Has nothing to train at all."""

    def __init__(self) -> None:
        super().__init__(0.2)


def tied() -> Model:
    """Four layers use a weight that none trains."""
    def build(layer: Layer, *names: str) -> nn.Module:
        module = layer.build()
        for name in names:
            module.get_parameter(name).requires_grad_(False)
        return module

    model = thrice_tied_model()
    named = {layer.name: [*layer.ties, *(["word.weight"] if layer.name == "words" else [])] for layer in model.layers}
    return Model([replace(layer, build=partial(build, layer, *named[layer.name])) for layer in model.layers],
                 model.batch)


def front(*layers: type[nn.Module]) -> Model:
    """Layers in front of six that are trained."""
    return Model([Layer("words", Frozen, ("ids",), ("h",)), *(Layer(f"f{i}", kind) for i, kind in enumerate(layers)),
                  *(Layer(f"t{i}", RawMatmul) for i in range(4)), Layer("late", FrozenNorm),
                  Layer("head", Head, ("h", "labels"), ("loss",))], batch=("ids", "labels"), labels="labels")


def frozen_front() -> Model:
    return front(FrozenNorm, Dropped, FrozenNorm)


@pytest.mark.parametrize(("frozen", "words"), [
    (2, {"schedule": "1f1b", "partition": [1, 3, 3, 3], "recompute": 0.5, "grad_clip": 0.5}),
    (1, {"schedule": "zb_h1", "partition": [3, 2, 3, 2]}),
    (3, {"schedule": "interleaved", "partition": [1, 2, 1, 6], "chunks": 2}),
    pytest.param(2, {"schedule": "gpipe", "partition": [2, 2, 6], "executor": "async_threaded"},
                 marks=pytest.mark.extras("async_threaded")),
    (1, {"schedule": "1f1b", "placement": [[0, 1], [2, 3]], "partition": [3, 7], "zero1": True, "grad_clip": 0.5}),
    (2, {"schedule": "pipedream", "partition": [1, 3, 3, 3], "update_every": 1, "recompute": 0.5,
         "per_token_loss": True}),
    (1, {"schedule": "2bw", "partition": [4, 3, 3], "update_every": 4, "precision": "fp16", "loss_scale": 1024}),
    (1, {"schedule": "pipedream", "placement": [[0, 1], [2], [3]], "partition": [3, 2, 5], "update_every": 1})])
def test_every_kind_of_schedule_equals_its_oracle(frozen: int, words: dict[str, Any]) -> None:
    pipe, _ = equals_its_oracle(frozen_front, rich_batches(3, 8), rich_batches(2, 8, seed=4), **words)
    assert pipe.lowered.frozen == frozen
    usage = {stage: used for stages in pipe.local_usage().values() for stage, used in stages.items()}
    assert [(used.backward_s > 0, used.peak_activations > 0) for _, used in sorted(usage.items())] == [
        (stage >= frozen,) * 2 for stage in range(len(usage))]


@pytest.mark.parametrize("words", [
    {"schedule": "1f1b", "partition": [2, 2, 2], "recompute": 0.5, "grad_clip": 0.5},
    {"schedule": "interleaved", "partition": [1, 2, 1, 2], "chunks": 2, "precision": "bf16_pure"},
    {"schedule": "zb_h1", "placement": [[0, 1], [2], [3, 4]], "partition": [2, 2, 2], "zero1": True},
    {"schedule": "pipedream", "placement": [[0], [1, 2], [3]], "partition": [1, 3, 2], "update_every": 1}])
def test_a_tied_weight_that_is_not_trained_is_exchanged_once(words: dict[str, Any], tmp_path: Path) -> None:
    pipe, _ = equals_its_oracle(tied, rich_batches(3, 8), rich_batches(2, 8, seed=4), **words)
    assert not pipe.lowered.ties
    if pipe.lowered.flush and max(map(len, pipe.placement)) == 1:
        reference, = references(pipe.model, pipe.description, pipe.lowered, rich_batches(1, 8))
        assert reference.bound == 0, "plain PyTorch itself"
    assert "TIED" not in pipe.lowered.to_csv()
    pipe.save(tmp_path)
    other = pipeline_of(tied, schedule="1f1b", partition=[1, 1, 1, 3])
    copies = [stage.modules[4].decoder for stage in other.engine.local_stages if 4 in stage.modules]
    copies += [stage.modules[5].decoder.weight for stage in other.engine.local_stages if 5 in stage.modules]
    for copy in copies:
        copy.data.zero_()
    other.load(tmp_path)
    weight = pipe.state_dict()["words.word.weight"]
    assert all(torch.equal(copy, weight) for copy in copies)


def test_one_of_two_tied_weights_is_trained() -> None:
    """Both lie on the same two stages."""
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.still = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
            self.raw = RawMatmul()

        def forward(self, hidden: Tensor) -> Tensor:
            return self.raw(hidden) * self.still

    ties = {"still": "first.still", "raw.w": "first.raw.w"}
    model = between(Layer("first", Two), Layer("raw", RawMatmul), Layer("last", Two, ties=ties))
    pipe, _ = equals_its_oracle(model, rich_batches(3, 8), schedule="1f1b", partition=[2, 3])
    assert pipe.lowered.ties == {0: (1,)}
    assert [len(stage.frozen_ties) for stage in pipe.engine.local_stages] == [0, 1]


def test_a_stream_does_not_run_ahead_of_what_is_trained() -> None:
    read = []

    def batches() -> Iterator[Batch]:
        for batch in rich_batches(40, 4):
            read.append(batch)
            yield batch

    pipe = pipeline_of(frozen_front, schedule="pipedream", partition=[4, 3, 3], microbatches=2, update_every=1)
    steps = pipe.train(batches())
    assert [next(steps).index for _ in range(8)] == list(range(8))
    assert len(read) <= 4 + 2  # of two microbatches: those of eight updates, and the three in flight


def test_a_gradient_that_nothing_could_be_trained_by_is_refused() -> None:
    class Wants(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.requires_grad_()

    pipe = pipeline_of(front(Wants), schedule="1f1b", partition=[2, 6])
    with pytest.raises(UserError, match="'h' requires a gradient, but nothing is trained up to there: it gets none"):
        list(pipe.train(rich_batches(1, 4)))
