"""Meet the other ranks of a job, watch them from then on, and exchange values with them."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # are public

from vpipe.distributed.connection import Connection, HungUpError, connect, introduce
from vpipe.distributed.device import DeviceMap
from vpipe.distributed.environment import RankEnvironment
from vpipe.distributed.failure_detector import FailureDetector, WatchdogTiming
from vpipe.distributed.network import Host
from vpipe.distributed.value_exchange import Exchange
from vpipe.distributed.watchdog import Watchdog, watch
from vpipe.errors import RunError, UserError

POLL_S = 0.02
"""Time between two tries to reach rank 0, which may not listen yet."""

DROPPED_S = 10.0
"""Time for which a rank tries again that rank 0 has dropped: it does so with the oldest of many connections that have
not shown yet that they know the key, as strangers make them."""

_groups_made = count()


def agent_has_store() -> bool:
    """Return whether torchrun's agent keeps the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def ranks_have_secret() -> bool:
    """Return whether the ranks know something that others do not, and so can meet without a store."""
    return bool(_private(RankEnvironment.SECRET)) and not agent_has_store()


_taken_from_environment: dict[str, str] = {}


def _private(name: str) -> str:
    """Return a variable of the environment, empty if it is not set, and keep it from processes that this one starts:
    such a one may be a rank of another run."""
    if value := os.environ.pop(name, ""):
        _taken_from_environment[name] = value
    return _taken_from_environment.get(name, "")


def _key(secret: str) -> str:
    """Return what the ranks of this run alone know; a user may give several runs the same secret."""
    return f"{secret} {os.environ.get(RankEnvironment.RUN) or os.environ.get('TORCHELASTIC_RUN_ID', '')}"


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
    run = os.environ.get(RankEnvironment.RUN) or os.environ.get("TORCHELASTIC_RUN_ID", "")
    if hosted:
        store.set("run", run)
    elif not agent_has_store():  # an agent has refused a port in use
        theirs = _text(store.get("run"))
        if theirs != run:
            raise _other_run(address, port, rank, f" ({theirs or 'unnamed'}), not to this one ({run or 'unnamed'})")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent_has_store() else ""
    return PrefixStore(f"{kind} {run} {attempt}", store)


def _other_run(address: str, port: int, rank: int, which: str) -> RunError:
    return RunError(f"{address} port {port} belongs to another run{which}", rank=rank,
                    hint="give each run a port of its own: parallel.master_port, or MASTER_PORT; under srun it may be "
                    "left out")


def _text(stored: bytes) -> str:
    """Return a value of a store, which anybody may have written."""
    return bytes(stored[:MOST_BYTES]).decode(errors="replace")


MOST_BYTES = 4096
"""Largest size of a value that is read from a store."""


class Rendezvous:
    """The ranks of a job, met. From now on they watch one another.

    Rank 0 runs the failure detector, to which all connect.

    Args:
        timing: of the watchdog.
        connection: with the failure detector, which knows who this is.
        detector: on rank 0.
        hosts: by rank, where they are known already.
        store: for the process group; None to make one.

    Attributes:
        exchange: with all ranks, for the main thread.
        group, devices: the process group of these ranks, and what they compute on, once they have them.
        ports: at which the failure detector and the store are, 0 where they have none.
    """

    def __init__(self, rank: int, ranks: int, timing: WatchdogTiming, connection: Connection,
                 detector: FailureDetector | None, port: int, hosts: Sequence[str] | None = None,
                 store: Store | None = None) -> None:
        self.rank, self.ranks, self._store, self._detector = rank, ranks, store, detector
        self.ports = [port]
        self.group: object = None
        self.devices: DeviceMap
        self.watchdog = Watchdog(rank, [""] * ranks if hosts is None else hosts, connection, timing, watch.end_process)
        self.exchange = Exchange(self.watchdog)
        watch.begin(self.watchdog)
        self._process = os.getpid()
        atexit.register(self._leave_at_exit)

    @classmethod
    def by_secret(cls, rank: int, ranks: int, timing: WatchdogTiming, address: str, port: int) -> Rendezvous:
        """Meet where rank 0 listens: in the folder of the run's only host, or at an address and port of the first one.

        Raises:
            RunError: rank 0 is not reached in time, or is that of another run.
            OSError: rank 0 cannot listen there.
        """
        folder, secret = _private(RankEnvironment.MEETING), _key(_private(RankEnvironment.SECRET))
        where = os.path.join(folder, "ranks") if folder else address
        detector = FailureDetector(ranks, timing, where, secret, port) if rank == 0 else None
        deadline, why = time.monotonic() + timing.join_s, ""
        while time.monotonic() < deadline:
            try:
                connection = _let_in(where, port, min(5.0, timing.join_s), rank, secret, timing.join_s)
            except NotLetInError as error:
                if detector is not None:
                    detector.stop()
                raise _other_run(where, port, rank, f": {error}") from error
            except OSError as error:
                why = error.strerror or str(error)
                time.sleep(POLL_S)
                continue
            return cls(rank, ranks, timing, connection, detector, 0 if folder else port)
        at = where if folder else f"{where}:{port}"
        raise _unreached(rank, f" at {at}", f" within {timing.join_s:g} s: {why}")

    @classmethod
    def in_store(cls, rank: int, ranks: int, timing: WatchdogTiming, store: Store, address: str | None,
                 hosts: Sequence[str] | None = None) -> Rendezvous:
        """Meet through a store, in which rank 0 leaves the address of its detector.

        Args:
            address: of rank 0, as this rank reaches it; None where only the store may know.
            hosts: by rank, where they are known already.

        Raises:
            RunError: rank 0 is not reached in time.
        """
        reached_at = address or _address_of(store) or ""
        detector = None
        secret = _private(RankEnvironment.SECRET)
        try:
            if rank == 0:
                named, listens_at = ("", address) if address is not None else \
                    server_address(reached_at, hosts or [""] * ranks)
                token = secrets.token_hex(16)
                detector = FailureDetector(ranks, timing, listens_at, _key(secret or token))
                store.set("watchdog", f"{detector.port} {'' if secret else token} {named}")
            store.wait(["watchdog"], timedelta(seconds=timing.join_s))
            port, token, named = _text(store.get("watchdog")).split(" ")
            reached_at = named or reached_at
            connection = _let_in(reached_at, int(port), timing.join_s, rank, _key(secret or token), timing.join_s)
        except (RuntimeError, OSError, ValueError, OverflowError) as error:
            if detector is not None:
                detector.stop()
            on = f" on {hosts[0]}" if hosts and hosts[0] else ""
            why = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise _unreached(rank, f"{on} at {reached_at}", f": {why}") from error
        return cls(rank, ranks, timing, connection, detector, int(port), hosts, store)

    def group_store(self, timeout_s: float) -> Store:
        """Return a store in which the ranks make their process group. All ranks must call it.

        Where all are on one host it is a file that nobody else can open; else rank 0 serves one at a port of the
        system's choice, for as long as the group is being made.
        """
        if self._store is not None:
            return self._store
        if folder := _private(RankEnvironment.MEETING):
            return FileStore(os.path.join(folder, f"group {next(_groups_made)}"), self.ranks)
        address, limit = os.environ["MASTER_ADDR"], timedelta(seconds=timeout_s)
        made = TCPStore(address, 0, self.ranks, is_master=True, timeout=limit, wait_for_workers=False) \
            if self.rank == 0 else None
        port = self.exchange.from_rank(None if made is None else made.port)
        self.ports.append(port)
        return made or TCPStore(address, port, self.ranks, is_master=False, timeout=limit, wait_for_workers=False)

    def set_timing(self, timing: WatchdogTiming) -> None:
        """Watch at another pace from now on. Every rank must beat as often before rank 0 expects it."""
        self.watchdog.timing = timing
        if self._detector is not None:
            self._detector.timing = timing

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


class NotLetInError(OSError):
    """Who listens where rank 0 is expected is no rank of this run."""


def _let_in(where: str, port: int, connect_s: float, rank: int, key: str, join_s: float) -> Connection:
    """Connect to rank 0 and show that this is a rank; again, if it hangs up meanwhile.

    Raises:
        NotLetInError: it is no rank of this run, or goes on hanging up.
        OSError: it does not listen.
    """
    give_up_at = time.monotonic() + min(DROPPED_S, join_s)
    while True:
        connection = connect(where, port, connect_s)
        try:
            introduce(connection, rank, key, join_s)
            return connection
        except OSError as error:
            if not isinstance(error, HungUpError) or time.monotonic() > give_up_at:
                raise NotLetInError(str(error)) from error
        time.sleep(POLL_S)


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
    if store and Host(store).is_this:
        return "", store if alone else ""  # others may know this host by another name
    if alone:
        return "127.0.0.1", "127.0.0.1"
    if (named := os.environ.get("MASTER_ADDR")) and Host(named).is_this:
        return named, ""
    try:
        return Host(hosts[0]).address_for([host for host in hosts if host != hosts[0]]), ""
    except UserError as error:
        raise RunError(error.problems[0].what, rank=0, hint="export MASTER_ADDR, the address of rank 0's host in the "
                       "network of all ranks") from None


def _unreached(rank: int, where: str, why: str) -> RunError:
    return RunError(f"rank {rank} could not reach rank 0{where}{why}", rank=rank, peer=0,
                    hint="rank 0 ended, or a firewall is in the way: ranks connect to ports of the system's choice")


def hosts_of_group(store: Store, rank: int, ranks: int, host: str, timeout_s: float) -> list[str]:
    """Return the host of every rank of a process group that is there already.

    Raises:
        RunError: a rank does not take part in time.
    """
    names = [f"host {other}" for other in range(ranks)]
    try:
        store.set(names[rank], host)
        store.wait(names, timedelta(seconds=timeout_s))
        return [_text(store.get(name)) for name in names]
    except RuntimeError as error:
        missing: list[int] = []
        with suppress(RuntimeError):
            missing = [other for other, name in enumerate(names) if not store.check([name])]
        raise RunError(f"ranks {', '.join(map(str, missing)) or '?'} of {ranks} did not join within {timeout_s:g} s",
                       hint="every rank must make a Pipeline with the same process group", rank=rank,
                       peer=missing[0] if missing else None) from error
