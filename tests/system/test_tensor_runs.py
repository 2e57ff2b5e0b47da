"""Runs whose layers are split over processes compute what one process computes with whole layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from measured import measured
from small_run import check_updates, losses, metrics, only_run, oracle, write_config

from vpipe.app.cli import main
from vpipe.app.config.config import load_config
from vpipe.app.launch.network import free_port
from vpipe.app.train.job import Job, microbatch_of
from vpipe.plan.profile import Profile

pytestmark = pytest.mark.usefixtures("forked")

HIDDEN, LENGTH, WORDS, SAMPLES, LAYERS = 16, 16, 32, 8, 5
SGD = {"training__optimizer": "sgd", "training__learning_rate": 0.2, "training__grad_clip": 1.0, "model__num_heads": 4}
EXPERTS = {"model__name": "mixtral", "model__preset": None, "model__num_layers": 2, "model__experts": 4,
           "model__balance_weight": 0.5}

ROUNDINGS = 2 * (LAYERS * (5 * HIDDEN + 4 * HIDDEN + LENGTH) + WORDS + SAMPLES * LENGTH)
"""Of the longest chain of sums of a forward and a backward, see tests/model/test_tensor_parallel.py."""


def near(found: list[float], expected: list[float]) -> bool:
    """In fp32 each of two computations rounds by 2^-24. Later losses are of weights that moved by rate times gradient,
    together by less than the norm of clipping allows, so that every update adds as much at most as the forward."""
    return len(found) == len(expected) and all(
        abs(ours - theirs) <= 2 * (update + 1) * ROUNDINGS * 2.0 ** -24 * max(1.0, theirs)
        for update, (ours, theirs) in enumerate(zip(found, expected, strict=True)))


@pytest.mark.parametrize(("tensor", "schedule"), [
    (2, "1f1b"), *(pytest.param(*words, marks=pytest.mark.long) for words in ((4, "zb_h1"), (2, "pipedream")))])
def test_a_run_and_its_end_with_whole_layers(tmp_path: Path, tensor: int, schedule: str,
                                             capfd: pytest.CaptureFixture[str]) -> None:
    """On 2 x 2 and 2 x 4 processes; resumed on 2."""
    config = write_config(tmp_path, **SGD, parallel__schedule=schedule, checkpoint__at_end=True,
                          metrics__rank_times_every=2)
    config.write_text(f"{config.read_text()}trace: true\n")
    assert main(["train", str(config), "--set", f"parallel.tensor={tensor}"]) == 0
    out, err = capfd.readouterr()
    run = only_run(tmp_path / "runs")
    assert out.splitlines()[1].endswith(f"times {tensor} that split its layers: ranks " + ", ".join(
        f"{first}-{first + tensor - 1}" for first in (0, tensor)) + " on one host each")
    assert out.count("4 updates in ") == 1, "one process prints"
    assert "error" not in out + err
    check_updates(run, 4)
    assert len(list(run.glob("rank*.log"))) == 2 * tensor
    *_, last = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert len({stage["forward_s"] for stage in last["summary"]["stages"]}) == last["summary"]["ranks"] == 2 * tensor
    [_, report] = map(json.loads, (run / "rank_times.jsonl").read_text().splitlines())
    assert [rank["rank"] for rank in report["ranks"]] == list(range(2 * tensor))
    assert main(["trace", str(run), "--lane", f"{tensor - 1}"]) == 0
    assert f"Lane {tensor - 1} of {tensor}" in capfd.readouterr().out
    job = Job.from_config(load_config(config))
    assert load_config(run / "config.yaml") == job.config.with_parallel(tensor=tensor)
    assert near(losses(run), oracle(job, 4).losses[:4])
    if schedule != "pipedream":
        assert main(["train", "--resume", str(run), "--set", "parallel.tensor=1", "--set", "training.max_steps=6"]) == 0
        assert near(losses(run), oracle(job, 6).losses)


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_in_slices_of_sequences(tmp_path: Path, replicas: int) -> None:
    """With dropout, on 2 x 2 processes; with replicas and texts in samples, on 2 x 2 x 2."""
    sizes = {"model__name": "gpt", "model__preset": None, "model__num_layers": 2, "model__packed": replicas == 2,
             "model__dropout": 0.1}
    config = write_config(tmp_path, **SGD, **sizes, parallel__tensor=2, parallel__schedule="seq1f1b",
                          parallel__slices=4, parallel__recompute=0.5, parallel__data_parallel_size=replicas)
    assert main(["train", str(config)]) == 0
    whole = Job.from_config(load_config(config).with_parallel(tensor=1, slices=1, schedule="1f1b"))
    assert near(losses(only_run(tmp_path / "runs")), oracle(whole, 4).losses)


@pytest.mark.long
@pytest.mark.timeout(300)  # of a busy machine
def test_a_run_with_experts_and_its_end_otherwise_split(tmp_path: Path) -> None:
    """On 2 x 2 x 2 processes, replicas sharing the optimizer's state; resumed on 2, and those on 2 x 2."""
    config = write_config(tmp_path, **SGD, **EXPERTS, parallel__tensor=2, parallel__data_parallel_size=2,
                          parallel__zero1=True, checkpoint__at_end=True)
    assert main(["train", str(config)]) == 0
    run = only_run(tmp_path / "runs")
    alone = Job.from_config(load_config(config).with_parallel(tensor=1))
    assert near(losses(run), oracle(alone, 4).losses[:4])
    for tensor, steps in ((1, 6), (2, 8)):
        assert main(["train", "--resume", str(run), "--set", f"parallel.tensor={tensor}", "--set",
                     f"training.max_steps={steps}", "--set", "parallel.data_parallel_size=1", "--set",
                     "parallel.zero1=false"]) == 0
    assert near(losses(run), oracle(alone, 8).losses)


@pytest.mark.long
def test_under_torchrun(tmp_path: Path) -> None:
    config = write_config(tmp_path, **SGD, parallel__tensor=2)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", str(free_port(None)),
         "-m", "vpipe", "train", config], capture_output=True, text=True, timeout=100, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path / "runs")
    assert done.stdout.splitlines()[1].endswith("ranks 0-1, 2-3 on one host each, started by torchrun")
    assert near(losses(run), oracle(Job.from_config(load_config(config).with_parallel(tensor=1)), 4).losses)


@pytest.mark.long
@pytest.mark.timeout(300)  # of a busy machine
def test_split_layers_are_measured_and_planned(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On 2 x 2 processes. Another run with the plan's partition computes the same, and the cache has the profile."""
    config = write_config(tmp_path, **SGD, parallel__partition="auto", parallel__tensor=2, training__max_steps=2,
                          dataset__cache_directory=str(tmp_path / "cache"))
    assert main(["train", str(config)]) == 0
    planned = only_run(tmp_path / "runs")
    found, job = Profile.load(planned / "profile.json"), Job.from_config(load_config(planned / "config.yaml"))
    assert (found.identity.tensor, found.identity.ranks, found.identity.ranks_per_host) == (2, 4, 2)
    [alone] = measured(job.model, dict(microbatch_of(job, 2)))
    assert found.layers[1].parameter_bytes == 4 * (3 * HIDDEN + (8 * HIDDEN + 4) * HIDDEN // 2), "norm, row bias whole"
    assert found.layers[1].forward_flops * 2 == alone.layers[1].forward_flops
    for split, whole in zip(found.layers, alone.layers, strict=True):
        assert split.like == whole.like
        assert whole.parameter_bytes / 2 < split.parameter_bytes < whole.parameter_bytes
        parts = 1 if split.name == "head" else 2  # of the sequence
        assert [parts * tensor.bytes for tensor in split.writes] == [tensor.bytes for tensor in whole.writes]
    given = f"parallel.partition={list(job.cut.partition)}"
    assert main(["train", str(config), "--set", given, "--set", f"log_directory={tmp_path / 'again'}"]) == 0
    assert losses(only_run(tmp_path / "again")) == losses(planned)
    capfd.readouterr()
    assert main(["profile", str(config)]) == 0
    out, err = capfd.readouterr()
    assert "layers split over 2 processes, bytes of one" in out
    assert not err, "it is in the cache"


def test_verify_compares_every_lane(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the same split layers without a pipeline bit for bit, and with whole ones within a bound. Of gradients of
    norms and routers ranks have parts, which are added up before those of replicas."""
    config = write_config(tmp_path, **SGD, **EXPERTS, parallel__tensor=2, parallel__data_parallel_size=2)
    assert main(["verify", str(config), "--steps", "1"]) == 0
    out = capfd.readouterr().out
    assert [f"lane {lane}, beside plain PyTorch on 2 processes that split its layers, gradients summed by replica "
            "(must be equal)" in out for lane in range(3)] == [True, True, False]
    assert "whole layers on one device: the first loss is " in out
    assert out.splitlines()[-1].startswith("equal: 1 steps give to the last bit")


def test_a_time_limit_ends_all_lanes_after_the_same_update(tmp_path: Path) -> None:
    config = write_config(tmp_path, **SGD, training__max_steps=None, training__max_minutes=0.02, parallel__tensor=2)
    assert main(["train", str(config)]) == 0
    run = only_run(tmp_path / "runs")
    check_updates(run)
    assert metrics(run)[1]
