"""libgpu_scheduler.so over a fake driver, whose clock is virtual: times are exact, and the same on every machine.

What happens is in kernel_intercept/tests/client.cpp.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120, func_only=True)  # not of compilers on a busy machine

MODES = {"FIFO": 0, "MULTI_PRIORITY": 1, "ROUND_ROBIN": 2}

KERNELS = """\
Name,Profile,Memory_footprint,SM_usage,Duration
gemm,1,0,66,100000
"void copy<4>(float*, float const*)",0,0,20,100000
wide,0,0,132,100000
not there,-1,0,1,1
"""


def run(native: Path, *arguments: object, preload: bool = True, **variables: str) -> str:
    """Run the client, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ORION_")}
    environment |= variables
    if preload:
        environment["LD_PRELOAD"] = str(native / "libgpu_scheduler.so")
    done = subprocess.run([native / "client", *map(str, arguments)], env=environment, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in (line.split() for line in text.splitlines())}


def test_policy(native: Path) -> None:
    subprocess.run([native / "test_policy"], check=True)


@pytest.mark.parametrize("test", [
    "routes",      # every way to the driver's launch functions, arguments and attributes unchanged
    "errors",      # what the driver answers is what the caller gets
    "passes",      # launches that are nobody's, and what the interface refuses
    "order",       # within streams, by events, after synchronization
    "cycle",       # client 0 waits for what only a waiting client can give
    "long_queue",  # client 0's thread waits, its work goes on
    "churn",       # start and stop under load
    "forked",      # a child launches without the gate
    "capture",     # no wait, and no query that breaks it
])
def test_client(native: Path, test: str) -> None:
    run(native, test)


@pytest.mark.parametrize("client", [0, 1])
def test_client_that_waits_for_a_receive_costs_the_others_one_bound(native: Path, client: int) -> None:
    run(native, "parked", client)


def test_kernels_of_different_classes_overlap(native: Path, tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(KERNELS)
    run(native, "profile", PROFILE=str(path))


@pytest.mark.parametrize("device", [[], ["in-turn"]], ids=["by-launch", "in-turn"])
def test_high_priority_iteration_beside_three_best_effort_clients(native: Path, device: list[str]) -> None:
    without = numbers(run(native, "benefit", -1, *device, preload=False))
    for mode in MODES.values():
        gated = numbers(run(native, "benefit", mode, *device))
        check_benefit(without, gated)


def check_benefit(without: dict[str, float], gated: dict[str, float]) -> None:
    assert gated["iteration_us"] <= 0.6 * without["iteration_us"]
    # Launches of 200 us: two may be outstanding, and one of each client may have starved.
    assert gated["inversion_us"] <= (2 + 3) * 200
    assert gated["max_wait_us"] <= 2000 + 1  # ORION_BE_MAX_WAIT_US
    counts = [gated[f"client_{client}"] for client in (1, 2, 3)]
    assert min(counts) >= 0.9 * max(counts) > 20
    # The device does not stand still: what client 0 leaves free, the others have.
    assert sum(counts) * 200 + 50 * 1000 >= 0.95 * 50 * (gated["iteration_us"] + 300)


def test_fairness_among_best_effort_clients(native: Path) -> None:
    for mode in ("FIFO", "ROUND_ROBIN"):
        counts = list(numbers(run(native, "fairness", MODES[mode])).values())
        assert min(counts) >= 0.9 * max(counts)
        assert sum(counts) >= 1200  # of 50 us, in 60 ms
    first, second, third = numbers(run(native, "fairness", MODES["MULTI_PRIORITY"])).values()
    assert first > 10 * second  # by priority
    assert second == pytest.approx(third, rel=0.1)
    assert third >= 50  # every half of a bound


@pytest.mark.parametrize("outstanding", [1, 2, 4])
def test_outstanding_launches_bound_what_high_priority_waits(native: Path, outstanding: int) -> None:
    # A bound on waits that nobody reaches.
    gated = numbers(run(native, "benefit", 2, ORION_BE_MAX_OUTSTANDING=str(outstanding), ORION_BE_MAX_WAIT_US="50000"))
    assert gated["starved"] == 0
    assert (outstanding - 1) * 200 < gated["inversion_us"] <= outstanding * 200


def test_bound_on_waits_comes_from_the_environment(native: Path) -> None:
    gated = numbers(run(native, "benefit", 2, ORION_BE_MAX_WAIT_US="700"))
    assert gated["max_wait_us"] <= 701
    assert gated["starved"] > 0


@pytest.mark.parametrize(("variables", "status", "says"), [
    ({}, 0, ""),
    ({"ORION_SM_THRESHOLD": "20"}, 0, ""),
    ({"ORION_BE_MAX_WAIT_US": "2ms"}, -1, "ORION_BE_MAX_WAIT_US=2ms is no number from 1"),
    ({"ORION_BE_MAX_OUTSTANDING": "0"}, -1, "ORION_BE_MAX_OUTSTANDING=0 is no number from 1"),
    ({"ORION_KERNEL_INFO": "/nowhere.csv"}, -1, "/nowhere.csv: No such file"),
    ({"ORION_KERNEL_INFO": "/dev/null"}, -1, "/dev/null: line 1 must be Name,"),
    ({"FAKE_NO_DEVICE": "1"}, -3, "the CUDA driver finds no device: cuInit returned 100")])
def test_start(native: Path, variables: dict[str, str], status: int, says: str) -> None:
    text = run(native, "environment", **variables)
    assert re.match(rf"status {status}\nthreshold {variables.get('ORION_SM_THRESHOLD', 0 if status else 66)}\n", text)
    assert says in text


@pytest.mark.parametrize("row", ["gemm,2,0,1,1", "gemm,1,0,1", "gemm,1,0,many,1", ",1,0,1,1", '"gemm,1,0,1,1'])
def test_kernel_info_that_cannot_be_read(native: Path, tmp_path: Path, row: str) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(f"{KERNELS}{row}\n")
    text = run(native, "environment", ORION_KERNEL_INFO=str(path))
    assert text.startswith("status -1\n")
    assert f"{path}: line 6 must have five fields" in text


@pytest.mark.parametrize(("preload", "driver", "status", "says"), [
    (False, True, -4, "without LD_PRELOAD="), (False, False, -3, "no CUDA driver"),
    (True, False, -3, "no CUDA driver")])
def test_start_says_what_is_missing(native: Path, tmp_path: Path, preload: bool, driver: bool, status: int,
                                    says: str) -> None:
    path = shutil.copy(native / "libgpu_scheduler.so", tmp_path)
    code = f"""if True:
        import ctypes
        library = ctypes.CDLL({path!r})
        library.orion_last_error.restype = ctypes.c_char_p
        # Only a driver makes a process look like one that has a driver.
        print(library.orion_is_preloaded(), library.orion_start_scheduler(4, 0), library.orion_last_error().decode(),
              hasattr(ctypes.CDLL(None), "cuLaunchKernel"))
    """
    variables = {"LD_PRELOAD": path if preload else "", "LD_LIBRARY_PATH": str(native if driver else tmp_path)}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=os.environ | variables, check=True,
                          capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.startswith(f"{int(preload)} {status} ")
    assert says in done.stdout
    assert done.stdout.endswith("False\n")


def test_dlsym_ends_in_a_tail_call(native: Path) -> None:
    """libc looks at who called dlsym: RTLD_NEXT of a library would be searched after ours, were this a call."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("no objdump")
    code = subprocess.run([objdump, "--disassemble=dlsym", "--no-show-raw-insn", native / "libgpu_scheduler.so"],
                          check=True, capture_output=True, text=True).stdout
    assert re.search(r"\bjmp +\*%r|\bbr\tx", code)
    assert not re.search(r"\bcall +\*|\bblr\t", code)


def test_only_the_interface_is_exported(native: Path) -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    listed = subprocess.run([nm, "-D", "--defined-only", native / "libgpu_scheduler.so"], check=True,
                            capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    header = (Path(__file__).parents[4] / "kernel_intercept" / "include" / "orion_scheduler.h").read_text()
    declared = set(re.findall(r"^[\w *]+\b(orion_\w+)\(", header, re.MULTILINE))
    assert {name for name in names if name.startswith("orion_")} == declared | {"orion_use_clock"}
    assert all(re.match(r"orion_|dlsym$|cuLaunch|cuGetProcAddress|cuStreamBeginCapture", name) for name in names)
