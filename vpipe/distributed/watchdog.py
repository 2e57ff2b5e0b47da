"""Watch the other ranks from a thread of each rank: send heartbeats, hear of failures, end this process for one.

A heartbeat says that the process lives, and no more. Rank 0 notices a failure first, in its
:mod:`~vpipe.distributed.failure_detector`, and sends it here.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum
from math import inf
from threading import Condition, Thread, current_thread, main_thread
from time import monotonic, perf_counter, sleep
from typing import Any, Literal, Protocol

from vpipe.distributed.connection import BEAT, Connection
from vpipe.distributed.failure_detector import RankState, Wait, WatchdogTiming
from vpipe.distributed.fault import Fault, may_follow
from vpipe.distributed.wait_graph import LONG, LongWaits, WaitChain, sentence
from vpipe.errors import RunError


class Transfer(Protocol):
    """A transfer that the main thread is in; its ``str`` is ``waiting for the loss of step 3 from stage 1 with rank
    2``.
    """

    @property
    def peer(self) -> int | None:
        """The other rank; None when all take part."""

    @property
    def purpose(self) -> str:
        """The words between "has waited 31 s" and the other rank: ``for the loss of step 3 from stage 1 from``."""

    @property
    def limit_s(self) -> float | None:
        """Seconds after which the watchdog gives it up, for transfers without a timeout of their own: nccl waits
        without end for the peer with which it makes a communicator."""


class Activity:
    """The activity of the main thread: one attribute to write per action. The reader asks once a second, the writer
    thousands of times.

    Attributes:
        now: what is under way, and since when by ``perf_counter``: an action of a schedule; in words, ``reading a
            batch``; None outside of the pipeline, in the program that runs it.
        part: what it is a part of, ``evaluating``.
    """

    __slots__ = ("now", "part")

    def __init__(self) -> None:
        self.now: tuple[object, float] = (None, perf_counter())
        self.part: str | None = None

    def rest(self) -> None:
        """Note that no action is under way."""
        self.now = (self.part, perf_counter())

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Name the activity meanwhile, whatever actions it is made of: ``saving a checkpoint``."""
        before, self.part = self.part, what
        self.rest()
        try:
            yield
        finally:
            self.part = before
            self.rest()

    def describe(self) -> tuple[str | None, float]:
        """Return what is under way, in words, and for how many seconds."""
        (what, since), part = self.now, self.part
        words = what if what is None or isinstance(what, str) else f"running {what}"
        return (f"{words} ({part})" if part not in (None, words) else words), perf_counter() - since


@dataclass(frozen=True)
class _ExchangeWait:
    """The transfer of a main thread that waits for the values of all ranks."""

    doing: str
    peer: None = None
    limit_s: None = None
    purpose: str = "for what each has from"

    def __str__(self) -> str:
        return self.doing


PATIENCE_S = 2.0
"""How long a rank that lost another asks who failed first, before it blames the one that it lost."""


class Phase(Enum):
    """How far a rank is on its way from work to the end of its watch."""

    WATCHING = "no failure is known"
    REPORTING = "the main thread has met a failure, and waits to hear which one of the job came first"
    FAILED = "a failure is known, which the main thread must raise in time, or the process is ended"
    RAISING = "the main thread raises the failure that is known"
    LEAVING = "the program is at its end, and waits until rank 0 has received all that was sent"
    CLOSED = "nothing arrives any more"


TRANSITIONS: Mapping[str, Mapping[Phase, Phase]] = {
    "failure": {Phase.WATCHING: Phase.FAILED, Phase.REPORTING: Phase.RAISING},
    "raise": {Phase.WATCHING: Phase.REPORTING, Phase.FAILED: Phase.RAISING},
    "leave": dict.fromkeys((Phase.WATCHING, Phase.REPORTING, Phase.FAILED, Phase.RAISING), Phase.LEAVING),
    "close": dict.fromkeys(Phase, Phase.CLOSED)}
"""What an event makes of a phase; other phases stay. The events: a failure becomes known, the main thread is about to
raise one, the program leaves, the thread of the watchdog has closed the connection."""


class Watchdog:
    """Send the heartbeats of one rank to rank 0 and receive the state of all, in a thread of its own.

    The main thread may be anywhere: in a transfer that nothing interrupts, in a debugger, in a pause of the
    user's. As long as this thread beats, the rank is alive. When a failure becomes known, the transfers of this
    process are broken off, so that the main thread raises; one that does not within ``timing.grace_s`` is ended. It is
    also the :class:`~vpipe.distributed.value_exchange.ExchangeLine` by which this rank exchanges values.

    Args:
        hosts: by rank.
        connection: with rank 0, which knows who this is.
        end: ends the process; it is given the error that the main thread should have raised.

    Attributes:
        describe: ``rank -> "rank 2 (stage 2)"``.
        transfer: that the main thread is in.
        activity: of the main thread.
        note: shows long waits; on rank 0, from another thread.
        break_off: makes the main thread's transfers fail.
        fault: the failure that ends the job, once one is known.
        left: ranks whose programs have come to their end.
        stops: why a rank asked all to stop, by what is to stop.
        abandoned: batches in which ranks that have not stepped will not: the pipeline, and a number.
    """

    def __init__(self, rank: int, hosts: Sequence[str], connection: Connection, timing: WatchdogTiming,
                 end: Callable[[RunError], None]) -> None:
        self.rank, self.hosts = rank, hosts
        self.describe: Callable[[int], str] = lambda rank: f"rank {rank}"
        self.transfer: Transfer | None = None
        self.activity = Activity()
        self.note: Callable[[str], None] = lambda text: None
        self.break_off: Callable[[], None] = lambda: None
        self.call, self.told = "", False
        self._connection, self.timing, self._end = connection, timing, end
        self._changed = Condition()  # what follows, up to the names
        self._phase = Phase.WATCHING
        self.fault: Fault | None = None
        self.left = set[int]()
        self._states = [RankState() for _ in hosts]  # when a rank asked last
        self._arrived: dict[str, Mapping[str, Any]] = {}  # exchanges by their names, until they are taken
        self._names = Counter[str]()
        self._long_waits = LongWaits(rank, timing, self.place, lambda text: self.note(text))
        self._asks = False  # for the states of all, since this rank has waited for long
        self._seen: tuple[Transfer | None, float] = None, 0.0  # the transfer of the main thread, and since when
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._leave_by = self._raise_by = 0.0
        self.stops: dict[str, str] = {}
        self._asked: deque[dict[str, str]] = deque()  # here, and still to be sent
        self._stepping: dict[int, tuple[int, bool | None]] = {}  # by pipeline, the arguments of ``may_step``
        self.abandoned = set[tuple[int, int] | None]()
        self._in_parts = False  # this rank has exchanged values with some of the others only
        self._thread = Thread(target=self._run, name="vpipe-watch", daemon=True)
        self._thread.start()

    # -- what the main thread calls --------------------------------------------------------------------

    def place(self, rank: int) -> str:
        """Return a rank with its stages, and its host if there are several: ``rank 2 (stage 2) on hostB``."""
        return self.describe(rank) + (f" on {self.hosts[rank]}" if len(set(self.hosts)) > 1 else "")

    def error(self, fault: Fault, meanwhile: str) -> RunError:
        """Return a failure as the error that this rank raises.

        Args:
            meanwhile: what this rank did.
        """
        chain = f"; {fault.chain}" if fault.chain else ""
        error = RunError(f"{fault.sentence(self.place)}; {meanwhile}{chain}", hint=fault.hint, rank=self.rank,
                         peer=None if self.rank in fault.ranks else next(iter(fault.ranks), None))
        if self.rank != self._reporter(fault):
            error.brief = self._brief(fault)
        return error

    def reported_by_another(self, error: BaseException) -> str | None:
        """Send all ranks an error of this one; if another rank reports the same, return the line to print instead."""
        self.failed(error)
        fault = self.fault
        if fault is None or self.rank in fault.ranks or fault != replace(Fault.failed(0, error), ranks=fault.ranks):
            return None
        return self._brief(fault)

    def _reporter(self, fault: Fault) -> int:
        """Return the rank that prints a failure: the one that failed if it can, else the first of the others."""
        there = [rank for rank in range(self.ranks) if rank not in fault.ranks and rank not in self.left]
        return there[0] if there and not fault.reported else min(fault.ranks, default=0)

    def _brief(self, fault: Fault) -> str:
        short = replace(fault, what="failed") if fault.reported else fault
        return f"{self.place(self.rank)} ends: {short.sentence(self.place)}"

    @property
    def is_reporter(self) -> bool:
        """True on the rank that prints the failure which ends the job."""
        return self.fault is None or self._reporter(self.fault) == self.rank

    def explain(self, peer: int | None, waited_s: float | None) -> Fault:
        """Return why a transfer failed: the first failure of the job. Takes up to twice :data:`PATIENCE_S`.

        Args:
            peer: of the transfer; None when all ranks take part.
            waited_s: the timeout that has passed; None when the connection broke.
        """
        self._go_on("raise")
        if waited_s is not None:
            self._report(self._blame(peer, waited_s, self.ask_states()))
        elif peer in self.left or not self._hears_of_failure(PATIENCE_S):
            rank, by = (self.rank, None) if peer is None else (peer, self.rank)
            self._report(Fault.left(rank) if peer in self.left else Fault.hung_up(rank, by))
        assert self.fault is not None
        return self.fault

    def failed(self, error: BaseException) -> None:
        """Send all ranks an error of this one, with its host; one that may come of another's end only if none did."""
        self._go_on("raise")
        if isinstance(error, RunError) and (error.rank, error.peer) == (self.rank, None) and len(set(self.hosts)) > 1:
            error.host = self.hosts[self.rank]
        follows = may_follow(str(error)) or getattr(error, "peer", None) is not None
        if self._phase is not Phase.LEAVING and not self._hears_of_failure(PATIENCE_S if follows else 0):
            self._report(Fault.failed(self.rank, error))

    def ask_states(self) -> Sequence[RankState]:
        """Ask all ranks what they wait for, or do. Takes up to :data:`PATIENCE_S`."""
        with self._changed:
            latest = self._states
            self._connection.send({"ask": True})
            self._changed.wait_for(lambda: self._states is not latest or self._phase is Phase.CLOSED, PATIENCE_S)
            return self._states

    def ask_stop(self, why: str, what: str = "") -> None:
        """Ask all ranks to stop and save; from a signal handler, too: no locks."""
        self.stops.setdefault(what, why)
        self._asked.append({what: why})
        self._wake_thread()

    def give_up(self, batch: tuple[int, int]) -> bool:
        """Keep all ranks from stepping in a batch; return False if one has stepped."""
        while True:
            name = self.next_name(f"rank {self.rank} gives up a batch")
            self._connection.send({"give up": batch, "by": self.rank, "name": name})
            stepped = [vote for *_, vote in self.take(name, "giving up a batch", self.timing.silent_s)]
            if None not in stepped:  # of a rank that is about to know
                return not any(stepped)
            sleep(0.01)

    def may_step(self, batch: tuple[int, int], stepped: bool | None) -> bool:
        """Note whether this rank has stepped in a batch, None: now it tries; return False if the batch is given up."""
        self._stepping[batch[0]] = batch[1], stepped  # before it looks: the thread that answers does so in turn
        return batch not in self.abandoned

    # -- exchanges: the protocol ExchangeLine ------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    def next_name(self, channel: str) -> str:
        """Return the name of the next exchange of a channel."""
        self._names[channel] += 1
        return f"{channel} {self._names[channel]}"

    def give(self, message: Mapping[str, Any]) -> None:
        """Send a message for rank 0's relay."""
        self._in_parts |= len(message.get("of") or self.hosts) < self.ranks
        self._connection.send(message)
        if self._connection.has_unsent:
            self._wake_thread()  # which sends the rest

    def take(self, name: str, doing: str, timeout_s: float | None) -> list[Any]:
        """Wait for the values of all ranks in an exchange.

        Raises:
            RunError: a rank failed, ended before it took part, or did not take part in time. A thread beside the main
                one goes on after a failure as long as all ranks still answer: a checkpoint is worth it.
        """
        in_main = current_thread() is main_thread()
        if in_main and timeout_s is not None:
            self.transfer = _ExchangeWait(doing)
        try:
            message = self._wait(name, in_main, timeout_s)
            me = self.place(self.rank)
            if timeout_s is not None and message is None:
                self.give({"late": name})
                message = self._wait(name, in_main, PATIENCE_S) or {}
                if "values" not in message:
                    fault = self.explain(message.get("late"), timeout_s)
                    raise self.error(fault, f"{me} gave up {doing} after {timeout_s:g} s")
            assert message is not None, "without a limit it comes"
            if "values" in message:
                values: list[Any] = message["values"]
                return values
            fault = Fault.left(message.get("without", 0))
            if in_main:
                self._go_on("raise")
                if self.fault is None:
                    self._report(fault)
            raise self.error(self.fault or fault, f"{me} was {doing}")
        finally:
            if in_main:
                self.transfer = None

    def _wait(self, name: str, in_main: bool, timeout_s: float | None) -> Mapping[str, Any] | None:
        """Wait for what arrives of an exchange; empty when nothing can any more, None when the time is over."""
        with self._changed:
            came = self._changed.wait_for(lambda: name in self._arrived or self._phase is Phase.CLOSED or (
                self.fault is not None and (in_main or self._connection.closed)), timeout_s)
            return self._arrived.pop(name, {}) if came else None

    def leave(self) -> None:
        """Tell rank 0 that this program comes to its end, so that it is not taken for dead.

        Where ranks exchange values in parts, such as lanes, others may not have all of theirs yet when rank 0, which
        relays them, is done with its own: it ends after the others then, or when they have not ended for long.
        """
        patience = monotonic() + self.timing.grace_s
        while (self.rank == 0 and self._in_parts and self.fault is None and monotonic() < patience
               and len(self.left | {0}) < self.ranks):
            sleep(min(0.01, self.timing.beat_s))
        if self.fault is None:
            self._connection.send({"left": True})
        self._leave_by = monotonic() + self.timing.grace_s
        self._go_on("leave")  # not before: the thread closes the connection when it sees it
        self._thread.join(self.timing.grace_s)

    def _go_on(self, event: Literal["failure", "raise", "leave", "close"]) -> None:
        """Go on to the phase that an event leads to."""
        with self._changed:
            self._phase = TRANSITIONS[event].get(self._phase, self._phase)
            self._changed.notify_all()
        self._wake_thread()

    def _wake_thread(self) -> None:
        with suppress(OSError):
            self._wake.send(b".")

    def _hears_of_failure(self, within_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.fault is not None, within_s)

    def _report(self, fault: Fault) -> None:
        """Send rank 0 a failure and receive which one came first; this one, when it does not answer."""
        self._connection.send({"fault": asdict(fault)})
        if not self._thread.is_alive() or not self._hears_of_failure(PATIENCE_S):
            self._set_fault(fault)

    def _set_fault(self, fault: Fault) -> None:
        with self._changed:
            self.fault = self.fault or fault
            self._go_on("failure")

    def _blame(self, peer: int | None, waited_s: float, states: Sequence[RankState]) -> Fault:
        """Return the fault of the rank at the end of the waits: one that is silent, else one that does not wait."""
        purpose = "for" if self.transfer is None else self.transfer.purpose
        own = RankState(waits=Wait(peer, waited_s, purpose), at=self.activity.describe())
        states = [*states[:self.rank], own, *states[self.rank + 1:]]
        chain = WaitChain.follow(states, self.rank, waited_s / 2, self.timing.beat_s)
        return replace(chain.fault, chain="; ".join(chain.sentences(self.place)))

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        last = beat_at = heard_at = monotonic()
        acts_on_failure = True
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._connection, selectors.EVENT_READ)
            while True:
                if self.fault is not None and acts_on_failure:
                    acts_on_failure = False
                    self._connection.send({"heard": True})
                    self.break_off()
                    self._raise_by = monotonic() + self.timing.grace_s
                if self._is_over():
                    break
                sends = selectors.EVENT_WRITE if self._connection.has_unsent else 0
                selector.modify(self._connection, selectors.EVENT_READ | sends)
                for key, events in selector.select(max(0.0, beat_at - monotonic())):
                    if key.fileobj is self._woken:
                        self._woken.recv(64)
                        continue
                    if events & selectors.EVENT_WRITE:
                        self._connection.flush()
                    if events & selectors.EVENT_READ and self._receive():
                        heard_at = monotonic()
                while self._asked:
                    self._connection.send({"stop": self._asked.popleft()})
                now = monotonic()
                if now - last > 2 * self.timing.beat_s:  # it was this process that paused: rank 0 was not silent
                    heard_at += now - last
                last = now
                if self.fault is None and self._phase is not Phase.LEAVING and 0 not in self.left:
                    self._find_failure_of_rank_0(now - heard_at)
                if now >= beat_at:
                    beat_at = now + self.timing.beat_s
                    if self.fault is None:
                        self._beat()
        for end in (self._connection, self._wake, self._woken):
            end.close()
        with self._changed:
            self._changed.wait_for(lambda: self._phase is not Phase.FAILED, max(0.0, self._raise_by - monotonic()))
            phase = self._phase
            self._go_on("close")
        if phase is Phase.FAILED and self.fault is not None:
            meanwhile = str(self.transfer or self.activity.describe()[0] or "at work")
            self._end(self.error(self.fault, f"{self.place(self.rank)} was {meanwhile}"))
        elif phase is Phase.LEAVING and self.fault is None:
            self._long_waits.end()

    def _is_over(self) -> bool:
        """Return whether this thread has nothing left to do for the phase that the rank is in."""
        if self._phase is Phase.LEAVING:
            if not self._connection.has_unsent:
                self._connection.end()
            return self._connection.closed or 0 in self.left or monotonic() > self._leave_by
        if self.fault is None:
            return 0 in self.left  # and the failure detector has ended with it
        return self._connection.closed or (self._phase is Phase.FAILED and monotonic() > self._raise_by)

    def _find_failure_of_rank_0(self, silent_s: float) -> None:
        if self._connection.closed:
            self._set_fault(Fault.ended(0))
        elif silent_s > self.timing.silent_s:
            fault = Fault.silent(silent_s, 0)
            self._connection.send({"fault": asdict(fault)})  # it may only sleep
            self._set_fault(fault)

    def _beat(self) -> None:
        """Send a heartbeat; ask for the states of all while this rank has waited for long, and once when it goes on.

        Give up a transfer from which the main thread does not come back: rank 0 tells why, or does not answer.
        """
        self._connection.send(BEAT)
        transfer, waited_s = self._waited()
        limit_s = inf if transfer is None or transfer.limit_s is None else transfer.limit_s
        asked, self._asks = self._asks, waited_s > min(self.timing.long_s, limit_s)
        if asked or self._asks:
            self._connection.send({"ask": True})
        if (late_s := waited_s - limit_s - self.timing.grace_s) > 0 and transfer is not None:
            fault = self._blame(transfer.peer, waited_s, self._states)
            self._connection.send({"fault": asdict(fault)})
            if late_s > 2 * self.timing.beat_s:
                self._set_fault(fault)

    def _waited(self) -> tuple[Transfer | None, float]:
        """Return the transfer that the main thread is in, and for how long as far as this thread has seen."""
        if self.transfer is not self._seen[0]:
            self._seen = self.transfer, monotonic()
        transfer, since = self._seen
        return transfer, 0.0 if transfer is None else monotonic() - since

    def _own_state(self) -> list[object]:
        """Return what the others learn of this rank: of what is new no more than whom it waits for."""
        new_s = 2 * self.timing.beat_s
        transfer, waited_s = self._waited()
        what, seconds = self.activity.describe()
        waits = None if transfer is None else \
            [transfer.peer, waited_s, *([transfer.purpose] if waited_s > new_s else [])]
        return [waits, [what, seconds] if seconds > new_s else None]

    def _receive(self) -> bool:
        with self._changed:
            messages = self._connection.receive()
            for message in filter(None, messages):  # an empty one is a heartbeat
                self._handle(message)
            self._changed.notify_all()
            return bool(messages)

    def _handle(self, message: Mapping[str, Any]) -> None:
        if "given" in message:
            self._arrived[message["given"]] = message
        if "left" in message:
            self.left.update(message["left"])
        if "ask" in message:
            self._connection.send({"state": self._own_state()})
        if "states" in message:
            self._states = [RankState(silent_s, left, waits and Wait(*waits), at)
                            for silent_s, left, waits, at in message["states"]]
            if self.fault is None:
                self._long_waits.timing = self.timing
                self._long_waits.update(self._states)
        if "give up" in message:
            pipeline, number = message["give up"]
            self.abandoned.add((pipeline, number))
            latest, stepped = self._stepping.get(pipeline, (-1, False))
            vote = ["giving up a batch", None, latest > number or (latest == number and stepped)]
            self.give({"give": message["name"], "value": vote, "of": None, "hears": self.rank == message["by"]})
        if "fault" in message:
            self._set_fault(Fault.from_message(message["fault"]))
        if "stop" in message:
            for what, why in message["stop"].items():
                self.stops.setdefault(what, why)


# -- this process --------------------------------------------------------------------------------------------------


class ProcessWatch:
    """The part of this process in its job: what it tells the other ranks, and hears of them. Alone it tells nobody.

    Attributes:
        activity: of the main thread; ranks that wait for long report it.
        watchdog: of this process; None as long as it has met no other ranks.
        report: shows why this process is ended in the middle of its work, by default on stderr.
        note: shows long waits on rank 0, called from another thread; by default on stderr.
    """

    def __init__(self) -> None:
        self.activity = Activity()
        self.watchdog: Watchdog | None = None
        self.report: Callable[[RunError], None] = _print
        self.note: Callable[[str], None] = _print
        self._stops: dict[str, str] = {}  # asked here

    def begin(self, watchdog: Watchdog) -> None:
        """Take the watchdog of a job that this process has joined."""
        self.watchdog = watchdog
        watchdog.activity, watchdog.note = self.activity, lambda text: self.note(text)
        for what, why in self._stops.items():
            watchdog.ask_stop(why, what)  # asked while this process was joining the others

    def failed(self, error: BaseException) -> None:
        """Send all ranks an error of this one, if there are others."""
        if self.watchdog is not None:
            self.watchdog.failed(error)

    def late(self, error: Exception) -> RunError | None:
        """Return the error to raise where a collective has waited too long, with what ranks do that wait for none."""
        if (dog := self.watchdog) is None or not isinstance(error, RuntimeError) or "imed out" not in str(error):
            return None
        busy = [sentence(rank, state, dog.place) for rank, state in enumerate(dog.ask_states())
                if rank != dog.rank and state.waits is None]
        me, doing = dog.place(dog.rank), self.activity.describe()[0] or dog.call
        return RunError("; ".join([f"{me} has waited too long for other ranks in a collective, {doing}", *busy[:LONG]]),
                        hint=Fault.busy(dog.rank).hint, rank=dog.rank)

    def end_process(self, error: RunError) -> None:
        """Report an error and end this process, from any thread."""
        with suppress(Exception):
            self.report(error)
        os._exit(error.exit_status)

    def ask_stop(self, why: str, what: str = "") -> None:
        """Ask all ranks to stop and save; the first to ask gives the reason, such as ``SIGTERM``.

        A signal handler may call it, whatever it interrupts: it takes no lock and does not wait.

        Args:
            what: is to stop, by a name that all ranks give it; the run when empty.
        """
        if what not in self._stops:
            self._stops[what] = why
            if self.watchdog is not None:
                self.watchdog.ask_stop(why, what)

    def why_stop(self, what: str = "") -> str | None:
        """Return why a rank of this job, this one or another, asked to stop it; None while none did.

        Other ranks know within milliseconds, not all at one time: they agree on a step when one of them decides.
        """
        return self._stops.get(what) or (None if self.watchdog is None else self.watchdog.stops.get(what))

    @property
    def stop_asked(self) -> str | None:
        """Why a rank of this job was asked to stop; None while none was."""
        return self.why_stop()

    def forget_stop(self) -> None:
        """Forget a request to stop: it was about another run than the next, in a process alone; ranks have one each."""
        self._stops.pop("", None)


def _print(message: RunError | str) -> None:
    print(message if isinstance(message, str) else message.brief or message, file=sys.stderr, flush=True)


watch = ProcessWatch()
"""The part of this process in its job."""
