"""Processes that torchrun or srun started: one run of all of them, and what goes wrong is said once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import check_updates, losses, only_run, oracle, write_config
from test_runs import FRAGILE

from vpipe.app.config.config import load_config
from vpipe.app.launch.network import free_port
from vpipe.app.train.job import Job

pytestmark = [pytest.mark.jobs, pytest.mark.usefixtures("forked")]

BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
SCONTROL = '#!/bin/sh\n[ "$2" = hostnames ] && echo n1\n[ "$2" = node ] && echo "   NodeAddr=127.0.0.1 Port=1"\ntrue\n'


def srun(folder: Path, arguments: list[str], tasks: int, **environment: str) -> list[tuple[int, str, str]]:
    """What ``srun --ntasks`` would start; of each process its status, output and errors."""
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    processes = [subprocess.Popen(
        [BIN / "vpipe", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid()),
             "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NODELIST": "n1",
             "SLURM_STEP_NUM_TASKS": str(tasks), "SLURMD_NODENAME": f"n{1 + rank}", "MASTER_PORT": environment["PORT"]})
        for rank in range(tasks)]
    try:
        said = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, out, err) for process, (out, err) in zip(processes, said, strict=True)]


def put_model(folder: Path, text: str) -> str:
    """A package with the model ``fragile``; the path on which Python finds it."""
    package = folder / "site"
    (package / "fragile-1.0.dist-info").mkdir(parents=True)
    (package / "fragile.py").write_text(text)
    (package / "fragile-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fragile\nVersion: 1.0\n")
    (package / "fragile-1.0.dist-info" / "entry_points.txt").write_text("[vpipe.models]\nfragile = fragile\n")
    return os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))


def test_torchrun(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    done = subprocess.run([*TORCHRUN, "--master-port", str(free_port(None)), "-m",
                           "vpipe", "train", config, "--set", "machines=[hostA:0, hostB:0]"],
                          capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path / "runs")
    assert done.stdout.splitlines()[0] == done.stdout.splitlines()[-1] == f"run folder: {run}"
    assert done.stdout.splitlines()[1].endswith("one process per stage, started by torchrun; machines is not used")
    check_updates(run, 4)
    assert losses(run) == oracle(Job.from_config(load_config(config)), 4).losses
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "metrics.jsonl", "rank0.log", "rank1.log",
                                                             "rank_times.jsonl", "run.json", "starter.json",
                                                             "summary.csv"]
    assert "Traceback" not in done.stderr


def test_a_mistake_is_said_once_and_ends_all_with_status_2(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (first, second) = srun(tmp_path, ["train", str(config), "--set", "parallel.model_parallel_size=3", "--set",
                                      "parallel.partition=auto"], 2,
                           PORT=str(free_port(None)))
    assert first == (2, "", "error: srun started 2 processes, but the schedule has 3 ranks\n"
                            "hint: use srun --ntasks 3, or change parallel.model_parallel_size\n")
    assert second == (2, "", "")
    assert not (tmp_path / "runs").exists()


def test_a_failure_is_said_once_and_ends_all_with_status_1(tmp_path: Path) -> None:
    path = put_model(tmp_path, FRAGILE)
    config = write_config(tmp_path, model__name="fragile", parallel__partition=[3, 3])
    ends = srun(tmp_path, ["train", str(config)], 2, PORT=str(free_port(None)), PYTHONPATH=path)
    run = only_run(tmp_path / "runs")
    assert [status for status, _, _ in ends] == [1, 1]
    errors = [line for _, _, err in ends for line in err.splitlines() if line.startswith("error:")]
    assert errors == [
        "error: the forward of layer 3 'breaks' on h float32[2, 16, 16] raised ArithmeticError: too hot to handle "
        "(rank 1, stage 1, host n2, microbatch 5, action 1F1)"]
    assert "Traceback" not in "".join(out + err for _, out, err in ends)
    assert "raise ArithmeticError" in (run / "rank1.log").read_text()


def test_a_rank_that_is_killed_while_it_opens_the_data_is_named_at_once(tmp_path: Path) -> None:
    path = put_model(tmp_path, FRAGILE.replace("    good = ", "    import os, time\n    if os.environ['RANK'] == '1':\n"
                                               "        time.sleep(1)\n        os.kill(os.getpid(), 9)\n    good = "))
    config = write_config(tmp_path, model__name="fragile", parallel__partition=[3, 3])
    done = subprocess.run([*TORCHRUN, "--master-port", str(free_port(None)), "-m", "vpipe", "train", config],
                          capture_output=True, text=True, timeout=50, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert error.startswith("error: rank 1 died without a message; rank 0 was waiting for all ranks"), error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_an_environment_that_is_not_whole(tmp_path: Path, missing: str) -> None:
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run([BIN / "vpipe", "train", write_config(tmp_path)], capture_output=True, text=True, timeout=60,
                          env={**os.environ, **whole, missing: ""})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: its starter did not set {missing} for this process\nhint: start with vpipe")
