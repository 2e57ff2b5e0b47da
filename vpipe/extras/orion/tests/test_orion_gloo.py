"""torch on CPUs with the Orion library preloaded, two ranks of torchrun over gloo: the losses of a run without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import losses, only_run, write_config

from vpipe.app.launch.network import free_port

ROOT = Path(__file__).parents[4]
CXX = shutil.which("g++") or shutil.which("clang++")

pytestmark = [pytest.mark.extras("async_threaded"), pytest.mark.system, pytest.mark.long,
              pytest.mark.skipif(CXX is None, reason="no C++ compiler")]


def test_the_same_losses_under_torchrun(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "kernel_intercept", tmp_path / "kernel_intercept", ignore=shutil.ignore_patterns("build"))
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run(["make", "orion", f"CXX={CXX}"], cwd=tmp_path, check=True, capture_output=True)
    preloaded = {"LD_PRELOAD": str(tmp_path / "kernel_intercept" / "build" / "libgpu_scheduler.so"),
                 "USE_ORION_SCHEDULER": "1"}
    found, said = {}, {}
    for name, variables in (("without", {}), ("preloaded", preloaded)):
        folder = tmp_path / name
        folder.mkdir()
        config = write_config(folder, parallel__schedule="gpipe", parallel__executor="async_threaded")
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
                               str(free_port(None)), "-m", "vpipe", "train", config], capture_output=True, text=True,
                              timeout=200, env=os.environ | variables)
        assert done.returncode == 0, done.stderr
        assert "ld.so" not in done.stderr
        found[name], said[name] = losses(only_run(folder / "runs")), done.stdout
    assert found["without"] == found["preloaded"]
    assert "orion: inactive (ranks compute on cpu" in said["preloaded"]
    assert "orion" not in said["without"]
