"""The notebooks run from the first cell to the last, each in less than 20 s of one core."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAST = {"1": "largest difference of a loss: 0.0\n", "2": "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,1STEP0\n",
        "3": "pipedream, a stream of 32 microbatches: bubble 9%", "4": "tensor([[ 5,  6,  7,  8,  9, 10, 11, 12,",
        "5": "error: no plan fits into 2 MiB per rank",
        "6": "largest difference of a loss: 0.0\nthe same loss from the files: True\n"}
"""Of each notebook, by its number, what it prints near its end."""


@pytest.mark.long
@pytest.mark.timeout(600)  # of a busy machine
@pytest.mark.parametrize("path", [path for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
                                  if not path.stem.endswith(".zh")], ids=lambda path: path.stem)  # has the same code
def test_it_runs(path: Path, tmp_path: Path) -> None:
    for package in {"4": ["transformers"], "6": ["transformers", "peft"]}.get(path.name[0], []):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    before = os.times()
    done = subprocess.run([sys.executable, ROOT / "tests" / "system" / "run_notebook.py", path], cwd=tmp_path,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert LAST[path.name[0]] in done.stdout
    assert after.children_user + after.children_system - before.children_user - before.children_system < 20
    assert not list(tmp_path.iterdir())
