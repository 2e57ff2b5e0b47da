"""Meet the other ranks of a job in a store, watch them from then on, and exchange values with them."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from vpipe.distributed.connection import connect
from vpipe.distributed.environment import RUN
from vpipe.distributed.failure_detector import FailureDetector, Fault, WatchdogTiming
from vpipe.distributed.network import is_this_host, meeting_address
from vpipe.distributed.watchdog import Watchdog, end_process, install
from vpipe.errors import RunError, UserError

POLL_S = 0.01
READ_S = 5.0
"""For the others to read what was exchanged, which they do at once; the store may end with rank 0."""


def agent_has_store() -> bool:
    """Return whether torchrun's agent keeps the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(kind: str, address: str, port: int, rank: int, ranks: int, timeout_s: float) -> PrefixStore:
    """Open the store of one ``kind``, of this run and this attempt of it; it is in rank 0, or in torchrun's agent.

    An agent's store outlives a restart of the ranks, and still has the addresses of the dead: there the attempt is
    part of the name. Rank 0's is a new one each time; of several agents only the one that lost a rank counts the
    attempt, so its number must not be part of it there. Several stores of one process share the port.

    Raises:
        RuntimeError: nobody answers there, or rank 0 cannot listen.
        RunError: another run has the port.
    """
    hosted = rank == 0 and not agent_has_store()
    store = TCPStore(address, port, ranks, is_master=hosted, timeout=timedelta(seconds=timeout_s),
                     wait_for_workers=False, multi_tenant=True)
    run = os.environ.get(RUN) or os.environ.get("TORCHELASTIC_RUN_ID", "")
    if hosted:
        store.set("run", run)
    elif not agent_has_store():  # an agent has refused a port in use
        theirs = bytes(store.get("run")).decode()
        if theirs != run:
            raise RunError(f"{address} port {port} belongs to another run ({theirs or 'unnamed'}), not to this one "
                           f"({run or 'unnamed'})", rank=rank,
                           hint="give each run a port of its own: parallel.master_port, or MASTER_PORT; under srun it "
                           "may be left out")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent_has_store() else ""
    return PrefixStore(f"{kind} {run} {attempt}", store)


def own_store(kind: str, rank: int, ranks: int, timeout_s: float) -> PrefixStore:
    """Open the store of one ``kind`` where this process's environment says that the ranks meet."""
    return open_store(kind, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, ranks, timeout_s)


class Rendezvous:
    """The ranks of a job, met in a store. From now on they watch one another.

    Rank 0 runs the failure detector and leaves its address in the store.

    Args:
        timing: of the watchdog.
        address: of rank 0, as this rank reaches it; None where only the store may know.
        hosts: by rank, where they are known already.

    Raises:
        RunError: rank 0 is not reached in time.
    """

    def __init__(self, store: Store, rank: int, ranks: int, timing: WatchdogTiming, address: str | None,
                 hosts: Sequence[str] | None = None) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        hosts = [""] * ranks if hosts is None else hosts
        self._detector: FailureDetector | None = None
        reached_at = address or _address_of(store) or ""
        try:
            if rank == 0:
                named, listens_at = ("", address) if address is not None else server_address(reached_at, hosts)
                self._detector = FailureDetector(ranks, timing, listens_at)
                store.set("watchdog", f"{self._detector.port} {self._detector.token} {named}")
            store.wait(["watchdog"], timedelta(seconds=timing.join_s))
            port, token, named = store.get("watchdog").decode().split(" ")
            reached_at = named or reached_at
            connection = connect(reached_at, int(port), timing.join_s)
        except (RuntimeError, OSError) as error:
            where = f" on {hosts[0]}" if hosts[0] else ""
            raise RunError(f"rank {rank} could not reach rank 0{where} at {reached_at}: {str(error).splitlines()[0]}",
                           hint="rank 0 ended, or a firewall is in the way: ranks connect to ports of the system's "
                           "choice", rank=rank, peer=0) from error
        self.detector_port = int(port)
        self.watchdog = Watchdog(rank, hosts, connection, token, timing, end_process)
        install(self.watchdog)
        self._process = os.getpid()
        atexit.register(self._leave_at_exit)

    def set_timing(self, timing: WatchdogTiming) -> None:
        """Watch at another pace from now on. Every rank must beat as often before rank 0 expects it."""
        self.watchdog.set_timing(timing)
        if self._detector is not None:
            self._detector.timing = timing

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Give all ranks a value as JSON; return the values of all, by rank.

        Args:
            name: of the exchange; each has a name of its own.

        Raises:
            RunError: a rank failed or ended before it took part.
        """
        names = [f"{name} {rank}" for rank in range(self.ranks)]
        try:
            self.store.set(names[self.rank], json.dumps(value))
            self.store.add(f"{name} given", 1)
            self._wait(f"{name} given", names)
            values = [json.loads(text) for text in self.store.multi_get(names)]
            if self.store.add(f"{name} read", 1) < self.ranks and self.rank == 0:
                deadline = time.monotonic() + READ_S
                while self.store.add(f"{name} read", 0) < self.ranks and time.monotonic() < deadline:
                    time.sleep(POLL_S)
            return values
        except RuntimeError as error:
            raise self.watchdog.error(self.watchdog.explain(None, None), f"rank {self.rank} was waiting for all ranks: "
                                      f"{str(error).splitlines()[0]}") from error

    def _wait(self, counter: str, names: Sequence[str]) -> None:
        """Wait until all ranks have given their values, named in ``names``, and counted them."""
        looked_at = time.monotonic()
        while self.store.add(counter, 0) < self.ranks:
            time.sleep(POLL_S)
            fault = self.watchdog.fault
            if fault is None and time.monotonic() - looked_at > 1.0:
                looked_at = time.monotonic()
                ended = [rank for rank in range(self.ranks) if self.watchdog.has_left(rank)]
                missing = [rank for rank in ended if not self.store.check([names[rank]])]
                fault = Fault.left(missing[0]) if missing else None
            if fault is not None:
                self.watchdog.acknowledge()
                raise self.watchdog.error(fault, f"{self.watchdog.place(self.rank)} was waiting for all ranks")

    def leave(self) -> None:
        """End the watch: this program comes to its end."""
        atexit.unregister(self._leave_at_exit)
        self.watchdog.leave()
        if self._detector is not None:
            self._detector.stop()

    def leave_first(self) -> None:
        """At exit, leave before anything is undone that was set up until now."""
        atexit.unregister(self._leave_at_exit)
        atexit.register(self._leave_at_exit)

    def _leave_at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # a child that was forked
        error = getattr(sys, "last_value", None)  # what nobody caught, and ended the program
        if error is not None:
            self.watchdog.failed(error)
        self.leave()


def _address_of(store: Store) -> str | None:
    """Return the address of the server of a store; None of one without a server, such as a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


def server_address(store: str, hosts: Sequence[str]) -> tuple[str, str]:
    """Return the address at which the other ranks reach rank 0, and the one where it listens.

    The first is empty where each rank reaches it as it reaches the store; the second stands for all if empty.

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


def hosts_of_group(store: Store, rank: int, ranks: int, host: str, timeout_s: float) -> list[str]:
    """Return the host of every rank of a process group that is there already.

    Raises:
        RunError: a rank does not take part in time.
    """
    names = [f"host {other}" for other in range(ranks)]
    try:
        store.set(names[rank], host)
        store.wait(names, timedelta(seconds=timeout_s))
        return [store.get(name).decode() for name in names]
    except RuntimeError as error:
        missing: list[int] = []
        with suppress(RuntimeError):
            missing = [other for other, name in enumerate(names) if not store.check([name])]
        raise RunError(f"ranks {', '.join(map(str, missing)) or '?'} of {ranks} did not join within {timeout_s:g} s",
                       hint="every rank must make a Pipeline with the same process group", rank=rank,
                       peer=missing[0] if missing else None) from error
