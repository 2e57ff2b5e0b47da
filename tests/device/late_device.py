"""A device without hardware, as a kind of torch's own: ``late``, two per process, on which everything is late.

:func:`load` builds it once (a compiler is needed) and makes it the accelerator of this process, for good: it belongs
into processes that end with their test. What it does is in queues.h.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

NAME = "late"
SOURCES = ("queues.cpp", "backend.cpp", "autocast.cpp")
FLAGS = ("-std=c++20", "-Og", "-fPIC")  # -Og compiles as fast as -O0, and checks take two thirds of the time
HERE = Path(__file__).parent

_libraries: list[ctypes.CDLL] = []


def compiler() -> str | None:
    """The C++ compiler, None where there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), None)


def built() -> Path:
    """The library for this torch, built if these sources have not been."""
    texts = [(HERE / name).read_bytes() for name in ("queues.h", *SOURCES)]
    versions = repr((torch.__version__, sys.version, FLAGS)).encode()
    key = hashlib.sha256(b"".join([*texts, versions])).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"vpipe-late-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{key}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(library)
    return library


def _build(library: Path) -> None:
    include = Path(torch.__file__).parent / "include"
    command = [str(compiler()), *FLAGS, "-isystem", str(include),
               f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    with tempfile.TemporaryDirectory(dir=library.parent) as objects:
        compiling = [(name, subprocess.Popen([*command, "-c", HERE / name, "-o", f"{objects}/{name}.o"],
                                             stderr=subprocess.PIPE, text=True)) for name in SOURCES]
        for name, process in compiling:
            _, said = process.communicate()
            if process.returncode:
                raise RuntimeError(f"{name} does not compile:\n{said}")
        lib = include.parent / "lib"
        subprocess.run([str(compiler()), "-shared", *(f"{objects}/{name}.o" for name in SOURCES), f"-L{lib}",
                        "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}", "-o", f"{objects}/late.so"], check=True)
        os.replace(f"{objects}/late.so", library)


def library() -> ctypes.CDLL:
    """The library, which has been loaded."""
    return _libraries[0]


def load() -> types.ModuleType:
    """Make the device torch's accelerator and return its module, as ``torch.cuda`` is CUDA's."""
    if not _libraries:
        library = ctypes.CDLL(str(built()))
        library.late_configure.argtypes = [ctypes.c_uint64, ctypes.c_double, ctypes.c_bool]
        library.late_busy.argtypes = [ctypes.c_double]
        library.late_host_waits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        library.late_host_waits.restype = ctypes.c_size_t
        library.late_give_default_generators.argtypes = [ctypes.c_bool]
        library.late_copy.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        library.late_gate.argtypes = library.late_open.argtypes = [ctypes.c_int, ctypes.c_int64]
        library.late_queued.argtypes = [ctypes.c_int, ctypes.c_int64]
        library.late_wait_quietly.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_uint64]
        for name in ("late_allocated", "late_peak", "late_queued"):
            getattr(library, name).restype = ctypes.c_uint64
        _libraries.append(library)
        rename_privateuse1_backend(NAME)
        library.late_start()
        torch._register_device_module(NAME, _module(library))  # type: ignore[no-untyped-call]
        generate_methods_for_privateuse1_backend()
        atexit.register(library.late_configure, 0, 0, False)  # no kernel runs while torch is taken apart
    module: types.ModuleType = torch.get_device_module(NAME)
    return module


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Each device draws its own random numbers."""
    dropout = F.dropout
    F.dropout = lambda given, *_: given  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout = dropout


class Stream(torch.Stream):
    """As ``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Stream:
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, torch.device(NAME, _index(device)), priority=priority)

    @property
    def late_stream(self) -> int:
        """Its number, other on each device and never that of a stream of old."""
        return 64 * self.device_index + self.stream_id + 1


def new_event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """As ``torch.cuda.Event``; torch compares the times of its own class alone."""
    return torch.Event(NAME, enable_timing=enable_timing)


class DeviceProperties:
    """As ``torch.cuda.get_device_properties`` returns them."""

    name = "late"
    total_memory = 4 << 30


def _index(device: Any = None) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _module(library: ctypes.CDLL) -> types.ModuleType:
    """The functions of ``torch.cuda`` that this device has, and three of its own: configure, busy, host_waits."""
    library.late_give_default_generators(True)
    generators = tuple(torch.Generator(f"{NAME}:{index}") for index in range(2))
    library.late_give_default_generators(False)

    def configure(seed: int = 0, patience_ms: float = 20, synchronous: bool = False) -> None:
        """Draw delays from a seed and count host waits anew; without patience (0) nothing runs that nobody waits for.

        A synchronous device carries out each task at once, and has no races.
        """
        library.late_configure(seed, patience_ms, synchronous)

    def busy(seconds: float = 1) -> None:
        """Keep the current stream busy; virtual seconds take no time."""
        library.late_busy(1e6 * seconds)

    def host_waits() -> dict[str, int]:
        """How often the host has waited for the device, by its reason."""
        text = ctypes.create_string_buffer(65536)
        assert library.late_host_waits(text, len(text)) < len(text)
        return {reason: int(count) for reason, _, count in (line.rpartition("=") for line in
                                                            text.value.decode().splitlines())}

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return generators[_index(device)].get_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        generators[_index(device)].set_state(state)

    def manual_seed(seed: int) -> None:
        generators[_index()].manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def current_stream(device: Any = None) -> Stream:
        stream = torch.accelerator.current_stream(_index(device))
        return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

    def default_stream(device: Any = None) -> Stream:
        return Stream(stream_id=0, device_index=_index(device), device_type=current_stream().device_type)

    @contextlib.contextmanager
    def stream(chosen: torch.Stream | None) -> Iterator[None]:
        if chosen is None:
            yield
            return
        device = torch.accelerator.current_device_index()
        before = torch.accelerator.current_stream(chosen.device_index)
        torch.accelerator.set_stream(chosen)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(device)

    @contextlib.contextmanager
    def device(index: Any) -> Iterator[None]:
        before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(_index(index))
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)

    module = types.ModuleType(f"torch.{NAME}", __doc__)
    loaded_by = os.getpid()
    functions: dict[str, Any] = {
        "Stream": Stream, "Event": new_event, "default_generators": generators, "configure": configure, "busy": busy,
        "host_waits": host_waits, "get_rng_state": get_rng_state, "set_rng_state": set_rng_state,
        "manual_seed": manual_seed, "manual_seed_all": manual_seed_all, "current_stream": current_stream,
        "default_stream": default_stream, "stream": stream, "device": device,
        "is_available": lambda: True, "is_initialized": lambda: True, "init": lambda: None, "_initialized": True,
        "_lazy_init": lambda: None, "_is_in_bad_fork": lambda: os.getpid() != loaded_by,
        "device_count": lambda: 2, "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        "get_device_name": lambda device=None: DeviceProperties.name,
        "get_device_properties": lambda device=None: DeviceProperties(),
        "memory_allocated": lambda device=None: int(library.late_allocated(_index(device))),
        "max_memory_allocated": lambda device=None: int(library.late_peak(_index(device))),
        "reset_peak_memory_stats": lambda device=None: library.late_reset_peak(_index(device)),
        "mem_get_info": lambda device=None: (DeviceProperties.total_memory - int(library.late_allocated(
            _index(device))), DeviceProperties.total_memory),
        "empty_cache": lambda: None, "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    vars(module).update(functions)
    return module
