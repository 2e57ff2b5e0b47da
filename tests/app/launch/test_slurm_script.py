"""``vpipe slurm``: what it writes, refuses and submits. tests/system runs the scripts under a real SLURM."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from test_run_ends import put_program

from vpipe.app.cli import main
from vpipe.app.commands.slurm import WRITTEN_BY

ROOT = Path(__file__).parents[3]
CONFIG = "configs/bert_mini_4stage.yaml"

TWO_NODES = """\
#!/bin/bash
# Written by: vpipe slurm configs/bert_mini_4stage.yaml --nodes 2 --time 2:00:00
# Submit it with sbatch from the folder where its relative paths start, with vpipe on PATH (its environment activated).
# The ranks compute on GPUs where there are any, else cpu; nccl where each has a GPU, else gloo between them.
# The job requests no GPUs; with parallel.device: cuda it requests one per rank.

#SBATCH --job-name=bert_mini_4stage
#SBATCH --output=%x-%j.out           # <job name>-<job id>.out: output of rank 0; all logs are in the run's folder
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2          # a task is a rank: 4 in all
#SBATCH --cpus-per-task=1            # training.threads
#SBATCH --time=2:00:00               # SLURM ends the job after it

set -euo pipefail

# What only the ranks of this run know: nobody else on the cluster can pass for one.
VPIPE_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d '[:space:]')
export VPIPE_SECRET

# srun starts the ranks on all nodes; they meet on the first node. When a rank fails, srun ends the others, which have a
# few seconds to report what they saw. --cpus-per-task is repeated: since SLURM 22.05 srun does not inherit it.
srun --cpus-per-task=1 --kill-on-bad-exit=1 vpipe train configs/bert_mini_4stage.yaml
"""

AGAIN = """\
srun --cpus-per-task=1 --kill-on-bad-exit=1 vpipe train configs/bert_mini_4stage.yaml --restarts 2 || status=$?

# Requeue the job, which then resumes from its newest checkpoint: after status 138 (it saved before the time limit)
# and after up to 2 failures, counted in a file; never after status 2, a mistake in the config or the data.
"""

SBATCH = """\
#!/bin/sh
cat > "{folder}/submitted"
echo "$@" > "{folder}/arguments"
{answer}
"""


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def written(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["slurm", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    assert main(["slurm", *arguments]) == status
    out, err = capsys.readouterr()
    assert out == ""
    return err


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """An sbatch on PATH that keeps what it is given."""
    put_program(folder / "sbatch", SBATCH.format(folder=folder, answer=answer))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    script = written(capsys, CONFIG, "--nodes", "2", "--time", "2:00:00")
    assert script == TWO_NODES
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_the_ready_scripts_are_what_the_command_writes(nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command that they name."""
    ready = (ROOT / "configs" / "slurm" / f"bert_mini_4stage_{nodes}node{'s' if nodes > 1 else ''}.sh").read_text()
    command = next(line for line in ready.splitlines() if line.startswith(WRITTEN_BY)).removeprefix(WRITTEN_BY)
    assert command.startswith(f"vpipe slurm {CONFIG} --nodes {nodes}")
    assert ready == written(capsys, *shlex.split(command)[2:])


def test_requested_resources_are_in_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my own.yaml"
    path.write_text((ROOT / CONFIG).read_text())
    arguments = [str(path), "--nodes", "2", "--ranks-per-node", "2", "--partition", "gpu,big", "--set",
                 "training.threads=3", "--set", "parallel.backend=nccl", "--set", "parallel.partition=[1, 2, 3, 3]"]
    script = written(capsys, *arguments)
    lines = [line.partition("  # ")[0].rstrip() for line in script.splitlines()]
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")] == [
        "--job-name=my_own", "--output=%x-%j.out", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=3",
        "--gpus-per-node=2", "--partition=gpu,big"]
    assert "# The ranks compute on cuda; nccl between them.\n\n" in script
    settings = ["--set", "training.threads=3", "--set", "parallel.backend=nccl", "--set",
                "parallel.partition=[1, 2, 3, 3]"]
    assert shlex.split(lines[-1]) == ["srun", "--cpus-per-task=3", "--kill-on-bad-exit=1", "vpipe", "train", str(path),
                                      *settings]
    [by] = [line.removeprefix(WRITTEN_BY) for line in lines if line.startswith(WRITTEN_BY)]
    assert written(capsys, *shlex.split(by)[2:]) == script
    assert written(capsys, *arguments, "-o", str(tmp_path / "job.sh")) == ""
    assert (tmp_path / "job.sh").read_text() == script


@pytest.mark.extras("legacy")
def test_a_list_of_machines_is_said_to_have_no_part(capsys: pytest.CaptureFixture[str]) -> None:
    line = "# SLURM chooses the hosts; the config's machines are not used.\n"
    assert line in written(capsys, "bert_4vpipe_tiny", "--nodes", "2")
    assert line not in written(capsys, CONFIG, "--nodes", "2")


@pytest.mark.parametrize(("arguments", "words"), [
    (["--nodes", "3"], ["4 ranks cannot be put on 3 nodes", "--nodes 1 or 2 or 4"]),
    (["--nodes", "8"], ["4 ranks cannot be put on 8 nodes"]),
    (["--nodes", "2", "--ranks-per-node", "4"], ["2 nodes with 4 ranks on each would be 8", "has 4 ranks",
                                                 "leave --ranks-per-node out"]),
    (["--nodes", "0"], ["--nodes is 0"]),
    (["--nodes", "8", "--set", "parallel.tensor=2"],
     ["ranks 0 to 1 split every layer (parallel.tensor is 2), but are on 2 hosts: node 0, node 1",
      "give every host a multiple of 2 ranks"]),
    (["--nodes", "2", "--ranks-per-node", "-2"], ["--ranks-per-node is -2"]),
    (["--nodes", "2", "--time", "1h"], ["--time is '1h'", "2:00:00"]),
    (["--nodes", "2", "--time", "١٢"], ["--time is '١٢'", "2:00:00"]),
    (["--nodes", "2", "--partition", "a\n#SBATCH --nodes=9"], ["--partition is", "sinfo"]),
    (["--nodes", "2", "--set", "dataset.path=a\nrm -r b"], ["dataset.path=a\\nrm -r b", "line breaks"]),
    (["--nodes", "2", "-o", "no/such/folder/job.sh"], ["cannot write 'no/such/folder/job.sh'", "-o"]),
    (["--nodes", "2", "--set", "parallel.schedule=1g1b"], ["1g1b", "1f1b"])])
def test_refused(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, CONFIG, *arguments)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("time", ["30", "30:00", "2:00:00", "1-12", "1-12:30", "1-12:30:00", "infinite"])
def test_every_form_of_a_time(time: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"#SBATCH --time={time} " in written(capsys, CONFIG, "--nodes", "1", "--time", time)


def test_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(tmp_path, monkeypatch, "echo '4711;cluster'")
    assert written(capsys, CONFIG, "--nodes", "2", "--time", "2:00:00", "--submit") == \
        "submitted job 4711: squeue shows it\n"
    assert (tmp_path / "submitted").read_text() == TWO_NODES
    assert (tmp_path / "arguments").read_text() == "--parsable\n"


def test_sbatch_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(tmp_path, monkeypatch, "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    assert "sbatch did not take the job: sbatch: error: invalid partition specified: gpu\nhint: sinfo" in refused(
        capsys, CONFIG, "--nodes", "2", "--partition", "gpu", "--submit", status=1)


def test_no_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no sbatch on PATH\nhint: submit on a machine of the cluster" in refused(
        capsys, CONFIG, "--nodes", "2", "--submit")


def test_a_job_that_may_go_back_into_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    """srun and scontrol are stand-ins; SLURM kills the script that requeues its job, here it goes on."""
    script = written(capsys, CONFIG, "--nodes", "2", "--restarts", "2")
    for line in ("#SBATCH --requeue ", "#SBATCH --open-mode=append ", "#SBATCH --signal=USR1@120 "):
        assert line in script
    assert AGAIN in script
    for name, text in (("srun", 'exit "$ANSWER"'), ("scontrol", 'echo "$@" >> requeued')):
        put_program(tmp_path / name, f"#!/bin/sh\n{text}\n")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NAME": "bert", "SLURM_JOB_ID": "7"}
    requeued = []
    for status in (138, 1, 2, 0, 137, 138, 1):
        done = subprocess.run(["bash"], input=script, text=True, cwd=tmp_path, timeout=10,
                              env={**environment, "ANSWER": str(status)})
        assert done.returncode == status
        requeued.append((tmp_path / "requeued").read_text().count("requeue 7\n"))
    assert requeued == [1, 2, 2, 2, 3, 4, 4]  # three failures are one too many
    assert (tmp_path / "bert-7.failures").read_text() == "1\n137\n1\n"
    assert "--restarts is -1" in refused(capsys, CONFIG, "--nodes", "2", "--restarts", "-1")
