"""The loss of an update is the mean over its labels: microbatches with unequal numbers of them, some with none."""

from __future__ import annotations

import pytest
import torch
from models import rich_batches, rich_model
from oracles import Momentum, pipeline_of
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Layer, Model, Pipeline, Update
from vpipe.errors import UserError


def labelled() -> Model:
    return Model(rich_model().layers, rich_model().batch, labels="labels")


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 5)

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(h), labels)


def two_layers() -> Model:
    return Model([Layer("first", lambda: nn.Linear(3, 4), ("x",), ("h",)),
                  Layer("head", Scores, ("h", "labels"), ("loss",))], batch=("x", "labels"), labels="labels")


def test_it_is_what_one_writes_by_hand() -> None:
    """Labels are powers of two in each microbatch and together, so that no division rounds: the sum over tokens,
    divided by the labels of the batch, has the same bits."""
    random = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(24, 3, generator=random), "labels": torch.randint(5, (24,), generator=random)}
               for _ in range(3)]
    for batch in batches:
        for first, labels in ((0, 8), (8, 4), (16, 4)):
            batch["labels"][first + labels:first + 8] = Model.NO_LABEL
    pipe = Pipeline(two_layers(), Update(lambda p: torch.optim.SGD(p, lr=0.1, foreach=True), per_token_loss=True),
                    stages=2, microbatches=3)
    modules = two_layers().materialize()
    optimizer, losses = torch.optim.SGD(modules.parameters(), lr=0.1, foreach=True), []
    for batch in batches:
        optimizer.zero_grad()
        parts = [F.cross_entropy(modules["head"].scores(modules["first"](x)), labels, reduction="sum") / 16
                 for x, labels in zip(batch["x"].split(8), batch["labels"].split(8), strict=True)]
        for part in parts:
            part.backward()
        losses.append(sum(part.item() for part in parts))
        optimizer.step()
    assert [step.loss for step in pipe.train(batches)] == losses
    assert all(torch.equal(value, modules.state_dict()[name]) for name, value in pipe.state_dict().items())


class WithPenalty(Scores):
    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return super().forward(h, labels) + h.square().mean()


def test_a_microbatch_without_labels_is_no_loss_that_is_not_finite() -> None:
    """Its mean is NaN, which must not reach the penalty's gradient."""
    layers = [two_layers().layers[0], Layer("head", WithPenalty, ("h", "labels"), ("loss",))]
    pipe = pipeline_of(Model(layers, batch=("x", "labels"), labels="labels"), stages=2, optimizer=Momentum(),
                       microbatches=2, per_token_loss=True, skip_not_finite=True)
    labels = torch.tensor([1, 2, Model.NO_LABEL, Model.NO_LABEL])
    [step] = pipe.train([{"x": torch.ones(4, 3), "labels": labels}])
    assert not step.skipped
    assert step.loss == step.loss
    assert pipe.evaluate([{"x": torch.ones(4, 3), "labels": labels}]) < step.loss


def test_labels_must_have_values_everywhere() -> None:
    pipe = pipeline_of(labelled, stages=2, per_token_loss=True)
    with pytest.raises(UserError, match="'labels' of a batch is on the meta device, but per_token_loss counts"):
        list(pipe.train([{name: field.to("meta") for name, field in rich_batches(1, 8)[0].items()}]))
