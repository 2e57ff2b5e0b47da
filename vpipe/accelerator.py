"""Know the kinds of devices beside the processor: the one file that names any of them.

Everything else asks here what a device can do. NVIDIA's GPUs are of the kind cuda, and so, in torch, are AMD's; Intel's
are xpu, Ascend's NPUs npu, Gaudi's hpu, Apple's mps. What a device lacks is asked for, not assumed: the module of torch
that serves a kind (:func:`torch.get_device_module`) has a function for it, or has not.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from vpipe.errors import UserError, counted

if TYPE_CHECKING:  # a config is read without torch
    import torch

USUAL = "cuda"
"""The kind that is meant where torch knows none: it is asked how many devices there are, and says none."""

KINDS = (USUAL, "xpu", "npu", "hpu", "mps")
"""Kinds that a config may name before torch is asked (:func:`kind`); a torch is built for one of them at most."""

COLLECTIVES = {USUAL: "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl"}
"""The backend of torch.distributed that carries tensors of a kind between devices; gloo, over the host, of others."""

DIRECT = frozenset(COLLECTIVES.values())
"""Those backends: each device has one rank, and transfers match by their order alone (docs/nccl.md)."""

FUSED = frozenset({"cpu", USUAL, "xpu"})
"""Kinds for which torch's optimizers have fused kernels."""

VISIBILITY = {USUAL: "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES",
              "hpu": "HABANA_VISIBLE_DEVICES"}
"""The variable of the environment that says which devices of a kind a process sees."""

LISTED_BY = {USUAL: "nvidia-smi", "xpu": "xpu-smi", "npu": "npu-smi", "hpu": "hl-smi"}
"""The program that lists the devices of a kind."""


def kind() -> str:
    """Return the kind of the devices that this torch is built for."""
    import torch

    found = torch.accelerator.current_accelerator()
    return USUAL if found is None else found.type


def collectives() -> str:
    """Return the backend of this torch's devices."""
    return COLLECTIVES.get(kind(), "gloo")


def has_collectives() -> bool:
    """Return whether this torch has that backend."""
    import torch.distributed as dist

    return dist.is_backend_available(collectives())


def carriers(backend: str) -> str:
    """Return the backends of a process group: beside one for devices, tensors in the host's memory go by gloo."""
    return backend if backend not in DIRECT else f"cpu:gloo,{kind()}:{backend}"


def current() -> torch.device:
    """Return the current device of this process."""
    import torch

    return torch.device(kind(), current_index())


def module_of(device: torch.device | str) -> Any:
    """Return torch's module for the kind of a device, such as ``torch.cuda``."""
    import torch

    return torch.get_device_module(device)


def visibility() -> str:
    """Return the variable that says which devices a process sees, or words for it."""
    return VISIBILITY.get(kind(), "the environment")


def count() -> int:
    """Return how many devices this process sees; starts no context on them."""
    return int(module_of(kind()).device_count())


def is_started() -> bool:
    """Return whether this process has a context on its devices."""
    return bool(getattr(module_of(kind()), "is_initialized", bool)())


def current_index() -> int:
    """Return the number of the device that the program chose, 0 where it chose none."""
    return int(getattr(module_of(kind()), "current_device", int)())


def make_current(device: torch.device) -> None:
    """Make a device the current one of this process, which nccl and the kernels of libraries use; a processor is.

    Raises:
        UserError: it cannot be used.
    """
    if device.type == "cpu" or not hasattr(module_of(device), "set_device"):
        return
    try:
        module_of(device).set_device(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"{device} cannot be used: {str(error).splitlines()[0]}",
                        hint=f"{LISTED_BY.get(device.type, 'its driver')} shows the GPUs, their driver and who uses "
                        "them; device cpu computes on the processor") from error


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock to measure a device with: the difference of two readings is the seconds between them.

    On a processor with one thread it is the time of that thread: it counts the work, not the time that other processes
    had the core; torch carries out a backward on the processor in the thread that asks for it. With several threads it
    is the time that passes. On another device it is the time until all work that was launched is done.
    """
    import torch

    if device.type == "cpu":
        return time.thread_time if torch.get_num_threads() == 1 else perf_counter

    def synchronised() -> float:
        synchronize(device)
        return perf_counter()

    return synchronised


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that was queued; a processor has."""
    if device.type != "cpu":
        import torch

        torch.accelerator.synchronize(device)


# -- which device a rank has ------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Visible:
    """The GPUs that this process sees, and its number on its host.

    Attributes:
        gpus: how many.
        local_rank: number of this process on its host; of the rank if that is unknown.
        current: the GPU that the program chose, by ``torch.accelerator.set_device_index`` or as the ``device_id`` of
            its process group; None where it did not. GPU 0, the current one of every process, counts as not chosen.
        is_rank: whether ``local_rank`` is the number of the rank.
    """

    gpus: int
    local_rank: int = 0
    current: int | None = None
    is_rank: bool = False

    @classmethod
    def here(cls, local_rank: int, *, is_rank: bool = False) -> Visible:
        """Return what this process sees; starts no context on devices."""
        return cls(count(), local_rank, (current_index() or None) if is_started() else None, is_rank)


def choose(wanted: torch.device | str | None, backend: str | None, there: Visible) -> torch.device:
    """Return the device of this rank, a GPU always with its index.

    None takes a GPU where there is one, else the processor. A GPU without an index is the one that the program chose,
    else that of the local rank; where ranks outnumber GPUs, they share them in turn.

    Args:
        wanted: ``cpu``, ``cuda``, ``cuda:1`` or None.
        backend: that the user named, if any; under nccl no GPU is shared.
        there: what the rank sees.

    Raises:
        UserError: there is no such device, or nccl is to carry what a processor computes.
    """
    import torch

    device, direct = _parsed(wanted), backend in DIRECT
    if direct and (device is None or device.type != "cpu") and not there.gpus:
        raise UserError(f"backend {backend}, but this machine has no GPU" + _why_none(), hint="use backend: gloo")
    if device is None and not there.gpus:
        return torch.device("cpu")
    if device is not None and device.type == "cpu":
        if direct:
            raise UserError(f"device is cpu, but {backend} carries tensors of GPUs only",
                            hint="use backend: gloo, or leave device out")
        return torch.device("cpu")
    if not there.gpus:
        raise UserError(f"device is {wanted}, but this process sees no GPU{_why_none()}",
                        hint="leave device out, or set it to cpu")
    index = there.current if device is None or device.index is None else device.index
    if index is None:
        if direct and there.local_rank >= there.gpus > 1 and not there.is_rank:
            raise UserError(f"backend {backend} needs a GPU per rank: GPU {there.local_rank} is wanted, but this "
                            f"host has {counted(there.gpus, 'GPU')}, counted from 0",
                            hint="use backend: gloo, under which ranks may share a GPU, or start fewer ranks here")
        index = there.local_rank % there.gpus
    if index >= there.gpus:
        names = f"{kind()}:0" if there.gpus == 1 else f"{kind()}:0 to {kind()}:{there.gpus - 1}"
        raise UserError(f"device is {wanted}, but this process sees {counted(there.gpus, 'GPU')}, {names}",
                        hint=f"write one of these, or {kind()}, which takes the GPU of this rank; {visibility()} "
                        "decides which a process sees")
    return torch.device(kind(), index)


def _parsed(wanted: torch.device | str | None) -> torch.device | None:
    import torch

    hint = f"write cpu, {kind()} (the GPU of this rank) or a GPU by its number, such as {kind()}:1; or leave it out"
    if wanted is None:
        return None
    if not isinstance(wanted, (str, torch.device)):
        raise UserError(f"device is {wanted!r}, which names no device", hint=hint)
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UserError(f"device is '{wanted}', which names no device", hint=hint) from None
    if device.type not in ("cpu", kind()):
        raise UserError(f"device is {wanted}: this torch computes on cpu and {kind()} only", hint=hint)
    return device


def _why_none() -> str:
    import torch

    return f" (torch {torch.__version__} is built for processors alone)" if (
        torch.accelerator.current_accelerator() is None) else ""


# -- what a device is -----------------------------------------------------------------------------------------------

def name_of(device: torch.device) -> str:
    """Return the name that its maker gave it, or the processor."""
    if device.type != "cpu":
        return str(getattr(module_of(device), "get_device_name", lambda device: device.type)(device))
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def uuid_of(device: torch.device) -> str:
    """Return the identity of a device, in whatever order a process sees them; its number where torch has no other."""
    properties = getattr(module_of(device), "get_device_properties", lambda device: None)(device)
    return str(getattr(properties, "uuid", device))


def total_bytes(device: torch.device) -> int:
    """Return its memory, 0 where torch does not know; of a processor the host's, or the limit of this process's cgroup
    (a container's)."""
    if device.type == "cpu":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with suppress(OSError):
            limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
            return min(total, int(limit)) if limit.isdecimal() else total
        return total
    if hasattr(module_of(device), "recommended_max_memory"):  # that it shares with the processor
        return int(module_of(device).recommended_max_memory())
    properties = getattr(module_of(device), "get_device_properties", lambda device: None)(device)
    return int(getattr(properties, "total_memory", 0))


def free_bytes(device: torch.device) -> int:
    """Return its unused memory; half of all where nobody knows."""
    if device.type == "cpu":
        with suppress(OSError, StopIteration):
            lines = Path("/proc/meminfo").read_text().splitlines()
            available = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
            return min(total_bytes(device), available)
    elif hasattr(module_of(device), "mem_get_info"):
        return int(module_of(device).mem_get_info(device)[0])
    return total_bytes(device) // 2


def taken_bytes(device: torch.device) -> int:
    """Return the memory that this process takes: resident on a CPU; elsewhere what is not free, of all processes."""
    if device.type != "cpu":
        return total_bytes(device) - free_bytes(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0


def give_back_unused(device: torch.device) -> None:
    """Give memory back that no tensor has and that its allocator keeps; on a CPU where its C library can."""
    if hasattr(module_of(device), "empty_cache"):
        module_of(device).empty_cache()
    elif device.type == "cpu":
        with suppress(OSError, AttributeError):  # only glibc has it
            CDLL(None).malloc_trim(0)


def multiplies_in_tf32(device: torch.device) -> bool:
    """Return whether products of fp32 are rounded to tf32: see ``torch.set_float32_matmul_precision``."""
    import torch

    return device.type == USUAL and torch.get_float32_matmul_precision() != "highest"


def needs_triton(device: torch.device) -> bool:
    """Return whether torch.compile makes kernels for the device by triton."""
    return device.type in (USUAL, "xpu")


def add_in_fixed_order(device: torch.device) -> None:
    """Let torch choose kernels that add in a fixed order, as those of a processor do."""
    import torch

    if device.type != "cpu":
        if device.type == USUAL:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
            for kernel in ("flash", "mem_efficient", "cudnn"):  # whose backwards add in any order if torch only warns
                getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
        torch.use_deterministic_algorithms(True, warn_only=True)


# -- memory that torch counts -----------------------------------------------------------------------------------------

def counts_memory(device: torch.device) -> bool:
    """Return whether torch counts the memory of tensors there, and its peak."""
    return hasattr(module_of(device), "max_memory_allocated")


def held_bytes(device: torch.device) -> int:
    """Return the memory that tensors of this process have."""
    return int(module_of(device).memory_allocated(device))


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that tensors of this process have had since :func:`reset_peak`."""
    return int(module_of(device).max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Begin to count the peak anew."""
    module_of(device).reset_peak_memory_stats(device)


def queued_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device, only queued where that is no processor; the host may change the tensor at once.

    It goes by way of pinned memory: for a copy from other memory of the host a driver may wait until the stream has
    done all before it (CUDA, API synchronization behavior).
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device, non_blocking=device.type != "cpu", copy=True)
    if hasattr(module_of(device), "recommended_max_memory"):  # that it shares with the processor
        return tensor.to(device)
    return tensor.new_empty(tensor.shape, pin_memory=True).copy_(tensor).to(device, non_blocking=True)


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors in the host's memory, contiguous; the host waits for their device once, however many they are."""
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    queued = all(hasattr(module_of(device), "current_stream") for device in devices)
    copies = [tensor.contiguous().to("cpu", non_blocking=queued) for tensor in tensors]
    for device in devices if queued else ():
        current_stream(device).synchronize()
    return copies


def pinned_bytes(count: int) -> torch.Tensor:
    """Return memory of the host that devices copy from and to by themselves."""
    import torch

    return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)


# -- random numbers ---------------------------------------------------------------------------------------------------

def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return the generators that layers on a device draw from: the host's, and the device's own.

    Each rank seeds them for every microbatch, so that a mask does not depend on which device draws it.
    """
    import torch

    if device.type == "cpu":
        return [torch.default_generator]
    assert device.index is not None, "any other device would draw from another generator than the one that is seeded"
    return [torch.default_generator, _generator(device.index)]


def _generator(index: int) -> torch.Generator:
    """Return the generator of a device by its number."""
    module = module_of(kind())
    getattr(module, "init", lambda: None)()  # makes them
    generator: torch.Generator = module.default_generators[index]
    return generator


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from the generators of the host and of the current device as seeded, and leave the caller's states alone."""
    import torch

    devices = [current_index()] if is_started() else []
    with torch.random.fork_rng(devices=devices, device_type=kind()):
        for generator in (torch.default_generator, *map(_generator, devices)):
            generator.manual_seed(seed)
        yield


def seed_all(seed: int) -> None:
    """Seed the generators of all devices of this process, if there are any."""
    if (module := module_of(kind())).is_available():
        getattr(module, "manual_seed_all", module.manual_seed)(seed)


# -- streams ----------------------------------------------------------------------------------------------------------

def new_stream(device: torch.device, priority: int = 0) -> torch.Stream:
    """Return a queue of work on a device; negative priorities go first."""
    stream: torch.Stream = module_of(device).Stream(device, priority)
    return stream


def current_stream(device: torch.device) -> torch.Stream:
    """Return the queue that takes the work of this thread."""
    stream: torch.Stream = module_of(device).current_stream(device)
    return stream


def mark(device: torch.device) -> torch.Event:
    """Note in the queue of this thread when the device comes to here; two marks tell the time between them."""
    event: torch.Event = module_of(device).Event(enable_timing=True)
    event.record()
    return event


def using(device: torch.device, stream: torch.Stream) -> AbstractContextManager[None]:
    """Return the context in which a stream of a device takes the work of this thread."""
    within: AbstractContextManager[None] = module_of(device).stream(stream)
    return within


def handle_of(device: torch.device, stream: torch.Stream) -> int:
    """Return the driver's handle of a stream."""
    return int(getattr(stream, f"{device.type}_stream"))
