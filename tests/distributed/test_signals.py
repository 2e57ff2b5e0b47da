"""What a signal does to a rank: before and after training, while it trains, and when a starter leaves it a moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from vpipe.app.signals import Stopped, stopped_status

WAITING = """\
import sys, time
from vpipe.app.signals import graceful_stop, handle_signals, ignore_signals
from vpipe.distributed.watchdog import watch
handle_signals(float(sys.argv[1]))

def wait(word):
    print(word, flush=True)
    sys.stdin.readline()    # whatever it waits for

def asked():
    deadline = time.monotonic() + 20
    while watch.stop_asked is None and time.monotonic() < deadline:
        time.sleep(0.01)
    print(watch.stop_asked, flush=True)
"""


@pytest.fixture
def waiting(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A program after ``WAITING``, when it has said ``ready``."""
    patience, program = request.param
    with subprocess.Popen([sys.executable, "-S", "-c", WAITING + program, str(patience)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": os.getcwd()}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.parametrize("waiting", [(60, "wait('ready'); print('spoken'); ignore_signals(); sys.exit(3)")],
                         indirect=True)
def test_it_speaks_and_ends_by_itself(waiting: subprocess.Popen[str]) -> None:
    waiting.send_signal(signal.SIGTERM)
    said, _ = waiting.communicate("the others are gone\n", timeout=30)
    assert said == "spoken\n"
    assert waiting.returncode == 3


@pytest.mark.parametrize(("waiting", "number", "status"), [
    ((0.1, "wait('ready')"), signal.SIGTERM, 143), ((0, "wait('ready')"), signal.SIGTERM, 143),
    ((0, "wait('ready')"), signal.SIGINT, 130), ((0, "wait('ready')"), signal.SIGUSR1, 1)], indirect=["waiting"],
    ids=["late", "at-once", "ctrl-c", "unsaved"])
def test_it_ends_though_it_waits_for_ever(waiting: subprocess.Popen[str], number: int, status: int) -> None:
    waiting.send_signal(number)
    assert waiting.wait(30) == status


@pytest.mark.parametrize("waiting", [(0, "with graceful_stop():\n    wait('ready'); asked()\nsys.exit(5)")],
                         indirect=True)
def test_in_training_it_is_asked_to_leave_off_and_the_first_signal_gives_the_reason(
        waiting: subprocess.Popen[str]) -> None:
    waiting.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    waiting.send_signal(signal.SIGTERM)
    said, _ = waiting.communicate("\n", timeout=30)
    assert (said, waiting.returncode) == ("SIGUSR1\n", 5)


@pytest.mark.parametrize("waiting", [(0, "with graceful_stop(): pass\nwait('ready'); time.sleep(0.1); print('told')\n"
                                         "ignore_signals(); sys.exit(3)")], indirect=True)
def test_a_signal_that_comes_when_the_others_have_left_off_already_changes_nothing(
        waiting: subprocess.Popen[str]) -> None:
    """It may take its time: each rank hears of a launcher's signal by itself, and one that hears suffices."""
    waiting.send_signal(signal.SIGINT)
    time.sleep(0.2)
    said, _ = waiting.communicate("\n", timeout=30)
    assert (said, waiting.returncode) == ("told\n", 3)


@pytest.mark.parametrize("waiting", [(0.2, "print('ready', flush=True); time.sleep(0.1)\nwith graceful_stop(): asked()"
                                           "\nsys.exit(5)")], indirect=True)
def test_a_signal_from_a_moment_before_the_training_counts(waiting: subprocess.Popen[str]) -> None:
    waiting.send_signal(signal.SIGTERM)
    said, _ = waiting.communicate(timeout=30)
    assert (said, waiting.returncode) == ("SIGTERM\n", 5)


@pytest.mark.parametrize("waiting", [(0.1, "try:\n    with graceful_stop():\n        wait('ready'); asked(); 1 / 0\n"
                                           "except ArithmeticError: time.sleep(60)")], indirect=True)
def test_a_failure_after_a_signal_has_a_moment_for_its_last_words(waiting: subprocess.Popen[str]) -> None:
    waiting.send_signal(signal.SIGTERM)
    said, _ = waiting.communicate("\n", timeout=30)
    assert (said, waiting.returncode) == ("SIGTERM\n", 143)


@pytest.mark.parametrize("waiting", [(60, "import atexit\nignore_signals(); atexit.register(wait, 'ready'); "
                                          "sys.exit(3)")], indirect=True)
def test_nothing_changes_its_status_once_it_has_spoken(waiting: subprocess.Popen[str]) -> None:
    waiting.send_signal(signal.SIGTERM)
    waiting.communicate("\n", timeout=30)
    assert waiting.returncode == 3


def test_only_the_first_rank_tells_of_a_signal() -> None:
    assert [stopped_status(rank, Stopped("SIGUSR1", saved=True)) for rank in (0, 1)] == [138, 0]
    assert stopped_status(0, None) == 0


def test_nothing_that_was_not_saved_ends_with_138(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script would send the job back into the queue as often as that comes."""
    assert [stopped_status(0, Stopped(name, saved=False)) for name in ("SIGUSR1", "SIGTERM")] == [1, 143]
    monkeypatch.setenv("VPIPE_PARENT_PIPE", "0")  # what the launcher makes of it: test_local.py
    assert [stopped_status(0, Stopped(name, saved=False)) for name in ("SIGUSR1", "SIGTERM")] == [64 + 10, 64 + 15]
