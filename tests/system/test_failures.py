"""Every failure at every moment, really made: the run ends or goes on within seconds, nothing stays behind, and
``--resume`` gives bit for bit what a run without the failure gives, with every sample used once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cells import RANKS, TIMEOUT_S, Cell, Ended, Run
from small_run import oracle

from vpipe.checkpoint.manifest import MANIFEST
from vpipe.data.hdf5_shard import write_shard
from vpipe.data.synthetic import synthetic_bert
from vpipe.train.config import load_config
from vpipe.train.job import Job

AT_ONCE = 4
"""Runs at a time: they wait for each other more than they compute."""

SOON_S = 15.0
"""Within which all has ended, where nobody must wait for a timeout."""

MOMENTS = {
    # By 4 microbatches a step; the failure comes in the fifth step, after the checkpoint of step 4.
    "1f1b": {"warm-up": ("forward", 16), "steady": ("backward", 17), "cooldown": ("backward", 19), "step": ("step", 4),
             "write": ("write", 1), "commit": ("commit", 1), "evaluation": ("evaluation", 5)},
    # By one microbatch a step; the pipeline runs empty after 5, 7, 10, 14 and 15.
    "pipedream": {"warm-up": ("forward", 10), "steady": ("backward", 11), "cooldown": ("backward", 13),
                  "step": ("step", 11), "write": ("write", 1), "evaluation": ("evaluation", 5)}}
"""What a rank does for the how manieth time, counted from 0."""


PLACES = list(MOMENTS["pipedream"])


def cell(do: str, schedule: str, moment: str, rank: int, **more: Any) -> Cell:
    what, count = MOMENTS[schedule][moment]
    return Cell(schedule, {"rank": rank, "moment": what, "count": count, "do": do}, **more)


KILLED = [("1f1b", moment, rank) for moment in PLACES for rank in range(RANKS)] + [
    ("pipedream", moment, number % RANKS) for number, moment in enumerate(PLACES)]
STOPPED = [("pipedream" if number % 2 else "1f1b", moment, 2 - number % RANKS)
           for number, moment in enumerate(PLACES)]
OUT_OF_MEMORY = [("1f1b" if number % 2 else "pipedream", moment, (number + 1) % RANKS)
                 for number, moment in enumerate(PLACES) if moment != "write"]


class Bench:
    """Carries out cells in the background, several at a time; a test waits for its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pool = folder, ThreadPoolExecutor(AT_ONCE)
        self._work: dict[Any, Future[Any]] = {}

    def begin(self, key: Any, job: Callable[[Path], Any]) -> None:
        """Have ``job`` done in a folder of its own."""
        self._work[key] = self._pool.submit(job, self._folder / str(len(self._work)))

    def result(self, key: Any) -> Any:
        return self._work[key].result(timeout=110)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


Outcome = tuple[Run, Ended, float, Ended]
"""The run, how it ended, how many seconds after the failure, and how it went on."""


def whole(cell: Cell, folder: Path) -> Run:
    """A run to which nothing happens."""
    run = Run(folder, cell)
    ended = run.begin()
    assert ended.status == 0, ended.err
    return run


def failed_and_resumed(cell: Cell, folder: Path) -> Outcome:
    run = Run(folder, cell)
    ended = run.begin()
    assert run.fired is not None, ended.err
    return run, ended, run.ended_at - run.fired, run.go_on()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """With the cells of all chosen tests at work."""
    bench = Bench(tmp_path_factory.mktemp("cells"))
    for schedule in MOMENTS:
        bench.begin(schedule, partial(whole, Cell(schedule)))
    for item in request.session.items:
        for mark in item.iter_markers("cell"):
            bench.begin(item.nodeid, partial(*mark.args))
    yield bench
    bench.close()


@pytest.fixture
def outcome(bench: Bench, request: pytest.FixtureRequest) -> Outcome:
    return bench.result(request.node.nodeid)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for two checkpoints."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1200k", "none", tmp_path]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("to mount a small disk needs root")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True, timeout=20)


def cells(do: str, places: list[tuple[str, str, int]], **more: Any) -> Any:
    return pytest.mark.parametrize("place", [
        pytest.param(place, id="-".join(map(str, place)), marks=alone(cell(do, *place, **more))) for place in places])


def alone(cell: Cell) -> pytest.MarkDecorator:
    """Marks the test that looks at a cell."""
    return pytest.mark.cell(failed_and_resumed, cell)


def both(do: str, **more: Any) -> pytest.MarkDecorator:
    """One of each schedule."""
    return pytest.mark.parametrize("schedule", [
        pytest.param(schedule, marks=alone(cell(do, schedule, "warm-up", 2, **more))) for schedule in MOMENTS])


def check_resumed(run: Run, resumed: Ended, bench: Bench) -> None:
    assert resumed.status == 0, resumed.err
    run.check_equals(bench.result(run.cell.schedule))


@cells("kill", KILLED)
def test_a_killed_rank(place: tuple[str, str, int], outcome: Outcome, bench: Bench) -> None:
    run, ended, seconds, resumed = outcome
    rank = place[2]
    assert (ended.status, ended.errors) == (1, [f"error: rank {rank} (stage {rank}) was killed by signal 9 (SIGKILL)"])
    assert "Traceback" not in ended.out + ended.err
    assert seconds < SOON_S
    check_resumed(run, resumed, bench)


@cells("stop", STOPPED)
def test_a_stopped_rank(place: tuple[str, str, int], outcome: Outcome, bench: Bench) -> None:
    run, ended, seconds, resumed = outcome
    rank = place[2]
    assert ended.status == 1
    [error] = ended.errors
    assert re.match(rf"error: rank {rank} \(stage {rank}\) gave no sign of life for \d+\.?\d* s; ", error), error
    assert seconds < TIMEOUT_S + SOON_S
    check_resumed(run, resumed, bench)


@cells("memory", OUT_OF_MEMORY)
def test_out_of_memory(place: tuple[str, str, int], outcome: Outcome, bench: Bench) -> None:
    run, ended, seconds, resumed = outcome
    rank = place[2]
    assert ended.status == 1
    [error] = ended.errors
    assert error.startswith("error: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB "
                            f"(rank {rank}, stage {rank}, action {rank}"), error
    assert seconds < SOON_S
    check_resumed(run, resumed, bench)


@alone(cell("kill", "1f1b", "commit", 0))
def test_killed_when_all_is_written_but_the_checkpoint_s_name(outcome: Outcome, bench: Bench) -> None:
    run, ended, _, resumed = outcome
    assert ended.errors == ["error: rank 0 (stage 0) was killed by signal 9 (SIGKILL)"]
    check_resumed(run, resumed, bench)


@alone(cell("terminate", "pipedream", "steady", 1))
def test_a_rank_that_is_asked_to_end(outcome: Outcome) -> None:
    """As SLURM asks: all leave off after the same step, and save. The pipeline runs empty there, once more than in a
    run that is not asked to."""
    run, ended, seconds, resumed = outcome
    assert ended.status == 128 + signal.SIGTERM
    stopped = re.search(r"stopped by SIGTERM after update (\d+): saved", ended.err)
    assert stopped, ended.err
    assert seconds < SOON_S
    assert resumed.status == 0, resumed.err
    drained = tuple(sorted({5, 7, 10, 14, 15, int(stopped[1])}))
    assert run.losses() == oracle(Job.of(load_config(run.config)), 16, drained).losses
    assert len(run.samples()) == 16
    run.check_tidy()


@pytest.mark.parametrize(("schedule", "drained"), [("1f1b", ()), ("pipedream", (5, 7, 10, 14, 15))])
def test_the_runs_that_all_are_held_to(schedule: str, drained: tuple[int, ...], bench: Bench) -> None:
    run = bench.result(schedule)
    assert run.losses() == oracle(Job.of(load_config(run.config)), len(run.losses()), drained).losses
    run.check_tidy()


@alone(Cell("1f1b", {"rank": 2, "moment": "forward", "count": 20, "do": "terminate"}))
def test_a_run_asked_to_end_where_it_would_have_evaluated_does_so_when_it_goes_on(outcome: Outcome,
                                                                                  bench: Bench) -> None:
    """After step 6: with a flush the pipeline is empty there anyway."""
    run, ended, _, resumed = outcome
    assert ended.status == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after update 6: saved" in ended.err
    check_resumed(run, resumed, bench)


@alone(cell("kill", "pipedream", "cooldown", 2, words=("--restarts", "1")))
def test_a_run_that_is_started_again_by_itself(outcome: Outcome, bench: Bench) -> None:
    run, ended, _, _ = outcome
    assert ended.status == 0, ended.err
    assert "attempt 2 of 2: rank 2 (stage 2) was killed by signal 9 (SIGKILL); going on from step 10" in ended.err
    run.check_equals(bench.result("pipedream"))


@both("nan")
def test_a_loss_that_is_no_number_stops_all(schedule: str, outcome: Outcome, bench: Bench) -> None:
    """And nothing is saved after it."""
    run, ended, seconds, resumed = outcome
    step = 4 if schedule == "1f1b" else 10
    assert ended.status == 1
    assert ended.errors == [f"error: loss is nan at step {step}"]
    assert seconds < SOON_S
    check_resumed(run, resumed, bench)


@both("nan", config={"training__on_nan": "skip"})
def test_an_update_that_is_no_number_is_skipped(schedule: str, outcome: Outcome, bench: Bench) -> None:
    run, ended, _, _ = outcome
    step = 4 if schedule == "1f1b" else 10
    assert ended.status == 0, ended.err
    assert [line["step"] for line in run.lines() if line.get("skipped")] == [step]
    other = bench.result(schedule)
    losses, others = run.losses(), other.losses()
    assert losses[:step] == others[:step]
    assert losses[step] is None
    assert losses[step + 1:] != others[step + 1:]
    assert all(loss is not None for loss in losses[step + 1:])
    assert run.samples() == other.samples()
    assert all(tensor.isfinite().all() for tensor in run.tensors().values())
    run.check_tidy()


@alone(cell("host memory", "1f1b", "write", 2))
def test_out_of_memory_while_a_checkpoint_is_written(outcome: Outcome, bench: Bench) -> None:
    """Training goes on, and the next checkpoint is made."""
    run, ended, _, _ = outcome
    assert ended.status == 0, ended.err
    assert "warning: could not save step 4: out of memory (rank 2); training goes on" in ended.err
    run.check_equals(bench.result("1f1b"))


def test_the_disk_is_full_for_a_while(disk: Path, tmp_path_factory: pytest.TempPathFactory, bench: Bench) -> None:
    """The checkpoint before stays, and training goes on; when there is room again, checkpoints are made again."""
    run = Run(tmp_path_factory.mktemp("full") / "run", cell("fill for a while", "1f1b", "write", 1, config={
        "checkpoint__directory": str(disk)}))
    ended = run.begin()
    assert ended.status == 0, ended.err
    assert re.search(r"warning: could not save step 4: No space left on device \(rank \d\).*; training goes on, the "
                     "latest checkpoint is step 2", ended.err), ended.err
    run.check_equals(bench.result("1f1b"))


def test_the_disk_is_full_to_the_end(disk: Path, tmp_path_factory: pytest.TempPathFactory, bench: Bench) -> None:
    run = Run(tmp_path_factory.mktemp("full") / "run", cell("fill", "1f1b", "write", 1, config={
        "checkpoint__directory": str(disk)}))
    ended = run.begin()
    assert ended.status == 1
    assert len(run.losses()) == 8
    [error] = ended.errors
    assert error.startswith("error: the last checkpoint, of step 8, could not be saved: No space left on device")
    assert [path.name for path in run.checkpoints.all()] == ["step-2"]
    run.check_tidy()
    (run.checkpoints.root / "filler").unlink()
    check_resumed(run, run.go_on(), bench)


def truncated(checkpoint: Path) -> str:
    os.truncate(checkpoint / "rank1.safetensors", 1000)
    return "rank1.safetensors has 1,000 bytes instead of "


def flipped(checkpoint: Path) -> str:
    file = checkpoint / "rank2.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    return "rank2.safetensors was changed"


def flipped_manifest(checkpoint: Path) -> str:
    text = (checkpoint / MANIFEST).read_text()
    (checkpoint / MANIFEST).write_text(text.replace('"step": 8', '"step": 9', 1))
    assert (checkpoint / MANIFEST).read_text() != text
    return MANIFEST


@pytest.mark.parametrize("damage", [truncated, flipped, flipped_manifest])
def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(damage: Callable[[Path], str], tmp_path: Path,
                                                                  bench: Bench) -> None:
    """The command in the hint goes on from that one."""
    run = bench.result("1f1b").copy(tmp_path / "copy")
    newest = run.checkpoints.newest()
    said = damage(newest)
    before = sorted(run.path.rglob("*"))
    ended = run.go_on()
    assert ended.status == 2
    [error] = ended.errors
    assert str(newest) in error
    assert said in error
    assert sorted(run.path.rglob("*")) == before
    command = re.search(r"resume from step 6 with: vpipe train --resume (\S+)\n", ended.err)
    assert command, ended.err
    check_resumed(run, run.go_on(command[1]), bench)


def data_vanish(folder: Path) -> tuple[Outcome, Run]:
    """Also the run of which the data stay."""
    data = folder / "data"
    data.mkdir(parents=True)
    [batch] = synthetic_bert(32, 16, 80).batches("train", 80, seed=0)
    for shard, name in enumerate([*(f"training_{number}" for number in range(4)), "test"]):  # of two batches each
        write_shard(data / f"{name}.hdf5", {
            field: tensor[16 * shard:16 * (shard + 1)].numpy() for field, tensor in batch.items()})
    config = {"dataset__name": "bert_hdf5", "dataset__path": str(data)}
    run = Run(folder / "run", Cell("1f1b", {"rank": 0, "moment": "forward", "count": 16, "do": "hide",
                                            "folder": str(data)}, config))
    ended = run.begin()
    assert run.fired is not None, ended.err
    (folder / "data.away").rename(data)
    return (run, ended, run.ended_at - run.fired, run.go_on()), whole(Cell("1f1b", None, config), folder / "whole")


@pytest.mark.cell.with_args(data_vanish)
def test_data_that_vanish(bench: Bench, request: pytest.FixtureRequest) -> None:
    (run, ended, seconds, resumed), other = bench.result(request.node.nodeid)
    assert ended.status == 1
    [error] = ended.errors
    assert re.search(r"(training_\d|test)\.hdf5.*action reading (evaluation )?batch ", error), error
    assert seconds < SOON_S
    assert resumed.status == 0, resumed.err
    run.check_equals(other)
