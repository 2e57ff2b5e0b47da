"""What is checked of Orion in a process that has its library, on a GPU or a device that takes its place."""

from __future__ import annotations

import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import torch
from findings import Part
from orion_devices import TRITON, Device, Stream

from vpipe.extras.orion.kernels import Bound, KernelProfile, kernel_csv
from vpipe.extras.orion.scheduler import LIBRARY, get_scheduler


class Checks:
    """The checks on one device."""

    def __init__(self, part: Part, device: Device) -> None:
        self._part, self._device, self._scheduler = part, device, get_scheduler()

    def run(self) -> None:
        """Do all checks; one that fails does not stop the next."""
        for check in (self.starts, self.coverage, self.collectives, self.backwards, self.names, self.priority,
                      self.first_of_four, self.liveness, self.forks, self.interpreter, self.graphs):
            self._attempt(check.__name__, check)
            self._scheduler.stop()

    def _attempt(self, subject: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._part.add(subject, f"{type(error).__name__}: {error}", False)

    @contextmanager
    def _clients(self, count: int) -> Iterator[list[Stream]]:
        """Start the scheduler; gives a stream per client, bound, the first with the highest priority."""
        if status := self._scheduler.start(count):
            raise RuntimeError(f"start returned {status}: {self._scheduler.last_error()}")
        streams = self._streams(count, -3)
        for client, stream in enumerate(streams):
            assert self._scheduler.bind_stream(client, stream.handle) == 0
        yield streams
        self._scheduler.stop()

    def _streams(self, count: int, first: int = 0) -> list[Stream]:
        """Return streams of nobody, the first with a priority of its own."""
        return [self._device.stream(first if number == 0 else 0) for number in range(count)]

    def _repeat(self, stream: Stream, kind: str, times: int) -> None:
        self._device.launch(stream, kind, times)
        self._device.wait(stream)

    def _gated(self, work: Callable[[], None]) -> int:
        """Return how many launches of some work came through the gate."""
        before = self._scheduler.totals()["gated"]
        self._device.together(work)
        return self._scheduler.totals()["gated"] - before

    def starts(self) -> None:
        with self._clients(4):
            self._part.add("preloaded and started", f"version 1, {LIBRARY.name}", self._scheduler.is_preloaded)

    def coverage(self) -> None:
        """Each kind of work: as many kernels through the gate as the oracle counts."""
        with self._clients(1) as [stream]:
            for kind in self._device.kinds:
                self._attempt(f"coverage, {kind}", lambda kind=kind: self._covers(stream, kind))

    def _covers(self, stream: Stream, kind: str) -> None:
        self._device.together(lambda: self._repeat(stream, kind, 3))  # libraries choose kernels
        gated: list[int] = []
        counts = self._device.kernels(lambda: gated.append(self._gated(lambda: self._repeat(stream, kind, 3))))
        self._part.add(f"coverage, {kind}", f"{gated[0]} gated of {sum(counts)} kernels", gated[0] == sum(counts) > 0)

    def collectives(self) -> None:
        """The streams of nccl are nobody's."""
        with self._clients(1) as [stream]:
            gated = self._gated(lambda: self._device.collective(stream))
            self._part.add("a collective operation of one rank", f"{gated} gated", gated == 0)

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

    def _alone(self, streams: list[Stream]) -> float:
        """Return the launches per second of streams that all have work without end."""
        rounds, began = 20, self._device.now()
        self._device.together(*(lambda one=one: [self._repeat(one, "large", 5) for _ in range(rounds)]
                                for one in streams))
        return len(streams) * rounds * 5 / (self._device.now() - began)

    def _iterations(self, streams: list[Stream], count: int) -> tuple[list[float], list[int], float]:
        """Return the seconds of each iteration of the first stream; the launches of the others, each; all seconds."""
        kernels = 10 if self._part.small else 50
        seconds: list[float] = []
        others = [0] * (len(streams) - 1)
        done = threading.Event()

        def first() -> None:
            try:
                for _ in range(count):
                    began = self._device.now()
                    self._repeat(streams[0], "large", kernels)
                    seconds.append(self._device.now() - began)
            finally:
                done.set()

        def other(at: int) -> None:
            while not done.is_set():
                self._repeat(streams[1 + at], "large", 5)
                others[at] += 5

        self._device.together(first, *(lambda at=at: other(at) for at in range(len(others))))
        return seconds[1:], others, sum(seconds)

    def priority(self) -> None:
        """Microbatch 0 beside three that always have work: alone, without help, with stream priorities, with Orion."""
        count, found = (6 if self._part.small else 60), {}
        alone, _, _ = self._iterations(self._streams(1), count)
        others_alone = self._alone(self._streams(3))
        found["nothing"], _, _ = self._iterations(self._streams(4), count)
        found["stream priorities"], _, _ = self._iterations(self._streams(4, -3), count)
        with self._clients(4) as streams:
            found["Orion"], others, span_s = self._iterations(streams, count)
            longest = max(self._scheduler.client_stats(client)["max_wait_ns"] for client in range(1, 4))
        best = median(alone)
        middle = {name: median(seconds) / best for name, seconds in found.items()}
        slow = {name: quantiles(seconds, n=100)[-1] / best for name, seconds in found.items()}
        for name in found:
            self._part.add(f"priority, {name}", f"{middle[name]:.2f} times as long as alone ({1e3 * best:.2f} ms), "
                           f"99th percentile {slow[name]:.2f}")
        less, share = middle["Orion"] / middle["nothing"], sum(others) / span_s / others_alone
        self._part.add("priority, demanded", f"Orion {middle['Orion']:.2f} of alone (at most 1.3), {less:.2f} of "
                       f"nothing (0.6), 99th percentile {slow['Orion']:.2f} (2); the others {others} launches, "
                       f"{share:.0%} of what they do alone (at least 15 %); longest wait {1e-6 * longest:.2f} ms",
                       middle["Orion"] <= 1.3 and less <= 0.6 and slow["Orion"] <= 2 and min(others) > 0
                       and share >= 0.15)

    def first_of_four(self) -> None:
        """Four microbatches with the same work, once each: when the first ends, and when all have."""
        self._part.add("the first of four microbatches ends after", "; ".join(
            f"{name} {1e3 * first:.2f} of {1e3 * whole:.2f} ms" for name, (first, whole) in self._ends().items()))

    def _ends(self) -> Mapping[str, tuple[float, float]]:
        def ends(streams: list[Stream]) -> tuple[float, float]:
            found = []
            for _ in range(7):
                after, began = [0.0] * len(streams), self._device.now()

                def work(at: int, after: list[float] = after, began: float = began) -> None:
                    self._repeat(streams[at], "large", 20)
                    after[at] = self._device.now() - began

                self._device.together(*(lambda at=at, work=work: work(at) for at in range(len(streams))))
                found.append((after[0], max(after)))
            first, whole = zip(*found[1:], strict=True)
            return median(first), median(whole)

        found = {"nothing": ends(self._streams(4)), "stream priorities": ends(self._streams(4, -3))}
        with self._clients(4) as streams:
            return {**found, "Orion": ends(streams)}

    def liveness(self) -> None:
        """Many starts and stops; streams that wait for each other, and a thread that ends with an error, under work."""
        rounds, starved, submitted, resident = (10 if self._part.small else 100), 0, 0, 0
        for number in range(rounds):
            with self._clients(4) as streams:
                def work(at: int, streams: list[Stream] = streams, number: int = number) -> None:
                    for _ in range(5):
                        self._device.mixed(streams[at], after=streams[at - 1])
                    self._repeat(streams[at], "small", 20)
                    if at == number % 4:
                        raise ZeroDivisionError

                try:
                    self._device.together(*(lambda at=at, work=work: work(at) for at in range(4)))
                except ZeroDivisionError:
                    stats = [self._scheduler.client_stats(client) for client in range(4)]
                    starved += sum(one["starved"] for one in stats)
                    submitted += sum(one["submitted"] for one in stats)
                else:
                    raise RuntimeError("an error of a thread was lost")
            if number == rounds // 10:
                resident = _resident_bytes()
        grown = (_resident_bytes() - resident) / 2**20
        self._part.add("starts and stops", f"{rounds} with an error each and {20 * rounds} backwards that recompute, "
                       f"none hung; {starved} of {submitted} launches starved (less than 1 %), {grown:.0f} MiB more "
                       "memory (less than 20)",
                       True if self._part.small else 100 * starved < submitted and grown < 20)

    def forks(self) -> None:
        """A forked worker of a DataLoader works beside a started scheduler."""
        with self._clients(2) as streams:
            self._device.together(lambda: self._repeat(streams[0], "small", 3))
            loader = torch.utils.data.DataLoader(range(64), batch_size=8, num_workers=2)
            found = sum(int(batch.sum()) for batch in loader)
            self._part.add("forked workers", f"{found} of 2016", found == 2016)

    def interpreter(self) -> None:
        """While a launch waits in the gate, of Triton too, other threads of Python go on."""
        os.environ["ORION_BE_MAX_WAIT_US"] = "50000"  # read at the start
        try:
            for kind in ("small", *({TRITON} & self._device.kinds.keys())):
                self._ticks(kind)
        finally:
            del os.environ["ORION_BE_MAX_WAIT_US"]

    def _ticks(self, kind: str) -> None:
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
            self._device.together(lambda: self._repeat(streams[1], kind, 3))
            ticker.start()
            self._device.together(lambda: self._repeat(streams[0], "large", 400),
                                  lambda: self._repeat(streams[1], kind, 50))
            held = self._scheduler.client_stats(1)["max_wait_ns"]
            stop.set()
            ticker.join()
        self._part.add(f"other threads of Python, {kind}", f"at most {1e3 * max(gaps):.1f} ms between ticks of 1 ms "
                       f"(less than 10), while a launch waited {1e-6 * held:.1f} ms",
                       None if self._part.small else max(gaps) < 0.01 and held > 20e6)

    def graphs(self) -> None:
        """A graph is captured on a bound stream while another client is at work."""
        with self._clients(2) as streams:
            right: list[bool] = []
            self._device.together(lambda: right.append(self._device.captured(streams[1], "small")),
                                  lambda: self._repeat(streams[0], "large", 5))
            self._part.add("CUDA graphs", f"{self._scheduler.totals()['captured']} launches under capture passed",
                           right == [True])


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
