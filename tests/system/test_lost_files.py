"""A disk that is full, checkpoints that were damaged, data that vanish, really made: training goes on or ends with the
reason, and ``--resume`` gives bit for bit what a run without the failure gives."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import SOON_S, Bench, Outcome, check_resumed, failure, whole
from failures import Failure, Run

from vpipe.app.data.synthetic import synthetic_bert


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for two checkpoints."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1200k", "none", tmp_path]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("to mount a small disk needs root")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True, timeout=20)


def test_a_disk_that_fills_up_ends_the_run(disk: Path, tmp_path_factory: pytest.TempPathFactory, bench: Bench) -> None:
    """The checkpoint before stays, and the run goes on from it when there is room."""
    run = Run(tmp_path_factory.mktemp("full") / "run", failure("fill", "1f1b", "write", 1, config={
        "checkpoint__directory": str(disk)}))
    ended = run.begin()
    assert ended.status == 1
    [error] = ended.errors
    assert re.match(r"error: the checkpoint of step \d could not be saved: No space left on device", error)
    assert "then go on from step 2 with: vpipe train --resume" in ended.err
    assert [path.name for path in run.checkpoints.all()] == ["step-2"]
    run.check_tidy()
    (run.checkpoints.root / "filler").unlink()
    check_resumed(run, run.go_on(), bench)


def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(tmp_path: Path, bench: Bench) -> None:
    """The command in the hint goes on from that one."""
    run = bench.result("1f1b").copy(tmp_path / "copy")
    newest = run.checkpoints.newest()
    file = newest / "rank2.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    before = sorted(run.path.rglob("*"))
    ended = run.go_on()
    assert ended.status == 2
    [error] = ended.errors
    assert str(newest) in error
    assert "rank2.safetensors was changed" in error
    assert sorted(run.path.rglob("*")) == before
    command = re.search(r"resume from step 6 with: vpipe train --resume (\S+)\n", ended.err)
    assert command, ended.err
    check_resumed(run, run.go_on(command[1]), bench)


def data_vanish(folder: Path) -> tuple[Outcome, Run]:
    """Also the run of which the data stay."""
    shards, data = pytest.importorskip("vpipe.extras.bert_hdf5.shards"), folder / "data"
    data.mkdir(parents=True)
    [batch] = synthetic_bert(32, 16, 80).batches("train", 80, seed=0)
    for shard, name in enumerate([*(f"training_{number}" for number in range(4)), "test"]):  # of two batches each
        shards.write_shard(data / f"{name}.hdf5", {
            field: tensor[16 * shard:16 * (shard + 1)].numpy() for field, tensor in batch.items()})
    config = {"dataset__name": "bert_hdf5", "dataset__path": str(data)}
    run = Run(folder / "run", Failure("1f1b", {"rank": 0, "moment": "forward", "count": 16, "do": "hide",
                                            "folder": str(data)}, config))
    ended = run.begin()
    assert run.fired is not None, ended.err
    (folder / "data.away").rename(data)
    return (run, ended, run.ended_at - run.fired, run.go_on()), whole(Failure("1f1b", None, config), folder / "whole")


@pytest.mark.failure.with_args(data_vanish)
def test_data_that_vanish(bench: Bench, request: pytest.FixtureRequest) -> None:
    (run, ended, seconds, resumed), other = bench.result(request.node.nodeid)
    assert ended.status == 1
    [error] = ended.errors
    what = r"(training_\d|test)\.hdf5"  # said by the rank that reads, or by the next, whichever is the first
    assert re.search(rf"{what}.*action reading (evaluation )?batch |could not read batch .*{what}", error)
    assert seconds < SOON_S
    assert resumed.status == 0, resumed.err
    run.check_equals(other)
