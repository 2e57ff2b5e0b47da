"""The checks of Orion for a GPU, rehearsed over the fake driver."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(620),
              pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")]


def test_every_check_passes_in_a_rehearsal(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "benchmarks" / "gpu" / "run.py", "--device", "cpu", "--only", "orion",
                    "--out", tmp_path], check=True, timeout=600, capture_output=True)
    part = json.loads((tmp_path / "report.json").read_text())["parts"]["orion"]
    assert part["failure"] is None
    assert len(part["findings"]) == 33
    assert all(finding["passed"] in (True, None) for finding in part["findings"])
    [priority] = [finding for finding in part["findings"] if finding["subject"] == "priority, demanded"]
    assert priority["passed"]
