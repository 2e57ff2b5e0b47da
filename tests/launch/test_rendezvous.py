"""What the ranks that torchrun or srun started say to one another before they train, and when one does not."""

from __future__ import annotations

import re
from threading import Event, Thread
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import HashStore, Store

from vpipe.distributed.environment import RankEnvironment
from vpipe.distributed.network import free_port
from vpipe.errors import RunError, UserError
from vpipe.launch import rendezvous
from vpipe.launch import rendezvous as meetings
from vpipe.launch.rendezvous import Agreement, Meeting, Pulse, Silence, together


def state(host: str, *problems: str, status: int = 0, data: str = "d0") -> dict[str, Any]:
    return {"host": host, "source": None, "status": status, "data": data,
            "problems": [[what, "mend it", None] for what in problems]}


def test_all_that_is_wrong_is_said() -> None:
    """A failure of one rank does not hide the mistakes that others found."""
    mixed = together([state("a", "no data", status=2), state("b", "no data", "broken", status=1)], {})
    assert isinstance(mixed, RunError)
    assert str(mixed) == ("error: no data\nhint: mend it\nerror: broken (rank 1 on b)\nhint: mend it")
    mistakes = together([state("a", "no data", status=2), state("b", "no GPU", status=2)], {})
    assert isinstance(mistakes, UserError)
    assert [problem.what for problem in mistakes.problems] == ["no data (rank 0 on a)", "no GPU (rank 1 on b)"]


def test_other_data_on_another_host_are_refused() -> None:
    assert together([state("a"), state("b")], {}) is None
    refused = together([state("a"), state("a"), state("b", data="d1")], {})
    assert isinstance(refused, UserError)
    assert "do not read the same data: ranks 0, 1 on a read d0; rank 2 on b read d1 (" in str(refused)


def test_ranks_that_never_come_or_fall_silent() -> None:
    silences = {1: Silence(121, False), 2: Silence(61, True), 3: Silence(121, False)}
    lost = together([state("a"), None, None, None], silences)
    assert isinstance(lost, RunError)
    assert "error: 2 ranks of 4 did not come within 120 s: 1, 3\n" in str(lost)
    assert "error: 1 rank of 4 gave no sign of life for 60 s: 2\n" in str(lost)
    assert not Silence(119, False).too_long


def member(rank: int, port: int, ranks: int = 2) -> RankEnvironment:
    return RankEnvironment("srun", rank, ranks, 0, f"n{rank}", "127.0.0.1", port)


def test_rank_0_gives_up_on_a_rank_that_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MEET_S", 0.2)
    with pytest.raises(RunError, match=re.escape("1 rank of 2 did not come within 0.2 s: 1\n")):
        Meeting(member(0, free_port(None))).settle(None, "d0", lambda agents: "never")


def test_a_pulse_is_heard_and_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "BEAT_S", 0.01)
    store = HashStore()
    speaker, listener = Pulse(store, 1, [0]), Pulse(store, 0, [1, 2])
    heard = Event()
    Thread(target=lambda: [None for _ in iter(lambda: listener.silences()[1].came, True)] == heard.set(),
           daemon=True).start()
    assert heard.wait(30)
    assert not listener.silences()[2].came
    assert not listener.silences()[0].too_long
    speaker.stop()
    listener.stop()


def test_the_port_of_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port(None)
    monkeypatch.setenv("VPIPE_RUN", "17.0")
    first = Meeting(member(0, port))
    monkeypatch.setenv("VPIPE_RUN", "18.0")
    with pytest.raises(RunError, match=re.escape(f"127.0.0.1 port {port} belongs to another run (17.0), not to this "
                                                 "one (18.0) (rank 1)\nhint: give each run a port of its own")):
        Meeting(member(1, port))
    first._pulse.stop()


def test_a_store_that_does_not_answer_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a rank 0 which is stopped: its connections stand, and nothing comes."""
    over = Event()

    class Stopped:
        def check(self, *question: Any) -> bool:
            return not over.wait()

        set = check

    monkeypatch.setattr(meetings, "GRACE_S", 0.05)
    meeting = Meeting(member(0, free_port(None), 1))
    meeting._store = cast(Store, Stopped())
    ended = Event()

    def ask() -> None:
        assert not meeting.cause_is_said(0.05)
        meeting.found_cause()
        ended.set()

    Thread(target=ask, daemon=True).start()
    assert ended.wait(30)
    over.set()
    meeting._pulse.stop()


def test_two_ranks_agree() -> None:
    port = free_port(None)
    first, found = Meeting(member(0, port)), list[Agreement]()
    second = Meeting(member(1, port))
    other = Thread(target=lambda: found.append(second.settle(None, "d0", lambda agents: "not asked")), daemon=True)
    other.start()
    mine = first.settle(None, "d0", lambda agents: "a folder")
    other.join(30)
    assert found == [mine] == [Agreement("a folder", ["n0", "n1"], ["127.0.0.1", "127.0.0.1"])]
    assert not second.cause_is_said(0.0)
    first.found_cause()
    assert second.cause_is_said(5.0)
