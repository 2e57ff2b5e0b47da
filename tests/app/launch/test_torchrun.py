"""Processes that torchrun or srun started: one run of all of them, and what goes wrong is said once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import write_config
from test_run_ends import put_program
from test_runs import FRAGILE

from vpipe.app.launch.network import free_port

pytestmark = [pytest.mark.jobs, pytest.mark.usefixtures("forked")]

BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
SCONTROL = '#!/bin/sh\n[ "$2" = hostnames ] && echo n1\n[ "$2" = node ] && echo "   NodeAddr=127.0.0.1 Port=1"\ntrue\n'


def srun(folder: Path) -> list[dict[str, str]]:
    """What ``srun --ntasks 2`` sets for each of its processes, beside a stand-in for scontrol on their path."""
    put_program(folder / "scontrol", SCONTROL)
    port = str(free_port(None))
    return [{"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0",
             "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NODELIST": "n1",
             "SLURM_STEP_NUM_TASKS": "2", "SLURMD_NODENAME": f"n{1 + rank}", "MASTER_PORT": port}
            for rank in range(2)]


def put_model(folder: Path, text: str) -> str:
    """A package with the model ``fragile``; the path on which Python finds it."""
    package = folder / "site"
    (package / "fragile-1.0.dist-info").mkdir(parents=True)
    (package / "fragile.py").write_text(text)
    (package / "fragile-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fragile\nVersion: 1.0\n")
    (package / "fragile-1.0.dist-info" / "entry_points.txt").write_text("[vpipe.models]\nfragile = fragile\n")
    return os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))


def test_a_mistake_is_said_once_and_ends_all_with_status_2(tmp_path: Path) -> None:
    train = [BIN / "vpipe", "train", write_config(tmp_path), "--set", "parallel.model_parallel_size=3", "--set",
             "parallel.partition=auto"]
    processes = [subprocess.Popen(train, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env={**os.environ, **own}) for own in srun(tmp_path)]
    try:
        said = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [2, 2]
    assert said == [("", "error: srun started 2 processes, but the schedule has 3 ranks\n"
                         "hint: use srun --ntasks 3, or change parallel.model_parallel_size\n"), ("", "")]
    assert not (tmp_path / "runs").exists()


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
