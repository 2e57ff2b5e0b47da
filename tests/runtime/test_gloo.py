"""Four processes, over gloo and under nccl's rules, compute what one process does, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jobs
import pytest
from everywhere import OVER, over, same_everywhere
from world import World

from vpipe.description import Executor
from vpipe.distributed.environment import AT_START, SPARE, joining
from vpipe.runtime import p2p
from vpipe.schedules.registry import RegisteredSchedule

EVEN, UNEVEN = [2, 2, 2, 2], [1, 4, 2, 1]
RICH: dict[str, Any] = {"model": "rich", "microbatches": 4, "batches": 2, "partition": EVEN}
EARLY: dict[str, Any] = {"recompute": [1.0, 0.25, 0.0, 1.0], "partition": UNEVEN}
UNTIED: dict[str, Any] = {"model": "untied", "recompute": 0.5, "partition": UNEVEN, "grad_clip": 0.5}
CLIPPED: dict[str, Any] = {"recompute": 0.0, "grad_clip": 0.5}
SHAPES: dict[str, Any] = {"lengths": [6, 9, 3], "batches": 4, "recompute": 0.5, "microbatches": 2, "samples": 4}
DTYPES: dict[str, Any] = {"model": "dtypes", "microbatches": 2, "samples": 4, "recompute": [0.0, 1.0, 0.0, 1.0]}
NORM: dict[str, Any] = {"model": "norm", "partition": [1, 2, 2, 1], "microbatches": 2, "samples": 4, "recompute": 1.0}
STOCHASTIC: dict[str, Any] = {"compress": "int8_stochastic"}


# One schedule of each kind is for make test: schedules/test_transfer_order.py has all of them reach their end under
# nccl's rules, test_every_schedule.py compute what they should. Over gloo the other kinds are in the tests below.
KINDS = {"gloo": ("interleaved", "zb_v", "chimera"),
         "nccl": ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "chimera", "pipedream", "2bw")}
FOR_SYSTEM = [pytest.mark.system, pytest.mark.long]


@pytest.mark.parametrize(("schedule", "rules"), [
    pytest.param(name, rules, marks=[] if name in KINDS[over] else FOR_SYSTEM, id=f"{name}-{over}")
    for name in RegisteredSchedule.names() for over, rules in OVER.items()])
def test_every_schedule(world: World, schedule: str, rules: Mapping[str, bool] | None) -> None:
    """Tied weights, tensors that skip stages, recompute and clipping; four ranks, with as many stages on each as the
    schedule has."""
    stages = 4 * RegisteredSchedule.named(schedule).chunks
    run = same_everywhere(world, rules, model="rich", schedule=schedule, microbatches=8, batches=2,
                          partition=[8 // stages] * stages, recompute=0.5, grad_clip=0.5)
    assert {norm is not None and norm > 0 for *_, norm, _ in run["steps"]} == {RegisteredSchedule.named(schedule).flush}
    assert len(set(run["state"].values())) == len(run["state"]), "different tensors have different fingerprints"


def with_short_memory(**run: Any) -> tuple[Any, int]:
    """A run in which the ends of a transfer know the shapes of two batches at a time, and how many a rank knows."""
    known = list[int]()
    with patch.object(p2p, "MOST_BATCHES", 2), patch.object(
            p2p, "_remember", lambda *entry: (remember(*entry), known.append(len(entry[0])))):
        return jobs.train(**run), max(known, default=0)


remember = p2p._remember


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_shapes_that_both_ends_have_forgotten_are_told_again(world: World, schedule: str) -> None:
    run = {**RICH, "schedule": schedule, "batches": 7, "lengths": [6, 9, 3, 5]}
    assert world.run(with_short_memory, **run) == [[jobs.train(**run), 2]] * 4


@pytest.mark.jobs
@over(*[("gloo", {"schedule": "gpipe", **changes}) for changes in (UNTIED, SHAPES, STOCHASTIC)],
      *[("gloo", {"schedule": "1f1b", **changes}) for changes in (EARLY, {"model": "untied", "recompute": 1.0}, NORM)],
      *[("gloo", {"schedule": "pipedream", **changes}) for changes in (EARLY, NORM, UNTIED | {"update_every": 2})],
      *[("gloo", {"schedule": "pipedream", "update_every": 2, **changes}) for changes in (CLIPPED, SHAPES)],
      ("gloo nccl", {"schedule": "1f1b", **SHAPES, "hide": True, "evaluate_after": [1]}),
      ("gloo nccl", {"schedule": "pipedream", **SHAPES, "hide": True, "evaluate_after": [1]}),
      ("gloo nccl", {"schedule": "zb_h1", "precision": "bf16", "recompute": 0.5, "compress": "int8", "grad_clip": 0.5}),
      ("gloo nccl", {"schedule": "1f1b", "precision": "fp16", "evaluate_after": [0]}),
      ("gloo", {"schedule": "1f1b", **STOCHASTIC, **SHAPES, "evaluate_after": [1], "grad_clip": 0.5}),
      ("gloo", {"schedule": "pipedream", **STOCHASTIC | {"compress": ["int8", "none", "bf16"]}, **SHAPES}),
      ("gloo nccl", {"schedule": "gpipe", **DTYPES, "partition": [1, 1, 1, 2]}),
      ("gloo", {"schedule": "gpipe", **DTYPES, "partition": [2, 1, 1, 1], "compress": "int8"}),
      ("gloo", {"schedule": "pipedream", **DTYPES, "partition": [1, 1, 1, 2]}),
      ("gloo", {"schedule": "pipedream", **DTYPES, "partition": [2, 1, 1, 1], "compress": "bf16"}),
      ("nccl", {"schedule": "pipedream", **NORM}),
      ("nccl", {"schedule": "pipedream", "precision": "fp16", "loss_scale": 1024}),
      ("nccl", {"schedule": "1f1b", "model": "untied"}), ("nccl", {"schedule": "gpipe", "skip_not_finite": True}),
      ("nccl", {"schedule": "dualpipe", "microbatches": 8, "precision": "fp16"}),
      *[("nccl", {"schedule": "gpipe", "executor": name}) for name in Executor.names() if name == "async_threaded"],
      *[("nccl", {"schedule": schedule, "executor": "naive"}) for schedule in ("1f1b", "chimera", "pipedream")])
def test_every_setting(world: World, rules: Mapping[str, bool] | None, arguments: dict[str, Any]) -> None:
    """Cuts, recompute, shapes that change, fields that a rank does not read and that have no values, tensors of any
    dtype, size and layout, buffers, codecs, precisions, executors."""
    same_everywhere(world, rules, **RICH | arguments)


def test_stages_that_take_microbatches_in_other_orders(world: World, tmp_path: Path) -> None:
    """The second stage takes first what was sent second: the shapes it waits for come with another microbatch."""
    file = tmp_path / "turned.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n2F0,2F1,2B1,2B0\n3F1,3F0,3B1,3B0\n")
    same_everywhere(world, model="rich", schedule=str(file), microbatches=2, partition=EVEN, recompute=0.5,
                    lengths=(6, 9))


@over(("gloo nccl", {"update_every": 1}), ("gloo nccl", {"update_every": 1, "warmup_depth": [7, 4, 2, 0]}),
      ("gloo", {"update_every": 2, "delay_correction": 1.0}))
def test_evaluation_drains_an_asynchronous_pipeline_that_then_goes_on(world: World, rules: Mapping[str, bool] | None,
                                                                      arguments: dict[str, Any]) -> None:
    run = same_everywhere(world, rules, model="rich", schedule="pipedream", microbatches=2, partition=EVEN, batches=14,
                          samples=4, evaluate_after=[3, 4, 12], recompute=0.5, **arguments)
    assert run["evaluations"][0] == run["evaluations"][1] != run["evaluations"][2]
    assert [step[0] for step in run["steps"]] == list(range(28 // arguments["update_every"]))


@over(("gloo", {"schedule": "1f1b", "entered": 5}), ("gloo", {"schedule": "pipedream", "entered": 9}),
      ("gloo", {"schedule": "pipedream", "update_every": 2, "entered": 7}),
      ("nccl", {"schedule": "2bw", "microbatches": 4, "entered": 6}))
def test_leaving_the_loop_early_then_training_on(world: World, rules: Mapping[str, bool] | None,
                                                 arguments: dict[str, Any]) -> None:
    """``entered``: updates made by the time the pipeline is empty, so the number of the next one."""
    entered, asked = arguments["entered"], {name: value for name, value in arguments.items() if name != "entered"}
    run = same_everywhere(world, rules, **{"model": "rich", "microbatches": 2, "partition": UNEVEN, "batches": 12,
                                           "samples": 4, "leave_after": 4, "more": 2, **asked})
    assert [step[0] for step in run["steps"]][:6] == [0, 1, 2, 3, 4, entered]
    assert run["middle"] != run["state"]


def test_layers_of_a_rank_are_given_the_fields_they_name_alone(world: World) -> None:
    assert world.run(jobs.what_ranks_read) == [["ids"], [], [], ["labels"]]
    assert jobs.what_ranks_read() == ["ids", "labels"]


def test_a_rank_builds_its_own_layers_once(world: World) -> None:
    names = [layer.name for layer in jobs.rich_model().layers]
    own = [[[name, "cpu"] for name in names[start:stop]] for start, stop in ((0, 2), (2, 3), (3, 5), (5, 8))]
    assert world.run(jobs.what_ranks_build, balance=False) == own


def test_balancing_builds_nothing_in_memory(world: World) -> None:
    names = [layer.name for layer in jobs.rich_model().layers]
    built = world.run(jobs.what_ranks_build, balance=True)
    assert all(rank[:8] == [[name, "meta"] for name in names] for rank in built)
    assert [entry for rank in built for entry in rank[8:]] == [[name, "cpu"] for name in names]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_stop_reaches_every_rank_with_the_same_step(world: World, schedule: str) -> None:
    expected = jobs.stopped(schedule=schedule, after=3)
    assert [stop for *_, stop in expected[:-1]] == [False, False, False, True]
    assert world.run(jobs.stopped, schedule=schedule, after=3) == [expected] * 4


def test_a_thread_of_any_rank_stops_all_after_the_same_step(world: World) -> None:
    first, *others = world.run(jobs.stopped_by_rank, rank=1)
    assert others == [first] * 3
    assert [stop for stop, _ in first] == [True, False] * 2
    assert all(2 < index < 499 for _, index in first[::2]), first


def test_usage_of_every_stage_is_known_on_every_rank(world: World) -> None:
    expected = [{"versions": 4 - s, "staleness": 3 - s, "peak_activations": 4 - s, "sent": True, "positive": True}
                for s in range(4)]
    assert world.run(jobs.used) == [expected] * 4
    assert jobs.used() == expected


@pytest.mark.parametrize(("arguments", "text"), [
    ({"tied_to": "embed.word.weight"},
     "error: 'head.decoder.bias' [23] (float32) is tied to 'embed.word.weight' [23, 12] (float32)\n"
     "hint: tied parameters are one: give both the same shape and dtype, train both or none, or leave out the tie"),
    ({"evaluate": True}, "error: there is nothing to evaluate on\nhint: give evaluate at least one batch"),
    ({"optimizer": "none"},
     "error: the optimizer factory returned None for every stage, so nothing would be trained\n"
     "hint: let it return what it makes: return torch.optim.AdamW(params, lr=1e-3)")])
def test_mistakes_that_no_rank_sees_alone_are_refused_by_all(world: World, arguments: dict[str, Any],
                                                             text: str) -> None:
    assert jobs.refused(**arguments) == text
    assert world.run(jobs.refused, **arguments) == [text] * 4


@pytest.mark.parametrize(("arguments", "rates"), [
    ({"schedule": "1f1b"}, [0.1, 0.025, 0.1 * 0.25 / 3, 0.1 * 0.125 / 4]),
    ({"schedule": "pipedream"}, None), ({"schedule": "pipedream", "change": 4}, None)])
def test_schedulers_of_torchs_on_every_rank(world: World, arguments: dict[str, Any], rates: list[float] | None) -> None:
    """A change while microbatches are in flight is refused on every rank after the same step, and all drain alike."""
    expected = jobs.scheduled(**arguments)
    assert world.run(jobs.scheduled, **arguments) == [expected] * 4
    steps, _ = expected
    if rates is not None:
        assert [rate for _, rate in steps] == pytest.approx(rates)
    if "change" in arguments:
        assert "a parameter group of an optimizer was changed after step 4" in steps.pop()
        assert len(steps) == 5


def test_a_rank_opens_as_many_files_as_are_reserved_for_it(tmp_path: Path) -> None:
    world = World(4, tmp_path)  # groups of meshes, which other tests have made, stay open
    try:
        world.run(jobs.train, model="rich", schedule="1f1b", microbatches=4, batches=1, partition=EVEN)
        files_of_ranks = world.run(jobs.open_files)
    finally:
        world.kill()
    for rank, files in enumerate(files_of_ranks):
        assert joining(rank, 4) - 8 < files <= AT_START + joining(rank, 4) + SPARE, f"rank {rank}"
