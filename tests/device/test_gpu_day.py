"""``make gpu`` on the late device, where there is no device, and where tools are missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import late_device
import pytest

pytestmark = pytest.mark.jobs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PARTS = ("suite", "exactness", "ranks", "prediction", "utilization", "host", "orion")
LEFT_OUT = {"suite": {"tests marked gpu, published bugs of streams"}, "orion": {"all checks"}}

SYSTEM = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(1500)]

Report = dict[str, dict[str, Any]]


def make_gpu(*arguments: str | Path, python: tuple[str, ...] = (),
             **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *python, ROOT / "benchmarks" / "gpu" / "run.py", *arguments], text=True,
                          env=os.environ | variables, capture_output=True, check=False, timeout=1500)


@pytest.mark.parametrize(("arguments", "python", "said"), [
    ((), (), "error: there is no accelerator here that torch can use, so nothing was tested\nhint: "),
    pytest.param(("--device", "cuda"), (), "error: device is cuda, but this process sees no GPU", marks=SYSTEM),
    pytest.param(("--import", "no_such_module"), (), "error: torch cannot be imported: ", marks=SYSTEM),
    ((), ("-S",), "error: packages are missing: torch (for everything), ")],
    ids=["no device", "no GPU", "no module", "no packages"])
def test_nothing_is_tested_without(arguments: tuple[str, ...], python: tuple[str, ...], said: str,
                                   tmp_path: Path) -> None:
    done = make_gpu(*arguments, "--out", tmp_path / "report", python=python, PYTHONPATH="")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(said)
    assert "\nhint: " in done.stderr
    assert not (tmp_path / "report").exists()


@pytest.fixture(scope="module")
def report(ended: object, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What is found on the late device, which is built, where there are no compiler, no make and no git."""
    late_device.built()
    folder = tmp_path_factory.mktemp("gpu day")
    done = make_gpu("--import", "late_autoload", "--small", "--out", folder, PYTHONPATH=str(HERE), PATH=str(folder))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    found: Report = json.loads((folder / "report.json").read_text())
    assert found["machine"]["device"].startswith("2 x late (late), 4 GiB")
    assert found["machine"]["commit"] == "unknown"
    return found["parts"]


@pytest.mark.parametrize("part", [pytest.param(part, marks=SYSTEM) for part in PARTS])
def test_a_part_on_the_late_device(report: Report, part: str) -> None:
    findings = {one["subject"]: one for one in report[part]["findings"]}
    assert report[part]["failure"] is None
    assert findings
    assert not [one for one in findings.values() if one["passed"] is False]
    left_out = {subject for subject, one in findings.items() if one["text"].startswith("left out: ")}
    assert left_out == LEFT_OUT.get(part, set())


@pytest.mark.system
@pytest.mark.long
def test_orion_is_left_out_without_a_compiler(tmp_path: Path) -> None:
    done = make_gpu("--device", "cpu", "--only", "orion", "--out", tmp_path, PATH=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "all checks: left out: no C++ compiler, or no make, builds its library\n" in done.stdout
