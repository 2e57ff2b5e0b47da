"""The scripts of ``vpipe slurm`` under a real SLURM, with a node per host."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from hosts import VPIPE, Host, until
from small_run import check_updates, job_of, losses, only_run, oracle, write_config

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # of a busy machine
ROOT = Path(__file__).parents[2]
CONFIG = Path("configs/bert_mini_4stage.yaml")
SIZES = {"parallel__model_parallel_size": 4, "training__max_steps": 3}


@pytest.fixture
def work(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the ready scripts, where their config is a small one; nothing runs on any node afterwards."""
    others = (folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "vpipe").exists())
    monkeypatch.setenv("PATH", os.pathsep.join([str(VPIPE.parent), *others]))
    shutil.copytree(ROOT / "configs" / "slurm", tmp_path / "configs" / "slurm")
    write_config(tmp_path, **SIZES).rename(tmp_path / CONFIG)
    idle = [set(host.processes().values()) for host in cluster.hosts]
    yield tmp_path
    for job in cluster.command("squeue", "--noheader", "--format", "%i").stdout.split():
        cluster.command("scancel", "--signal=KILL", job)
    until(lambda: [set(host.processes().values()) for host in cluster.hosts] == idle, 20, "the nodes are idle")


def submit(cluster: Cluster, work: Path, script: str | Path) -> int:
    done = cluster.command("sbatch", "--parsable", script, cwd=work)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def said(work: Path, job: int) -> str:
    """What the job printed."""
    return (work / f"bert_mini_4stage-{job}.out").read_text()


def long_run(work: Path) -> None:
    write_config(work, **SIZES | {"training__max_steps": None, "training__max_minutes": 2.0}).rename(work / CONFIG)


def trains(work: Path) -> bool:
    """Whether a few updates are done."""
    return any(path.read_text().count("\n") > 3 for path in work.glob("runs/*/metrics.jsonl"))


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_ready_script(nodes: int, cluster: Cluster, work: Path, tmp_path: Path) -> None:
    """It is run as it stands in the repository (the one of two nodes below). The losses are those of one device."""
    [script] = (ROOT / "configs" / "slurm").glob(f"*_{nodes}node*.sh")
    job = submit(cluster, work, script.relative_to(ROOT))
    state = cluster.wait(job, 240)
    assert state == "COMPLETED", said(work, job)
    assert cluster.shown(job)["NumNodes"] == str(nodes)
    run = only_run(work / "runs")
    check_updates(run, 3)
    assert losses(run) == oracle(job_of(tmp_path, **SIZES), 3).losses
    assert said(work, job).count("run folder: ") == 2, said(work, job)
    assert {path.name for path in run.glob("*.log")} == {f"rank{rank}.log" for rank in range(4)}


def test_a_killed_rank_ends_the_job_and_is_named(cluster: Cluster, work: Path) -> None:
    long_run(work)
    job = submit(cluster, work, "configs/slurm/bert_mini_4stage_2nodes.sh")
    until(lambda: trains(work), 60, "a few updates")
    [rank] = cluster.hosts[1].find(SLURM_PROCID="3")
    os.kill(rank, signal.SIGKILL)
    assert cluster.wait(job, 60) == "FAILED"
    text = said(work, job)
    assert "srun: error: n2: task 3: Killed" in text
    assert "error: rank 3 (stage 3) on n2 died without a message" in text
    assert "Traceback" not in text


def listening(host: Host, job: int) -> set[str]:
    """The ports at which the ranks of a job listen; srun and slurmstepd have ports of their own."""
    inodes = set()
    for pid in host.find(SLURM_JOB_ID=str(job)):
        if "vpipe" in host.processes().get(pid, "").partition("srun")[0]:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(entry))
    return {str(int(line.split()[1].rpartition(":")[2], 16)) for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{host.first}/net/{table}").read_text().splitlines()[1:]
            if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in inodes}


def test_nobody_answers_another_user(cluster: Cluster, work: Path) -> None:
    """By the secret that the script makes; another user of a node tries all that listens."""
    report, host = work / "reached.json", cluster.hosts[0]
    long_run(work)
    job = submit(cluster, work, "configs/slurm/bert_mini_4stage_2nodes.sh")
    until(lambda: trains(work), 60, "a few updates")
    ports = listening(host, job)
    assert len(ports) >= 2, "gloo's, for as long as the group lives"
    done = host.run([sys.executable, Path(__file__).with_name("stranger.py"), report, "0", 2, "127.0.0.1", "::1",
                     host.address], timeout=60)
    assert done.returncode == 0, done.stderr
    assert not any(answer for name, answer in json.loads(report.read_text())["now"].items() if name in ports)
    [run] = work.glob("runs/*/metrics.jsonl")
    updates = run.read_text().count("\n")
    until(lambda: run.read_text().count("\n") > updates, 60, "it goes on")
    secrets = {line for pid in host.find(SLURM_JOB_ID=str(job)) for line in
               Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if line.startswith(b"VPIPE_SECRET=")}
    assert [len(secret) for secret in secrets] == [len("VPIPE_SECRET=") + 32]
    cluster.command("scancel", str(job))
    assert cluster.wait(job, 60) == "CANCELLED"


def test_a_cancelled_job(cluster: Cluster, work: Path) -> None:
    """Submitted by the command; ``work`` sees that nothing is left."""
    long_run(work)
    done = cluster.command(VPIPE, "slurm", CONFIG, "--nodes", "2", "--partition", "main", "--submit", cwd=work)
    assert done.stdout.startswith("submitted job "), done.stderr
    job = int(done.stdout.split()[2].rstrip(":"))
    until(lambda: trains(work), 60, "a few updates")
    cluster.command("scancel", str(job))
    assert cluster.wait(job, 60) == "CANCELLED"
    assert "Traceback" not in said(work, job)


def test_a_node_without_vpipe(cluster: Cluster, work: Path) -> None:
    environment = Path(sys.executable).parents[1]
    cluster.hosts[3].hide(environment)
    try:
        job = submit(cluster, work, "configs/slurm/bert_mini_4stage_4nodes.sh")
        assert cluster.wait(job, 120) == "FAILED"
    finally:
        cluster.hosts[3].show(environment)
    assert "vpipe: No such file or directory" in said(work, job)
    assert "n4: task 3: Exited with exit code 2" in said(work, job)


def test_a_job_that_goes_back_into_the_queue_goes_on(cluster: Cluster, work: Path, tmp_path: Path) -> None:
    """As before a pre-emption: the ranks save and end. Then they find their run; its losses are those of one device."""
    sizes: dict[str, Any] = SIZES | {"training__max_steps": 40}
    write_config(work, **sizes, checkpoint__at_end=True).rename(work / CONFIG)
    cluster.command(VPIPE, "slurm", CONFIG, "--nodes", "2", "--restarts", "1", "-o", "job.sh", cwd=work, check=True)
    job = submit(cluster, work, "job.sh")
    until(lambda: trains(work), 60, "a few updates")
    cluster.command("scontrol", "requeue", str(job), check=True)
    until(lambda: cluster.state(job) == "PENDING", 60, "it is requeued")
    # SLURM would wait for two minutes, and takes a start in the same second for that of the job before.
    cluster.command("scontrol", "update", f"JobId={job}", "StartTime=now+2", check=True)
    assert cluster.wait(job, 240) == "COMPLETED", said(work, job)
    run, text = only_run(work / "runs"), said(work, job)
    [saved] = re.findall(rf"stopped by SIGTERM after update (\d+): saved; go on with: vpipe train --resume {run}", text)
    assert f"attempt 2: srun starts the ranks again; going on from step {saved}\n" in text
    assert "Traceback" not in text
    check_updates(run, 40)
    assert losses(run) == oracle(job_of(tmp_path, **sizes), 40).losses
