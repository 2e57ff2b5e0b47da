"""Where the ranks that torchrun or srun started agree before they train: whether all can, and in which folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from vpipe.errors import Problem, RunError, UserError, VpipeError
from vpipe.launch.member import Member
from vpipe.launch.network import free_port, source_towards_name

MEET_S = 120.0
"""For all processes to be started."""

SETTLE_S = 3600.0
"""For all to look at the config; a large text takes a rank minutes to prepare, and the others wait for it."""

HEARD_S = 5.0


@dataclass(frozen=True)
class Agreement:
    """What all ranks know when all can train.

    Attributes:
        conclusion: of rank 0.
        hosts: by rank.
        sources: by rank, its address on the route to rank 0; None where there is no route.
    """

    conclusion: str
    hosts: list[str]
    sources: list[str | None]

    def towards(self, member: Member) -> str:
        """An address on the route to the other hosts: rank 0's, or where that means this very host, another rank's.

        Many systems give a host's own name a loopback address.
        """
        if not (self.sources[member.rank] or "").startswith("127."):
            return member.address
        others = (source for source in self.sources if source is not None and not source.startswith("127."))
        return next(others, member.address)


class Meeting:
    """Notes that the ranks leave for one another, with rank 0 or with torchrun.

    Raises:
        UserError: the port is in use.
        RunError: rank 0 is not there.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        # torchrun's own store outlives a restart of the ranks: each attempt has its own notes.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        hosted = member.rank == 0 and not agent
        if hosted:
            free_port(member.port)
        try:
            # Several in one process share the port: the ranks join by it later.
            store = TCPStore(member.address, member.port, member.ranks, is_master=hosted,
                                  timeout=timedelta(seconds=MEET_S), wait_for_workers=False, multi_tenant=True)
        except RuntimeError as error:
            raise RunError(f"rank {member.rank} on {member.host} could not reach rank 0 at "
                           f"{member.address}:{member.port} within {MEET_S:g} s: {str(error).splitlines()[0]}",
                           hint="rank 0 ended: see what it said; or a firewall is in the way, or the address is wrong: "
                           "set parallel.master_address") from None
        self._store = PrefixStore(f"meeting_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def settle(self, error: VpipeError | None, conclude: Callable[[], str]) -> Agreement:
        """Wait until all ranks have looked at the config.

        Args:
            error: why this rank cannot train.
            conclude: what rank 0 does when all can.

        Raises:
            VpipeError: on rank 0, all that is wrong anywhere, each thing once.
            SystemExit: on the others, then; with the same status.
        """
        try:
            self._store.set(f"state {self._member.rank}", json.dumps(
                {"host": self._member.host, "source": source_towards_name(self._member.address),
                 "status": error.exit_status if error else 0, "problems": _problems(error)}))
            if self._member.rank == 0:
                return self._conclude(conclude)
            verdict = json.loads(self._wait("verdict"))
            self._store.add("heard", 1)
        except RuntimeError:
            if error is not None:
                raise error from None
            raise SystemExit(1) from None  # rank 0 has ended, and said why
        if verdict["status"]:
            raise SystemExit(verdict["status"])
        return Agreement(verdict["conclusion"], verdict["hosts"], verdict["sources"])

    def _conclude(self, conclude: Callable[[], str]) -> Agreement:
        states = [json.loads(self._wait(f"state {rank}")) for rank in range(self._member.ranks)]
        hosts = [str(state["host"]) for state in states]
        sources = [state["source"] for state in states]
        conclusion, error = "", _together(states)
        if error is None:
            try:
                conclusion = conclude()
            except VpipeError as own:
                error = own
        self._store.set("verdict", json.dumps({"status": error.exit_status if error else 0, "conclusion": conclusion,
                                               "hosts": hosts, "sources": sources}))
        if error is None:
            return Agreement(conclusion, hosts, sources)
        deadline = time.monotonic() + HEARD_S
        while self._store.add("heard", 0) < self._member.ranks - 1 and time.monotonic() < deadline:
            time.sleep(0.02)  # the notes may end with this process
        raise error

    def _wait(self, name: str) -> bytes:
        self._store.wait([name], timedelta(seconds=SETTLE_S))
        return bytes(self._store.get(name))

    def found_cause(self) -> None:
        """Let the others know that this rank says why the run failed."""
        with suppress(RuntimeError):
            self._store.set("cause", "said")

    def cause_is_said(self) -> bool:
        """Whether another rank says why the run failed."""
        try:
            return bool(self._store.check(["cause"]))
        except RuntimeError:
            return False


def _problems(error: VpipeError | None) -> list[list[str | None]]:
    if error is None:
        return []
    if isinstance(error, UserError):
        return [[problem.what, problem.hint, problem.where] for problem in error.problems]
    assert isinstance(error, RunError)
    return [[error.located, error.hint, None]]


def _together(states: list[dict[str, Any]]) -> VpipeError | None:
    """What all ranks found wrong, as one error: each thing once, with the ranks that met it where not all did."""
    met: dict[tuple[str, str, str | None], list[int]] = {}
    for rank, state in enumerate(states):
        for what, hint, where in state["problems"]:
            met.setdefault((what, hint, where), []).append(rank)
    problems = []
    for (what, hint, where), ranks in met.items():
        if len(ranks) < len(states):
            on = sorted({str(states[rank]["host"]) for rank in ranks})
            what = f"{what} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {', '.join(on)})"
        problems.append(Problem(what, hint, where))
    if not problems:
        return None
    if all(state["status"] in (0, UserError.exit_status) for state in states):
        return UserError.all_of(problems)
    first = problems[0]
    return RunError(first.what, hint=first.hint)
