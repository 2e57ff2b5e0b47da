"""Measures what libgpu_scheduler.so adds to a kernel launch that does not have to wait.

The driver is the fake one of the library's tests, told to do nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "kernel_intercept"

WAYS = {"none": "without the library", "stopped": "preloaded, not started", "unbound": "started, stream not bound",
        "high": "client 0", "best": "client 1, client 0 idle"}


def build(folder: Path) -> None:
    """Build the library as users do, the fake driver and the program that launches."""
    subprocess.run(["make", "--no-print-directory", "orion"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-pthread", f"-I{NATIVE / 'include'}",
                f"-I{NATIVE / 'tests'}"]
    driver = folder / "libcuda.so.1"
    subprocess.run([*compiler, "-fPIC", "-shared", "-fvisibility=hidden", NATIVE / "tests" / "fake_driver.cpp",
                    "-Wl,-soname,libcuda.so.1", "-o", driver], check=True)
    subprocess.run([*compiler, Path(__file__).with_name("launches.cpp"), driver, f"-Wl,-rpath,{folder}", "-ldl", "-o",
                    folder / "launches"], check=True)


def measure(folder: Path, way: str, launches: int) -> float:
    """Return the ns of a launch."""
    environment = dict(os.environ)
    if way != "none":
        environment["LD_PRELOAD"] = str(NATIVE / "build" / "libgpu_scheduler.so")
    return float(subprocess.run([folder / "launches", way, str(launches)], env=environment, check=True,
                                capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        # In turns, so that a machine that slows down slows all of them.
        rounds = [{way: measure(folder, way, arguments.launches) for way in WAYS} for _ in range(arguments.rounds)]
    plain = statistics.median(one["none"] for one in rounds)
    print("| launch | ns, median | least | most | added ns |\n|---|---:|---:|---:|---:|")
    for way, title in WAYS.items():
        times = [one[way] for one in rounds]
        print(f"| {title} | {statistics.median(times):.0f} | {min(times):.0f} | {max(times):.0f} | "
              f"{statistics.median(times) - plain:+.0f} |")


if __name__ == "__main__":
    main()
