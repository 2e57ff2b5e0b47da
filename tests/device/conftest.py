"""Programs that have the late device; a process that loads it keeps it, so each is a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="session")
def printed(ended: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., Any]:
    """What a program prints as JSON; of the tests that look at it, the first lets it run."""
    @cache
    def found(program: str, *arguments: str) -> Any:
        process = ended(program, *arguments)
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    return found
