"""Each extra can be deleted, or all: everything else is imported, its tests are collected, and its commands run."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = sorted(folder.name for folder in (ROOT / "vpipe" / "extras").iterdir() if (folder / "__init__.py").is_file())
COPIED = ("vpipe", "tests", "docs", "configs", "examples", "benchmarks", "site", "kernel_intercept")

# One worker makes the first copy, and the process that tries the others one after the other.
pytestmark = [pytest.mark.jobs, pytest.mark.xdist_group("extras")]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, compiled; those without extras share its files, so that each takes a moment."""
    first = tmp_path_factory.mktemp("extras") / "first"
    for name in COPIED:
        shutil.copytree(ROOT / name, first / name, ignore=shutil.ignore_patterns("node_modules", "*-pytest-*.pyc"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy2(file, first)
    compileall.compile_dir(first / "vpipe", quiet=2)
    compileall.compile_dir(first / "tests", quiet=2)
    return first


@pytest.fixture(scope="module")
def trying() -> Iterator[subprocess.Popen[str]]:
    """The program that tries the copies that it reads the paths of."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    with subprocess.Popen([sys.executable, str(ROOT / "tests" / "without_extras.py")], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
                          env={**environment, "OMP_NUM_THREADS": "1"}) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)  # where a test gave up, a copy is still being tried


@pytest.mark.parametrize("absent", [*EXTRAS, "all"])
def test_each_extra_can_be_deleted(tree: Path, trying: subprocess.Popen[str], absent: str) -> None:
    gone = set(EXTRAS) if absent == "all" else {absent}
    copy = tree.with_name(absent)
    shutil.copytree(tree, copy, copy_function=os.link, ignore=lambda folder, names: gone & set(names)
                    if Path(folder) == tree / "vpipe" / "extras" else set())
    assert trying.stdin is not None
    assert trying.stdout is not None
    print(copy, file=trying.stdin, flush=True)
    if wrong := json.loads(trying.stdout.readline()):
        pytest.fail("\n\n".join(f"{check}: {why}" for check, why in wrong.items()))
