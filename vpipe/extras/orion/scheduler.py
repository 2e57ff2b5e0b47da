"""Bind libgpu_scheduler.so, the Orion scheduler, by ctypes. kernel_intercept/include/orion_scheduler.h describes it.

Of what a user can put in the way of the library, nothing is hidden: :func:`start` either starts it or returns why not.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vpipe import accelerator
from vpipe.errors import UserError, counted

LIBRARY = Path(__file__).resolve().parents[3] / "kernel_intercept" / "build" / "libgpu_scheduler.so"
"""Where ``make orion`` puts the library."""

ABI_VERSION = 1

MOST_CLIENTS = 32
"""Microbatches of a rank: as many streams of one priority does torch have, and then hands them out again."""

SWITCH = "USE_ORION_SCHEDULER"
"""The environment variable of OurGPipe's users for ``parallel.use_orion_scheduler``."""

PRELOAD = "LD_PRELOAD"


class SchedulingMode(IntEnum):
    """In which order launches of best-effort clients that wait are let through."""

    FIFO = 0
    MULTI_PRIORITY = 1
    ROUND_ROBIN = 2


class Counts(ctypes.Structure):
    """A structure of whole numbers."""

    def as_dict(self) -> dict[str, int]:
        """Return the numbers by name."""
        return {field[0]: getattr(self, field[0]) for field in self._fields_}


class ClientStats(Counts):
    """What happened to the launches of one client: ``orion_stats``."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in (
        "submitted", "queued", "starved", "wait_ns", "max_wait_ns", "waiting"))


class LaunchTotals(Counts):
    """What happened to the launches of the process: ``orion_totals``."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in (
        "gated", "passed", "captured", "hooked", "unhooked", "unnamed"))


class OrionScheduler:
    """The scheduler of this process, under the names of OurGPipe's binding. A call releases Python's lock.

    Methods that return ``int`` return a negative status of the library on failure; :meth:`last_error` says why.

    Args:
        lib_path: of the library; None takes the preloaded one, else that of ``make orion``, which without LD_PRELOAD
            refuses to start.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be loaded, or has another version than this binding.
    """

    def __init__(self, lib_path: str | os.PathLike[str] | None = None) -> None:
        library = ctypes.CDLL(None)
        if lib_path is not None or not hasattr(library, "orion_abi_version"):
            path = Path(lib_path or LIBRARY)
            if not path.is_file():
                raise FileNotFoundError(f"Library not found: {path}")
            library = ctypes.CDLL(str(path.resolve()))
        if (version := library.orion_abi_version()) != ABI_VERSION:
            raise OSError(f"libgpu_scheduler.so has version {version} of the interface, not {ABI_VERSION}")
        library.orion_last_error.restype = ctypes.c_char_p
        for name in ("stop_scheduler", "set_client_idx", "sync_client_stream", "set_sm_threshold", "reset_state"):
            getattr(library, f"orion_{name}").restype = None
        library.orion_bind_stream.argtypes = ctypes.c_int, ctypes.c_void_p
        library.orion_unbind_stream.argtypes = (ctypes.c_void_p,)
        library.orion_load_kernel_info.argtypes = ctypes.c_int, ctypes.c_char_p
        library.orion_get_stats.argtypes = ctypes.c_int, ctypes.POINTER(ClientStats)
        library.orion_get_totals.argtypes = (ctypes.POINTER(LaunchTotals),)
        self._library: Any = library

    @property
    def is_preloaded(self) -> bool:
        """Return whether the process was started with the library in LD_PRELOAD."""
        return bool(self._library.orion_is_preloaded())

    def is_running(self) -> bool:
        """Return whether launches are gated."""
        return bool(self._library.orion_is_running())

    def start(self, num_clients: int, device_id: int = 0) -> int:
        """Start to gate launches on the bound streams of clients ``0 .. num_clients - 1``; 0 on success."""
        return int(self._library.orion_start_scheduler(num_clients, device_id))

    def stop(self) -> None:
        """Let every waiting launch through, unbind all streams, and gate no more."""
        self._library.orion_stop_scheduler()

    def set_scheduling_mode(self, mode: SchedulingMode | int) -> int:
        """Set the order of waiting launches, at once and for later starts."""
        return int(self._library.orion_set_mode(int(mode)))

    def get_scheduling_mode(self) -> SchedulingMode:
        """Return the order of waiting launches."""
        return SchedulingMode(self._library.orion_get_mode())

    def set_client_idx(self, client: int) -> None:
        """Note the client of the calling thread, and bind torch's current stream to it: call it where that is the
        client's own. The default stream, which all threads share, is not bound."""
        self._library.orion_set_client_idx(client)
        if client >= 0 and self.is_running() and "torch" in sys.modules and accelerator.is_started():
            device = accelerator.current()
            self.bind_stream(client, accelerator.handle_of(device, accelerator.current_stream(device)))

    def get_client_idx(self) -> int:
        """Return the client of the calling thread; -1: none."""
        return int(self._library.orion_get_client_idx())

    def bind_stream(self, client: int, stream: int) -> int:
        """Count the launches on a stream, by its handle, such as ``torch.cuda.Stream().cuda_stream``, for a client."""
        return int(self._library.orion_bind_stream(client, stream))

    def unbind_stream(self, stream: int) -> int:
        """Let launches on a stream pass again."""
        return int(self._library.orion_unbind_stream(stream))

    def sync_stream(self, client: int) -> None:
        """Wait until a client's streams have done all their work."""
        self._library.orion_sync_client_stream(client)

    def set_sm_threshold(self, multiprocessors: int) -> None:
        """Set how many multiprocessors a best-effort kernel may use that runs beside client 0."""
        self._library.orion_set_sm_threshold(multiprocessors)

    def get_sm_threshold(self) -> int:
        """Return the threshold; 0 before the first start."""
        return int(self._library.orion_get_sm_threshold())

    def load_kernel_info(self, client: int, path: str | os.PathLike[str]) -> int:
        """Read kernel profiles for a client, or with -1 for all; return the number of rows, or a negative status."""
        return int(self._library.orion_load_kernel_info(client, os.fsencode(path)))

    def get_stats(self, client: int) -> tuple[int, int]:
        """Return how many launches of a client went to the driver, and how many wait now."""
        stats = self.client_stats(client)
        return stats["submitted"], stats["waiting"]

    def client_stats(self, client: int) -> dict[str, int]:
        """Return ``submitted``, ``queued``, ``starved``, ``wait_ns``, ``max_wait_ns`` and ``waiting`` of a client.

        Raises:
            ValueError: there is no such client.
        """
        stats = ClientStats()
        if self._library.orion_get_stats(client, ctypes.byref(stats)):
            raise ValueError(self.last_error())
        return stats.as_dict()

    def totals(self) -> dict[str, int]:
        """Return ``gated``, ``passed``, ``captured``, ``hooked``, ``unhooked`` and ``unnamed`` of the process."""
        totals = LaunchTotals()
        self._library.orion_get_totals(ctypes.byref(totals))
        return totals.as_dict()

    def reset_state(self) -> None:
        """Set the statistics to zero."""
        self._library.orion_reset_state()

    def last_error(self) -> str:
        """Return why the last call of this thread that failed did so."""
        text: bytes = self._library.orion_last_error()
        return text.decode(errors="replace")


@cache
def get_scheduler() -> OrionScheduler:
    """Return the scheduler of this process; see :class:`OrionScheduler`."""
    return OrionScheduler()


class Inactive(NamedTuple):
    """Why launches are not gated, and what to do about it."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"orion: inactive ({self.reason}; {self.remedy})"


_REMEDIES = {
    -1: "correct it, or leave it out",
    -2: "train one pipeline at a time in a process",
    -3: "start it where nvidia-smi lists a GPU",
}
"""By status of the library; see orion_scheduler.h."""


def start(device_type: str, device: int, clients: int) -> OrionScheduler | Inactive:
    """Start the scheduler of this process for a device of torch, or return why it cannot.

    ``clients``: microbatches of the rank, each with a stream.
    """
    if device_type != accelerator.USUAL:
        return Inactive(f"ranks compute on {device_type}, which launches no kernels",
                        "compute on GPUs: parallel.device: cuda")
    if clients > MOST_CLIENTS:
        return Inactive(f"a rank has {counted(clients, 'microbatch')}, but torch {MOST_CLIENTS} streams",
                        "lower training.num_microbatches")
    try:
        scheduler = get_scheduler()
    except FileNotFoundError:
        return Inactive(f"there is no {LIBRARY}", f"build it with make orion, then {preload_hint()}")
    except OSError as error:
        return Inactive(str(error), "build it anew with make orion")
    if not scheduler.is_preloaded:
        return Inactive("libgpu_scheduler.so is not preloaded", preload_hint())
    status = scheduler.start(clients, device)
    return scheduler if status == 0 else Inactive(scheduler.last_error(), _REMEDIES.get(status, "see kernel_intercept"))


def preload_hint() -> str:
    """Return how to start ranks with the library."""
    return f"start with vpipe train alone, or with {PRELOAD}={LIBRARY} before torchrun or srun"


def preload_variable(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable that preloads the library into a process; nothing where it is not built, or is set already.
    """
    others = environment.get(PRELOAD, "")
    if not LIBRARY.is_file() or LIBRARY.name in others:
        return {}
    return {PRELOAD: f"{LIBRARY}:{others}".rstrip(":")}


def switched_on(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``USE_ORION_SCHEDULER`` asks for Orion.

    Raises:
        UserError: it is neither 1 nor 0.
    """
    value = environment.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise UserError(f"{SWITCH} is '{value}' in the environment", hint="set it to 1, or to 0 to leave it to the "
                        "config")
    return value == "1"
