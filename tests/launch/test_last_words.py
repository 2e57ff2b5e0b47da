"""A rank that srun ends has a moment left. tests/system does it under a real SLURM."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

WAITING = """\
import sys
from vpipe.launch import last_words
last_words.LAST_WORDS_S = float(sys.argv[1])
last_words.take_time_to_speak()
print("ready", flush=True)
sys.stdin.readline()    # whatever it waits for
print("spoken", flush=True)
sys.exit(3)
"""


@pytest.fixture
def waiting(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", WAITING, str(request.param)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with process:
        yield process
        process.kill()


@pytest.mark.parametrize("waiting", [60], indirect=True)
def test_it_speaks_and_ends_by_itself(waiting: subprocess.Popen[str]) -> None:
    waiting.send_signal(signal.SIGTERM)
    said, _ = waiting.communicate("the others are gone\n", timeout=30)
    assert said == "spoken\n"
    assert waiting.returncode == 3


@pytest.mark.parametrize("waiting", [0.1], indirect=True)
def test_it_ends_though_it_waits_for_ever(waiting: subprocess.Popen[str]) -> None:
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(30) == 128 + signal.SIGTERM


ENDING = """\
import atexit, sys
from vpipe.launch import last_words
last_words.take_time_to_speak()
last_words.end_as_decided()
atexit.register(lambda: (print("ending", flush=True), sys.stdin.readline()))
sys.exit(3)
"""


def test_nothing_changes_its_status_once_it_has_spoken() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ending\n"
        process.send_signal(signal.SIGTERM)
        process.communicate("\n", timeout=30)
    assert process.returncode == 3
