"""However a run ends, no process stays behind, and the user is told why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fork_server
import pytest
from small_run import only_run, write_config

pytestmark = [pytest.mark.jobs, pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"),
              pytest.mark.usefixtures("forked")]

VPIPE = Path(sys.executable).with_name("vpipe")
FORKED = f'#!/bin/sh\nexec {sys.executable} -S {fork_server.__file__} "$@"\n'


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def put_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Launched:
    """``vpipe train`` on a long run, in a session of its own as a terminal would start it."""

    def __init__(self, folder: Path, hosts: bool) -> None:
        self.folder = folder
        config = write_config(folder, training__max_steps=None, training__max_minutes=2.0,
                              parallel__stage_to_rank_map={"0": [1], "1": [0]})
        more = ["--set", "machines=[localhost:0, hostB:0]", "--set", "parallel.master_address=127.0.0.1"]
        put_program(folder / "bin" / "ssh", '#!/bin/bash\nbash -c "${@: -1}"\n')
        put_program(folder / "bin" / "python", FORKED)
        more += ["--set", f"launch.python={folder}/bin/python"]
        self.path = f"{folder}/bin:{os.environ['PATH']}"
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen([VPIPE, "train", config, *(more if hosts else [])], stdout=out, stderr=err,
                                            start_new_session=True, env={**os.environ, "PATH": self.path})
        self.ranks: dict[int, int] = {}

    def find_ranks(self) -> bool:
        self.ranks.update({int(environment["RANK"]): pid for pid, environment in fork_server.running().items()
                           if environment["PATH"] == self.path and "RANK" in environment})
        return len(self.ranks) == 2

    def start(self) -> None:
        until(self.find_ranks, 20, "two ranks")

    def train(self) -> None:
        self.start()
        until(lambda: any(path.read_text().count("\n") > 3 for path in self.folder.glob("runs/*/metrics.jsonl")), 60,
              "a few updates")
        self.ranks.clear()  # one of the other host may have been there only to look at the config
        assert self.find_ranks()

    def ends(self, seconds: float) -> int:
        """The exit status, once nothing of the run is left."""
        status = self.process.wait(timeout=seconds)
        until(lambda: not any(map(alive, self.ranks.values())), seconds, "the ranks have ended")
        return status

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def clean(self) -> None:
        for pid in (self.process.pid, *self.ranks.values()):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=10)


@pytest.fixture
def launched(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launched]:
    launched = Launched(tmp_path, getattr(request, "param", "one host") == "two hosts")
    yield launched
    launched.clean()


def test_ctrl_c_in_training(launched: Launched) -> None:
    launched.train()
    os.killpg(launched.process.pid, signal.SIGINT)  # as a terminal does, to all in the foreground
    assert launched.ends(10) == 130
    assert launched.err.splitlines()[-1] == "interrupted (SIGINT): all ranks have ended"
    assert "Traceback" not in launched.out + launched.err
    assert "error" not in launched.out + launched.err
    assert launched.out.splitlines()[-1] == f"run folder: {only_run(launched.folder / 'runs')}"


def test_sigterm_while_ranks_start(launched: Launched) -> None:
    launched.start()
    launched.process.terminate()
    assert launched.ends(10) == 143
    assert launched.err.splitlines()[-2] == "no checkpoint was made: it made no step"
    assert launched.err.splitlines()[-1] == "interrupted (SIGTERM): all ranks have ended"
    assert "Traceback" not in launched.out + launched.err


@pytest.mark.parametrize("launched", ["two hosts"], indirect=True)
def test_ranks_end_when_their_launcher_is_killed(launched: Launched) -> None:
    launched.train()
    launched.process.kill()
    assert launched.ends(10) == -signal.SIGKILL
