"""The Python binding under LD_PRELOAD, over the fake driver; orion_binding has the names that its users know."""

from __future__ import annotations

import ctypes.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vpipe.extras.orion.kernels import Bound, KernelProfile, kernel_csv

pytestmark = pytest.mark.timeout(120, func_only=True)  # not of compilers on a busy machine

BINDING = Path(__file__).parents[4] / "kernel_intercept" / "python"

PROGRAM = """
import ctypes
from orion_binding import SchedulingMode, get_scheduler

scheduler = get_scheduler()
assert scheduler is get_scheduler() and scheduler.is_preloaded and not scheduler.is_running()
print(scheduler.start(0), scheduler.last_error())
print(scheduler.bind_stream(0, 77), scheduler.last_error())
assert scheduler.set_scheduling_mode(SchedulingMode.MULTI_PRIORITY) == 0
assert scheduler.get_scheduling_mode() is SchedulingMode.MULTI_PRIORITY
if (status := scheduler.start(2, device_id=0)) != 0:
    raise SystemExit(f"{status} {scheduler.last_error()}")
assert scheduler.is_running() and scheduler.start(2) == -2
assert scheduler.load_kernel_info(-1, "kernels.csv") == 1, scheduler.last_error()
assert scheduler.get_client_idx() == -1
scheduler.set_client_idx(1)  # without torch there is no stream to bind
assert scheduler.get_client_idx() == 1
scheduler.set_sm_threshold(7)
assert scheduler.get_sm_threshold() == 7

class Kernel(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("ns", ctypes.c_uint64), ("error", ctypes.c_int)]

driver, kernel = ctypes.CDLL("libcuda.so.1"), Kernel(b"gemm", 1000, 0)
driver.cuInit(0)
streams = [ctypes.c_void_p() for _ in range(2)]
for client, stream in enumerate(streams):
    assert driver.cuStreamCreate(ctypes.byref(stream), 0) == 0
    assert scheduler.bind_stream(client, stream.value) == 0

def work(_):
    for stream in [streams[0], streams[0], streams[1]]:
        launched = driver.cuLaunchKernel(ctypes.byref(kernel), 1, 1, 1, 1, 1, 1, 0, stream, None, None)
        assert launched == 0
    scheduler.sync_stream(0)
    scheduler.sync_stream(1)

function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)
driver.fake_run(1, ctypes.byref(ctypes.cast(function, ctypes.c_void_p)), ctypes.byref(ctypes.c_void_p()))
print(scheduler.get_stats(0), scheduler.get_stats(1), scheduler.totals()["gated"])
stats = scheduler.client_stats(1)  # client 0's kernels end on the virtual clock, which stands still meanwhile
assert stats["queued"] == 1 and stats["max_wait_ns"] == stats["wait_ns"] > 1_000_000
scheduler.unbind_stream(streams[1].value)
scheduler.reset_state()
print(scheduler.get_stats(0))
scheduler.stop()
assert not scheduler.is_running()
"""


START = """
from vpipe.extras.orion.scheduler import Inactive, start

found = start("cuda", 0, 4)
print(found if isinstance(found, Inactive) else f"{found.is_running()} {len(found.totals())}")
"""


def run(native: Path, folder: Path, program: str = PROGRAM, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("ORION_", "LD_")) and name != "PYTHONPATH"}
    environment["PYTHONPATH"] = os.pathsep.join([str(BINDING), str(BINDING.parents[1])])
    (folder / "kernels.csv").write_text(kernel_csv([KernelProfile('f<1, "x">(int)', Bound.MEMORY, 3, 1e-5)]))
    environment |= {"LD_LIBRARY_PATH": str(native), "LD_PRELOAD": str(native / "libgpu_scheduler.so"), **variables}
    return subprocess.run([sys.executable, "-S", "-c", program], env=environment, capture_output=True, text=True,
                          timeout=60, cwd=folder)


def test_names_that_users_know(native: Path, tmp_path: Path) -> None:
    done = run(native, tmp_path)
    assert done.returncode == 0, done.stderr
    bad, unbound, stats, reset = done.stdout.splitlines()
    assert bad.startswith("-1 ")
    assert unbound.startswith("-5 ")
    assert stats == "(2, 0) (1, 0) 3"
    assert reset == "(0, 0)"


def test_it_does_not_start_without_a_driver(native: Path, tmp_path: Path) -> None:
    done = run(native, tmp_path, FAKE_NO_DEVICE="1")
    assert done.stderr.splitlines()[-1] == "-3 the CUDA driver finds no device: cuInit returned 100"


@pytest.mark.parametrize(("variables", "found"), [
    ({}, "True 6"),
    ({"LD_LIBRARY_PATH": ""}, r"orion: inactive \(no CUDA driver: libcuda.so.1: .*; start it where nvidia-smi .*\)"),
    ({"FAKE_NO_DEVICE": "1"}, r"orion: inactive \(the CUDA driver finds no device: .*; start it where nvidia-smi .*\)"),
    ({"ORION_BE_MAX_WAIT_US": "0"}, r"orion: inactive \(ORION_BE_MAX_WAIT_US=0 is no number from 1 to \d+; correct it, "
     r"or leave it out\)")])
def test_a_rank_starts_it_or_says_why_not(native: Path, tmp_path: Path, variables: dict[str, str], found: str) -> None:
    if "LD_LIBRARY_PATH" in variables and ctypes.util.find_library("cuda"):
        pytest.skip("this machine has a CUDA driver")
    done = run(native, tmp_path, START, **variables)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(found, done.stdout.strip())
