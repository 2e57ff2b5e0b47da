"""The encoder's output skips to every layer of the decoder, and lengths change: every schedule computes what plain
PyTorch computes, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from jobs import fingerprint, pipeline
from oracles import AdamW, assert_same_state, decay
from peft_models import check_training
from test_every_schedule import copies
from torch import Tensor
from world import World

from vpipe import Cut, Model, Pipeline, Update
from vpipe.app.families.registry import ModelSettings
from vpipe.extras.translation.model import TranslationOptions, translation_from_settings
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.testing import ReferenceRun, TrainingRecipe, asynchronous_oracle, evaluate_oracle, flush_oracle, version_rule

MICROBATCHES = 4
WORDS = 19
LENGTHS = ((5, 4), (3, 6), (5, 4))


def model(tied: bool = True, pre_norm: bool = False) -> Model:
    """Two and two blocks, 11 layers, with every dropout."""
    return translation_from_settings(ModelSettings(
        WORDS, "tiny", hidden_size=8, num_layers=2, num_heads=2, tie_weights=tied, dropout=0.1,
        overrides={"attention_dropout": 0.1}, options=TranslationOptions(0.1, pre_norm)))


def batches(samples: int = MICROBATCHES, lengths: Sequence[tuple[int, int]] = LENGTHS) -> list[dict[str, Tensor]]:
    """Random sentences, of which only the first fills its batch's lengths."""
    generator, found = torch.Generator().manual_seed(5), []
    for source, target in lengths:
        def ids(length: int) -> Tensor:
            return torch.randint(1, WORDS, (samples, length), generator=generator)

        def there(length: int) -> Tensor:
            ends = torch.randint(1, length + 1, (samples, 1), generator=generator)
            ends[0] = length
            return torch.arange(length) < ends

        mask, labels, words = there(source), ids(target), ids(source)
        labels[~there(target)] = Model.NO_LABEL
        shifted = torch.cat((torch.zeros(samples, 1, dtype=torch.int64), labels[:, :-1].clamp(min=0)), 1)
        found.append({"source_ids": words * mask, "source_mask": mask.long(), "target_ids": shifted, "labels": labels})
    return found


@pytest.mark.jobs
def test_adapters_are_those_of_peft_without_a_pipeline() -> None:
    base = translation_from_settings(ModelSettings(
        WORDS, "tiny", hidden_size=8, num_layers=2, num_heads=2, tie_weights=True, dropout=0.0))
    check_training(base, ["query", "value", "expand"], batches())


def cut(name: str, ranks: int = 2) -> list[int]:
    """Eleven layers over the stages that a schedule has on so many ranks."""
    stages = ranks * RegisteredSchedule.named(name).chunks
    return [11 // stages + (stage < 11 % stages) for stage in range(stages)]


def recipe(seed: int = 7) -> TrainingRecipe:
    return TrainingRecipe(AdamW().from_named, MICROBATCHES, seed, decay, 0.5)


@cache
def plain(tied: bool, partition: tuple[int, ...] | None, widths: tuple[int, ...] | None = None) -> ReferenceRun:
    return flush_oracle(model(tied), batches(), recipe(), partition, widths)


FLUSH = ("gpipe", "1f1b", "interleaved_zb", "looped_bfs", "zb_v", "hanayo", "dualpipe", "chimera")
"""One of each placement, with whole and with halved backwards: the runtime runs all of them in tests/runtime."""

STREAMS = [name for name in RegisteredSchedule.names() if not RegisteredSchedule.named(name).flush]


@pytest.mark.parametrize("name", FLUSH)
def test_with_a_flush_it_equals_plain_pytorch(name: str) -> None:
    """Untied without a partition: exactly plain PyTorch. All three weights tied: a gradient per copy, then the sum."""
    for tied, recompute in ((False, 0.0), (True, 0.5)):
        partition = tuple(cut(name))
        pipe = Pipeline(model(tied), Update(AdamW(), learning_rate_factor=decay, grad_clip=0.5),
                        stages=Cut(partition, recompute=recompute), schedule=name, microbatches=MICROBATCHES, seed=7)
        widths = copies(name)
        expected = plain(tied, partition if tied or widths else None, widths)
        losses = [step.loss for step in pipe.train(batches())]
        assert losses == expected.losses
        assert_same_state(pipe.state_dict(), expected.state)


@pytest.mark.parametrize("recompute", [0.0, 1.0])
@pytest.mark.parametrize("name", STREAMS)
def test_without_a_flush_it_equals_its_oracle(name: str, recompute: float) -> None:
    pipe = Pipeline(model(), Update(AdamW(), learning_rate_factor=decay, grad_clip=0.5),
                    stages=Cut([3, 4, 4], recompute=recompute), schedule=name, microbatches=MICROBATCHES, seed=7)
    losses = [step.loss for step in pipe.train(batches())]
    expected = asynchronous_oracle(model(), batches(), recipe(), [3, 4, 4], pipe.update_every,
                                   version_of=version_rule(name))
    assert losses == expected.losses
    assert_same_state(pipe.state_dict(), expected.state)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_replicas(schedule: str) -> None:
    placement, partition = [[0, 1], [2], [3, 4]], [3, 4, 4]
    pipe = Pipeline(model(), Update(AdamW(), learning_rate_factor=decay),
                    stages=Cut(partition, ranks=placement, recompute=0.5),
                    schedule=schedule, microbatches=MICROBATCHES, seed=7)
    losses, own = [step.loss for step in pipe.train(batches())], TrainingRecipe(
        AdamW().from_named, MICROBATCHES, 7, decay)
    expected = flush_oracle(model(), batches(), own, partition, [2, 1, 2]) if schedule == "1f1b" else \
        asynchronous_oracle(model(), batches(), own, partition, widths=[2, 1, 2])
    assert losses == expected.losses
    assert_same_state(pipe.state_dict(), expected.state)


def train(*, schedule: str, partition: Sequence[int], **arguments: Any) -> dict[str, Any]:
    """Batches whose lengths change, of which a rank has the fields that its layers read; then an evaluation."""
    pipe = pipeline(model(pre_norm=True), schedule=schedule, partition=partition, microbatches=MICROBATCHES,
                    **arguments)
    read = {name for stage in pipe.engine.local_stages for name in stage.spec.fields}
    data = [{name: t if name in read else t.to("meta") for name, t in batch.items()} for batch in batches()]
    losses = [step.loss for step in pipe.train(data)]
    return {"losses": losses, "held_out": pipe.evaluate(data), "state": fingerprint(pipe.state_dict())}


@pytest.mark.jobs
@pytest.mark.parametrize(("schedule", "arguments"), [
    ("1f1b", {"partition": [4, 2, 2, 3]}), ("pipedream", {"partition": [2, 3, 3, 3], "shared_memory": False}),
    ("zb_v", {"partition": [2, 1, 1, 2, 1, 1, 1, 2], "recompute": 0.5}),
    ("1f1b", {"partition": [6, 5], "placement": [[0, 1], [2, 3]], "stages": 2})])
def test_over_gloo(world: World, schedule: str, arguments: dict[str, Any]) -> None:
    expected = train(schedule=schedule, **arguments)
    assert world.run(train, schedule=schedule, **arguments) == [expected] * 4


def test_an_evaluation_is_the_mean_over_tokens_without_smoothing() -> None:
    found = Pipeline(model(), AdamW(), stages=[3, 4, 4], microbatches=MICROBATCHES, seed=7)
    held_out = [batch for samples, lengths in ((4, LENGTHS[:1]), (7, LENGTHS[1:2]), (1, LENGTHS[2:]))
                for batch in batches(samples, lengths)]
    loss, state = found.evaluate(held_out), found.state_dict()
    assert loss == evaluate_oracle(model(), state, held_out, MICROBATCHES)
    modules = model().materialize().eval()
    modules.load_state_dict(state, strict=False)
    total, tokens = 0.0, 0
    for batch in held_out:
        tensors = dict(batch)
        with torch.no_grad():
            for layer in model().layers[:-1]:
                tensors[layer.outputs[0]] = modules[layer.name](*(tensors[name] for name in layer.inputs))
            logits = modules["head"].scores(tensors["h"]).flatten(0, 1)
        total += float(torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum"))
        tokens += int((batch["labels"] != Model.NO_LABEL).sum())
    assert loss == pytest.approx(total / tokens, rel=16 * torch.finfo(torch.float32).eps)
