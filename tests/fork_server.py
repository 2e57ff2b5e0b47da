"""A process that has imported torch and vpipe, and forks those that tests start: an import costs each of them two to
four seconds of a processor, a fork a few milliseconds.

``Popen`` stands in for ``subprocess.Popen``. What would start Python with a program of ours comes from the fork server,
as a process like any other: with its own number, session, environment, folder and files. Everything else is started as
ever.
A process so made asks the same fork server for those that it starts itself, such as the ranks of a launcher.

Here is what its owner sees of it; :mod:`forking` is what it does. As a program, this file is Python's command line.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ADDRESS = "VPIPE_TEST_FORK_SERVER"
"""Environment variable with the path of the fork server's socket."""

HOOK = "VPIPE_TEST_HOOK"
"""Environment variable, ``module:function``: called in a forked process with its program and arguments before it
starts; tests of failures arm them so."""

BIN = Path(sys.executable).parent

MODULES = re.compile(r"vpipe(\.|$)|torch\.distributed\.run$")
"""What the fork server runs with ``-m``."""

_REAL = subprocess.Popen
_AT_FIRST = dict(os.environ)  # before any test changes it


def known(command: Any, options: Mapping[str, Any]) -> list[str] | None:
    """A command as the fork server carries it out, ``[kind, ...]``; None when it is for the system to start."""
    if isinstance(command, (str, bytes, os.PathLike)) or options.get("shell") or options.get("preexec_fn"):
        return None
    words = [os.fspath(word) for word in command]
    match [word for word in words if word != "-u"]:
        case [python, "-m", module, *rest] if python == sys.executable and MODULES.match(module):
            return ["module", module, *rest]
        case [python, script, *rest] if python == sys.executable and script.endswith(".py"):
            return ["script", script, *rest]
        case [program, *rest] if program == str(BIN / "vpipe"):
            return ["module", "vpipe", *rest]
    return None


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """``subprocess.Popen`` whose process comes from the fork server where that knows the command.

    It takes over what starts a process and what waits for one (CPython's own names for them, 3.11 to 3.14).
    """

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        self._words = known(args, options)
        self._line: socket.socket | None = None
        super().__init__(args, *more, **options)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Sequence[int],
                       cwd: Any, env: Mapping[str, str] | None, startupinfo: Any, creationflags: Any, shell: Any,
                       p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
                       *more: Any) -> None:
        if self._words is None:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, p2cread,
                p2cwrite, c2pread, c2pwrite, errread, errwrite, *more)
            return
        session = bool(more[5])
        environment = dict(os.environ if env is None else env)
        environment.setdefault(ADDRESS, address())
        given = [own if end == -1 else end for own, end in enumerate((p2cread, c2pwrite, errwrite))] + list(pass_fds)
        request = {"words": self._words, "env": {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()},
                   "cwd": os.path.abspath(os.fspath(cwd or ".")), "session": session, "files": [0, 1, 2, *pass_fds]}
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(environment[ADDRESS])
        text = json.dumps(request).encode()
        socket.send_fds(self._line, [len(text).to_bytes(4)], given)
        self._line.sendall(text)
        self.pid = int.from_bytes(exactly(self._line, 4))
        self._child_created = True
        for end, own in ((p2cread, p2cwrite), (c2pwrite, c2pread), (errwrite, errread)):
            if end != -1 and own != -1:
                os.close(end)
        if (null := getattr(self, "_devnull", None)) is not None:
            os.close(null)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._line is None:
            return super()._try_wait(flags)  # type: ignore[misc,no-any-return]
        if flags & os.WNOHANG and not select.select([self._line], [], [], 0)[0]:
            return 0, 0
        status = int.from_bytes(exactly(self._line, 4))
        self._line.close()
        return self.pid, status

    def _internal_poll(self, *more: Any, **options: Any) -> int | None:
        if self._line is None:
            return super()._internal_poll(*more, **options)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def exactly(line: socket.socket, count: int) -> bytes:
    said = b""
    while len(said) < count:
        more = line.recv(count - len(said))
        if not more:
            raise RuntimeError("the fork server is gone")
        said += more
    return said


class ForkServer:
    """The process, as its owner sees it; it and all that it forked end with the owner, however that ends."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork_server")
        self.address = f"{self._folder.name}/socket"
        self.log = Path(self._folder.name) / "log"
        environment = {name: value for name, value in _AT_FIRST.items() if name != ADDRESS}
        with self.log.open("wb") as log, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)  # who asks before it has imported torch waits
            self._process = _REAL([sys.executable, Path(__file__).with_name("forking.py"), str(listener.fileno())],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                  env={**environment, "OMP_NUM_THREADS": "1"}, pass_fds=[listener.fileno()])

    def close(self) -> list[int]:
        """End it; the numbers of processes that a test had left behind, which are killed."""
        said, _ = self._process.communicate(timeout=30)
        if self._process.returncode:
            raise RuntimeError(self.log.read_text())
        self._folder.cleanup()
        return [int(word) for word in said.split()]


_own: list[ForkServer] = []
_making = threading.Lock()


def own() -> ForkServer:
    """This process's own, made when the first is asked of it."""
    with _making:
        if not _own:
            _own.append(ForkServer())
    return _own[0]


def address() -> str:
    """Of the fork server of the process that has the tests shared, or else of this process's own."""
    return os.environ.get(ADDRESS) or own().address


def running() -> dict[int, dict[str, str]]:
    """Return process id -> environment of what runs now, of all that share the fork server: ``/proc`` would show the
    server's."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address())
        text = json.dumps({}).encode()
        line.sendall(len(text).to_bytes(4) + text)
        with line.makefile() as said:
            return {int(pid): environment for pid, environment in json.load(said).items()}


def close(patience_s: float) -> list[int]:
    """End this process's own if there is one, once those that came from it have had time to end; as
    :meth:`ForkServer.close`."""
    deadline = time.monotonic() + patience_s
    while _own and running() and time.monotonic() < deadline:
        time.sleep(0.05)
    return _own.pop().close() if _own else []


def front() -> NoReturn:
    """Stand in for Python's command line: the program that it names comes from the fork server.

    This process ends as that one does, or ends it when asked to end.
    """
    process = Popen([sys.executable, *sys.argv[1:]])
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    status = process.wait()
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    front()
