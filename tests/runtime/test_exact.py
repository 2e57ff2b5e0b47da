"""Flush schedules equal plain PyTorch, asynchronous ones their sequential oracle, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import rich_batches, rich_model, untied_model
from oracles import (
    DECAY_AND_CLIP,
    AdamW,
    Momentum,
    assert_same,
    assert_same_state,
    equals_its_oracle,
    oracle_of,
    pipeline_of,
)
from torch import Tensor, nn

from vpipe import Cut, Layer, Model, Pipeline
from vpipe.runtime.microbatches import Batch


@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_any_layers_may_be_recomputed(data: st.DataObject) -> None:
    """Kept and recomputed layers in any order, each run of them a span of its own, whole backwards and halves."""
    cuts = sorted(data.draw(st.sets(st.integers(1, 7), min_size=1, max_size=3)))
    partition = [end - start for start, end in zip([0, *cuts], [*cuts, 8], strict=True)]
    dropped = data.draw(st.sets(st.integers(0, 7), min_size=1))
    recompute = [[i for i in dropped if start <= i < end] for start, end in zip([0, *cuts], [*cuts, 8], strict=True)]
    schedule = data.draw(st.sampled_from(["1f1b", "zb_h1", "pipedream"]))
    pipe, _ = equals_its_oracle(rich_model if schedule == "pipedream" else untied_model, rich_batches(2, 8),
                                schedule=schedule, partition=partition, recompute=recompute, **DECAY_AND_CLIP)
    assert [set().union(*({i for i, _, _ in span.layers} for span in stage._spans if span.recomputed))
            for stage in pipe.engine.local_stages] == list(map(set, recompute))


def test_pipedream_with_momentum_over_forty_updates_holds_four_three_two_one_versions() -> None:
    """In as much memory, which serves all of them in turn."""
    batches = rich_batches(40, 4)
    pipe = pipeline_of(rich_model, schedule="pipedream", stages=4, microbatches=1, optimizer=Momentum())
    steps, places = [], [set[int]() for _ in range(4)]
    for step in pipe.train(batches):
        steps.append(step)
        for stage, seen in zip(pipe.engine.local_stages, places, strict=True):
            seen.add(stage.weights.values(stage.weights.names)[0].data_ptr())
    assert_same(pipe, steps, oracle_of(pipe, batches))
    assert [stage.weights.most_versions for stage in pipe.engine.local_stages] == [4, 3, 2, 1]
    assert list(map(len, places)) == [4, 3, 2, 1]


def test_a_flush_schedule_holds_one_version_and_copies_nothing() -> None:
    pipe = Pipeline(rich_model(), AdamW(), stages=3, schedule="1f1b", microbatches=4)
    stages = [stage for worker in pipe.engine.workers.values() for stage in worker.stages.values()]
    memory = [[value.data_ptr() for value in stage.weights.values(stage.weights.names)] for stage in stages]
    assert len(list(pipe.train(rich_batches(3, 8)))) == 3
    assert memory == [[value.data_ptr() for value in stage.weights.values(stage.weights.names)] for stage in stages]
    assert [stage.weights.most_versions for stage in stages] == [1, 1, 1]


@pytest.mark.parametrize(("warmup", "drained_at"), [(None, (12, 35)), ((6, 4, 2, 0), (15, 38))])
def test_evaluation_drains_an_asynchronous_pipeline_and_training_goes_on_as_its_oracle_says(
        warmup: tuple[int, ...] | None, drained_at: tuple[int, int]) -> None:
    words = {"schedule": "pipedream", "partition": [2, 2, 2, 2], "warmup_depth": warmup, "microbatches": 2}
    batches = rich_batches(30, 4)
    pipe, steps, evaluations = pipeline_of(rich_model, **words), [], []
    for step in pipe.train(batches):
        steps.append(step)
        if step.index in (7, 8, 30):
            evaluations.append(pipe.evaluate(rich_batches(2, 4, seed=9)))
    # After update 7 (8 done) microbatches up to 11 may be in flight: 12 are finished. Updates 8..11 were made by then.
    assert_same(pipe, steps, oracle_of(pipe, batches, drained_at=drained_at))
    assert evaluations[0] == evaluations[1] != evaluations[2]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_the_iterator_of_batches_is_freed_after_training(schedule: str) -> None:
    def batches() -> Iterator[Batch]:
        yield from rich_batches(3, 4)

    pipe = Pipeline(rich_model(), AdamW(), stages=3, schedule=schedule, microbatches=2)
    iterator = batches()
    alive = weakref.ref(iterator)
    list(pipe.train(iterator))
    del iterator
    assert alive() is None


def test_leaving_the_loop_early_keeps_what_was_in_flight() -> None:
    words, batches = {"schedule": "pipedream", "partition": [3, 3, 2], "microbatches": 1}, rich_batches(20, 4)
    pipe = pipeline_of(rich_model, **words)
    for step in pipe.train(batches):
        if step.index == 4:
            break
    state = pipe.state_dict()  # drains: 5 updates were seen, 3 more microbatches had entered
    assert_same_state(state, oracle_of(pipe, batches[:8]).state)
    more = [step.index for step in pipe.train(batches[8:10])]
    assert more == [8, 9]


def test_the_random_state_of_the_caller_is_left_alone() -> None:
    pipe = Pipeline(rich_model(), AdamW(), stages=Cut(3, recompute=1.0), schedule="1f1b", microbatches=2)
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    list(pipe.train(rich_batches(1, 4)))
    pipe.evaluate(rich_batches(1, 4))
    assert torch.equal(torch.rand(4), expected)


def test_two_loops_over_one_asynchronous_pipeline_take_turns() -> None:
    model = rich_model()
    pipe = Pipeline(model, AdamW(), stages=[3, 3, 2], schedule="pipedream", microbatches=1, seed=2)
    first, second = pipe.train(rich_batches(9, 4)), pipe.train(rich_batches(9, 4, seed=8))
    indices = [step.index for pair in zip(first, second, strict=True) for step in pair]
    assert sorted(indices) == list(range(18))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_loss_of_one_element_is_a_number(schedule: str) -> None:
    """Its shape does not matter: it is told to all ranks beside other numbers."""

    class Mean(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output - target).pow(2).mean().reshape(1)

    model, batches = Model.sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), loss=Mean()), [
        {"input": torch.ones(4, 4), "target": torch.zeros(4, 4)}]
    pipe = Pipeline(model, AdamW(), stages=2, schedule=schedule, microbatches=2)
    assert all(step.loss > 0 for step in pipe.train(batches))
    assert pipe.evaluate(batches) > 0


class PlainSteps:
    """The weights after a step are the gradients."""

    def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        return torch.optim.SGD(named.values(), 1.0) if named else None


class Forked(nn.Module):
    """A hidden state and a skip whose gradients, at a weight of 0, are the weights after a step at rate 1."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.skip = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.h, x.cos() + self.skip


class Reads(nn.Module):
    def forward(self, h: Tensor, skip: Tensor) -> Tensor:
        return (h * skip).sin() + skip.exp()


class Ends(nn.Module):
    def forward(self, h: Tensor, skip: Tensor) -> Tensor:
        return (h * skip.tanh()).mean()


@pytest.mark.parametrize("recompute", [0.0, 1.0])
@pytest.mark.parametrize("partition", [[1, 2, 1], [1, 1, 1, 1]])
def test_gradients_of_a_skip_add_up_in_the_order_of_one_graph(partition: list[int], recompute: float) -> None:
    """Read twice in a stage and passed on: three numbers, whose sum depends on their order."""
    skipping = Model([Layer("fork", Forked, ("x",), ("h", "skip")), Layer("one", Reads, ("h", "skip"), ("h",)),
                      Layer("two", Reads, ("h", "skip"), ("h",)), Layer("end", Ends, ("h", "skip"), ("loss",))], ("x",))
    batches = [{"x": torch.randn(4, 64, generator=torch.Generator().manual_seed(1))}]
    equals_its_oracle(skipping, batches, microbatches=1, optimizer=PlainSteps(), partition=partition,
                      recompute=recompute)
