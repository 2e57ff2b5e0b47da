"""Builds what tests of the Orion library need, once for all processes, and anew when its sources have changed."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[4] / "kernel_intercept"
CXX = shutil.which("g++") or shutil.which("clang++")
COMPILE = [str(CXX), "-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror"]
SHARED = [*COMPILE, "-fPIC", "-shared", "-fvisibility=hidden"]


def commands(folder: Path) -> list[list[str]]:
    """Return the commands that build the library, a driver that is none, a client of both and the policy's table."""
    sources = [str(path) for path in sorted((ROOT / "src").glob("*.cpp"))]
    include = [f"-I{ROOT / name}" for name in ("include", "src", "tests")]
    driver = folder / "libcuda.so.1"
    return [
        # Less optimized than the library of `make orion`, to be built sooner; but with its tail calls.
        [*SHARED, "-O1", "-foptimize-sibling-calls", "-static-libstdc++", "-static-libgcc",
         f"-Wl,--version-script={ROOT / 'src' / 'exports.map'}", *include, *sources, "-ldl",
         "-o", str(folder / "libgpu_scheduler.so")],
        [*SHARED, *include, str(ROOT / "tests" / "fake_driver.cpp"), "-Wl,-soname,libcuda.so.1", "-o", str(driver)],
        [*COMPILE, *include, str(ROOT / "tests" / "client.cpp"), str(driver), f"-Wl,-rpath,{folder}", "-ldl",
         "-o", str(folder / "client")],
        [*COMPILE, *include, str(ROOT / "tests" / "test_policy.cpp"), str(ROOT / "src" / "policy.cpp"), "-o",
         str(folder / "test_policy")]]


@pytest.fixture(scope="session")
def native(pytestconfig: pytest.Config) -> Path:
    """The folder with libgpu_scheduler.so, a fake libcuda.so.1, client and test_policy."""
    if CXX is None:
        pytest.skip("no C++ compiler")
    sources = hashlib.sha256(Path(__file__).read_bytes() + CXX.encode())
    for file in sorted(file for name in ("src", "include", "tests") for file in (ROOT / name).rglob("*.*")):
        sources.update(file.read_bytes())
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("orion") / sources.hexdigest()[:16]
    with FileLock(f"{folder}.lock"):
        if not (folder / "built").exists():
            folder.mkdir(exist_ok=True)
            library, *others = commands(folder)
            with subprocess.Popen(library) as beside:
                for command in others:
                    subprocess.run(command, check=True)
            assert beside.returncode == 0
            (folder / "built").touch()
    return folder
