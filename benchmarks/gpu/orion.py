"""The checks of Orion on a GPU: that launches come through the gate, what it costs, what it gains, that nothing hangs.

The checks run in a process with libgpu_scheduler.so in LD_PRELOAD. A rehearsal on a processor puts the fake driver of
kernel_intercept/tests in place of CUDA's; runs of vpipe then say why Orion is inactive.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from findings import Part
from orion_checks import Checks
from orion_devices import Device, FakeDevice, TorchDevice

from vpipe import accelerator
from vpipe.app.launch.network import free_port
from vpipe.extras.orion.scheduler import LIBRARY, OrionScheduler, get_scheduler

ROOT = Path(__file__).parent.parent.parent
ROLE = "VPIPE_ORION_CHECKS"
LAUNCHES, AT_ONCE = 20_000, 500  # no queue fills
CONFIG = """
model: {name: gpt, hidden_size: 512, num_layers: 4, num_heads: 8, sequence_length: 128, vocab_size: 4096}
dataset: {name: synthetic, batch_size: 16}
training: {learning_rate: 0.0001, max_steps: 20, num_microbatches: 4, threads: 1}
parallel: {model_parallel_size: RANKS, schedule: gpipe, executor: async_threaded, backend: gloo}
log_directory: runs
"""


def seconds_of(work: Callable[[], None], wait: Callable[[], None], times: int) -> float:
    """Return the least of five medians of the seconds of some work, after each of which the device is waited for."""
    found = []
    for _ in range(5):
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
            wait()
        found.append(median(seconds))
    return min(found)


def overhead(device: Device, role: str) -> dict[str, float]:
    """Return seconds per launch: without the library, or by what the stream is; and of a query and of steps."""

    def launch(stream: Any) -> float:
        return seconds_of(lambda: device.launch(stream, "small", AT_ONCE), lambda: device.wait(stream),
                          LAUNCHES // AT_ONCE) / AT_ONCE

    def step(stream: Any) -> float:
        return seconds_of(lambda: device.backward(stream, here=True), lambda: device.wait(stream), 100)

    stream = device.stream()
    device.launch(stream, "small")
    device.backward(stream, here=True)
    if role == "bare":
        return {"bare": launch(stream), "query": seconds_of(lambda: device.query(stream), lambda: None, 1000)}
    scheduler: OrionScheduler = get_scheduler()
    found = {"not started": launch(stream)}
    assert scheduler.start(2) == 0, scheduler.last_error()
    found |= {"not bound": launch(stream), "step": step(stream)}
    for client in (0, 1):
        stream = device.stream()
        scheduler.bind_stream(client, stream.handle)
        found |= {f"microbatch {client}": launch(stream), f"step {client}": step(stream)}
    scheduler.stop()
    return found


def build(part: Part, folder: Path, compiler: str) -> dict[str, str]:
    """Build the library, and for a rehearsal the fake driver; returns the environment that loads them."""
    done = subprocess.run(["make", "orion", f"CXX={compiler}"], cwd=ROOT, capture_output=True, text=True, check=False)
    part.add("make orion", "built" if done.returncode == 0 else done.stderr[-500:], done.returncode == 0)
    if done.returncode:
        sys.exit(1)
    variables = {"LD_PRELOAD": str(LIBRARY)}
    if part.on_processor:
        tests = ROOT / "kernel_intercept" / "tests"
        subprocess.run([compiler, "-std=c++17", "-pthread", "-fPIC", "-shared", f"-I{tests}",
                        f"-I{tests.parent / 'src'}", f"-I{tests.parent / 'include'}", tests / "fake_driver.cpp",
                        "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1"], check=True)
        variables["LD_LIBRARY_PATH"] = str(folder)
    return variables


def child(role: str, part: Part, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run this program again in one of its roles."""
    return subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=os.environ | variables | {ROLE: role},
                          capture_output=True, text=True, check=False)


def costs(part: Part, variables: dict[str, str]) -> None:
    """Time launches with and without the library."""
    found: dict[str, float] = {}
    for role, given in (("bare", {key: value for key, value in variables.items() if key != "LD_PRELOAD"}),
                        ("overhead", variables)):
        done = child(role, part, given)
        if done.returncode:
            part.add(f"cost of a launch, {role}", done.stderr[-300:], False)
            return
        found |= json.loads(done.stdout.splitlines()[-1])
    limits_us = {"not started": 0.1, "not bound": 0.1, "microbatch 0": 0.5, "microbatch 1": 3.0}
    for name, limit in limits_us.items():
        added = 1e6 * (found[name] - found["bare"])
        part.add(f"cost of a launch, {name}", f"{added:+.2f} us on {1e6 * found['bare']:.2f} (at most {limit})",
                 None if part.small else added <= limit)
    part.add("cost of a query of a stream", f"{1e6 * found['query']:.2f} us from Python")
    slower = found["step 0"] / found["step"]
    part.add("a forward and its backward", f"{slower:.3f} times as long for microbatch 0 as on a stream of nobody (at "
             "most 1.02)", None if part.small else slower <= 1.02)


def traced(part: Part, variables: dict[str, str]) -> None:
    """Record a process that has the library with Nsight Systems, where it is installed."""
    if part.on_processor or shutil.which("nsys") is None:
        part.add("Nsight Systems", "left out: " + ("a rehearsal" if part.on_processor else "not installed"))
        return
    with tempfile.TemporaryDirectory() as name:
        done = subprocess.run(["nsys", "profile", "--trace=cuda", "--output", f"{name}/trace", sys.executable, "-c",
                               "import torch; torch.ones(1, device='cuda').add_(1); torch.cuda.synchronize()"],
                              env=os.environ | variables, capture_output=True, text=True, check=False, timeout=60)
        part.add("Nsight Systems", f"ended with status {done.returncode} {done.stderr[-200:]}".strip(),
                 done.returncode == 0 and any(Path(name).glob("trace.*")))


def train(folder: Path, ranks: int, variables: dict[str, str], settings: list[str],
          torchrun: bool = False) -> tuple[list[float], str, dict[str, Any]]:
    """Train GPT; returns the losses, what was printed, and the summary of ``metrics.jsonl``."""
    folder.mkdir()
    (folder / "gpt.yaml").write_text(CONFIG.replace("RANKS", str(ranks)))
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port(None))] \
        if torchrun else []
    done = subprocess.run([sys.executable, *start, "-m", "vpipe", "train", "gpt.yaml",
                           *(word for setting in settings for word in ("--set", setting))], cwd=folder,
                          env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    [metrics] = folder.glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], done.stdout, lines[-1]["summary"]


def runs(part: Part, folder: Path) -> None:
    """Train with and without Orion, by vpipe's launcher and under torchrun."""
    own = ["parallel.device=cpu", "model.hidden_size=64", "model.sequence_length=16"] if part.on_processor else [
        "parallel.device=cuda"]
    plain, _, without = train(folder / "without", 1, {}, own)
    gated, said, summary = train(folder / "with", 1, {}, [*own, "parallel.use_orion_scheduler=true"])
    part.add("same losses with and without", f"20 updates, last {plain[-1]:.4f}", plain == gated)
    ratio = without["samples_per_s"] / summary["samples_per_s"]
    part.add("time of an update with Orion", f"{ratio:.2f} of that without (at most 1.10)",
             None if part.small else ratio <= 1.10)
    word = "inactive (ranks compute on cpu" if part.on_processor else "active"
    part.add("vpipe train", next((line for line in said.splitlines() if line.startswith("orion:")), "no line"),
             f"orion: {word}" in said)
    for ranks in (1, 2):
        _, said, summary = train(folder / f"torchrun{ranks}", ranks,
                                 {"LD_PRELOAD": str(LIBRARY), "USE_ORION_SCHEDULER": "1"}, own, torchrun=True)
        grants = [rank["gated"] for rank in summary["orion"].get("ranks", ())]
        part.add("torchrun, 1 rank" if ranks == 1 else "torchrun, 2 ranks that share the GPU, gloo",
                 f"launches through the gate: {grants}",
                 f"orion: {word}" in said and (part.on_processor or min(grants) > 0))
    part.add("several GPUs, nccl", "not tried by this check")


def attempt(part: Part, name: str, work: Callable[[], None]) -> None:
    """Report what a group of checks raised, and go on."""
    try:
        work()
    except Exception as error:
        part.add(name, f"{type(error).__name__}: {error}", False)


def main() -> None:
    part, role = Part(__doc__), os.environ.get(ROLE)
    if role is not None:
        device: Device = FakeDevice(timeless=role != "checks") if part.on_processor else TorchDevice()
        if role == "checks":
            Checks(part, device).run()
        else:
            print(json.dumps(overhead(device, role)))
        return
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "c++", "clang++"))), None)
    if part.device.type not in ("cpu", accelerator.USUAL) or torch.version.hip:
        part.add("all checks", "left out: Orion stands before CUDA's driver, and this is another")
        return
    if compiler is None or shutil.which("make") is None:
        part.add("all checks", "left out: no C++ compiler, or no make, builds its library")
        return
    with tempfile.TemporaryDirectory() as name:
        variables = build(part, Path(name), compiler)
        done = child("checks", part, variables)
        print(done.stdout, end="")
        part.add("the process of the checks", f"ended with status {done.returncode} {done.stderr[-300:]}".strip(),
                 done.returncode == 0 and "ld.so" not in done.stderr)
        attempt(part, "costs", lambda: costs(part, variables))
        attempt(part, "Nsight Systems", lambda: traced(part, variables))
        attempt(part, "runs", lambda: runs(part, Path(name)))


if __name__ == "__main__":
    main()
