"""docs/two-nodes.md, tried on two hosts with two ranks each: its commands, and the losses of one process.

Its SLURM job is ``test_a_ready_script[2]`` of test_slurm.py, its ssh command ``test_a_run`` of test_over_ssh.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hosts import VPIPE, Hosts
from small_run import losses, only_run, write_config

pytestmark = pytest.mark.long
TORCHRUN = Path(sys.executable).with_name("torchrun")
SIZES = {"parallel__model_parallel_size": 4, "training__max_steps": 3}
EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.py"


def under_torchrun(hosts: Hosts, folder: Path, *program: str | Path) -> list[str]:
    """The output of the page's torchrun command, by host: the same on both."""
    command = [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
               "host0:29400", "--rdzv-id", "42", *program]
    started = [host.popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=dict(host.environment()) | {"OMP_NUM_THREADS": "1"}) for host in hosts[:2]]
    outputs = []
    for process in started:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        outputs.append(out)
    return outputs


@pytest.fixture
def one_process(tmp_path: Path) -> list[float]:
    """The losses of the config when all ranks are on this host."""
    folder = tmp_path / "alone"
    folder.mkdir()
    done = subprocess.run([VPIPE, "train", write_config(folder, **SIZES)], cwd=folder, capture_output=True, text=True,
                          timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return losses(only_run(folder / "runs"))


def test_torchrun(hosts: Hosts, tmp_path: Path, one_process: list[float]) -> None:
    under_torchrun(hosts, tmp_path, "-m", "vpipe", "train", write_config(tmp_path, **SIZES))
    assert losses(only_run(tmp_path / "runs")) == one_process


def test_a_script_under_torchrun(hosts: Hosts, tmp_path: Path) -> None:
    shorter = tmp_path / "quickstart.py"
    shorter.write_text(EXAMPLE.read_text().replace("range(36)", "range(3)"))
    first, second = under_torchrun(hosts, tmp_path, shorter)
    assert "gpipe: partition" in first + second
    alone = subprocess.run([sys.executable, shorter], capture_output=True, text=True, timeout=100, check=True)
    assert alone.stdout in (first, second), "the node of rank 0 prints"
