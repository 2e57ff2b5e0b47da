"""Join the processes of one job: choose their devices, make their process group, have them watch one another."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from vpipe.distributed.connection import break_off, connect, connections
from vpipe.distributed.device import (
    DeviceMap,
    RankDevice,
    Visible,
    check_backend,
    choose_backend,
    choose_device,
    make_current,
)
from vpipe.distributed.environment import HOST, RankEnvironment
from vpipe.distributed.fault import WatchdogTiming
from vpipe.distributed.network import check_interfaces, is_this_host, meeting_address
from vpipe.distributed.store import Asked, agent_has_store, open_store
from vpipe.distributed.watchdog import Watchdog, end_process, install
from vpipe.distributed.watchdog_server import WatchdogServer
from vpipe.errors import RunError, UserError, counted

CARRIERS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""What the process group is made with: under nccl, tensors in host memory still go by gloo."""

KNOWS_S = 5.0
"""For a rank to read what the others wrote, which it does at once."""


@dataclass
class _Joined:
    """The process group of this process, once its ranks watch one another.

    Attributes:
        devices: of all ranks, as they were when they joined.
        leave: ends the watch in good order.
    """

    group: dist.ProcessGroup | None
    leave: Callable[[], None]


_joined: _Joined | None = None
_groups_made, _meetings = count(), count()


def join_world(backend: str | None = None, timeout_s: float = 60.0,
               device: torch.device | str | None = None) -> DeviceMap:
    """Join the job that torchrun, srun or vpipe's own launcher started; return the device of every rank.

    The launchers describe the job in the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, or those
    of SLURM), which is the one place where the library reads it. A process that is alone is its only rank. From then on
    the ranks watch one another: see docs/faults.md. A process group that the program made itself is used as it is, with
    the watch. All ranks must call this.

    Args:
        backend: ``nccl`` or ``gloo``; None takes nccl where each rank has a GPU of its own.
        device: of this rank, see :func:`~vpipe.distributed.device.choose_device`; it becomes the current one.

    Raises:
        RunError: a rank did not join in time, or failed meanwhile; it is named.
        UserError: the environment, the devices or the machine do not fit.
    """
    if backend not in (None, *CARRIERS):
        raise UserError(f"backend is {backend!r}", hint="write nccl or gloo, or leave it out")
    if not dist.is_initialized():
        _take_names_of_srun()
    own = choose_device(device, backend, Visible.here())
    make_current(own)
    if dist.is_initialized():
        return _join_group(own, backend, timeout_s)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or _number("WORLD_SIZE") == 1:
        return _alone(own, backend)
    return _make_group(own, backend, timeout_s)


def _alone(own: torch.device, backend: str | None) -> DeviceMap:
    return DeviceMap(0, (RankDevice.here(_host(), own),), backend or ("gloo" if own.type == "cpu" else "nccl"))


def _take_names_of_srun() -> None:
    """Give the variables of a step of srun the names of torchrun's."""
    if "RANK" not in os.environ and (member := RankEnvironment.parse(os.environ)) is not None:
        os.environ.update(member.variables)


def _make_group(own: torch.device, backend: str | None, timeout_s: float) -> DeviceMap:
    rank, ranks = _number("RANK"), _number("WORLD_SIZE")
    address, port = _variable("MASTER_ADDR"), _number("MASTER_PORT")
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        check_interfaces(os.environ["GLOO_SOCKET_IFNAME"])
    store = _store(address, port, rank, ranks, timeout_s)  # of one address the same as before, where that is used still
    global _joined
    if _joined is not None:  # the program has destroyed that group
        _joined.leave()
    there = _meet(store, rank, ranks, own, timeout_s)
    with _refused_by_all(store, rank, ranks):
        carrier, reason = choose_backend(backend, there)
    devices = DeviceMap(rank, there, carrier)
    if reason and rank == 0:
        print(f"gloo carries tensors between ranks, not nccl: {reason}", file=sys.stderr, flush=True)
    watch, hub_port, leave = _watch(store, devices, timeout_s, address)
    before, hook = connections(), sys.excepthook
    try:
        # Without device_id: the communicators of nccl are then made when they are first used, in the engine's order.
        dist.init_process_group(CARRIERS[carrier], store=store, rank=rank, world_size=ranks,
                                timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        fault = watch.explain(None, timeout_s if "imed out" in str(error) else None)
        raise watch.error(fault, f"rank {rank} was joining the others: {str(error).splitlines()[0]}") from error
    sys.excepthook = hook  # torch has put one before it that writes the rank before each line
    # The hub in rank 0 may have got connections of its own meanwhile, and the store.
    made = connections(but=(hub_port, port)).items() - before.items()
    watch.break_off = partial(break_off, dict(made))
    _joined = _Joined(dist.group.WORLD, leave)
    atexit.unregister(leave)
    atexit.register(_destroy, dist.group.WORLD, os.getpid())
    atexit.register(leave)  # comes before what was registered earlier: the group is destroyed last
    return devices


def _join_group(own: torch.device, backend: str | None, timeout_s: float) -> DeviceMap:
    """Use the process group that is there, and start the watch where it is not one that is watched already."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return _alone(own, backend)
    store = PrefixStore(f"vpipe {next(_meetings)}", _get_default_store())
    there = _meet(store, rank, ranks, own, timeout_s)  # each time: ranks may compute on other devices now
    with _refused_by_all(store, rank, ranks):
        carrier = check_backend(backend, dist.get_backend_config(), there)
    devices = DeviceMap(rank, there, carrier)
    global _joined
    if _joined is not None and _joined.group is dist.group.WORLD:
        return devices
    if _joined is not None:  # the program has destroyed that group, and made another
        _joined.leave()
    _, _, leave = _watch(store, devices, timeout_s)
    _joined = _Joined(dist.group.WORLD, leave)
    return devices


def _host() -> str:
    """What the user calls this host, if the launcher says so."""
    return os.environ.get(HOST) or socket.gethostname()


def _variable(name: str) -> str:
    if not os.environ.get(name):
        raise UserError(f"the environment has RANK and WORLD_SIZE, but not {name}",
                        hint="start with vpipe train, torchrun or srun, or set it to the address and port of rank 0")
    return os.environ[name]


def _number(name: str) -> int:
    value = _variable(name)
    if not value.isdecimal():
        raise UserError(f"the environment has {name}={value!r}", hint="it must be a whole number")
    return int(value)


def _store(address: str, port: int, rank: int, ranks: int, timeout_s: float) -> Store:
    """Where the ranks of a world leave notes for one another."""
    try:
        return open_store(f"world {next(_groups_made)}", address, port, rank, ranks, timeout_s)
    except RuntimeError as error:
        if rank == 0 and not agent_has_store():
            raise RunError(f"rank 0 cannot listen on port {port}: {str(error).splitlines()[0]}", rank=0,
                           hint="give the run a free port: torchrun's --master-port, MASTER_PORT, or "
                           "parallel.master_port of a config") from error
        raise RunError(f"rank {rank} on {_host()} could not reach rank 0 at {address}:{port} within "
                       f"{timeout_s:g} s", hint="rank 0 ended or is slow to start: see what it printed; or another "
                       "address, an interface or a firewall is in the way", rank=rank, peer=0) from error


def _meet(store: Store, rank: int, ranks: int, own: torch.device, timeout_s: float) -> tuple[RankDevice, ...]:
    """Wait until all are there; return the host and device of each."""
    names = [f"device_of_rank_{other}" for other in range(ranks)]
    try:
        store.set(names[rank], json.dumps(asdict(RankDevice.here(_host(), own))))
        store.wait(names, timedelta(seconds=timeout_s))
        there = tuple(RankDevice(**json.loads(store.get(name))) for name in names)
        store.set(f"rank_{rank}_knows", "")
        return there
    except RuntimeError as error:
        missing = [0]
        asked = Asked(lambda: [other for other, name in enumerate(names) if not store.check([name])])
        with suppress(RuntimeError):
            missing = asked.answer if asked.answered(WatchdogTiming.of(timeout_s).grace_s) else missing
        raise RunError(f"{counted(len(missing), 'rank')} of {ranks} did not join within {timeout_s:g} s: "
                       f"{', '.join(map(str, missing))}", hint="a rank ended or is slow to start: see what it "
                       "printed, or its log, or raise timeout_s", rank=rank,
                       peer=missing[0] if missing else None) from error


@contextmanager
def _refused_by_all(store: Store, rank: int, ranks: int) -> Iterator[None]:
    """Let rank 0 end only when all ranks know what they are refused for: the store may end with it."""
    try:
        yield
    except UserError:
        if rank == 0:
            with suppress(RuntimeError):
                store.wait([f"rank_{other}_knows" for other in range(ranks)], timedelta(seconds=KNOWS_S))
        raise


def _watch(store: Store, devices: DeviceMap, timeout_s: float,
           address: str | None = None) -> tuple[Watchdog, int, Callable[[], None]]:
    """Have the ranks watch one another; return also the port of the hub, and what ends the watch in good order.

    Args:
        address: of rank 0, as this rank reaches it; None where only the store may know.
    """
    pace, rank = WatchdogTiming.of(timeout_s), devices.rank
    hosts = [one.host for one in devices.devices]
    hub, reached_at = None, address or _address_of(store) or ""
    try:
        if rank == 0:
            told, listens_at = ("", address) if address is not None else _own_address(reached_at, hosts)
            hub = WatchdogServer(len(hosts), pace, listens_at)
            store.set("hub", f"{hub.port} {hub.token} {told}")
        store.wait(["hub"], timedelta(seconds=timeout_s))
        port, token, told = store.get("hub").decode().split(" ")
        reached_at = told or reached_at
        line = connect(reached_at, int(port), timeout_s)
    except (RuntimeError, OSError) as error:
        raise RunError(f"rank {rank} on {hosts[rank]} could not reach rank 0 on {hosts[0]} at {reached_at}: "
                       f"{str(error).splitlines()[0]}", hint="rank 0 ended, or a firewall is in the way: ranks "
                       "connect to ports of the system's choice", rank=rank, peer=0) from error
    watch = Watchdog(rank, hosts, line, token, pace, end_process)
    install(watch)
    leave = partial(_leave, watch, hub, os.getpid())
    atexit.register(leave)
    return watch, int(port), leave


def _address_of(store: Store) -> str | None:
    """Return where the server of a store is, as this process reaches it; None of one that has none, such as a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


def _own_address(store: str, hosts: Sequence[str]) -> tuple[str, str]:
    """Return where the other ranks reach rank 0, and where it listens.

    The first is empty where each rank reaches it as it reaches the store.

    Args:
        store: the address of the server, empty where there is none.

    Raises:
        RunError: none is found.
    """
    alone = len(set(hosts)) == 1
    if store and is_this_host(store):
        return "", store if alone else ""  # others may know this host by another name
    if alone:
        return "127.0.0.1", "127.0.0.1"
    if (named := os.environ.get("MASTER_ADDR")) and is_this_host(named):
        return named, ""
    try:
        return meeting_address(hosts[0], [host for host in hosts if host != hosts[0]]), ""
    except UserError as error:
        raise RunError(error.problems[0].what, rank=0, hint="export MASTER_ADDR, the address of rank 0's host in the "
                       "network of all ranks") from None


def _leave(watch: Watchdog, hub: WatchdogServer | None, process: int) -> None:
    if os.getpid() != process:
        return  # a child that was forked
    error = getattr(sys, "last_value", None)  # what nobody caught, and ended the program
    if error is not None:
        watch.failed(error)
    watch.leave()
    if hub is not None:
        hub.stop()


def _destroy(group: dist.ProcessGroup | None, process: int) -> None:
    """Destroy the group that vpipe made, unless the program has done so."""
    if os.getpid() == process and dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()
