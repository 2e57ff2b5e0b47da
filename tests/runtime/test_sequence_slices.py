"""Sequences in slices: every schedule of them computes what plain PyTorch does slice by slice, and whole sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from everywhere import same_everywhere
from models import CarriedAttention, rich_batches, sliced_model
from oracles import DECAY_AND_CLIP, assert_same_state, equals_its_oracle, pipeline_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from world import World

from vpipe import Layer, Model
from vpipe.app.families.dropout import Dropout
from vpipe.errors import RunError, UserError
from vpipe.runtime.label_weights import LabelCount
from vpipe.runtime.microbatches import BatchForm, MicrobatchLoader
from vpipe.testing import evaluate_oracle, references

BATCHES = rich_batches(2, 8, lengths=(7, 9))
"""Uneven slices: 4 + 3 tokens, 3 + 2 + 2, 2 + 2 + 2 + 1."""
for batch in BATCHES:  # microbatches and slices with unequal labels, some with none
    batch["labels"][1, :5] = batch["labels"][4:6, 4:] = batch["labels"][6:, 2] = Model.NO_LABEL


@pytest.mark.parametrize(("slices", "words"), [
    *((slices, {"stages": stages}) for slices, stages in ((2, 4), (3, 3), (4, 2))),
    (1, {"stages": 3}), (3, {"stages": 3, "schedule": "gpipe"}), (7, {"stages": 2, "microbatches": 2}),
    (3, {"stages": 3, "recompute": 1.0}), (2, {"partition": [4, 2], "recompute": 0.5}),
    (3, {"stages": 2, "per_token_loss": True, **DECAY_AND_CLIP}), (2, {"stages": 2, "replicas": 2}),
    (3, {"stages": 2, "placement": [[0, 1, 2], [3]], "per_token_loss": True, "zero1": True}),
    (3, {"stages": 2, "executor": "naive", "skip_not_finite": True}),
    *((2, {"stages": 3, "precision": precision, "recompute": 0.5}) for precision in ("bf16", "bf16_pure", "fp16"))])
def test_equals_plain_pytorch_slice_by_slice(slices: int, words: dict[str, Any]) -> None:
    equals_its_oracle(sliced_model, BATCHES, BATCHES[:1], slices=slices, **{"schedule": "seq1f1b", **words})


def test_every_order_of_a_file(tmp_path: Path) -> None:
    """Of two microbatches in two slices: backwards in two halves, recomputed ahead, offloaded."""
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,0F2,0OFFLOAD0,0F3,0R1,0I1,0W1,0FETCH0,0B0,0B3,0I2,0W2\n"
                    "1F0,1F1,1I1,1I0,1W1,1W0,1F2,1F3,1B3,1B2\n")
    pipe, _ = equals_its_oracle(sliced_model, BATCHES, schedule=str(file), slices=2, microbatches=2, stages=2,
                                recompute=[0.5, 0.5])
    exact, plain = references(pipe.model, pipe.description, pipe.lowered, BATCHES)
    assert (exact.bound, exact.name.partition(", ")[2]) == (0, "slice by slice, tied gradients summed by stage")
    assert plain.name.endswith("slice by slice, one update at a time")
    # As many roundings as gradients: of four slices, of the tied weight eight. Some of them cancel.
    assert 4 < plain.bound / torch.finfo(torch.float32).eps < 16


class Sums(nn.Module):
    """Linear attention without division: every token gets the sum over those before of what they have in common.

    On whole numbers it rounds nothing, so that order and slices change no bit."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = (nn.Parameter(torch.randint(-1, 2, (3, 3)).double()) for _ in range(2))

    def forward(self, x: Tensor, carried: tuple[Tensor, ...] | None = None) -> Any:
        pairs = (x @ self.key)[..., :, None] * (x @ self.value)[..., None, :]
        sums = pairs.cumsum(1) + (carried[0] if carried else 0)
        output = (x[..., None, :] @ sums).squeeze(-2) + x
        return output if carried is None else (output, sums[:, -1:])


def is_label(labels: Tensor) -> Tensor:
    return labels != Model.NO_LABEL


class SquareError(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        there = is_label(labels)
        return ((x.sum(-1) - labels).square() * there).sum() / there.sum().clamp(min=1)


class Checkpointed(Dropout):
    """Drops half once more in its backward, which needs the places."""

    def __init__(self) -> None:
        super().__init__(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def same_in_slices(model: Model, batch: dict[str, Tensor], *counts: int, **words: Any) -> None:
    """Train on whole sequences, and on slices of them: the same losses and weights."""
    runs = []
    for slices in (1, *counts):
        pipe = pipeline_of(model, schedule="1f1b" if slices == 1 else "seq1f1b", slices=slices, microbatches=2, **words,
                           optimizer=lambda parameters: torch.optim.SGD(parameters, lr=2**-20))
        runs.append(([step.loss for step in pipe.train([batch])], pipe.state_dict()))
    for losses, state in runs[1:]:
        assert losses == runs[0][0]
        assert_same_state(state, runs[0][1])


@pytest.mark.parametrize("words", [{"stages": 2}, {"stages": 3, "recompute": 1.0},
                                   {"stages": 3, "per_token_loss": True}], ids=str)
def test_equals_whole_sequences_where_nothing_rounds(words: dict[str, Any]) -> None:
    """The labels of a slice, and those of a microbatch, are none or a power of two, so that shares do not round. The
    dropout drops of a slice what it drops of the whole, in its backward again."""
    model = Model([Layer("sums0", Sums, ("field",), ("x",), carried=("sums",)),
                   Layer("dropout", Checkpointed, ("x",), ("x",), carried=()),
                   Layer("sums1", Sums, ("x",), ("x",), carried=("sums",)),
                   Layer("error", SquareError, ("x", "labels"), ("loss",), carried=())],
                  batch=("field", "labels"), labels="labels", label_weights=is_label)
    random = torch.Generator().manual_seed(4)
    batch = {"field": torch.randint(-1, 2, (4, 8, 3), generator=random).double(),
             "labels": torch.randint(5, (4, 8), generator=random)}
    for samples, tokens in ((slice(0, 2), (2, 3)), (1, (4, 5)), (0, (6, 7)), (slice(2, 4), (2, 3, 4, 5))):
        batch["labels"][samples, list(tokens)] = Model.NO_LABEL
    same_in_slices(model, batch, 2, 4, **words)
    equals_its_oracle(model, [batch], schedule="seq1f1b", slices=4, microbatches=2, **words)


class Embed(nn.Module):
    """Whole numbers; its forward is the one that docs/concepts.md shows."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = (nn.Embedding.from_pretrained(torch.randint(9, (8, 3)).double(), freeze=False)
                                  for _ in range(2))


def test_places_go_on_from_slice_to_slice_where_tokens_are_carried() -> None:
    page = (Path(__file__).parents[2] / "docs/concepts.md").read_text()
    made: dict[str, Any] = {"torch": torch}
    exec(page[page.index("def forward(self, ids, carried=None):"):].partition("```")[0], made)
    embed = type("Placed", (Embed,), {"forward": made["forward"]})
    model = Model([Layer("embed", embed, ("ids",), ("x",), carried=("before",)),
                   Layer("error", SquareError, ("x", "labels"), ("loss",), carried=())], ("ids", "labels"), "labels",
                  is_label)
    batch = {"ids": torch.arange(32).reshape(4, 8) * 3 % 8, "labels": torch.arange(32).reshape(4, 8)}
    same_in_slices(model, batch, 4, stages=2)


def test_a_checkpoint_counts_microbatches_and_goes_on_with_other_slices() -> None:
    """The weights after two updates in slices are those before the third in whole sequences."""
    first, then = pipeline_of(sliced_model, stages=3, schedule="seq1f1b", slices=3), pipeline_of(sliced_model, stages=2)
    list(first.train(BATCHES))
    assert (first.position.updates, first.position.microbatches, first.position.samples) == (2, 8, 16)
    assert first.evaluate(BATCHES) == evaluate_oracle(sliced_model(), first.state_dict(), BATCHES, 4)
    then.engine.restore(first.position, first.engine.checkpoint_state())
    assert_same_state(then.state_dict(), first.state_dict())
    assert [step.index for step in then.train(BATCHES)] == [2, 3]


def changed(number: int, **changes: Any) -> Model:
    layers = list(sliced_model().layers)
    layers[number] = replace(layers[number], **changes)
    return Model(layers, sliced_model().batch, "labels")


class Fails(CarriedAttention):
    def forward(self, hidden: Tensor, carried: tuple[Tensor, ...] | None = None) -> Any:
        if carried and carried[0].shape[1] == 7:  # the last of the four slices, but of nine tokens
            raise ValueError("not this one")
        return super().forward(hidden, carried)


class Keeps(CarriedAttention):
    """Hands on its output, which the next layer changes in place."""

    def forward(self, hidden: Tensor, carried: tuple[Tensor, ...] | None = None) -> Any:
        output = super().forward(hidden)
        return output if carried is None else (output, output, output)


@pytest.mark.parametrize(("model", "error", "what"), [
    (lambda: changed(1, build=Fails), RunError,
     r"the forward of layer 1 'attention0' on h float32\[4, 2, 12\], keys of attention0 float32\[4, 7, 12\], values of "
     r".* \(rank 0, stage 0, microbatch 2, action 0F3 on slice 3 of 4\)"),
    (lambda: changed(1, carried=("keys",)), UserError, "returned 3 value.* its 1 outputs and the 1 that it carries on"),
    (lambda: changed(3, carried=("k",)), RunError, r"argument 'carried' .*\nhint: Layer\(carried=\('k',\)\) asks for a "
     "forward with carried=None: .* returns what it carries on behind its outputs"),
    (lambda: Model([*changed(1, build=Keeps).layers[:2], Layer("relu", lambda: nn.ReLU(inplace=True), carried=()),
                    *sliced_model().layers[2:]], ("ids", "labels"), "labels"), UserError, "its input in place")])
def test_what_fails_in_a_slice_is_named(model: Any, error: type[Exception], what: str) -> None:
    """Of four slices of a batch of nine tokens; the first batch has seven."""
    built = model()
    pipe = pipeline_of(built, partition=[3, len(built) - 3], schedule="seq1f1b", slices=4, microbatches=2)
    with pytest.raises(error, match=what):
        list(pipe.train(BATCHES))


@pytest.mark.parametrize(("changes", "what"), [
    ({"labels": torch.zeros(8, dtype=torch.int64)}, r"the field 'labels' of a batch has the shape \[8\], without seq"),
    ({"labels": torch.zeros(8, 4, dtype=torch.int64)}, "disagree on the number of tokens: {'ids': 3, 'labels': 4}"),
    ({"labels": torch.zeros(8, 3, device="meta")}, "on the meta device, but slices of sequences count its labels"),
    ({}, "sequences of 3 tokens cannot be cut into 4 slices")])
def test_what_cannot_be_cut_is_refused(changes: Mapping[str, Tensor], what: str) -> None:
    pipe = pipeline_of(sliced_model, stages=2, schedule="seq1f1b", slices=4 - bool(changes))
    with pytest.raises(UserError, match=what):
        list(pipe.train([{**rich_batches(1, 8, lengths=(3,))[0], **changes}]))


def test_slices_of_every_microbatch_of_a_batch() -> None:
    fields = {"x": torch.arange(14).view(2, 7)[:, :, None], "labels": torch.arange(14).view(2, 7)}
    fields["labels"][1, :5] = Model.NO_LABEL
    loader = MicrobatchLoader(iter([fields, fields]), BatchForm(("x", "labels"), 2, slices=3), lambda _: 1,
                              labels=LabelCount("labels", by_label=False))
    assert loader.has(11)
    assert not loader.has(12)
    places = [loader.signature(index)[-1][1] for index in range(6)]
    assert [(place.number, place.start, place.length) for place in places] == 2 * [(0, 0, 7), (1, 3, 7), (2, 5, 7)]
    assert len({loader.signature(index) for index in range(12)}) == 3
    assert [loader.counts[index] for index in range(6)] == [(3 / 7, 0), (2 / 7, 0), (2 / 7, 1), (0, 0), (0, 0), (1, 1)]
    assert [loader.samples(0, index) for index in (3, 6, 9, 12)] == [1, 2, 3, 4]
    assert [loader.consume(index)["x"].flatten().tolist() for index in range(4)] == [
        [0, 1, 2], [3, 4], [5, 6], [7, 8, 9]]


class Weighted(nn.Module):
    """Saves all that it carries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, carried: tuple[Tensor, ...] | None = None) -> Any:
        keys = torch.cat([*(carried or ()), x], 1)
        output = x + (keys * self.weight).sum(1, keepdim=True)
        return output if carried is None else (output, keys)


def test_what_slices_have_in_common_counts_once() -> None:
    """Keys of one to six tokens are saved by the slices that made them, and are what the next ones began with."""
    model = Model([Layer("weighted", Weighted, ("field",), ("x",), carried=("keys",)),
                   Layer("error", SquareError, ("x", "labels"), ("loss",), carried=())],
                  batch=("field", "labels"), labels="labels", label_weights=is_label)
    pipe = pipeline_of(model, stages=2, schedule="gpipe", slices=3, microbatches=1)
    recorder = pipe.record()[0]
    list(pipe.train([{"field": torch.ones(2, 6, 3), "labels": torch.ones(2, 6)}]))
    fields, keys = 2 * 6 * 3 * 4, 2 * (2 + 4 + 6) * 3 * 4
    assert max(each.held_bytes for each in recorder.pop_records()) == fields + keys


def test_over_gloo(world: World) -> None:
    same_everywhere(world, model="sliced", schedule="seq1f1b", slices=3, microbatches=4, partition=[3, 3],
                    placement=[[0, 1], [2, 3]], recompute=0.5, lengths=[7, 9], grad_clip=0.5, evaluate_after=[0])
