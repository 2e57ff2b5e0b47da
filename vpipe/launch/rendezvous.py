"""Agree with the ranks that torchrun or srun started, before training: whether all can, and in which folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from vpipe.distributed.environment import RankEnvironment
from vpipe.distributed.network import free_port, source_towards_name
from vpipe.distributed.store import Asked, agent_has_store, open_store
from vpipe.errors import Problem, RunError, UserError, VpipeError, counted
from vpipe.launch.local import GRACE_S, POLL_S

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

    def towards(self, member: RankEnvironment) -> str:
        """An address on the route to the other hosts: rank 0's, or where that means this very host, another rank's.

        Many systems give a host's own name a loopback address.
        """
        if not (self.sources[member.rank] or "").startswith("127."):
            return member.address
        others = (source for source in self.sources if source is not None and not source.startswith("127."))
        return next(others, member.address)


class Meeting:
    """Notes that the ranks leave for one another, with rank 0 or with torchrun.

    While a rank looks at the config, a thread of it says once a second that the process lives.

    Raises:
        UserError: the port is in use.
        RunError: rank 0 is not there, or that of another run.
    """

    def __init__(self, member: RankEnvironment) -> None:
        self._member = member
        if member.rank == 0 and not agent_has_store():
            free_port(member.port)
        try:
            self._store, self._pulse_store = (
                open_store("meeting", member.address, member.port, member.rank, member.ranks, MEET_S)
                for _ in range(2))  # a store answers one thread at a time
        except RuntimeError as error:
            raise RunError(f"rank {member.rank} on {member.host} could not reach rank 0 at "
                           f"{member.address}:{member.port} within {MEET_S:g} s: {str(error).splitlines()[0]}",
                           hint="rank 0 ended: see what it said; or a firewall is in the way, or the address is wrong: "
                           "set parallel.master_address") from None
        self._pulse = Pulse(self._pulse_store, member.rank, range(1, member.ranks) if member.rank == 0 else [0])

    def settle(self, error: VpipeError | None, data: str, conclude: Callable[[Sequence[str]], str]) -> Agreement:
        """Wait until all ranks have looked at the config.

        Args:
            error: why this rank cannot train.
            data: the fingerprint of this rank's.
            conclude: what rank 0 does when all can; it is given the agents that started them.

        Raises:
            VpipeError: on rank 0, all that is wrong anywhere, each thing once; on another, that rank 0 is gone.
            SystemExit: on the others, when rank 0 says it; with the same status.
        """
        try:
            self._store.set(f"state {self._member.rank}", json.dumps(
                {"host": self._member.host, "agent": self._member.agent, "data": data,
                 "source": source_towards_name(self._member.address),
                 "status": error.exit_status if error else 0, "problems": _problems(error)}))
            if self._member.rank == 0:
                return self._conclude(conclude)
            verdict = self._verdict()
        except RuntimeError as lost:
            if error is not None:
                raise error from None
            raise self._without_rank_0(f"ended: {str(lost).splitlines()[0]}") from None
        finally:
            self._pulse.stop()
        if verdict is None:
            raise error or self._without_rank_0(f"gave no sign of life for {QUIET_S:g} s")
        if verdict["status"]:
            raise SystemExit(verdict["status"])
        return Agreement(verdict["conclusion"], verdict["hosts"], verdict["sources"])

    def _without_rank_0(self, how: str) -> RunError:
        return RunError(f"rank {self._member.rank} on {self._member.host} lost rank 0 before the training: it {how}",
                        hint=f"see what rank 0 and {self._member.starter} said; Linux kills a process when memory runs "
                        "out, which then says nothing")

    def _conclude(self, conclude: Callable[[Sequence[str]], str]) -> Agreement:
        states = self._states()
        conclusion, error = "", together(states, self._pulse.silences())
        hosts = [str(state["host"]) if state else "" for state in states]
        sources = [state["source"] if state else None for state in states]
        if error is None:
            try:
                conclusion = conclude(list(dict.fromkeys(state["agent"] for state in states if state)))
            except VpipeError as own:
                error = own
        self._store.set("verdict", json.dumps({"status": error.exit_status if error else 0, "conclusion": conclusion,
                                               "hosts": hosts, "sources": sources}))
        if error is None:
            return Agreement(conclusion, hosts, sources)
        self._wait_until_heard(len(list(filter(None, states))) - 1)
        raise error

    def end(self) -> None:
        """After an agreement not to train: rank 0 stays until all have heard it."""
        if self._member.rank == 0:
            self._wait_until_heard(self._member.ranks - 1)

    def _wait_until_heard(self, others: int) -> None:
        """The notes may end with this process."""
        deadline = time.monotonic() + HEARD_S
        while self._store.add("heard", 0) < others and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _states(self) -> list[dict[str, Any] | None]:
        """What each rank found; None of one that never came or fell silent."""
        states: dict[int, dict[str, Any]] = {}
        while True:
            for rank in set(range(self._member.ranks)) - set(states):
                if self._store.check([f"state {rank}"]):
                    states[rank] = json.loads(self._store.get(f"state {rank}"))
            silences = self._pulse.silences()
            if all(rank in states or silences[rank].too_long for rank in range(self._member.ranks)):
                return [states.get(rank) for rank in range(self._member.ranks)]
            time.sleep(POLL_S)

    def _verdict(self) -> dict[str, Any] | None:
        """What rank 0 has concluded; None when it fell silent."""
        def ask() -> Any:
            while not self._store.check(["verdict"]):
                time.sleep(POLL_S)
            verdict = json.loads(self._store.get("verdict"))
            self._store.add("heard", 1)
            return verdict

        asked: Asked[Any] = Asked(ask)
        while not asked.answered(1.0):
            if self._pulse.silences()[0].too_long:
                return None
        found: dict[str, Any] = asked.answer
        return found

    def found_cause(self) -> None:
        """Let the others know that this rank says why the run failed."""
        Asked(lambda: self._store.set("cause", "said")).answered(GRACE_S)

    def cause_is_said(self, wait_s: float) -> bool:
        """Whether another rank says why the run failed, or does so within ``wait_s``.

        Rank 0 may be stopped or out of reach, and a store that does not answer keeps who asks it for ever.
        """
        deadline = time.monotonic() + wait_s

        def ask() -> bool:
            while not self._store.check(["cause"]):
                if time.monotonic() > deadline:
                    return False
                time.sleep(POLL_S)
            return True

        asked = Asked(ask)
        with suppress(RuntimeError):
            return asked.answered(wait_s + GRACE_S) and asked.answer
        time.sleep(max(0.0, deadline - time.monotonic()))
        return False


def _problems(error: VpipeError | None) -> list[list[str | None]]:
    if error is None:
        return []
    if isinstance(error, UserError):
        return [[problem.what, problem.hint, problem.where] for problem in error.problems]
    assert isinstance(error, RunError)
    return [[error.located, error.hint, None]]


def together(states: Sequence[Mapping[str, Any] | None], silences: Mapping[int, Silence]) -> VpipeError | None:
    """What all ranks found wrong, as one error: each thing once, with the ranks that met it where not all did.

    Args:
        states: by rank; None of one that never came or fell silent.
        silences: of those.
    """
    there = {rank: state for rank, state in enumerate(states) if state is not None}
    met: dict[tuple[str, str, str | None], list[int]] = {}
    for rank, state in there.items():
        for what, hint, where in state["problems"]:
            met.setdefault((what, hint, where), []).append(rank)
    problems = []
    for (what, hint, where), ranks in met.items():
        if len(ranks) < len(states):
            what = f"{what} ({_named(ranks, there)})"
        problems.append(Problem(what, hint, where))
    failed = any(state["status"] not in (0, UserError.exit_status) for state in there.values())
    for how in dict.fromkeys(silences[rank].how for rank, state in enumerate(states) if state is None):
        ranks = [rank for rank, state in enumerate(states) if state is None and silences[rank].how == how]
        problems.append(Problem(f"{counted(len(ranks), 'rank')} of {len(states)} {how}: {', '.join(map(str, ranks))}",
                                "look at what was said on the host; a process that was killed says nothing (Linux "
                                "kills one when memory runs out), and one that cannot read the config may look for "
                                "the others elsewhere"))
        failed = True
    if not problems:
        return _other_data(there)
    if not failed:
        return UserError.all_of(problems)
    first, *more = problems
    return RunError(first.what + (f" ({first.where})" if first.where else ""),
                    hint="\n".join([first.hint, *map(str, more)]))


def _other_data(states: Mapping[int, Mapping[str, Any]]) -> UserError | None:
    """Refuse ranks that read other data than others: they would train, and learn nothing."""
    seen: dict[str, list[int]] = {}
    for rank, state in states.items():
        seen.setdefault(state["data"], []).append(rank)
    if len(seen) < 2:
        return None
    what = "; ".join(f"{_named(ranks, states)} read {data}" for data, ranks in seen.items())
    return UserError(f"the ranks do not read the same data: {what} (a hash of the vocabulary's size, the numbers of "
                     "samples and the first batch)", hint="copy the same files, or the prepared data "
                     "(dataset.cache_directory), to all hosts")


def _named(ranks: Sequence[int], states: Mapping[int, Mapping[str, Any]]) -> str:
    on = sorted({str(states[rank]["host"]) for rank in ranks})
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {', '.join(on)}"


MEET_S = 120.0
"""For all processes to be started."""

QUIET_S = 60.0
"""Without a sign of life from one that has come. Preparing a large text takes minutes, in which it gives signs."""

BEAT_S = 1.0

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Silence:
    """How long nothing was heard of a rank, and whether anything ever was."""

    seconds: float
    came: bool

    @property
    def too_long(self) -> bool:
        return self.seconds > (QUIET_S if self.came else MEET_S)

    @property
    def how(self) -> str:
        """``did not come within 120 s``."""
        return f"gave no sign of life for {QUIET_S:g} s" if self.came else f"did not come within {MEET_S:g} s"


class Pulse:
    """Says in a store, once a second, that this rank lives, and notices the same of others.

    Args:
        store: of its own: another thread may wait in one for long.
        others: the ranks to listen to.
    """

    def __init__(self, store: Store, rank: int, others: Collection[int]) -> None:
        self._store, self._rank = store, rank
        now = time.monotonic()
        self._heard = dict.fromkeys(others, (0, now))
        self._stopping = Event()
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone: whoever reads it will say so
            while not self._stopping.is_set():
                self._store.add(f"beats of rank {self._rank}", 1)
                for other, (beats, _) in self._heard.items():
                    now_at = self._store.add(f"beats of rank {other}", 0)
                    if now_at != beats:
                        self._heard[other] = (now_at, time.monotonic())
                self._stopping.wait(BEAT_S)

    def stop(self) -> None:
        self._stopping.set()

    def silences(self) -> Mapping[int, Silence]:
        """By rank; this one is never silent."""
        now = time.monotonic()
        return {self._rank: Silence(0.0, True)} | {
            other: Silence(now - heard_at, beats > 0) for other, (beats, heard_at) in self._heard.items()}
