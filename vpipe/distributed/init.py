"""Join the processes of one job: choose their devices, make their process group, start their watchdogs."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from itertools import count
from threading import Timer
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from vpipe import accelerator
from vpipe.distributed import excepthook
from vpipe.distributed.connection import break_off, connections
from vpipe.distributed.device import DeviceMap, RankDevice, check_backend, choose_backend, visible_here
from vpipe.distributed.environment import (
    RankEnvironment,
    alone_hint,
    named_if_none_left,
    read_number,
    read_text,
    reserve_for_joining,
)
from vpipe.distributed.failure_detector import WatchdogTiming
from vpipe.distributed.lanes import Lanes
from vpipe.distributed.network import Host
from vpipe.distributed.rendezvous import Rendezvous, agent_has_store, hosts_of_group, open_store, ranks_have_secret
from vpipe.distributed.value_exchange import Exchange
from vpipe.distributed.watchdog import watch
from vpipe.errors import RunError, UserError
from vpipe.torch_private import default_store, world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STARTING = WatchdogTiming(beat_s=0.25, silent_s=60.0, grace_s=5.0, long_s=30.0, join_s=120.0)
"""Timing until all ranks begin to train. Preparing a large text takes minutes, in which a rank beats."""

_latest: Rendezvous | None = None
"""Of this process, while its ranks make a process group and have one."""
_groups_made, _groups_watched = count(), count()


@named_if_none_left()
def join_world(backend: str | None = None, timeout_s: float = 60.0,
               device: torch.device | str | None = None, mesh: DeviceMesh | None = None,
               data: str | None = None) -> DeviceMap:
    """Join the job that torchrun, srun or vpipe's own launcher started; return the device of every rank.

    The launchers describe the job in the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, or those
    of SLURM). A process that is alone is its only rank. From then on the ranks watch one another: see docs/faults.md. A
    process group that the program made itself is used as it is. All ranks must call this; while the group exists, they
    need not do so at the same time, unless they compute on other devices than before.

    Args:
        backend: ``nccl`` or ``gloo``; None takes nccl where each rank has a GPU of its own.
        device: of this rank, see :func:`vpipe.accelerator.choose`; it becomes the current one.
        mesh: of all ranks; its dimension ``pp`` makes the lanes.
        data: its dimension along which lanes train on batches of their own.

    Raises:
        RunError: a rank did not join in time, or failed meanwhile; it is named.
        UserError: the environment, the devices or the machine do not fit.
    """
    if backend not in (None, "gloo", *accelerator.DIRECT):
        raise UserError(f"backend is {backend!r}", hint="write nccl or gloo, or leave it out")
    if not dist.is_initialized() and "RANK" not in os.environ and \
            (environment := RankEnvironment.parse(os.environ)) is not None:
        os.environ.update(environment.variables)  # a step of srun: from here on as torchrun's
    own = accelerator.choose(device, backend, visible_here())
    accelerator.make_current(own)
    has_group = dist.is_initialized()
    if has_group:
        limit_groups(timeout_s)
    if is_alone():
        devices = DeviceMap(0, (RankDevice.here(_host(), own),),
                            backend or ("gloo" if own.type == "cpu" else accelerator.collectives()))
    else:
        devices = (_join_group if has_group else _make_group)(own, backend, timeout_s)
    if mesh is None or not has_group:
        return devices
    return replace(devices, lanes=Lanes.of_mesh(mesh, devices.rank, devices.ranks, data))


@named_if_none_left()
def _meet(timing: WatchdogTiming) -> Rendezvous:
    """Meet the ranks that the environment names, unless that is done and they have no process group yet."""
    global _latest
    if _latest is not None and _latest.group is None:
        return _latest
    excepthook.install()
    rank, ranks = _number("RANK"), _number("WORLD_SIZE")
    address, port = read_text(os.environ, "MASTER_ADDR", "the environment"), _number("MASTER_PORT")
    reserve_for_joining(rank, ranks)
    if _latest is not None:  # the program has destroyed that group
        _latest.leave()
    try:
        if ranks_have_secret():
            met = Rendezvous.by_secret(rank, ranks, timing, address, port)
        else:
            store = open_store(f"world {next(_groups_made)}", address, port, rank, ranks, timing.join_s)
            met = Rendezvous.in_store(rank, ranks, timing, store, address)
    except (RuntimeError, OSError) as error:
        if rank == 0 and not agent_has_store():
            raise RunError(f"rank 0 cannot listen on port {port}: {str(error).splitlines()[0]}", rank=0,
                           hint="give the run a free port: torchrun's --master-port, MASTER_PORT, or "
                           "parallel.master_port of a config") from error
        raise RunError(f"rank {rank} on {_host()} could not reach rank 0 at {address}:{port} within "
                       f"{timing.join_s:g} s", hint="rank 0 ended or is slow to start: see its output; or another "
                       "address, an interface or a firewall is in the way" + (
                           f"; {alone}" if (alone := alone_hint(os.environ)) else ""), rank=rank, peer=0) from error
    _latest = met
    return met


def exchange(channel: str = "", timeout_s: float | None = None, among: Sequence[int] | None = None) -> Exchange:
    """Return the exchange with the other ranks of this process's job.

    Ranks that the environment names and that have not joined yet (:func:`join_world`) meet first: while they prepare
    what they train, for however long, they watch one another. A process without others exchanges with itself.

    Arguments as of :class:`~vpipe.distributed.value_exchange.Exchange`.

    Raises:
        RunError: rank 0 is not there, or that of another run.
        UserError: the environment is incomplete.
    """
    watchdog = None
    if not is_alone():
        watchdog = watch.watchdog if dist.is_initialized() else _meet(STARTING).watchdog
    return Exchange(watchdog, channel, timeout_s, among)


def limit_groups(timeout_s: float) -> None:
    """Let collectives in all process groups of this process, such as those of layers, wait this long."""
    for backend in [each._get_backend(device) for each in world.pg_map for device in each._device_types]:
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(timedelta(seconds=timeout_s))


def is_alone() -> bool:
    """Return whether this process has no others: in its process group, else by the environment."""
    if dist.is_initialized():
        return dist.get_world_size() == 1
    return "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or _number("WORLD_SIZE") == 1


def _make_group(own: torch.device, backend: str | None, timeout_s: float) -> DeviceMap:
    global _latest
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        Host.check_interfaces(os.environ["GLOO_SOCKET_IFNAME"])
    timing = WatchdogTiming.from_timeout(timeout_s)
    with _told_if_others_are_late():
        rendezvous = _meet(timing)
        devices = _exchange_devices(rendezvous, own)
    _latest = None  # until these ranks have a group
    rendezvous.set_timing(timing)
    try:
        carrier, reason = choose_backend(backend, devices.devices)
    except UserError:
        rendezvous.leave()  # all ranks refuse alike
        raise
    devices = replace(devices, backend=carrier)
    rank, watchdog = rendezvous.rank, rendezvous.watchdog
    if reason and rank == 0:
        print(f"gloo carries tensors between ranks, not {accelerator.collectives()}: {reason}", file=sys.stderr,
              flush=True)
    before, hook = connections(), sys.excepthook
    try:
        # Without device_id: the communicators of nccl are made when they are first used, in the engine's order.
        dist.init_process_group(accelerator.carriers(carrier), store=rendezvous.group_store(timeout_s), rank=rank,
                                world_size=rendezvous.ranks, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        fault = watchdog.explain(None, timeout_s if "imed out" in str(error) else None)
        raise watchdog.error(fault, f"rank {rank} was joining the others: {str(error).splitlines()[0]}") from error
    sys.excepthook = hook  # torch has put one before it that writes the rank before each line
    # The failure detector in rank 0 may have got connections of its own meanwhile, and the store.
    made = dict(connections(but=(*rendezvous.ports, _number("MASTER_PORT"))).items() - before.items())
    watchdog.break_off = partial(break_off, made)
    _latest, rendezvous.group, rendezvous.devices = rendezvous, dist.group.WORLD, devices
    atexit.register(_destroy, dist.group.WORLD, os.getpid())
    rendezvous.leave_first()  # the group is destroyed last
    return devices


@contextmanager
def _told_if_others_are_late() -> Iterator[None]:
    """Say after two seconds why this process waits for others, where it may have been meant to run alone."""
    alone = alone_hint(os.environ)
    timer = Timer(2.0, lambda: print(f"rank {_number('RANK')} waits for the other ranks: {alone}", file=sys.stderr,
                                     flush=True))
    timer.daemon = True
    if alone:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _join_group(own: torch.device, backend: str | None, timeout_s: float) -> DeviceMap:
    """Use the process group that exists, and start the watchdog unless this group has one."""
    global _latest
    rank, ranks = dist.get_rank(), dist.get_world_size()
    excepthook.install()
    if _latest is None or _latest.group is not dist.group.WORLD:
        if _latest is not None and _latest.group is not None:  # the program has destroyed it, and made another
            _latest.leave()
        reserve_for_joining(rank, ranks)
        store: Store = PrefixStore(f"vpipe {next(_groups_watched)}", default_store())
        hosts = hosts_of_group(store, rank, ranks, _host(), timeout_s)
        _latest = Rendezvous.in_store(rank, ranks, WatchdogTiming.from_timeout(timeout_s), store, None, hosts)
        _latest.devices, _latest.group = _exchange_devices(_latest, own), dist.group.WORLD
    elif own != _latest.devices.own:
        _latest.devices = _exchange_devices(_latest, own)
    devices = _latest.devices
    return replace(devices, backend=check_backend(backend, dist.get_backend_config(), devices.devices))


def _exchange_devices(rendezvous: Rendezvous, own: torch.device) -> DeviceMap:
    """Return the device of every rank, before they choose a backend."""
    there = tuple(RankDevice(**one) for one in rendezvous.exchange.all_gather(
        asdict(RankDevice.here(_host(), own)), "waiting for all ranks"))
    rendezvous.watchdog.hosts = [one.host for one in there]
    return DeviceMap(rendezvous.rank, there, "")


def _host() -> str:
    """Return the name of this host, as the launcher gives it."""
    return os.environ.get(RankEnvironment.HOST) or socket.gethostname()


def _number(name: str) -> int:
    return read_number(os.environ, name, "the environment")


def _destroy(group: dist.ProcessGroup | None, process: int) -> None:
    """Destroy the group that vpipe made, unless the program has done so."""
    if os.getpid() == process and dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()
