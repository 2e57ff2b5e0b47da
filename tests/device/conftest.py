"""Programs that have the late device; a process that loads it keeps it, so each is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fork_server
import late_device
import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def ended() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program of this folder to its end; the first builds the device, where that has not been built."""
    if late_device.compiler() is None:
        pytest.skip("no C++ compiler builds the device")

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(HERE / program), *arguments]
        with fork_server.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                out, error = process.communicate(timeout=500)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, error)

    return run
