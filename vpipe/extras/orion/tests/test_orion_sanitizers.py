"""The gate of the Orion library under a sanitizer, with real threads and real time; and the library as `make orion` has
it built."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
NATIVE = ROOT / "kernel_intercept"
CXX = shutil.which("g++") or shutil.which("clang++")

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.skipif(CXX is None, reason="no C++ compiler")]


@pytest.mark.parametrize("options", [["-fsanitize=thread", "-DNO_FORK"], ["-fsanitize=address,undefined"], []],
                         ids=["thread", "address", "none"])
def test_gate_under_load(tmp_path: Path, options: list[str]) -> None:
    sources = [NATIVE / "src" / f"{name}.cpp" for name in ("clock", "gate", "kernel_info", "log", "policy")]
    include = [f"-I{NATIVE / name}" for name in ("include", "src", "tests")]
    subprocess.run([str(CXX), "-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", *options, *include,
                    NATIVE / "tests" / "stress.cpp", *sources, "-o", tmp_path / "stress"], check=True)
    variables = os.environ | {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}
    for _ in range(3):
        done = subprocess.run([tmp_path / "stress"], capture_output=True, text=True, timeout=100, env=variables)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("cmake", [True, False], ids=["cmake", "without"])
def test_make_orion(tmp_path: Path, cmake: bool) -> None:
    if cmake and not shutil.which("cmake"):
        pytest.skip("no cmake")
    shutil.copytree(NATIVE, tmp_path / "kernel_intercept", ignore=shutil.ignore_patterns("build"))
    shutil.copy(ROOT / "Makefile", tmp_path)
    command = ["make", "orion", f"CXX={CXX}", *([] if cmake else ["CMAKE=nothing"])]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "kernel_intercept" / "build" / "libgpu_scheduler.so").is_file()
