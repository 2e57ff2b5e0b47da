"""Every schedule there is computes what its oracle says, on a model with skips, dropout, ties and raw matmuls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import rich_batches, rich_model, thrice_tied_model
from oracles import DECAY_AND_CLIP, AdamW, Momentum, assert_same, equals_its_oracle, oracle_of, pipeline_of

from vpipe import Pipeline, Update
from vpipe.runtime.transport.transport import InProcessTransport, TransferKey
from vpipe.schedules.assignment import Layout, Size
from vpipe.schedules.builder import build
from vpipe.schedules.kinds import Action, Op, input_half, weight_half
from vpipe.schedules.registry import _REGISTERED, RegisteredSchedule

FLUSH = [name for name in RegisteredSchedule.names() if RegisteredSchedule.named(name).flush]
STREAMS = [name for name in RegisteredSchedule.names() if not RegisteredSchedule.named(name).flush]
MICROBATCHES = 8


def cut(name: str, ranks: int = 2) -> list[int]:
    """Eight layers over the stages that a schedule has on so many ranks."""
    stages = ranks * RegisteredSchedule.named(name).chunks
    return [8 // stages] * stages if stages in (1, 2, 4, 8) else [8 - stages + 1] + [1] * (stages - 1)


def copies(name: str, ranks: int = 2) -> tuple[int, ...] | None:
    """The copies of every stage of a schedule that places several: their gradients are sums of sums."""
    widths = tuple(map(len, RegisteredSchedule.named(name).layout(ranks, RegisteredSchedule.named(name).chunks)))
    return widths if max(widths) > 1 else None


@pytest.mark.parametrize("name", FLUSH)
def test_tied_weights_with_a_flush(name: str) -> None:
    batches = rich_batches(2, 8)
    pipe, _ = equals_its_oracle(rich_model, batches, schedule=name, microbatches=8, grad_clip=0.3,
                                partition=cut(name, 4), recompute=0.5, optimizer=Momentum())
    assert pipe.evaluate(batches[:1]) == pipe.evaluate(batches[:1])


@pytest.mark.parametrize(("name", "stages", "every", "recompute"), [
    (name, stages, every, recompute) for name in STREAMS
    for stages, every, recompute in ((2, 1, 0.6), (4, 1, 0.0), (2, 2, 0.0), (4, 2, 0.6), (4, 4, 0.0), (4, 8, 0.6))
    if every >= RegisteredSchedule.named(name).update_every(stages)])
def test_without_a_flush_equals_its_oracle(name: str, stages: int, every: int, recompute: float) -> None:
    recipe, count = RegisteredSchedule.named(name), 3 if every == MICROBATCHES else 2  # 2bw uses an update two later
    pipe, steps = equals_its_oracle(rich_model, rich_batches(count, MICROBATCHES), schedule=name,
                                    microbatches=MICROBATCHES, partition=cut(name, stages), recompute=recompute,
                                    update_every=every, **DECAY_AND_CLIP)
    assert len(steps) == count * MICROBATCHES // every
    size = Size(stages, count * MICROBATCHES, 1, every)
    for stage, usage in enumerate(pipe.engine.collectives.usage()):
        assert usage.versions <= recipe.versions(stage, size)
        assert usage.peak_activations <= recipe.peak_activations(stage, size)


@pytest.mark.parametrize(("warmup", "every"), [((4, 0), 1), ((2, 0), 4), ((5, 3, 1, 0), 1), ((6, 5, 4, 0), 4),
                                               ((7, 4, 2, 0), 8)])
@pytest.mark.parametrize("name", STREAMS)
def test_more_forwards_ahead_equal_their_oracle(name: str, warmup: tuple[int, ...], every: int) -> None:
    """The evaluation drains the pipeline, with as many microbatches in flight as the depths say."""
    recipe, size = RegisteredSchedule.named(name), Size(len(warmup), 24, 1, every, warmup=warmup)
    if every < recipe.update_every(warmup[0] + 1):
        return
    pipe, _ = equals_its_oracle(
        rich_model, rich_batches(1, MICROBATCHES), rich_batches(3, MICROBATCHES, seed=9), schedule=name,
        microbatches=MICROBATCHES, partition=cut(name, len(warmup)), recompute=0.6, update_every=every,
        warmup_depth=warmup)
    for stage, usage in enumerate(pipe.engine.collectives.usage()):
        assert usage.versions <= recipe.versions(stage, size)
        assert usage.peak_activations == warmup[stage] + 1


@pytest.mark.parametrize("recompute", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("partition", "schedule"), [([2, 4], "1f1b"), ([2, 4], "zb_h1"), ([2, 2, 2], "1f1b"),
                                                     ([1, 2, 1, 2], "zb_v"), ([1, 1, 2, 2], "interleaved")])
def test_a_weight_tied_several_times(partition: list[int], schedule: str, recompute: float) -> None:
    """Into several layers of one stage, into both of its spans, and into several stages.

    With half of the last stage recomputed, one span has two uses and the other one: a sum of three in another order.
    """
    words = {"schedule": schedule, "partition": partition, "recompute": recompute, "optimizer": Momentum()}
    batches = rich_batches(3, 8)
    if recompute == 0.5:
        pipe = pipeline_of(thrice_tied_model, **words)
        losses = [step.loss for step in pipe.train(batches)]
        assert losses == pytest.approx(oracle_of(pipe, batches).losses, rel=3 * 8 * torch.finfo(torch.float32).eps)
    else:
        equals_its_oracle(thrice_tied_model, batches, **words)


@pytest.mark.parametrize("name", RegisteredSchedule.names())
def test_receives_are_posted_as_sends_are_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a transport without tags needs, from the first batch on and when shapes change."""
    orders: dict[str, dict[tuple[int, int, str, int], list[int]]] = {"send": {}, "post": {}}
    send, post = InProcessTransport.send, InProcessTransport.post

    def sending(self: InProcessTransport, peer: int, key: TransferKey, tensors: Any) -> None:
        orders["send"].setdefault((self.rank, peer, key.kind, key.stage), []).append(key.number)
        send(self, peer, key, tensors)

    def posting(self: InProcessTransport, peer: int, key: TransferKey, specs: Any) -> None:
        orders["post"].setdefault((peer, self.rank, key.kind, key.stage), []).append(key.number)
        post(self, peer, key, specs)

    monkeypatch.setattr(InProcessTransport, "send", sending)
    monkeypatch.setattr(InProcessTransport, "post", posting)
    stages = 4 * RegisteredSchedule.named(name).chunks
    pipe = Pipeline(rich_model(), Update(AdamW(), grad_clip=0.5), stages=[8 // stages] * stages, schedule=name,
                    microbatches=8)
    batches = rich_batches(2, 8, lengths=(6, 9))
    list(pipe.train(batches))
    pipe.evaluate(batches[1:])
    assert orders["send"] == orders["post"]
    assert len(orders["send"]) > 6


@pytest.mark.parametrize("steps", [False, True])
def test_microbatches_in_an_order_of_each_stage_s_own(steps: bool, tmp_path: Path) -> None:
    """Each stage adds gradients in its order: four microbatches with a flush, two updates of three without one."""
    file = tmp_path / "turned.csv"
    file.write_text("1F0,1B0,1F1,1F3,1B3,1F2,1B1,1B2\n0F1,0F0,0F3,0F2,0B0,0B1,0B3,0B2\n" if not steps else
                    "0F0,0F1,0F2,0F3,0B2,0B0,0B1,0STEP0,0F4,0F5,0B5,0B3,0B4,0STEP1\n"
                    "1F0,1F1,1F2,1B2,1B0,1B1,1STEP0,1F3,1F4,1F5,1B5,1B3,1B4,1STEP1\n")
    microbatches = 6 if steps else 4
    equals_its_oracle(rich_model, rich_batches(3, 2 * microbatches), schedule=str(file), microbatches=microbatches,
                      partition=[3, 5], update_every=3 if steps else None)


@pytest.mark.parametrize("recompute", [0.0, 0.5, 1.0])
def test_late_weight_halves_of_a_stream_are_exact(recompute: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's schedule: as pipedream with an update every second microbatch, W one microbatch behind."""

    def late(rank: int, ranks: int, microbatches: int, update_every: int = 1,
             warmup: Sequence[int] = ()) -> Iterator[Action]:
        owed: int | None = None
        for action in RegisteredSchedule.named("pipedream").program(rank, ranks, microbatches, update_every, warmup):
            if action.op is Op.BACKWARD:
                yield input_half(rank, action.microbatch)
                if owed is not None:
                    yield weight_half(rank, owed)
                owed = action.microbatch
            else:
                if action.op is Op.STEP and owed is not None:
                    yield weight_half(rank, owed)
                    owed = None
                yield action

    monkeypatch.setattr("vpipe.schedules.registry._REGISTERED", {
        **_REGISTERED, "late": replace(RegisteredSchedule.named("pipedream"), name="late", program=late)})
    equals_its_oracle(rich_model, rich_batches(3, 4), schedule="late", update_every=2, partition=[3, 5],
                      recompute=recompute)


def test_evaluation_and_changes_within_a_batch_of_an_asynchronous_file_come_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "stream.csv"
    file.write_text(build("pipedream", Layout.LOOP(2), 4).to_csv())
    model, batches = rich_model(), rich_batches(2, 4)

    def run(evaluate: bool) -> list[float]:
        pipe = Pipeline(model, AdamW(), stages=[3, 5], schedule=str(file), microbatches=4, seed=7)
        losses = []
        for step in pipe.train(batches):
            losses.append(step.loss)
            if evaluate and step.index == 1:
                assert [made.index for made in pipe.engine.training.drain()] == [2, 3]
                pipe.evaluate(batches)
                with torch.no_grad():
                    pipe.engine.local_stages[0].weights.leaves()[0].mul_(1)
        return losses

    assert run(evaluate=True) == run(evaluate=False)


def test_an_asynchronous_schedule_from_a_file_ends_with_its_batch(tmp_path: Path) -> None:
    file = tmp_path / "stream.csv"
    file.write_text(build("pipedream", Layout.LOOP(2), 4).to_csv())
    pipe, batches = pipeline_of(rich_model, schedule=str(file), partition=[3, 5]), rich_batches(3, 4)
    assert_same(pipe, list(pipe.engine.training.train(batches, updates=6)), oracle_of(pipe, batches[:2]))
