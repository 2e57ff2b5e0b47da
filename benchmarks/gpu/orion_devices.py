"""A GPU as the checks of Orion use it: streams, kernels by name, threads and a clock. One is torch's, one is fake.

The fake one is the driver of kernel_intercept/tests on its virtual clock: it rehearses every check without a GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

TRITON = "compiled by Triton"

Work = Callable[[], None]


class Stream(Protocol):
    """A stream that kernels are launched on."""

    @property
    def handle(self) -> int:
        """Return the driver's CUstream."""


class Device(Protocol):
    """What the checks need of a GPU. All work happens in :meth:`together`."""

    kinds: Mapping[str, Any]
    """Kinds of work that the coverage is checked for; ``small`` is one short kernel, ``large`` a long one."""

    def stream(self, priority: int = 0) -> Any: ...

    def launch(self, stream: Any, kind: str, times: int = 1) -> None:
        """Launch the kernels of a kind of work."""

    def backward(self, stream: Any, here: bool) -> None:
        """Launch a forward and its backward, in the calling thread or as the framework does."""

    def mixed(self, stream: Any, after: Any) -> None:
        """Let a stream wait for another one, do a forward and a backward that recomputes it, and read the result."""

    def collective(self, stream: Any) -> None:
        """Let a stream wait for a collective operation of one rank."""

    def query(self, stream: Any) -> None:
        """Ask whether a stream has done all its work."""

    def wait(self, stream: Any) -> None:
        """Wait until a stream has done all its work."""

    def together(self, *threads: Work) -> None:
        """Run functions, each on a thread of its own, and wait for all; raises what one of them raised."""

    def kernels(self, work: Work) -> list[int]:
        """Do some work and return the kernels that it launched per stream, in ascending order."""

    def now(self) -> float: ...

    def captured(self, stream: Any, kind: str) -> bool:
        """Capture work for a graph and replay it; return whether its results are right."""


class _Threads:
    """Collects what threads raise."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def guarded(self, work: Work) -> Work:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

        return run

    def check(self) -> None:
        if self.errors:
            raise self.errors[0]


class TorchStream:
    """A stream of torch."""

    def __init__(self, priority: int) -> None:
        self.torch = torch.cuda.Stream(priority=priority)
        self.handle = int(self.torch.cuda_stream)


class TorchDevice:
    """The GPU of torch, with kernels of ATen, cuBLAS, cuDNN and fused optimizers; its oracle is torch's profiler."""

    def __init__(self) -> None:
        def random(*shape: int, dtype: torch.dtype = torch.float) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=dtype)

        one, a, b = random(1), random(1024, 1024), random(4096, 4096, dtype=torch.bfloat16)
        x, w, image, filters = random(64, 512), random(512, 512), random(8, 16, 64, 64), random(32, 16, 3, 3)
        q = random(2, 8, 256, 64, dtype=torch.bfloat16).requires_grad_()
        labels = torch.randint(512, (64,), device="cuda")
        weight = torch.nn.Parameter(w.clone())
        weight.grad = torch.randn_like(w)
        adam = torch.optim.Adam([weight], fused=True)
        self.kinds: Mapping[str, Callable[[], object]] = {
            "small": lambda: one.add_(1), "large": lambda: b @ b, "fp32 product": lambda: a @ a,
            "product and bias": lambda: F.linear(x.bfloat16(), w.bfloat16(), w[0].bfloat16()),
            "convolution": lambda: F.conv2d(image, filters), "layer norm": lambda: F.layer_norm(x, (512,)),
            "cross entropy": lambda: F.cross_entropy(x, labels),
            "attention, forward and backward": lambda: torch.autograd.grad(
                F.scaled_dot_product_attention(q, q, q).sum(), q),
            "fused Adam": adam.step}
        if find_spec("triton") is not None and (shutil.which("gcc") or shutil.which("clang")):
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # in this process
            compiled = torch.compile(lambda x: torch.relu(2 * x + 1))
            self.kinds = {**self.kinds, TRITON: lambda: compiled(x)}
        self._layer = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 1)).cuda()
        self._x = x
        torch.cuda.synchronize()  # other streams read these

    def stream(self, priority: int = 0) -> TorchStream:
        return TorchStream(priority)

    def launch(self, stream: TorchStream, kind: str, times: int = 1) -> None:
        work = self.kinds[kind]
        with torch.cuda.stream(stream.torch):
            for _ in range(times):
                work()

    def backward(self, stream: TorchStream, here: bool) -> None:
        with torch.cuda.stream(stream.torch), torch.autograd.set_multithreading_enabled(not here):
            torch.autograd.grad(self._layer(self._x).sum(), list(self._layer.parameters()))

    def mixed(self, stream: TorchStream, after: TorchStream) -> None:
        stream.torch.wait_event(after.torch.record_event())
        with torch.cuda.stream(stream.torch), torch.autograd.set_multithreading_enabled(False):
            x = self._x.detach().requires_grad_()
            result = checkpoint(self._layer, x, use_reentrant=False).sum()
            torch.autograd.grad(result, x)
            result.item()
        torch.cuda.empty_cache()

    def collective(self, stream: TorchStream) -> None:
        numbers = torch.ones(1 << 20, device="cuda")
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        with torch.cuda.stream(stream.torch):
            dist.all_reduce(numbers, async_op=True).wait()
        torch.cuda.synchronize()
        dist.destroy_process_group()

    def query(self, stream: TorchStream) -> None:
        stream.torch.query()

    def wait(self, stream: TorchStream) -> None:
        stream.torch.synchronize()

    def together(self, *threads: Work) -> None:
        state = _Threads()
        started = [threading.Thread(target=state.guarded(work)) for work in threads]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        state.check()

    def kernels(self, work: Work) -> list[int]:
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            work()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiled.export_chrome_trace(str(file))
            events = json.loads(file.read_text())["traceEvents"]
        return sorted(Counter(event["args"]["stream"] for event in events if event.get("cat") == "kernel").values())

    def now(self) -> float:
        return perf_counter()

    def captured(self, stream: TorchStream, kind: str) -> bool:
        value = torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream.torch, capture_error_mode="thread_local"):
            value += 1
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        return value.tolist() == [3.0] * 4


class _Kernel(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("ns", ctypes.c_uint64), ("error", ctypes.c_int))


class _Launch(ctypes.Structure):
    _fields_ = (("entry", ctypes.c_char_p), ("kernel", ctypes.c_void_p), ("stream", ctypes.c_void_p),
                ("sizes", ctypes.c_uint * 8), ("pointers", ctypes.c_void_p * 3), ("times_ns", ctypes.c_uint64 * 3),
                ("captured", ctypes.c_int))


class FakeStream:
    """A stream of the fake driver."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        found = ctypes.c_void_p()
        assert driver.cuStreamCreate(ctypes.byref(found), 0) == 0
        assert found.value is not None
        self.handle = found.value


class FakeDevice:
    """The fake driver: kernels are names and durations, and its own record of launches is the oracle.

    Args:
        timeless: launches do nothing, to be timed; otherwise the library takes the driver's clock.
    """

    def __init__(self, timeless: bool = False) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.fake_now.restype = self._driver.fake_launches.restype = ctypes.c_uint64
        self._driver.fake_launch.restype, self._driver.fake_launch.argtypes = _Launch, [ctypes.c_size_t]
        self._driver.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
        self._driver.cuInit(0)
        if timeless:
            self._driver.fake_do_nothing()
        else:
            driver = self._driver
            self._clock = (ctypes.c_void_p * 3)(*(ctypes.cast(one, ctypes.c_void_p).value for one in (
                driver.fake_now, driver.fake_wait, driver.fake_wake)))
            ctypes.CDLL(None).orion_use_clock(self._clock)
        self.kinds: Mapping[str, _Kernel] = {name: _Kernel(name.encode(), ns, 0) for name, ns in (
            ("small", 1_000), ("large", 100_000), ("product", 50_000), ("norm", 10_000))}

    def stream(self, priority: int = 0) -> FakeStream:
        return FakeStream(self._driver)

    def launch(self, stream: FakeStream, kind: str, times: int = 1) -> None:
        kernel, handle = ctypes.byref(self.kinds[kind]), ctypes.c_void_p(stream.handle)
        for _ in range(times):
            if status := self._driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, handle, None, None):
                raise RuntimeError(f"cuLaunchKernel returned {status}")

    def backward(self, stream: FakeStream, here: bool) -> None:
        for kind in ("product", "norm", "product"):
            self.launch(stream, kind)

    def mixed(self, stream: FakeStream, after: FakeStream) -> None:
        event = ctypes.c_void_p()
        self._driver.cuEventCreate(ctypes.byref(event), 0)
        self._driver.cuEventRecord(event, ctypes.c_void_p(after.handle))
        self._driver.cuStreamWaitEvent(ctypes.c_void_p(stream.handle), event, 0)
        self.backward(stream, here=True)
        self.wait(stream)

    def collective(self, stream: FakeStream) -> None:
        self.launch(FakeStream(self._driver), "small")

    def query(self, stream: FakeStream) -> None:
        self._driver.cuStreamQuery(ctypes.c_void_p(stream.handle))

    def wait(self, stream: FakeStream) -> None:
        self._driver.cuStreamSynchronize(stream.handle)

    def together(self, *threads: Work) -> None:
        state, kind = _Threads(), ctypes.CFUNCTYPE(None, ctypes.c_void_p)

        def called(work: Work) -> Any:
            guarded = state.guarded(work)
            return kind(lambda _: guarded())

        functions = [called(work) for work in threads]
        pointers = (ctypes.c_void_p * len(functions))(*(ctypes.cast(one, ctypes.c_void_p).value for one in functions))
        self._driver.fake_run(len(functions), pointers, (ctypes.c_void_p * len(functions))())
        state.check()

    def kernels(self, work: Work) -> list[int]:
        before = self._driver.fake_launches()
        work()
        launches = (self._driver.fake_launch(index) for index in range(before, self._driver.fake_launches()))
        return sorted(Counter(launch.stream for launch in launches).values())

    def now(self) -> float:
        return 1e-9 * float(self._driver.fake_now())

    def captured(self, stream: FakeStream, kind: str) -> bool:
        handle = ctypes.c_void_p(stream.handle)
        began = self._driver.cuStreamBeginCapture_v2(handle, 0)
        self.launch(stream, kind)
        ended = self._driver.cuStreamEndCapture(handle, ctypes.byref(ctypes.c_void_p()))
        return began == ended == 0 and bool(self._driver.fake_launch(self._driver.fake_launches() - 1).captured)
