"""Each extra can be deleted, or all: everything else is imported, its tests are collected, and its commands run."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

ROOT = Path(__file__).parents[1]
EXTRAS = sorted(folder.name for folder in (ROOT / "vpipe" / "extras").iterdir() if (folder / "__init__.py").is_file())
COPIED = ("vpipe", "tests", "docs", "configs", "examples", "benchmarks", "site", "kernel_intercept")

NOT_YET: dict[str, set[str]] = {}
"""The checks of tests/without_extras.py that fail without an extra, to be counted down to none."""


def copies_without_extras(folder: Path) -> list[Path]:
    """A copy of the tree without any, and one per extra without that; files are shared, so a copy takes a moment."""
    first = folder / "first"
    for name in COPIED:
        shutil.copytree(ROOT / name, first / name, ignore=shutil.ignore_patterns("node_modules", "*-pytest-*.pyc"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy2(file, first)
    compileall.compile_dir(first / "vpipe", quiet=2)
    compileall.compile_dir(first / "tests", quiet=2)
    absent = {"all": set(EXTRAS), **{extra: {extra} for extra in EXTRAS}}
    for copy, extras in absent.items():
        shutil.copytree(first, folder / copy, copy_function=os.link,
                        ignore=lambda here, names, extras=extras: extras & set(names)
                        if Path(here) == first / "vpipe" / "extras" else set())
    return [folder / copy for copy in absent]


def test_each_extra_can_be_deleted(tmp_path: Path) -> None:
    copies = copies_without_extras(tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    tried = subprocess.run([sys.executable, str(ROOT / "tests" / "without_extras.py"), *map(str, copies)],
                           capture_output=True, text=True, timeout=110,
                           env={**environment, "OMP_NUM_THREADS": "1"})
    found = {extra: wrong for line in tried.stdout.splitlines() for extra, wrong in json.loads(line).items()}
    assert sorted(found) == sorted([*EXTRAS, "all"]), tried.stderr[-3000:]
    failing = {extra: set(wrong) for extra, wrong in found.items() if wrong}
    if failing != NOT_YET:
        pytest.fail(json.dumps(found, indent=1).replace("\\n", "\n") + tried.stderr[-1000:])
