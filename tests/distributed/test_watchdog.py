"""Who is said to have failed: ranks as threads of this process, over real connections, on a fast clock."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from threading import Event, Thread, Timer

import pytest
from watched_ranks import PACE, WITHIN_S, Ranks, Waiting, hello, until

from vpipe.distributed.connection import Connection, break_off, connect, connections, listening_socket
from vpipe.distributed.failure_detector import WatchdogTiming
from vpipe.distributed.fault import Fault
from vpipe.distributed.value_exchange import Exchange
from vpipe.distributed.watchdog import TRANSITIONS, Phase
from vpipe.errors import RunError

pytestmark = pytest.mark.jobs

PHASES = """
              failure    raise      leave    close
    WATCHING  FAILED     REPORTING  LEAVING  CLOSED
    REPORTING RAISING    REPORTING  LEAVING  CLOSED
    FAILED    FAILED     RAISING    LEAVING  CLOSED
    RAISING   RAISING    RAISING    LEAVING  CLOSED
    LEAVING   LEAVING    LEAVING    LEAVING  CLOSED
    CLOSED    CLOSED     CLOSED     CLOSED   CLOSED
"""


def test_each_event_leads_from_each_phase_to_this_one() -> None:
    _, events, *rows = (line.split() for line in PHASES.splitlines())
    assert [phase.name for phase in Phase] == [row[0] for row in rows]
    assert {event: {Phase[row[0]]: TRANSITIONS[event].get(Phase[row[0]], Phase[row[0]]) for row in rows}
            for event in TRANSITIONS} == \
        {event: {Phase[row[0]]: Phase[row[column]] for row in rows} for column, event in enumerate(events, 1)}


@pytest.mark.parametrize(("calls", "phase", "ended"), [
    ("failure", "CLOSED", True), ("raise", "REPORTING", False), ("raise failure", "RAISING", False),
    ("failure raise", "RAISING", False), ("leave", "CLOSED", False), ("leave failure", "CLOSED", False),
    ("failure leave", "CLOSED", False), ("raise failure leave", "CLOSED", False)])
def test_only_a_rank_that_neither_raises_the_failure_nor_leaves_is_ended(ranks: Ranks, calls: str, phase: str,
                                                                         ended: bool) -> None:
    ranks.pace = replace(PACE, grace_s=1.0)
    ranks.start(2)
    watch = ranks.watches[1]
    for call in calls.split():
        {"failure": partial(watch._set_fault, Fault.ended(0)), "raise": partial(watch._go_on, "raise"),
         "leave": watch.leave}[call]()
    until(lambda: watch._phase is Phase[phase])
    if phase == "CLOSED":
        watch._thread.join(WITHIN_S)
    else:
        time.sleep(1.5)
    assert ranks.ended[1].empty() is not ended
    assert watch._phase is Phase[phase]
    assert (1 in ranks.broken_off) == ("failure" in calls and not calls.startswith("leave"))


def test_a_heartbeat_is_an_empty_message_whatever_the_ranks_do_and_however_many_they_are(ranks: Ranks) -> None:
    ranks.pace = replace(PACE, silent_s=WITHIN_S)
    quiet = hello(ranks.start(6, without=(5,)), 5)
    ranks.watches[1].transfer = Waiting(5)
    time.sleep(10 * PACE.beat_s)
    arrived = quiet.receive()
    assert len(arrived) in range(2, 15)
    assert not any(arrived)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ranks.join(5, 6, connect("127.0.0.1", server.getsockname()[1], WITHIN_S)).transfer = Waiting(1)
        with server.accept()[0] as connection:
            time.sleep(10 * PACE.beat_s)
            sent = connection.recv(1 << 16)
    assert sent == b"{}\n" * (len(sent) // 3)
    assert len(sent) in range(6, 45)
    quiet.close()


def test_states_are_sent_when_a_rank_asks_without_those_of_silent_ones(ranks: Ranks) -> None:
    quiet = hello(ranks.start(4, without=(3,)), 3)
    ranks.watches[1].transfer = Waiting(0)
    states = ranks.watches[2].ask_states()
    assert [None if state.waits is None else state.waits.peer for state in states] == [None, 0, None, None]
    assert states[3].silent_s >= PACE.beat_s
    assert max(state.silent_s for state in states[:3]) < states[3].silent_s
    for _ in range(50):
        ranks.lines[1].send({"ask": True})
        time.sleep(PACE.beat_s / 10)
    assert sum("ask" in message for message in quiet.receive()) in range(2, 20), "however often they want to know"
    quiet.close()


def test_a_lost_connection_is_an_end_and_all_hear_of_it_at_once(ranks: Ranks) -> None:
    detector = ranks.start(4, without=(2,))
    hello(detector, 2).close()
    for rank in (0, 1, 3):
        assert ranks.end_of(rank) == (
            f"error: rank 2 (stage 2) on b died without a message; rank {rank} (stage {rank}) on {'ab'[rank // 2]} was "
            f"at work (rank {rank}, peer rank 2)\nhint: see the rank's output or log; a process that is "
            "killed prints nothing (Linux kills one when memory runs out)")
    assert sorted(ranks.broken_off) == [0, 1, 3]  # so that the main thread raises, if it can


def test_a_rank_whose_main_thread_raises_is_not_ended(ranks: Ranks) -> None:
    detector = ranks.start(3, without=(2,))
    hello(detector, 2).close()
    assert ranks.watches[0].explain(1, None) == Fault.ended(2)  # not the neighbour that it lost
    ranks.end_of(1)
    assert ranks.ended[0].empty()


def test_a_death_goes_before_what_a_rank_says_that_noticed_it(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the detector reads the latter first: it had much else to do."""
    detector = ranks.start(3, without=(2,))
    line, find = hello(detector, 2), detector._find_failure
    until(lambda: all(member.connection is not None for member in detector._members))
    waits, said = Event(), Event()

    def late(now: float, *, ending: bool) -> None:
        waits.set()
        said.wait(WITHIN_S)
        find(now, ending=ending)

    monkeypatch.setattr(detector, "_find_failure", late)
    assert waits.wait(WITHIN_S)
    ranks.lines[1].send({"fault": asdict(Fault.hung_up(2, 1))})
    line.close()
    time.sleep(0.1)
    said.set()
    assert ranks.watches[0].explain(1, None) == Fault.ended(2)


def test_an_error_of_a_lost_connection_waits_for_the_death_that_it_may_come_from(ranks: Ranks) -> None:
    """It is an error of the user's own transfer, of which the watchdog knows nothing."""
    detector = ranks.start(3, without=(2,))
    line = hello(detector, 2)
    Timer(0.3, line.close).start()
    ranks.watches[1].failed(RuntimeError("[1] Connection closed by peer [127.0.0.1]:4711"))
    assert ranks.watches[1].fault == ranks.watches[0].explain(1, None) == Fault.ended(2)


def test_a_ranks_own_error_goes_before_its_end(ranks: Ranks) -> None:
    detector = ranks.start(3, without=(2,))
    line = hello(detector, 2)
    line.send({"fault": asdict(Fault.failed(2, ValueError("7")))})
    line.close()
    assert ranks.watches[0].explain(2, None) == Fault.failed(2, ValueError("7"))


def test_silence_is_a_failure_and_a_whole_host_fails_at_once(ranks: Ranks) -> None:
    detector = ranks.start(4, without=(2, 3))
    lines = [hello(detector, rank) for rank in (2, 3)]
    ranks.watches[0].transfer = Waiting(1)
    assert ranks.end_of(0).startswith("error: rank 2 (stage 2) on b, rank 3 (stage 3) on b gave no sign of life for ")
    assert "; rank 1 (stage 1) on a was at work" in ranks.end_of(1)
    for line in lines:
        line.close()


def test_one_that_ended_in_good_order_is_not_blamed(ranks: Ranks) -> None:
    detector = ranks.start(4, without=(3,))
    line = hello(detector, 3)
    ranks.watches.pop(1).leave()
    until(lambda: 1 in ranks.watches[2].left)
    line.close()
    assert ranks.end_of(2).startswith("error: rank 3 (stage 3) on b died without a message")
    assert ranks.ended[1].empty()


def test_the_last_word_is_said_before_the_line_is_closed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.start(2)
    say = Connection.send

    def slowly(line: Connection, message: Mapping[str, object] | bytes, **how: bool) -> None:
        if not isinstance(message, bytes) and "left" in message:
            time.sleep(4 * PACE.beat_s)  # the thread beats meanwhile
        say(line, message, **how)

    monkeypatch.setattr(Connection, "send", slowly)
    ranks.watches.pop(1).leave()
    until(lambda: 1 in ranks.watches[0].left)


def test_rank_0_ends_after_others_that_exchange_values_without_it(ranks: Ranks) -> None:
    ranks.pace = replace(PACE, grace_s=WITHIN_S, silent_s=WITHIN_S)
    detector = ranks.start(4)
    with ThreadPoolExecutor() as threads:
        def gathered(rank: int) -> Future[list[int]]:
            part = Exchange(ranks.watches[rank], "", WITHIN_S, (rank % 2, 2 + rank % 2))
            return threads.submit(part.all_gather, rank)

        assert [one.result(WITHIN_S) for one in [gathered(0), gathered(2)]] == [[0, 2]] * 2
        left = threads.submit(ranks.watches.pop(0).leave)
        time.sleep(4 * PACE.beat_s)
        assert [one.result(WITHIN_S) for one in [gathered(1), gathered(3)]] == [[1, 3]] * 2
        for rank in (1, 2, 3):
            ranks.watches.pop(rank).leave()
        left.result(WITHIN_S)
    detector.stop()


def test_when_rank_0_ends_in_good_order_the_others_go_on_without_a_watch(ranks: Ranks) -> None:
    detector = ranks.start(3)
    ranks.watches.pop(0).leave()
    for rank in (1, 2):
        ranks.watches[rank]._thread.join(WITHIN_S)
    time.sleep(4 * PACE.beat_s)  # the others have hung up, and the detector sees it
    assert detector._fault is None
    detector.stop()
    for rank in (1, 2):
        assert ranks.ended[rank].empty()
        assert ranks.watches[rank].explain(0, None) == Fault.left(0)


def test_rank_0_may_be_silent_too(ranks: Ranks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ranks.join(2, 3, connect("127.0.0.1", server.getsockname()[1], WITHIN_S))
        connection, _ = server.accept()
        with connection:
            assert "error: rank 0 (stage 0) on a gave no sign of life for " in ranks.end_of(2)
            assert b'"ranks": [0]' in connection.recv(1 << 16)  # said all the same: it may only sleep


def test_all_ranks_report_a_ranks_own_error(ranks: Ranks) -> None:
    ranks.start(3)
    ranks.watches[1].failed(RunError("IndexError: 7", hint="see there", rank=1, stage=1, action="1F0"))
    ranks.watches.pop(1).leave()
    for rank in (0, 2):
        fault = ranks.watches[rank].explain(1, None)
        assert (fault.ranks, fault.what, fault.hint) == ((1,), "failed: IndexError: 7 (action 1F0)", "see there")
    assert ranks.ended[1].empty()


def test_the_first_failure_counts(ranks: Ranks) -> None:
    detector = ranks.start(3, without=(1,))
    hello(detector, 1).close()
    until(lambda: ranks.watches[2].fault)
    ranks.watches[2].failed(ValueError("what follows from it"))
    assert ranks.watches[2].explain(1, None) == Fault.ended(1)
    assert ranks.watches[0].explain(2, None) == Fault.ended(1)


def test_a_stranger_is_shown_out(ranks: Ranks) -> None:
    detector = ranks.start(3, without=(2,))
    for said in (b'{"rank": 2, "nonce": "1", "proof": "guessed"}\n', b'{"rank": 2, "nonce": "", "proof": "\\ud800"}\n',
                 b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"\xff\n",
                 b"x" * (2 << 20), b"[" * 4000 + b"\n", b"x" * 5000, b""):
        with socket.create_connection(("127.0.0.1", detector.port), WITHIN_S) as stranger:
            try:
                assert json.loads(stranger.recv(100)).keys() == {"nonce"}
                stranger.sendall(said)
                assert stranger.makefile("rb").read() in (b"", b'{"proof": null}\n')
            except ConnectionError:
                pass
    assert detector._members[2].connection is None
    assert ranks.watches[0]._connection.closed is False  # and the detector is there for the others


def test_many_unauthenticated_do_not_use_up_the_files_of_the_hub(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.distributed.failure_detector.MAX_UNAUTHENTICATED", 2)
    detector = ranks.start(2, without=(1,))
    with ExitStack() as open_ones:
        strangers = [open_ones.enter_context(socket.create_connection(("127.0.0.1", detector.port), WITHIN_S))
                     for _ in range(6)]
        for stranger in strangers[:2]:
            stranger.recv(100)
            assert stranger.recv(1) == b""  # before it was silent for long
        assert len(detector._unauthenticated) == 4
        line = hello(detector, 1)
        until(lambda: detector._members[1].connection is not None)
        line.close()


def test_one_that_sends_without_end_does_not_silence_the_hub(ranks: Ranks) -> None:
    """A rank that has gone mad: the others hear on, and it is lost when what it says is too long."""
    detector = ranks.start(3, without=(2,))
    line, stop = hello(detector, 2), Event()

    def send() -> None:
        line._socket.setblocking(True)
        while not stop.is_set():
            try:
                line._socket.sendall(b"{}\n" * 10_000)
            except OSError:
                return

    thread = Thread(target=send)
    thread.start()
    try:
        until(lambda: detector._members[2].connection is not None)
        time.sleep(PACE.silent_s + 0.5)
        assert ranks.ended[0].empty()
        assert ranks.ended[1].empty()
        assert ranks.watches[1]._states[2].waits is None
    finally:
        stop.set()
        ranks.stop()
        ranks.watches.clear()
        thread.join(WITHIN_S)
        line.close()


def test_a_hub_that_ends_by_an_error_says_so(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    detector = ranks.start(3)
    until(lambda: all(member.connection is not None for member in detector._members))

    def broken(now: float, ending: bool) -> None:
        raise KeyError("judge")

    monkeypatch.setattr(detector, "_find_failure", broken)
    for rank in range(3):
        assert "rank 0 (stage 0) on a failed: its watchdog's server ended by KeyError: 'judge'; " in ranks.end_of(rank)


@pytest.mark.parametrize(("address", "bound"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"),
                                                ("203.0.113.9", "::"), ("a-name", "::")])
def test_the_hub_listens_where_the_ranks_meet(address: str, bound: str) -> None:
    with listening_socket(address) as server:
        assert server.getsockname()[0] in (bound, {"::": "0.0.0.0"}.get(bound))


def test_a_pause_of_the_own_process_is_nobodys_silence(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.start(2)
    clock, offset = time.monotonic, [0.0]
    monkeypatch.setattr("vpipe.distributed.failure_detector.monotonic", lambda: clock() + offset[0])
    monkeypatch.setattr("vpipe.distributed.watchdog.monotonic", lambda: clock() + offset[0])
    time.sleep(0.2)
    offset[0] = 100.0  # as after SIGCONT
    time.sleep(0.5)
    assert ranks.ended[0].empty()
    assert ranks.ended[1].empty()
    assert ranks.watches[0].fault is None


@pytest.mark.parametrize("timeout_s", [2.0, 4.0, 60.0, 600.0])
def test_all_is_over_within_the_timeout(timeout_s: float) -> None:
    pace = WatchdogTiming.from_timeout(timeout_s)
    assert pace.silent_s + 2 * pace.beat_s + pace.grace_s < timeout_s
    assert pace.silent_s >= 5 or timeout_s < 10
    assert pace.beat_s + pace.grace_s < 10


def test_the_connections_of_this_process_are_found_and_broken_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = connections()
        with socket.create_connection(server.getsockname(), WITHIN_S) as mine, server.accept()[0] as theirs:
            both = connections().items() - before.items()
            assert {number for number, _ in both} == {mine.fileno(), theirs.fileno()}
            assert connections(but=[server.getsockname()[1]]).items() - before.items() == set()
            break_off({mine.fileno(): "socket:[0]"})  # another one by now
            mine.sendall(b"x")
            break_off({mine.fileno(): dict(both)[mine.fileno()]})
            assert mine.recv(1) == b""
            assert theirs.recv(2) + theirs.recv(2) == b"x"


def test_a_transfer_that_nothing_else_ends_has_the_limit_that_it_says(ranks: Ranks) -> None:
    """As the making of a communicator of nccl, inside which the main thread stays for ever."""
    ranks.start(2)
    ranks.watches[1].transfer = Waiting(0, limit_s=0.3)
    assert ranks.end_of(1).startswith("error: rank 0 (stage 0) is running but did not answer in time; rank 1 "
                                      "(stage 1) was waiting for rank 0; rank 1 (stage 1) has waited 0.")
    assert ranks.end_of(0).startswith("error: rank 0 (stage 0) is running but did not answer in time; ")


def test_rank_0_that_ends_at_once_is_still_there_for_a_rank_that_connects_later(ranks: Ranks) -> None:
    """Where the program made the process group, nothing else keeps it until then."""
    detector = ranks.start(2, without=(1,))
    ranks.watches.pop(0).leave()
    stopping = Thread(target=detector.stop)
    stopping.start()
    time.sleep(2 * PACE.beat_s)
    line, heard = hello(detector, 1), list[object]()
    until(lambda: heard.extend(line.receive()) or heard)
    line.close()
    stopping.join(WITHIN_S)


def test_rank_0_that_ends_waits_for_a_rank_that_was_not_heard_lately(ranks: Ranks) -> None:
    """After a cut TCP waits before it sends again; what then meets a closed connection takes the failure along."""
    detector = ranks.start(3, without=(1, 2))
    quiet, killed = hello(detector, 1), hello(detector, 2)
    time.sleep(6 * PACE.beat_s)
    killed.close()
    assert ranks.end_of(0).startswith("error: rank 2 (stage 2) on b died without a message")
    ranks.watches.pop(0).leave()
    stopping = Thread(target=detector.stop)
    stopping.start()
    time.sleep(3 * PACE.beat_s)
    assert any("fault" in message for message in quiet.receive())
    assert not quiet.closed
    quiet.close()
    stopping.join(WITHIN_S)
