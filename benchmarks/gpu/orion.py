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
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from findings import Part
from orion_devices import Device, FakeDevice, Stream, TorchDevice

from vpipe.distributed.network import free_port
from vpipe.distributed.orion import LIBRARY, OrionScheduler, get_scheduler
from vpipe.profiling.kernels import Bound, KernelProfile, kernel_csv

ROOT = Path(__file__).parent.parent.parent
ROLE = "VPIPE_ORION_CHECKS"
LAUNCHES = 20_000
CONFIG = """
model: {name: gpt, hidden_size: 512, num_layers: 4, num_heads: 8, sequence_length: 128, vocab_size: 4096}
dataset: {name: synthetic, batch_size: 16}
training: {learning_rate: 0.0001, max_steps: 20, num_microbatches: 4, threads: 1}
parallel: {model_parallel_size: RANKS, schedule: gpipe, executor: async_threaded, backend: gloo}
log_directory: runs
"""


class Checks:
    """The checks on one device, in the process that has the library."""

    def __init__(self, part: Part, device: Device) -> None:
        self._part, self._device, self._scheduler = part, device, get_scheduler()

    def run(self) -> None:
        """Do all checks; one that fails does not stop the next."""
        for check in (self.starts, self.coverage, self.backwards, self.names, self.priority, self.liveness, self.forks,
                      self.interpreter, self.graphs):
            try:
                check()
            except Exception as error:
                self._part.add(check.__name__, f"{type(error).__name__}: {error}", False)
            finally:
                self._scheduler.stop()

    @contextmanager
    def _clients(self, count: int) -> Any:
        """Start the scheduler; gives a stream per client, bound, the first with the highest priority."""
        if status := self._scheduler.start(count):
            raise RuntimeError(f"start returned {status}: {self._scheduler.last_error()}")
        streams = [self._device.stream(-3 if client == 0 else 0) for client in range(count)]
        for client, stream in enumerate(streams):
            assert self._scheduler.bind_stream(client, stream.handle) == 0
        yield streams
        self._scheduler.stop()

    def _repeat(self, stream: Stream, kind: str, times: int, wait: bool = True) -> None:
        for _ in range(times):
            self._device.launch(stream, kind)
        if wait:
            self._device.wait(stream)

    def starts(self) -> None:
        with self._clients(4):
            self._part.add("preloaded and started", f"version 1, {LIBRARY.name}", self._scheduler.is_preloaded)

    def coverage(self) -> None:
        """Each kind of work: as many kernels through the gate as the oracle counts."""
        with self._clients(1) as [stream]:
            for kind in self._device.kinds:
                self._device.together(lambda kind=kind: self._repeat(stream, kind, 3))  # libraries choose kernels
                before = self._scheduler.totals()["gated"]
                counts = self._device.kernels(
                    lambda kind=kind: self._device.together(lambda: self._repeat(stream, kind, 3)))
                gated = self._scheduler.totals()["gated"] - before
                self._part.add(f"coverage, {kind}", f"{gated} gated of {sum(counts)} kernels",
                               gated == sum(counts) > 0)

    def backwards(self) -> None:
        """Kernels of two backwards at once belong to their own streams, on whatever thread they are launched."""
        with self._clients(2) as streams:
            for here in (True, False):
                self._device.together(*(lambda one=one, here=here: self._device.backward(one, here)
                                        for one in streams))
                self._scheduler.reset_state()
                counts = self._device.kernels(lambda here=here: self._device.together(
                    *(lambda one=one, times=1 + at: [self._device.backward(one, here) for _ in range(times)]
                      for at, one in enumerate(streams))))
                own = sorted(self._scheduler.get_stats(client)[0] for client in range(2))
                self._part.add(f"backwards on {'the calling' if here else 'autograd' + chr(39) + 's'} thread",
                               f"{own} of {counts} kernels by stream", own == counts)

    def names(self) -> None:
        """The driver tells the names of kernels, by which profiles are found."""
        with tempfile.TemporaryDirectory() as folder, self._clients(1) as [stream]:
            file = Path(folder) / "kernels.csv"
            file.write_text(kernel_csv([KernelProfile("none", Bound.UNKNOWN, 1, 1e-6)]))
            assert self._scheduler.load_kernel_info(-1, file) == 1
            self._device.together(lambda: [self._repeat(stream, kind, 1) for kind in self._device.kinds])
            totals = self._scheduler.totals()
            self._part.add("names of kernels", f"{totals['unnamed']} functions without, {totals['gated']} launches",
                           100 * totals["unnamed"] <= totals["gated"])

    def _iterations(self, streams: list[Stream], count: int) -> tuple[list[float], list[int]]:
        """Return the seconds of each iteration of the first stream, and the launches of each other meanwhile."""
        seconds: list[float] = []
        others = [0] * (len(streams) - 1)
        done = threading.Event()

        def first() -> None:
            try:
                for _ in range(count):
                    began = self._device.now()
                    self._repeat(streams[0], "large", 10)
                    seconds.append(self._device.now() - began)
            finally:
                done.set()

        def other(at: int) -> None:
            while not done.is_set():
                self._repeat(streams[1 + at], "large", 5)
                others[at] += 5

        self._device.together(first, *(lambda at=at: other(at) for at in range(len(others))))
        return seconds[1:], others

    def priority(self) -> None:
        """Microbatch 0 beside three that always have work: alone, without help, with stream priorities, with Orion."""
        count, found = (6 if self._part.small else 60), {}
        alone, _ = self._iterations([self._device.stream()], count)
        found["nothing"], _ = self._iterations([self._device.stream() for _ in range(4)], count)
        found["stream priorities"], _ = self._iterations(
            [self._device.stream(-3), *(self._device.stream() for _ in range(3))], count)
        with self._clients(4) as streams:
            found["Orion"], others = self._iterations(streams, count)
            longest = max(self._scheduler.client_stats(client)["max_wait_ns"] for client in range(1, 4))
        best = median(alone)
        for name, seconds in found.items():
            slow = quantiles(seconds, n=100)[-1] if len(seconds) > 1 else seconds[0]
            self._part.add(f"priority, {name}", f"{median(seconds) / best:.2f} times as long as alone "
                           f"({1e3 * best:.2f} ms), 99th percentile {slow / best:.2f}")
        ratio, less = median(found["Orion"]) / best, median(found["Orion"]) / median(found["nothing"])
        self._part.add("priority, demanded", f"Orion {ratio:.2f} of alone (at most 1.3), {less:.2f} of nothing (0.6), "
                       f"{others} launches of the others, longest wait {1e-6 * longest:.2f} ms",
                       ratio <= 1.3 and less <= 0.6 and min(others) > 0)

    def liveness(self) -> None:
        """Many starts and stops, and threads that end with errors, under work."""
        rounds = 10 if self._part.small else 100
        for number in range(rounds):
            with self._clients(4) as streams:
                def work(stream: Stream, fails: bool) -> None:
                    self._repeat(stream, "small", 20)
                    if fails:
                        raise ZeroDivisionError

                try:
                    self._device.together(*(lambda one=one, fails=at == number % 4: work(one, fails)
                                            for at, one in enumerate(streams)))
                except ZeroDivisionError:
                    starved = sum(self._scheduler.client_stats(client)["starved"] for client in range(4))
                else:
                    raise RuntimeError("an error of a thread was lost")
        self._part.add("starts and stops", f"{rounds} with an error each, {starved} starved in the last", True)

    def forks(self) -> None:
        """A forked worker of a DataLoader works beside a started scheduler."""
        with self._clients(2) as streams:
            self._device.together(lambda: self._repeat(streams[0], "small", 3))
            loader = torch.utils.data.DataLoader(range(64), batch_size=8, num_workers=2)
            found = sum(int(batch.sum()) for batch in loader)
            self._part.add("forked workers", f"{found} of 2016", found == 2016)

    def interpreter(self) -> None:
        """While a launch waits in the gate, other threads of Python go on."""
        gaps: list[float] = []
        stop = threading.Event()

        def tick() -> None:
            last = time.perf_counter()
            while not stop.is_set():
                time.sleep(0.001)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now

        ticker = threading.Thread(target=tick)
        with self._clients(2) as streams:
            ticker.start()
            self._device.together(lambda: self._repeat(streams[0], "large", 50),
                                  lambda: self._repeat(streams[1], "small", 50))
            time.sleep(0.05)
            stop.set()
            ticker.join()
        self._part.add("other threads of Python", f"at most {1e3 * max(gaps):.1f} ms between ticks of 1 ms",
                       None if self._part.small else max(gaps) < 0.05)

    def graphs(self) -> None:
        """A graph is captured on a bound stream while another client is at work."""
        with self._clients(2) as streams:
            right: list[bool] = []
            self._device.together(lambda: right.append(self._device.captured(streams[1], "small")),
                                  lambda: self._repeat(streams[0], "large", 5))
            self._part.add("CUDA graphs", f"{self._scheduler.totals()['captured']} launches under capture passed",
                           right == [True])


def seconds_per_launch(device: Device, stream: Stream) -> float:
    """Return the least of some medians; waits often enough that no queue fills."""
    found = []
    for _ in range(5):
        times = []
        for _ in range(LAUNCHES // 500):
            began = time.perf_counter()
            for _ in range(500):
                device.launch(stream, "small")
            times.append((time.perf_counter() - began) / 500)
            device.wait(stream)
        found.append(median(times))
    return min(found)


def overhead(device: Device, role: str) -> dict[str, float]:
    """Return seconds per launch: without the library, or by what the stream is."""
    stream = device.stream()
    device.launch(stream, "small")
    if role == "bare":
        return {"bare": seconds_per_launch(device, stream)}
    scheduler: OrionScheduler = get_scheduler()
    found = {"not started": seconds_per_launch(device, stream)}
    assert scheduler.start(2) == 0, scheduler.last_error()
    found["not bound"] = seconds_per_launch(device, stream)
    for client in (0, 1):
        stream = device.stream()
        scheduler.bind_stream(client, stream.handle)
        found[f"microbatch {client}"] = seconds_per_launch(device, stream)
    scheduler.stop()
    return found


def build(part: Part, folder: Path) -> dict[str, str]:
    """Build the library, and for a rehearsal the fake driver; returns the environment that loads them."""
    done = subprocess.run(["make", "orion"], cwd=ROOT, capture_output=True, text=True, check=False)
    part.add("make orion", "built" if done.returncode == 0 else done.stderr[-500:], done.returncode == 0)
    if done.returncode:
        sys.exit(1)
    variables = {"LD_PRELOAD": str(LIBRARY)}
    if part.small:
        tests, compiler = ROOT / "kernel_intercept" / "tests", shutil.which("g++") or shutil.which("clang++")
        assert compiler is not None, "make orion has found one"
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
    own = ["parallel.device=cpu", "model.hidden_size=64", "model.sequence_length=16"] if part.small else [
        "parallel.device=cuda"]
    plain, _, without = train(folder / "without", 1, {}, own)
    gated, said, summary = train(folder / "with", 1, {}, [*own, "parallel.use_orion_scheduler=true"])
    part.add("same losses with and without", f"20 updates, last {plain[-1]:.4f}", plain == gated)
    ratio = without["samples_per_s"] / summary["samples_per_s"]
    part.add("time of an update with Orion", f"{ratio:.2f} of that without (at most 1.10)",
             None if part.small else ratio <= 1.10)
    word = "inactive (ranks compute on cpu" if part.small else "active"
    part.add("vpipe train", next((line for line in said.splitlines() if line.startswith("orion:")), "no line"),
             f"orion: {word}" in said)
    _, said, summary = train(folder / "torchrun", 2, {"LD_PRELOAD": str(LIBRARY), "USE_ORION_SCHEDULER": "1"}, own,
                             torchrun=True)
    grants = [rank["gated"] for rank in summary["orion"].get("ranks", ())]
    part.add("torchrun, 2 ranks that share the GPU, gloo", f"launches through the gate: {grants}",
             f"orion: {word}" in said and (part.small or min(grants) > 0))
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
        device: Device = FakeDevice(timeless=role != "checks") if part.small else TorchDevice()
        if role == "checks":
            Checks(part, device).run()
        else:
            print(json.dumps(overhead(device, role)))
        return
    with tempfile.TemporaryDirectory() as name:
        variables = build(part, Path(name))
        done = child("checks", part, variables)
        print(done.stdout, end="")
        part.add("the process of the checks", f"ended with status {done.returncode} {done.stderr[-300:]}".strip(),
                 done.returncode == 0)
        attempt(part, "costs", lambda: costs(part, variables))
        attempt(part, "runs", lambda: runs(part, Path(name)))


if __name__ == "__main__":
    main()
