"""Under nccl's rules four processes compute what one process does, bit for bit, and none waits for ever."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import nccl_jobs
import pytest
import resuming_jobs
import test_resume_gloo
import torch
import torch.distributed as dist
from models import int16_model
from small_run import write_config
from test_replicas_gloo import DOWN_AND_UP, DOWN_AND_UP_TWICE, FOUR, ONE_THREE, TWO_ONE_ONE, TWO_TWO, without_rates
from world import World

from vpipe.app.config.config import load_config
from vpipe.app.train.job import Job
from vpipe.app.train.resume import ResumePoint, prepare_run
from vpipe.runtime.transport import process_group
from vpipe.runtime.transport.process_group import DistributedTransport, PeerTransfer
from vpipe.runtime.transport.transport import TransferKey, TransferKind
from vpipe.schedules.registry import RegisteredSchedule

RULES = {f"{'eager' if eager else 'lazy'}-{'buffered' if buffered else 'rendezvous'}":
         {"eager": eager, "buffered": buffered} for eager in (False, True) for buffered in (False, True)}
HARDEST = "lazy-rendezvous"
EVEN = [2, 2, 2, 2]
MIDDLE = [[0], [1, 2], [3]]
RICH: dict[str, Any] = {"model": "rich", "microbatches": 4, "batches": 2, "partition": EVEN}


def equal_under_rules(world: World, rules: str = HARDEST, **arguments: Any) -> dict[str, Any]:
    """Train here and on every rank under the rules; all tell the same but for the learning rate, a stage's own."""
    expected = jobs.train_here(**arguments)
    for rank, result in enumerate(world.run(nccl_jobs.under, run="jobs.train", **RULES[rules], **arguments)):
        assert without_rates(result) == without_rates(expected), f"rank {rank}"
    return expected


@pytest.mark.parametrize("schedule", RegisteredSchedule.names())
def test_every_schedule(world: World, schedule: str) -> None:
    """Tied weights, tensors that skip stages, recompute and clipping; several stages per rank where it has them."""
    stages = 4 * RegisteredSchedule.named(schedule).chunks
    equal_under_rules(world, model="rich", schedule=schedule, microbatches=8, batches=2,
                      partition=[8 // stages] * stages, recompute=0.5, grad_clip=0.5)


# Who waits less cannot wait for ever where the hardest rules let all pass: most combinations are for make test-system.
@pytest.mark.parametrize(("schedule", "rules"), [
    pytest.param(schedule, rules, marks=[] if number % 3 == place % 3 else pytest.mark.system)
    for place, schedule in enumerate(("1f1b", "zb_v", "pipedream", "chimera", "dualpipe"))
    for number, rules in enumerate(sorted(set(RULES) - {HARDEST}))])
def test_every_way_to_make_communicators_and_to_send(world: World, schedule: str, rules: str) -> None:
    stages = 4 * RegisteredSchedule.named(schedule).chunks
    equal_under_rules(world, rules, model="rich", schedule=schedule, microbatches=8, batches=2,
                      partition=[8 // stages] * stages, grad_clip=0.5)


@pytest.mark.parametrize("arguments", [
    {"schedule": "chimera", "executor": "naive"}, {"schedule": "dualpipe", "microbatches": 8, "precision": "fp16"},
    {"schedule": "1f1b"}, {"schedule": "1f1b", "model": "untied"}, {"schedule": "gpipe", "skip_not_finite": True},
    {"schedule": "1f1b", "precision": "fp16", "evaluate_after": [0]},
    {"schedule": "pipedream", "precision": "fp16"}, {"schedule": "zb_h1", "precision": "bf16", "compress": "int8"},
    {"schedule": "1f1b", "executor": "naive"}, {"schedule": "pipedream", "executor": "naive"},
    {"schedule": "gpipe", "executor": "async_threaded"},
    {"schedule": "1f1b", "lengths": [6, 9, 3], "batches": 4, "hide": True},
    {"schedule": "pipedream", "lengths": [6, 9, 3], "batches": 4},
    {"schedule": "pipedream", "batches": 14, "evaluate_after": [3, 4, 12]},
    {"schedule": "pipedream", "batches": 14, "evaluate_after": [3, 4, 12], "warmup_depth": [7, 4, 2, 0]},
    {"schedule": "2bw", "batches": 14, "leave_after": 4, "more": 2},
    {"schedule": "gpipe", "model": "dtypes", "partition": [1, 1, 1, 2], "microbatches": 2, "samples": 4},
    {"schedule": "pipedream", "model": "norm", "partition": [1, 2, 2, 1], "microbatches": 2}],
    ids=lambda arguments: "-".join(str(value) for value in arguments.values()))
def test_every_setting_trains_under_the_rules_of_nccl(world: World, arguments: dict[str, Any]) -> None:
    equal_under_rules(world, **{**RICH, **arguments})


@pytest.mark.parametrize(("schedule", "placement"), [
    ("1f1b", TWO_ONE_ONE), ("1f1b", MIDDLE), ("zb_h1", ONE_THREE), ("gpipe", FOUR),
    ("zb_v", [*TWO_TWO, *reversed(TWO_TWO)]), ("chimera", DOWN_AND_UP), ("chimera", DOWN_AND_UP_TWICE),
    ("pipedream", TWO_ONE_ONE), ("pipedream", MIDDLE),
    ("pipedream", ONE_THREE), ("2bw", TWO_TWO)])
def test_the_first_a_middle_and_the_last_stage_replicated(world: World, schedule: str,
                                                          placement: list[list[int]]) -> None:
    """Six microbatches, so that rounds of streams are incomplete; an evaluation after the first step."""
    equal_under_rules(world, model="rich", schedule=schedule, placement=placement, stages=len(placement),
                      microbatches=6, samples=12, batches=2, recompute=0.5, grad_clip=0.5, evaluate_after=[0])


@pytest.mark.parametrize("arguments", [
    {"schedule": "1f1b", "grad_clip": 0.5}, {"schedule": "chimera", "grad_clip": 0.5},
    {"schedule": "pipedream", "update_every": 1, "cadence": 3},
    {"schedule": "pipedream", "placement": TWO_TWO, "update_every": 2}],
    ids=["flush", "both directions", "drained", "replicas"])
def test_a_checkpoint_and_what_goes_on_from_it(world: World, tmp_path: Path, arguments: dict[str, Any]) -> None:
    arguments = {"microbatches": 4, "batches": 10, "stages": len(arguments.get("placement", EVEN)), **arguments}
    expected, saved = [], []
    for begin, steps in ((None, 2), (str(tmp_path / "here 2"), 2)):
        into = tmp_path / f"here {steps if begin is None else 4}"
        expected.append(resuming_jobs.stretch(folder=begin, into=str(into), steps=steps, **arguments))
    for begin, steps in ((None, 2), (str(tmp_path / "there 2"), 2)):
        into = tmp_path / f"there {steps if begin is None else 4}"
        saved.append(world.run(nccl_jobs.under, run="resuming_jobs.stretch", folder=begin, into=str(into),
                               steps=steps, **arguments))
    for one, every in zip(expected, saved, strict=True):
        assert every == [one] * 4


def test_how_many_communicators_a_run_makes(world: World) -> None:
    """Three groups: activations and gradients of neighbours, parameters of ranks that share some."""
    flush = world.run(nccl_jobs.communicators, schedule="1f1b", partition=EVEN, microbatches=4, model="untied")
    assert flush == [[["activations", 1], ["gradients", 1]], [["activations", 0], ["activations", 2],
                     ["gradients", 0], ["gradients", 2]], [["activations", 1], ["activations", 3], ["gradients", 1],
                     ["gradients", 3]], [["activations", 2], ["gradients", 2]]]
    tied = world.run(nccl_jobs.communicators, schedule="zb_v", stages=8, microbatches=8, model="rich")
    assert tied[0] == [["activations", 1], ["gradients", 1]], "the tied weight's stages are both on this rank"


@pytest.mark.parametrize(("remedy", "schedule"), [
    ("order", "1f1b"), ("host messages over gloo", "1f1b"), ("shapes at their place", "pipedream")])
def test_without_one_of_the_remedies_ranks_stand_still(pair: World, remedy: str, schedule: str) -> None:
    """Clipping on two ranks: one remedy is taken away, and both ranks wait until their patience ends."""
    pair.begin(nccl_jobs.without, remedy=remedy, schedule=schedule, timeout_s=1.5)
    said = [pair.outcome(rank, 30) for rank in range(2)]
    assert all(kind == "error" for kind, _ in said), said
    assert any("gave up" in value["text"] or "imed out" in value["text"] for _, value in said), said


def test_pipelines_of_a_process_share_their_groups_one_after_another(world: World) -> None:
    for groups, sets, refused, steps in world.run(nccl_jobs.one_after_another):
        assert (groups, sets, steps) == (3, 1, 2)
        assert refused.startswith("error: another pipeline of this process has transfers under way\nhint: let its ")


def test_dtypes_that_nccl_lacks_are_sent_as_bytes(world: World) -> None:
    results = world.run(nccl_jobs.with_dtypes_that_nccl_lacks)
    pipe = jobs.pipeline(int16_model(), schedule="1f1b", stages=4, microbatches=2)
    losses = [step.loss for step in pipe.train([{"ids": torch.arange(8).reshape(4, 2)}] * 2)]
    assert {losses for losses, *_ in results} == {str(losses)}
    assert "torch.int16 as torch.uint8" in results[1]
    assert "torch.float32 as torch.float32" in results[1]


@pytest.mark.parametrize(("config", "cpu", "cuda"), [
    ("cpu:gloo", "gloo", None), ("cpu:gloo,cuda:nccl", "gloo", "nccl"), ("cuda:nccl", None, "nccl"),
    ("cpu:gloo,cuda:gloo", "gloo", "gloo")])
def test_the_backend_is_that_of_the_device_that_carries_a_tensor(monkeypatch: pytest.MonkeyPatch, config: str,
                                                                 cpu: str | None, cuda: str | None) -> None:
    """What the user's group says of itself: made without a backend it is called undefined, its devices are known."""
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert process_group.backend_of(torch.device("cpu")) == cpu
    assert process_group.backend_of(torch.device("cuda", 1)) == cuda
    assert process_group.is_ordered(torch.device("cuda", 1)) == (cuda == "nccl")
    assert not process_group.is_ordered(torch.device("cpu"))


class Work:
    """Notes how it is waited for."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait(self, *timeout: Any) -> None:
        self.waits += timeout or ["the stream"]


def test_the_host_does_not_wait_for_what_a_stream_waits_for() -> None:
    """Given a timeout, nccl's wait would look for the end on the host."""
    transport = object.__new__(DistributedTransport)
    transport._device, transport._timeout = torch.device("cuda", 0), timedelta(seconds=7)
    transport._groups = process_group.TensorGroups({})
    on_stream, on_host = Work(), Work()
    transport._wait([on_stream], on_host=False)
    transport._wait([on_host], on_host=True)
    assert (on_stream.waits, on_host.waits) == (["the stream"], [timedelta(seconds=7)])


def test_the_profiler_measures_links_in_both_directions(world: World) -> None:
    """A pair sends a tensor back and forth: a receive that is posted first would hold up the send."""
    there_and_back = sorted([a, b] for a, b in ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2), (0, 3), (3, 0)))
    assert world.run(nccl_jobs.measured_links) == [there_and_back] * 4


def test_the_whole_loop_of_a_run_with_evaluations_and_checkpoints(world: World, tmp_path: Path) -> None:
    """As ``vpipe train`` has it: what ranks agree on, votes of checkpoints and figures go over gloo."""
    changes = {"parallel__model_parallel_size": 4, "training__grad_clip": 0.5}
    expected = test_resume_gloo.begin(tmp_path / "here", **changes)
    (tmp_path / "there").mkdir()
    run = prepare_run(ResumePoint(None, None), Job.from_config(load_config(write_config(
        tmp_path / "there", **test_resume_gloo.CHANGES, **changes))))
    world.run(nccl_jobs.under, run="resume_jobs.train_in", folder=str(run), checkpoint=None)
    test_resume_gloo.check_equal(expected, run)


@pytest.mark.parametrize(("ordered", "limit_s"), [(True, 7.0), (False, None)])
def test_where_nccl_may_make_a_communicator_the_watch_has_a_limit(ordered: bool, limit_s: float | None) -> None:
    """Nothing else ends a rank whose peer never comes to it; over gloo each wait has a limit."""
    transport: Any = SimpleNamespace(ordered=ordered, timeout_s=7.0, watch=None)
    key = TransferKey(TransferKind.ACTIVATIONS, 1, 0)
    assert PeerTransfer(1, "sending", transport.timeout_s, key, transport).limit_s == limit_s
