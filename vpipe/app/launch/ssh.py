"""Start and follow the ranks of other hosts over ssh, each through an agent there."""

from __future__ import annotations

import base64
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from vpipe.app.config.config import LaunchSection
from vpipe.app.config.machines import Hosts, host_of
from vpipe.app.imports import file_digests, imported_files
from vpipe.app.launch.failure_report import End
from vpipe.app.launch.local import GRACE_S, close_all
from vpipe.app.launch.network import listening
from vpipe.app.launch.rank_env import HostRanks
from vpipe.app.launch.remote_agent import ALIVE_S, SILENT_S, decoded, encoded, identity
from vpipe.errors import Problem, RunError, UserError

CONNECT_S = 10
HELLO_S = 20.0
"""Time for a host to send its versions, after the connection; Python starts slowly from a cold network folder."""

READY_S = 60.0
"""Time for a host to check the way to the first one."""

MOST_BYTES = 4 << 30
"""Largest size of a file that a host sends."""

_OF_RANK = re.compile(r"rank(?P<rank>\d+)\.(log|failure\.json)|trace/(lane\d+/)?rank\d+\.jsonl|"
                      r"profiler_[\w.-]+/rank\d+/rank\d+\.[\w.-]+", re.ASCII)
"""What the ranks of a host write: logs and failure reports of their own, timelines, profiles."""

NO_DIRECTORY = 96
"""Exit status of the remote shell that finds no ``launch.directory``."""


def ssh_command(login: str, settings: LaunchSection) -> list[str]:
    """Return the command that starts the agent of another host; ssh in batch mode asks for nothing."""
    script = (f"cd {shlex.quote(settings.directory or os.getcwd())} || exit {NO_DIRECTORY}; "
              f"exec {shlex.quote(settings.python or sys.executable)} -m vpipe.app.launch.remote_agent")
    # ssh takes the first value of an option: the user's go before ours, but for the batch mode.
    ours = {"ConnectTimeout": CONNECT_S, "ControlMaster": "no", "ServerAliveInterval": ALIVE_S,
            "ServerAliveCountMax": SILENT_S // ALIVE_S}
    return ["ssh", "-T", "-o", "BatchMode=yes", *settings.ssh_options,
            *(word for key, value in ours.items() for word in ("-o", f"{key}={value}")), login,
            f"exec sh -c {shlex.quote(script)}"]


def hello_s(settings: LaunchSection) -> float:
    """Return the seconds for a host to connect, for which the user may allow more, and to send its versions."""
    chosen = re.search(r"ConnectTimeout[ =]+(\d+)", " ".join(settings.ssh_options), re.IGNORECASE)
    return HELLO_S + (CONNECT_S if chosen is None else int(chosen[1]))


class Remote:
    """The agent on another host, from the start of ssh on.

    Args:
        login: as ssh takes it.
        devices: rank -> device, of its ranks.
    """

    def __init__(self, login: str, devices: Mapping[int, int], settings: LaunchSection) -> None:
        self.login, self.host = login, host_of(login)
        self._settings = settings
        self._devices = dict(devices)
        self._statuses: dict[int, int | None] = dict.fromkeys(devices)
        self._answers: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._errors: deque[str] = deque(maxlen=20)
        self._folder: Path | None = None
        self._received: Counter[str] = Counter()  # bytes, by the name of a file
        self._heard_at = self._asked_at = time.monotonic()
        self._closed, self._sending = Event(), Lock()
        self.lost: dict[int, End] = {}
        self._unwritten: RunError | None = None
        self.answer: dict[str, Any] = {}
        try:
            # A session of its own: no Ctrl-C, and no terminal to ask for a password.
            self._ssh = subprocess.Popen(ssh_command(login, settings), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.PIPE, start_new_session=True)
        except FileNotFoundError:
            raise UserError(f"there is no ssh on the path, by which '{self.host}' would be reached",
                            hint="install the OpenSSH client, or start the ranks by torchrun") from None
        assert self._ssh.stdin is not None
        os.set_blocking(self._ssh.stdin.fileno(), False)
        self._threads = [Thread(target=work, daemon=True) for work in (self._read, self._read_errors)]
        for thread in (*self._threads, Thread(target=self._send_alive, daemon=True)):
            thread.start()

    # -- before the run --------------------------------------------------------------------------------

    def problems(self, key: str, within_s: float) -> list[Problem]:
        """Wait for the answer ``key``; return what is wrong with this host, if it does not come in time."""
        while True:
            with suppress(Empty):
                self.answer = self._answers.get(timeout=0.05)
                if key in self.answer:
                    return []
                if "refused" in self.answer:
                    return [Problem(f"host {self.host}: {what}", str(hint), where)
                            for what, hint, where in self.answer["refused"]]
                continue
            if self._closed.is_set() and self._answers.empty():
                return [self._refusal()]
            if time.monotonic() - self._asked_at > within_s:
                return [Problem(f"host {self.host} did not say '{key}' within {within_s:g} s",
                                f"look whether it is up and its disks answer; try {self._trial('true')}")]

    def differs(self, container: bool) -> list[Problem]:
        """Return the packages that this host has in another version than the first, after its hello."""
        ours, theirs = identity(), self.answer["hello"]
        return [Problem(f"host {self.host} has {name} {theirs.get(name)}, but this host {ours[name]}",
                        f"install the same there, for {self._python}" +
                        (", or set launch.python to a Python that has it" if self._settings.python is None else ""))
                for name in ours if theirs.get(name) != ours[name] and not (container and name == "torch")]

    def _refusal(self) -> Problem:
        """Return why ssh, or what it started, ended at once."""
        status = self._ssh.wait()
        lines = [line for line in self._errors if line]
        text, last = " ".join(lines), lines[-1] if lines else "it printed nothing"
        if status == NO_DIRECTORY:
            folder = self._settings.directory or os.getcwd()
            return Problem(f"host {self.host} has no folder '{folder}'",
                           "make it, or set launch.directory to the folder there from which paths are taken")
        if status != 255:
            if status in (126, 127):
                return Problem(f"host {self.host} has no Python at '{self._python}': {last}",
                               "set launch.python to the Python there that has vpipe")
            if "No module named" in text:
                return Problem(f"host {self.host} has no vpipe for '{self._python}': {last}",
                               "install vpipe there, or set launch.python to a Python that has it")
            return Problem(f"host {self.host}: the launcher there ended with exit status {status}: {last}",
                           f"try what vpipe does: {self._trial(f'{self._python} -m vpipe --version')}")
        if "ermission denied" in text or "authentication" in text:
            return Problem(f"host {self.host} does not let ssh in: {last}",
                           "vpipe never asks for a password: let a key in (ssh-copy-id), or name one in "
                           f"launch.ssh_options; try {self._trial('true')}")
        if "ost key verification failed" in text:
            return Problem(f"host {self.host} is not known to ssh: {last}",
                           f"look at its key and accept it once: ssh {self.login}")
        return Problem(f"host {self.host} cannot be reached: {last}",
                       f"look whether it is up and the name is right; try {self._trial('true')}")

    @property
    def _python(self) -> str:
        return self._settings.python or sys.executable

    def _trial(self, command: str) -> str:
        return shlex.join(["ssh", "-o", "BatchMode=yes", *self._settings.ssh_options, self.login, command])

    def send_run(self, config: str, here: HostRanks) -> None:
        """Send what is to be run; it answers ``ready`` or ``refused``."""
        self._asked_at = time.monotonic()
        self._send(run={"config": config, "world": here.world, "address": here.address, "port": here.port,
                        "run": here.run, "secret": here.secret, "task": list(here.task), "host": self.host,
                        "devices": self._devices, "imports": file_digests(imported_files())})

    # -- the run ---------------------------------------------------------------------------------------

    def start(self, folder: Path) -> None:
        """Start its ranks; what they write is copied into ``folder``."""
        self._folder = folder
        self._send(start=str(folder))

    @property
    def statuses(self) -> Mapping[int, int | None]:
        """As :attr:`~vpipe.app.launch.local.RemoteRanks.statuses`."""
        if self._unwritten is not None:
            raise self._unwritten
        return dict(self._statuses)

    def stop(self, number: int) -> None:
        """Ask its ranks to stop and save, as if each had got this signal."""
        self._send(stop=int(number))

    def close(self) -> None:
        """End its ranks; wait until all that they wrote is here, or it is lost; ssh ends."""
        self._send(end=True)
        asked = time.monotonic()
        while not self._closed.wait(0.05):  # as long as more comes
            if time.monotonic() - max(asked, self._heard_at) > 4 * GRACE_S:
                if self._ssh.poll() is None:
                    os.killpg(self._ssh.pid, signal.SIGKILL)  # there, the end of the input ends all
                break
        self._closed.set()
        self._ssh.wait()
        for thread in self._threads:
            thread.join(GRACE_S)
        for pipe in (self._ssh.stdin, self._ssh.stdout, self._ssh.stderr):
            assert pipe is not None
            if not any(thread.is_alive() for thread in self._threads):  # a shared connection may outlive ssh
                pipe.close()

    # -- messages --------------------------------------------------------------------------------------

    def _send_alive(self) -> None:
        """Send signs of life until the ranks start and watch one another."""
        while not self._closed.wait(ALIVE_S) and self._folder is None:
            self._send(alive=True)

    def _send(self, **message: Any) -> None:
        """Send a message; the reader finds out if nobody receives it."""
        assert self._ssh.stdin is not None
        data = encoded(**message)
        deadline = time.monotonic() + CONNECT_S
        with self._sending:
            while data and time.monotonic() < deadline and not self._closed.is_set():
                try:
                    data = data[os.write(self._ssh.stdin.fileno(), data):]
                except BlockingIOError:
                    time.sleep(0.01)
                except OSError:
                    return

    def _read(self) -> None:
        assert self._ssh.stdout is not None
        for line in self._ssh.stdout:
            self._heard_at = time.monotonic()
            message = decoded(line)
            if not message:
                continue  # what a login shell prints
            try:
                self._handle(message)
            except (OSError, ValueError) as error:
                self._unwritten = self._unwritten or RunError(
                    f"what host {self.host} sends cannot be written into '{self._folder}': {error}",
                    hint="look whether there is room")
        status = self._ssh.wait()
        left = [rank for rank, status in self._statuses.items() if status is None]
        if left and self._folder is not None:
            time.sleep(0.1)  # for its last lines on the other pipe
            last = next((f": {line}" for line in reversed(self._errors) if line), "")
            self.lost = dict.fromkeys(left, End(f"as ssh to {self.host} ended with exit status {status}{last}", True))
        self._closed.set()

    def _handle(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"file": str(name), "data": str(data)}:
                self._append(name, base64.b64decode(data))
            case {"ended": int(rank), "status": int(status)} if rank in self._statuses:
                self._statuses[rank] = status
            case _:
                self._answers.put(dict(message))

    def _read_errors(self) -> None:
        assert self._ssh.stderr is not None
        for line in self._ssh.stderr:
            self._errors.append(line.decode(errors="replace").strip())

    def _append(self, name: str, data: bytes) -> None:
        """Append to a file of the host's ranks; other names, links and what is beyond the limit are left out."""
        found, folder = _OF_RANK.fullmatch(name), self._folder
        if folder is None or found is None or (found["rank"] and int(found["rank"]) not in self._devices):
            return
        target = folder / name
        self._received[name] += len(data)
        if self._received[name] > MOST_BYTES or target.resolve() != folder.resolve() / name:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as file:
            file.write(data)


class UnreachableError(UserError):
    """Hosts that cannot take part; ``by_login`` is what is wrong with each."""

    by_login: Mapping[str, Sequence[Problem]]

    @classmethod
    def because(cls, by_login: Mapping[str, Sequence[Problem]]) -> UserError:
        """Return all that is wrong, as one error."""
        error = cls.all_of([problem for problems in by_login.values() for problem in problems])
        assert isinstance(error, cls)
        error.by_login = {login: problems for login, problems in by_login.items() if problems}
        return error


def connect(hosts: Hosts, settings: LaunchSection, *, container: bool) -> list[Remote]:
    """Return the agents of other hosts, all reached at the same time.

    Raises:
        UnreachableError: all that is wrong with any of them.
        UserError: there is no ssh here.
    """
    remotes: list[Remote] = []
    try:
        for login in hosts.others:
            remotes.append(Remote(login, hosts.on(login), settings))
        found = {remote.login: remote.problems("hello", hello_s(settings)) or remote.differs(container)
                 for remote in remotes}
        if any(found.values()):
            raise UnreachableError.because(found)
    except BaseException:
        close_all(remotes)
        raise
    return remotes


def prepare(remotes: Sequence[Remote], config: str, here: HostRanks) -> None:
    """Send other hosts what is to be run, and wait until all reach this one.

    Raises:
        UnreachableError: all that keeps any of them from it.
    """
    with listening(here.port):
        for remote in remotes:
            remote.send_run(config, here)
        found = {remote.login: remote.problems("ready", READY_S) for remote in remotes}
    if any(found.values()):
        raise UnreachableError.because(found)
