"""Every schedule there is computes what its oracle says, on a model with skips, dropout, ties and raw matmuls."""

from __future__ import annotations

import pytest
import torch
from models import rich_batches, rich_model
from test_exact import AdamW, Momentum, assert_same_state, decay

from vpipe import Pipeline
from vpipe.schedules.registry import recipe_named, schedule_names
from vpipe.schedules.size import Size
from vpipe.train.oracle import VERSIONS, Recipe, asynchronous_oracle, flush_oracle

FLUSH = [name for name in schedule_names() if recipe_named(name).flush]
STREAMS = [name for name in schedule_names() if not recipe_named(name).flush]
MICROBATCHES = 8


def cut(name: str, ranks: int = 2) -> list[int]:
    """Eight layers over the stages that a schedule has on so many ranks."""
    stages = ranks * recipe_named(name).chunks
    return [8 // stages] * stages if stages in (1, 2, 4, 8) else [8 - stages + 1] + [1] * (stages - 1)


@pytest.mark.parametrize("recompute", [0.0, [0.0, 1.0], 1.0], ids=["kept", "mixed", "recomputed"])
@pytest.mark.parametrize("name", FLUSH)
def test_with_a_flush_equals_plain_pytorch(name: str, recompute: float | list[float]) -> None:
    model, batches, partition = rich_model(tied=False), rich_batches(3, MICROBATCHES), cut(name)
    ratios = recompute if isinstance(recompute, float) else (recompute * len(partition))[:len(partition)]
    pipe = Pipeline(model, schedule=name, microbatches=MICROBATCHES, partition=partition, recompute=ratios,
                    optimizer=AdamW(), seed=7, learning_rate_factor=decay, grad_clip=0.5)
    steps = list(pipe.train(batches))
    expected = flush_oracle(model, batches, Recipe(AdamW().from_named, MICROBATCHES, 7, decay, 0.5))
    assert [step.loss for step in steps] == expected.losses
    assert [step.gradient_norm for step in steps] == expected.gradient_norms
    assert_same_state(pipe.state_dict(), expected.state)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", FLUSH)
def test_tied_weights_with_a_flush(name: str, ranks: int) -> None:
    model, batches, partition = rich_model(), rich_batches(2, MICROBATCHES), cut(name, ranks)
    pipe = Pipeline(model, schedule=name, microbatches=MICROBATCHES, partition=partition, recompute=0.5,
                    optimizer=Momentum(), seed=1, grad_clip=0.3)
    steps = list(pipe.train(batches))
    expected = flush_oracle(model, batches, Recipe(Momentum().from_named, MICROBATCHES, 1, clip=0.3),
                            sides_apart=partition)
    assert [step.loss for step in steps] == expected.losses
    assert [step.gradient_norm for step in steps] == expected.gradient_norms
    assert_same_state(pipe.state_dict(), expected.state)
    assert pipe.evaluate(batches) == pipe.evaluate(batches)


@pytest.mark.parametrize("recompute", [0.0, 0.6])
@pytest.mark.parametrize("every", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", STREAMS)
def test_without_a_flush_equals_its_oracle(name: str, stages: int, every: int, recompute: float) -> None:
    recipe = recipe_named(name)
    if every < recipe.update_every(stages):
        pytest.skip(f"{name} needs {recipe.update_every(stages)} microbatches per update")
    model, batches, partition = rich_model(), rich_batches(5, MICROBATCHES), cut(name, stages)
    pipe = Pipeline(model, schedule=name, microbatches=MICROBATCHES, partition=partition, recompute=recompute,
                    optimizer=AdamW(), seed=2, learning_rate_factor=decay, grad_clip=0.5, update_every=every)
    losses = [step.loss for step in pipe.train(batches)]
    expected = asynchronous_oracle(model, batches, Recipe(AdamW().from_named, MICROBATCHES, 2, decay, 0.5), partition,
                                   every, version_of=VERSIONS[name])
    assert losses == expected.losses
    assert len(losses) == 5 * MICROBATCHES // every
    assert_same_state(pipe.state_dict(), expected.state)
    size = Size(stages, 5 * MICROBATCHES, 1, every)
    for stage, usage in enumerate(pipe.engine.usage()):
        assert usage.versions <= recipe.versions(stage, size)
        assert usage.peak_activations <= recipe.peak_activations(stage, size)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_pauses_equals_its_oracle(name: str) -> None:
    model, partition = rich_model(), cut(name)
    first, second = rich_batches(2, MICROBATCHES), rich_batches(3, MICROBATCHES, seed=9)
    pipe = Pipeline(model, schedule=name, microbatches=MICROBATCHES, partition=partition, optimizer=AdamW(), seed=2,
                    update_every=4)
    losses = [step.loss for step in pipe.train(first)]
    pipe.evaluate(first)
    losses += [step.loss for step in pipe.train(second)]
    expected = asynchronous_oracle(model, first + second, Recipe(AdamW().from_named, MICROBATCHES, 2), partition, 4,
                                   drained_at=[2 * MICROBATCHES], version_of=VERSIONS[name])
    assert losses == expected.losses
    assert_same_state(pipe.state_dict(), expected.state)


@pytest.mark.parametrize("name", sorted(set(schedule_names()) - {"gpipe"}))
def test_evaluation_is_the_same_on_any_layout(name: str) -> None:
    batches = rich_batches(3, MICROBATCHES)
    losses = [Pipeline(rich_model(), schedule=schedule, microbatches=MICROBATCHES, partition=cut(schedule),
                       optimizer=AdamW(), seed=4).evaluate(batches) for schedule in ("gpipe", name)]
    assert losses[0] == losses[1]
    assert not torch.isnan(torch.tensor(losses)).any()
