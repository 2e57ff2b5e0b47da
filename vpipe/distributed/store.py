"""Open the store in which ranks exchange values: in rank 0, or in torchrun's agent."""

from __future__ import annotations

import os
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from vpipe.distributed.environment import RUN
from vpipe.errors import RunError


def agent_has_store() -> bool:
    """Return whether torchrun keeps the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def run_of_process() -> str:
    """Return what tells this run from others; empty where nobody says."""
    return os.environ.get(RUN) or os.environ.get("TORCHELASTIC_RUN_ID", "")


def open_store(kind: str, address: str, port: int, rank: int, ranks: int, timeout_s: float) -> PrefixStore:
    """Return the notes of one ``kind``, of this run and this attempt of it.

    That of an agent outlives a restart of the ranks, and still has the addresses of the dead: there the attempt is
    part of the name. Rank 0's is a new one each time; of several agents only the one that lost a rank counts the
    attempt, so its number must not be part of it there. Several stores of one process share the port.

    Raises:
        RuntimeError: nobody answers there, or rank 0 cannot listen.
        RunError: another run has the port.
    """
    hosted = rank == 0 and not agent_has_store()
    store = TCPStore(address, port, ranks, is_master=hosted, timeout=timedelta(seconds=timeout_s),
                     wait_for_workers=False, multi_tenant=True)
    run = run_of_process()
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
    """Return the notes of one ``kind``, where this process's environment says that the ranks meet.

    Raises:
        RuntimeError: nobody answers there.
    """
    return open_store(kind, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, ranks, timeout_s)
