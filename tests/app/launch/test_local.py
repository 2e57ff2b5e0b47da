"""The launcher over stand-ins for ranks: which failure is told, and that all of them end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from test_run_ends import alive, until

from vpipe.app.errors import LastingError
from vpipe.app.launch import local
from vpipe.app.launch.failure_report import find_failure, write_report
from vpipe.app.launch.local import Interrupted, StartNotice, StoppedRanks, close_all, run_ranks
from vpipe.app.launch.network import free_port
from vpipe.app.launch.rank_env import HostRanks
from vpipe.app.train.run_folder import failure_path, log_path
from vpipe.errors import RunError, UserError, VpipeError

pytestmark = pytest.mark.jobs

REPORT = "import json, os, sys, time; folder = sys.argv[1]\n" \
         "def report(rank, what, fault=None, after=0.0):\n" \
         "    text = json.dumps({'rank': rank, 'time': time.time() + after, 'starting': False, 'lasting': False,\n" \
         "                       'blames': not (fault or {}).get('reported', True), 'reporter': True, 'frames': '',\n" \
         "                       'fault': fault, 'problems': [[what, 'look there', None]]})\n" \
         "    open(f'{folder}/part{rank}', 'w').write(text)\n" \
         "    os.replace(f'{folder}/part{rank}', f'{folder}/rank{rank}.failure.json')\n" \
         "    sys.exit(1)\n" \
         "def lost(rank, other, what='died without a message', **more):\n" \
         "    report(rank, f'rank {other} (stage {9 - other}) {what}; rank {rank} was busy',\n" \
         "           {'ranks': [other], 'what': what, 'hint': 'look there', 'reported': False}, **more)\n" \
         "def failed(rank, what):\n" \
         "    fault = {'ranks': [rank], 'what': f'failed: {what}', 'hint': 'look there', 'reported': True}\n" \
         "    report(rank, what, fault)\n" \
         "def die(number): os.kill(os.getpid(), number)\n"
GRACE_S = 0.6
STUCK = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(f'{folder}/ready', 'w'); time.sleep(60)"


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *programs: str) -> float:
    """Run a program per rank; the seconds it took."""

    def command(ranks: HostRanks, folder: Path | str) -> list[str]:
        chosen = f"import os\nexec({programs!r}[int(os.environ['RANK'])])"
        return [sys.executable, "-S", "-c", REPORT + chosen, str(folder)]

    monkeypatch.setattr(HostRanks, "command", command)
    monkeypatch.setattr(local, "GRACE_S", GRACE_S)
    started = time.monotonic()
    local.run_ranks(HostRanks.alone(len(programs), free_port(None), threads=1), folder,
                    lambda rank: f"rank {rank} (stage {9 - rank})")
    return time.monotonic() - started


def failed(monkeypatch: pytest.MonkeyPatch, folder: Path, *programs: str) -> VpipeError:
    started = time.monotonic()
    with pytest.raises(VpipeError) as caught:
        run(monkeypatch, folder, *programs)
    assert time.monotonic() - started < 10
    return caught.value


def test_a_rank_that_is_stopped_for_long_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One rank has no other that would notice."""
    program = "import os, signal, time; os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)"
    monkeypatch.setattr(HostRanks, "command", lambda ranks, folder: [sys.executable, "-S", "-c", program])
    monkeypatch.setattr(local, "GRACE_S", GRACE_S)
    with pytest.raises(RunError, match=r"0 gave no sign of life for 0.3 s, stopped by a signal \(SIGSTOP\) or a deb"):
        local.run_ranks(HostRanks.alone(1, free_port(None), threads=1), tmp_path, str, stopped_ranks=StoppedRanks(0.3))


def test_a_rank_that_went_on_in_time_is_none_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = StoppedRanks(10.0)
    told = []
    for now, stopped in ((0, True), (9, True), (12, False), (15, True), (24, True), (26, True)):
        monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda now=now: now))
        monkeypatch.setattr(local, "_is_stopped", lambda process, stopped=stopped: stopped)
        if seen.update({0: None}) is not None:
            told.append(now)
    assert told == [26]


def test_all_ranks_end_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, tmp_path, "pass", "time.sleep(0.2)")


@pytest.mark.parametrize(("program", "how"), [
    ("sys.exit(3)", "with exit status 3"), ("sys.exit(255)", "with exit status 255"),
    ("os.kill(os.getpid(), 11)", "killed by signal 11 (SIGSEGV)"),
    ("os.kill(os.getpid(), 9)", "killed by signal 9 (SIGKILL)"),
    ("os.kill(os.getpid(), 40)", "killed by signal 40"),
    ("sys.exit(128 + 9)", "killed by signal 9 (SIGKILL)"),  # in a container
])
def test_a_rank_that_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, how: str) -> None:
    error = failed(monkeypatch, tmp_path, "time.sleep(60)", program)
    assert str(error).startswith(f"error: rank 1 (stage 8) died without a message, {how}\nhint: ")
    assert str(log_path(tmp_path, 1)) in str(error)
    assert error.exit_status == 1


CLOSED = "RuntimeError: Connection closed by peer"
KILLED = "rank 1 (stage 8) died without a message, killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(("programs", "told"), [
    (("lost(0, 1, 'has ended')", "time.sleep(0.2); report(1, 'ran dry')", "lost(2, 1)"), "ran dry"),
    (("lost(0, 1)", "time.sleep(0.2); os._exit(7)"),
     "rank 1 (stage 8) died without a message, with exit status 7; rank 0 was busy"),
    (("lost(0, 1, 'is slow', after=1)", "lost(1, 0, 'is slow')"), "rank 0 (stage 9) is slow; rank 1 was busy"),
    (("sys.exit(1)", "time.sleep(0.2); die(9)"), KILLED),
    ((f"failed(0, '{CLOSED}')", "time.sleep(0.2); die(9)"), KILLED),
    (("lost(0, 1, 'lost its connection with rank 0')", "time.sleep(0.2); die(9)"), f"{KILLED}; rank 0 was busy"),
    (("lost(0, 2, 'is running but did not answer in time')", "time.sleep(0.2); die(9)", "time.sleep(0.1); lost(2, 1)"),
     f"{KILLED}; rank 2 was busy"),
    ((f"failed(0, '{CLOSED}')", "time.sleep(60)"), CLOSED),
    (("sys.exit(1)", "lost(1, 2, 'has ended its program')", "pass"),
     "rank 2 (stage 7) has ended its program; rank 1 was busy"),
    (("die(6)", "time.sleep(0.2); failed(1, 'ran dry')"), "ran dry"),  # gloo aborts when it loses another
], ids=["a report", "a death", "two blames", "a full disk", "an error of gloo", "a hasty word", "a wrong word",
        "gloo alone", "disk and word", "abort"])
def test_consequences_of_a_failure_are_not_reported_as_its_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                                 programs: tuple[str, ...], told: str) -> None:
    """Whichever rank ended first, and whatever its number."""
    what, hint = str(failed(monkeypatch, tmp_path, *programs)).split("\n")
    assert what == f"error: {told}"
    assert hint.startswith("hint: ")


def test_how_a_rank_died_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its connections are closed first: the others may have ended for long when the system gives its exit status."""
    status, dead = local._status, list[float]()

    def late(process: subprocess.Popen[bytes]) -> int | None:
        if (known := status(process)) == -signal.SIGKILL:
            dead.append(time.monotonic())
            return known if time.monotonic() > dead[0] + 3 * GRACE_S else None
        return known

    monkeypatch.setattr(local, "_status", late)
    error = failed(monkeypatch, tmp_path, "lost(0, 1)", "die(9)")
    assert str(error).startswith(
        "error: rank 1 (stage 8) died without a message, killed by signal 9 (SIGKILL); rank 0 was busy\n")


def test_a_mistake_found_by_a_rank_is_a_failed_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_report(tmp_path, 1, UserError("the loss has shape [2]", hint="look there", where="a"))
    error = failed(monkeypatch, tmp_path, "time.sleep(60)", "sys.exit(2)")
    assert isinstance(error, LastingError)
    assert error.exit_status == 1
    assert str(error) == "error: rank 1: the loss has shape [2] (a)\nhint: look there"


def test_a_rank_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wait = "while not os.path.exists(f'{folder}/ready'): time.sleep(0.01)\n"
    assert str(failed(monkeypatch, tmp_path, STUCK, wait + "report(1, 'broke')")).startswith("error: broke\n")


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_processes_started_by_a_killed_rank_end_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts = "import subprocess; child = subprocess.Popen(['sleep', '60']); " \
             "open(f'{folder}/child', 'w').write(str(child.pid)); os.kill(os.getpid(), 9)"
    error = failed(monkeypatch, tmp_path, "time.sleep(60)", starts)
    assert "rank 1 (stage 8) died without a message, killed by" in str(error)
    until(lambda: not alive(int((tmp_path / "child").read_text())), 10, "the child has ended")


class LostHost:
    """Ranks of a host that takes some time to be given up."""

    statuses: ClassVar[dict[int, int | None]] = {7: 1}
    lost = None

    def start(self, folder: Path) -> None:
        pass

    def close(self) -> None:
        self.together.wait(20)

    together = threading.Barrier(3)


def test_hosts_are_closed_at_the_same_time() -> None:
    close_all([LostHost(), LostHost(), LostHost()])  # else the barrier breaks


def test_a_signal_ends_all_and_the_handlers_come_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(Interrupted, match="SIGTERM") as caught:
        run(monkeypatch, tmp_path, "time.sleep(60)", "time.sleep(60)")
    timer.join()
    assert caught.value.number == signal.SIGTERM
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_damaged_report_is_none_or_a_failure(tmp_path: Path) -> None:
    path = failure_path(tmp_path, 0)
    (tmp_path / "rankX.failure.json").write_text("{}")
    write_report(tmp_path, 0, RunError("broke", hint="mend", rank=0))
    whole = path.read_bytes()
    assert str(find_failure(tmp_path, str, {})) == "error: broke (rank 0)\nhint: mend"
    damages = [b"", b"[]", b"\xff\xfe", b'{"rank": 0, "fault": null}', whole.replace(b"[[", b"[").replace(b"]]", b"]")]
    for place in range(len(whole)):
        damages += [whole[:place], *(whole[:place] + put + whole[place + 1:] for put in (b"\xff", b"9", b"null", b"]"))]
    for damaged in damages:
        path.write_bytes(damaged)
        assert isinstance(find_failure(tmp_path, str, {}), RunError | None)


def test_gloos_interface_is_the_chosen_one_before_the_found_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was chosen goes before the environment, and that before what was found; each variable by itself."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    found = HostRanks({0: 0}, 1, "127.0.0.1", 1, "eth0", 1, interface_found=True).environment(0)
    assert found["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "NCCL_SOCKET_IFNAME" not in found  # as it is
    chosen = HostRanks({0: 0}, 1, "10.0.0.1", 1, "eth1", 1).environment(0)
    assert (chosen["GLOO_SOCKET_IFNAME"], chosen["NCCL_SOCKET_IFNAME"]) == ("eth1", "eth1")
    assert chosen["MASTER_ADDR"] == "10.0.0.1"


WELL = "open(f'{{folder}}/ready{rank}', 'w'); number = os.read(0, 1)[0]; sys.exit({status})"  # the pipe's


def interrupted(monkeypatch: pytest.MonkeyPatch, folder: Path, *programs: str, signals: int = 1,
                stop_s: float = 20.0) -> BaseException:
    """What a run says of signals, which come when all its programs are ready."""
    def send() -> None:
        until(lambda: len(list(folder.glob("ready*"))) == len(programs), 20, "all are ready")
        for number in (signal.SIGUSR1, signal.SIGINT)[:signals]:
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    monkeypatch.setattr(local, "run_ranks", partial(run_ranks, stop_s=stop_s))
    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises((Interrupted, VpipeError)) as caught:
        run(monkeypatch, folder, *programs)
    thread.join()
    return caught.value


@pytest.mark.parametrize("terminal", [False, True])
def test_a_signal_is_passed_on_and_the_ranks_leave_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str], terminal: bool) -> None:
    """The first rank says which and that it has saved, the others 0: that is no failure. On a terminal the line is
    written over the first rank's progress bar, not behind it."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    end = interrupted(monkeypatch, tmp_path, WELL.format(rank=0, status="128 + number"), WELL.format(rank=1, status=0))
    assert isinstance(end, Interrupted)
    assert (end.number, end.saved, end.exit_status) == (signal.SIGUSR1, True, 138)
    assert capsys.readouterr().err == ("\r\x1b[K" if terminal else "") + (
        "SIGUSR1: the ranks save and end, within 20 s; a second one ends them at once\n")


def test_to_a_script_138_says_that_it_was_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    end = interrupted(monkeypatch, tmp_path, WELL.format(rank=0, status="64 + number"), WELL.format(rank=1, status=0))
    assert isinstance(end, Interrupted)
    assert (end.number, end.saved, end.exit_status) == (signal.SIGUSR1, False, 1)
    assert Interrupted(signal.SIGINT).exit_status == 130


@pytest.mark.parametrize(("signals", "stop_s", "number"), [(2, 20.0, signal.SIGINT), (1, 0.2, signal.SIGUSR1)],
                         ids=["second", "late"])
def test_ranks_that_do_not_leave_off_are_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, signals: int,
                                               stop_s: float, number: int) -> None:
    deaf = STUCK.replace("ready", "ready0")
    end = interrupted(monkeypatch, tmp_path, deaf, signals=signals, stop_s=stop_s)
    assert isinstance(end, Interrupted)
    assert (end.number, end.saved) == (number, False)


def test_a_rank_that_fails_as_it_leaves_off_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once, whatever restarts are allowed: who asks for an end wants no other attempt."""
    full = WELL.format(rank=0, status=0).replace("sys.exit(0)", "report(0, 'could not save')")
    error = interrupted(monkeypatch, tmp_path, full, WELL.format(rank=1, status=0))
    assert str(error).startswith("error: could not save\n")
    assert isinstance(error, LastingError)


def test_a_rank_that_is_lost_to_the_signal_before_it_trains_is_no_failure(monkeypatch: pytest.MonkeyPatch,
                                                                          tmp_path: Path) -> None:
    blames = WELL.format(rank=0, status=0).replace("sys.exit(0)", "lost(0, 1)")
    end = interrupted(monkeypatch, tmp_path, blames, WELL.format(rank=1, status="64 + number"))
    assert isinstance(end, Interrupted)
    assert not end.saved


def test_a_signal_to_a_rank_ends_the_run_in_good_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However long the other ranks take to end."""
    with pytest.raises(Interrupted) as caught:
        run(monkeypatch, tmp_path, "sys.exit(128 + 10)", f"time.sleep({1.5 * GRACE_S})")
    assert (caught.value.number, caught.value.saved) == (signal.SIGUSR1, True)


def test_that_ranks_are_starting_is_said_when_it_takes_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([100.0, 101.0, 102.1, 103.0, 112.3, 122.1, 133.0])
    monkeypatch.setattr(local, "monotonic", lambda: next(times))
    (tmp_path / "running").write_text("an attempt that was killed")
    ranks = StartNotice(tmp_path, 2, tmp_path / "step-64")
    for _ in range(4):
        ranks.update()
    os.utime(tmp_path / "running", (1, 1))  # the first rank has taken it
    ranks.update()
    ranks.update()
    assert capsys.readouterr().err.splitlines() == [
        "starting 2 ranks, from step-64", "starting 2 ranks, from step-64: 12 s"]


def test_a_run_that_has_ended_is_not_starting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([100.0, 102.1, 103.0, 112.3])
    monkeypatch.setattr(local, "monotonic", lambda: next(times))
    ranks = StartNotice(tmp_path, 2, None)
    ranks.update()
    (tmp_path / "running").touch()
    ranks.update()
    (tmp_path / "running").unlink()
    ranks.update()
    assert capsys.readouterr().err == "starting 2 ranks\n"
