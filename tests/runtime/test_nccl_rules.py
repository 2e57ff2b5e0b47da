"""Under nccl's rules none waits for ever, and what else nccl asks for. That runs are equal: test_gloo.py."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dtensor_jobs
import jobs
import nccl_jobs
import pytest
import test_pipeline_checkpoint
import test_resume_gloo
import torch
import torch.distributed as dist
from everywhere import HARDEST, same_everywhere
from models import int16_model
from small_run import write_config
from test_fully_sharded import with_replicas
from test_lanes import TWO_BY_TWO
from test_replicas_gloo import TWO_TWO
from world import World

from vpipe.app.config.config import load_config
from vpipe.app.train.job import Job
from vpipe.app.train.resume import ResumePoint, prepare_run
from vpipe.runtime.transport import process_group
from vpipe.runtime.transport.process_group import DistributedTransport, PeerTransfer
from vpipe.runtime.transport.transport import TransferKey, TransferKind
from vpipe.schedules.registry import RegisteredSchedule

pytestmark = pytest.mark.jobs

LESS_HARD = {"eager-buffered": {"eager": True, "buffered": True},
             "eager-rendezvous": {"eager": True, "buffered": False},
             "lazy-buffered": {"eager": False, "buffered": True}}
EVEN = [2, 2, 2, 2]


# Who waits less cannot wait for ever where the hardest rules let all pass: most combinations are for make test-system.
@pytest.mark.parametrize(("schedule", "rules"), [
    pytest.param(schedule, rules, marks=[] if number == place else [pytest.mark.system, pytest.mark.long])
    for place, schedule in enumerate(("zb_v", "pipedream", "dualpipe", "1f1b", "chimera"))
    for number, rules in enumerate(LESS_HARD)])
def test_every_way_to_make_communicators_and_to_send(world: World, schedule: str, rules: str) -> None:
    stages = 4 * RegisteredSchedule.named(schedule).chunks
    same_everywhere(world, LESS_HARD[rules], model="rich", schedule=schedule, microbatches=8, batches=2,
                    partition=[8 // stages] * stages, recompute=0.5, grad_clip=0.5)


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
        expected.append(test_pipeline_checkpoint.stretch(folder=begin, into=str(into), steps=steps, **arguments))
    for begin, steps in ((None, 2), (str(tmp_path / "there 2"), 2)):
        into = tmp_path / f"there {steps if begin is None else 4}"
        saved.append(world.run(nccl_jobs.under, run="test_pipeline_checkpoint.stretch", **HARDEST, folder=begin,
                               into=str(into), steps=steps, **arguments))
    for one, every in zip(expected, saved, strict=True):
        assert every == [one] * 4


def test_how_many_communicators_a_run_makes(world: World) -> None:
    """Three groups: activations and gradients of neighbours, parameters of ranks that share some."""
    flush = world.run(nccl_jobs.communicators, run="jobs.train", schedule="1f1b", partition=EVEN, microbatches=4,
                      model="untied")
    assert flush == [[["activations", 1], ["gradients", 1]], [["activations", 0], ["activations", 2],
                     ["gradients", 0], ["gradients", 2]], [["activations", 1], ["activations", 3], ["gradients", 1],
                     ["gradients", 3]], [["activations", 2], ["gradients", 2]]]
    tied = world.run(nccl_jobs.communicators, run="jobs.train", schedule="zb_v", stages=8, microbatches=8, model="rich")
    assert tied[0] == [["activations", 1], ["gradients", 1]], "the tied weight's stages are both on this rank"
    lanes = world.run(nccl_jobs.communicators, run="test_lanes.in_lanes", shape=[2, 2], **TWO_BY_TWO)
    assert lanes == [[["activations", peer], ["gradients", peer], ["layers", None], ["parameters", peer]]
                     for peer in (2, 3, 0, 1)], "the rich model has a tied weight"


@pytest.mark.parametrize("arguments", [
    {"schedule": "1f1b", "grad_clip": 0.5}, {"schedule": "pipedream"}, {"schedule": "zb_h1", "recompute": 1.0}],
    ids=str)
def test_lanes_whose_layers_compute_together(world: World, arguments: dict[str, Any]) -> None:
    """Their collectives take turns with the transfers of a lane; every rank would wait for ever behind a receive."""
    given = {**TWO_BY_TWO, "batches": 2, **arguments}
    expected = jobs.train_here(model="rich", **given)
    assert world.run(nccl_jobs.under, run="test_lanes.in_lanes", **HARDEST, shape=[2, 2], **given) == [expected] * 4


def test_layers_of_dtensors_and_replicas_of_them(world: World) -> None:
    """Gathered and scattered in forwards and backwards, summed before a step; ZeRO-1 among them."""
    expected = dtensor_jobs.exactly_trained(lambda block: block, schedule="1f1b", grad_clip=1e30)
    for runs in world.run(nccl_jobs.under, run="dtensor_jobs.exactly_trained_in_lanes", **HARDEST):
        assert [run["state"] for run in runs] == [expected["state"]] * len(runs)


@pytest.mark.parametrize(("schedule", "partition"), [("1f1b", [4, 4]), ("interleaved", [2, 2, 2, 2])])
def test_stages_that_lanes_divide(world: World, schedule: str, partition: list[int]) -> None:
    """Their weights are gathered before the first receive of a batch, and not behind one."""
    given = {"schedule": schedule, "partition": partition, "batches": 2}
    expected = with_replicas(lanes=2, **given)
    assert world.run(nccl_jobs.under, run="test_fully_sharded.in_lanes", **HARDEST, shape=[2, 2], **given) == [
        expected] * 4


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
    transport._groups, transport.wait_s = process_group.TensorGroups({}), 0.0
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
    world.run(nccl_jobs.under, run="test_resume_gloo.train_in", **HARDEST, folder=str(run), checkpoint=None)
    test_resume_gloo.check_equal(expected, run)


@pytest.mark.parametrize(("ordered", "limit_s"), [(True, 7.0), (False, None)])
def test_where_nccl_may_make_a_communicator_the_watch_has_a_limit(ordered: bool, limit_s: float | None) -> None:
    """Nothing else ends a rank whose peer never comes to it; over gloo each wait has a limit."""
    transport: Any = SimpleNamespace(ordered=ordered, timeout_s=7.0, watch=None)
    key = TransferKey(TransferKind.ACTIVATIONS, 1, 0)
    assert PeerTransfer(1, "sending", transport.timeout_s, key, transport).limit_s == limit_s
