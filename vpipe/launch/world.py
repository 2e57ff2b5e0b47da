"""Joining the processes of one job."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from vpipe.errors import RunError, UserError, counted
from vpipe.launch.network import check_interfaces
from vpipe.launch.pulse import Asked
from vpipe.launch.store import agent_has_store, open_store
from vpipe.launch.variables import HOST
from vpipe.watch.current import end_process, install
from vpipe.watch.hub import Hub
from vpipe.watch.line import connect
from vpipe.watch.pace import Pace
from vpipe.watch.sockets import break_off, connections
from vpipe.watch.watch import Watch


def join_world(backend: str = "gloo", timeout_s: float = 60.0) -> int:
    """Join the job that torchrun, or vpipe's own launcher, started; the number of its processes, 0 when alone.

    The launchers say so in the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), which is the
    one place where the library reads it. From then on the ranks watch one another: see docs/faults.md. A process group
    that exists already is used as it is, without a watch.

    Raises:
        RunError: a rank did not join in time, or failed meanwhile; it is named.
        UserError: the environment or the machine does not fit.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 0
    rank, ranks = _number("RANK"), _number("WORLD_SIZE")
    if backend == "nccl" and torch.cuda.device_count() < 1:
        raise UserError("backend nccl, but this machine has no GPU", hint="use backend: gloo")
    if ranks == 1:
        return 1
    address, port = _variable("MASTER_ADDR"), _number("MASTER_PORT")
    if backend == "gloo" and os.environ.get("GLOO_SOCKET_IFNAME"):
        check_interfaces(os.environ["GLOO_SOCKET_IFNAME"])
    store = _store(address, port, rank, ranks, timeout_s)
    hosts = _meet(store, rank, ranks, timeout_s)
    watch, hub_port = _watch(store, address, rank, hosts, timeout_s)
    before, hook = connections(), sys.excepthook
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks,
                                timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        fault = watch.explain(None, timeout_s if "imed out" in str(error) else None)
        raise watch.error(fault, f"rank {rank} was joining the others: {str(error).splitlines()[0]}") from error
    sys.excepthook = hook  # torch has put one before it that writes the rank before each line
    if backend == "gloo":
        # The hub in rank 0 may have got connections of its own meanwhile, and the store.
        made = connections(but=(hub_port, port)).items() - before.items()
        watch.break_off = partial(break_off, dict(made))
    return ranks


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
        return open_store("world", address, port, rank, ranks, timeout_s)
    except RuntimeError as error:
        if rank == 0 and not agent_has_store():
            raise RunError(f"rank 0 cannot listen on port {port}: {str(error).splitlines()[0]}", rank=0,
                           hint="give the run a free port: torchrun's --master-port, MASTER_PORT, or "
                           "parallel.master_port of a config") from error
        raise RunError(f"rank {rank} on {_host()} could not reach rank 0 at {address}:{port} within "
                       f"{timeout_s:g} s", hint="rank 0 ended or is slow to start: see what it printed; or another "
                       "address, an interface or a firewall is in the way", rank=rank, peer=0) from error


def _meet(store: Store, rank: int, ranks: int, timeout_s: float) -> list[str]:
    """Wait until all are there; their hosts."""
    names = [f"host_of_rank_{other}" for other in range(ranks)]
    try:
        store.set(names[rank], _host())
        store.wait(names, timedelta(seconds=timeout_s))
        return [store.get(name).decode() for name in names]
    except RuntimeError as error:
        missing = [0]
        asked = Asked(lambda: [other for other, name in enumerate(names) if not store.check([name])])
        with suppress(RuntimeError):
            missing = asked.answer if asked.answered(Pace.of(timeout_s).grace_s) else missing
        raise RunError(f"{counted(len(missing), 'rank')} of {ranks} did not join within {timeout_s:g} s: "
                       f"{', '.join(map(str, missing))}", hint="a rank ended or is slow to start: see what it "
                       "printed, or its log, or raise timeout_s", rank=rank,
                       peer=missing[0] if missing else None) from error


def _watch(store: Store, address: str, rank: int, hosts: list[str], timeout_s: float) -> tuple[Watch, int]:
    """Have the ranks watch one another; the port of the hub."""
    pace = Pace.of(timeout_s)
    hub = Hub(len(hosts), pace, address) if rank == 0 else None
    if hub is not None:
        store.set("hub", f"{hub.port} {hub.token}")
    try:
        port, token = store.get("hub").decode().split()
        line = connect(address, int(port), timeout_s)
    except (RuntimeError, OSError) as error:
        raise RunError(f"rank {rank} on {hosts[rank]} could not reach rank 0 on {hosts[0]} at {address}: "
                       f"{str(error).splitlines()[0]}", hint="rank 0 ended, or a firewall is in the way: ranks "
                       "connect to ports of the system's choice", rank=rank, peer=0) from error
    watch = Watch(rank, hosts, line, token, pace, end_process)
    install(watch)
    atexit.register(_leave, watch, hub, os.getpid())
    return watch, int(port)


def _leave(watch: Watch, hub: Hub | None, process: int) -> None:
    if os.getpid() != process:
        return  # a child that was forked
    error = getattr(sys, "last_value", None)  # what nobody caught, and ended the program
    if error is not None:
        watch.failed(error)
    watch.leave()
    if hub is not None:
        hub.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
