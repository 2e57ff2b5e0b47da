"""A process that has imported torch and vpipe, and forks those that tests start: an import costs each of them two to
four seconds of a processor, a fork a few milliseconds.

``Popen`` stands in for ``subprocess.Popen``. What would start Python with a program of ours comes from the zygote, as a
process like any other: with its own number, session, environment, folder and files. Everything else is started as ever.
A process so made asks the same zygote for those that it starts itself, such as the ranks of a launcher.

The zygote has one thread and never trains: what is forked has seen neither gloo nor the threads of autograd.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ADDRESS = "VPIPE_TEST_ZYGOTE"
"""Environment variable with the path of the zygote's socket."""

BIN = Path(sys.executable).parent

IMPORTED = ("torch", "torch._dynamo", "torch.distributed", "numpy", "numpy.random", "h5py", "vpipe", "vpipe.cli",
            "vpipe.launch.worker", "vpipe.launch.together", "vpipe.train.loop", "vpipe.train.verify",
            "vpipe.train.planning", "vpipe.train.profiled", "vpipe.compare.enter", "vpipe.profiling.world",
            "vpipe.data.bert_hdf5", "vpipe.data.synthetic", "vpipe.model.bert")

MODULES = re.compile(r"vpipe(\.|$)|torch\.distributed\.run$")
"""What the zygote runs with ``-m``."""

_REAL = subprocess.Popen


def known(command: Any, options: Mapping[str, Any]) -> list[str] | None:
    """A command as the zygote carries it out, ``[kind, ...]``; None when it is for the system to start."""
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
    """``subprocess.Popen`` whose process comes from the zygote where that knows the command.

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
        address = environment.get(ADDRESS) or os.environ.get(ADDRESS) or zygote().address
        environment[ADDRESS] = address
        given = [own if end == -1 else end for own, end in enumerate((p2cread, c2pwrite, errwrite))] + list(pass_fds)
        request = {"words": self._words, "env": {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()},
                   "cwd": os.path.abspath(os.fspath(cwd or ".")), "session": session, "files": [0, 1, 2, *pass_fds]}
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(address)
        text = json.dumps(request).encode()
        socket.send_fds(self._line, [len(text).to_bytes(4)], given)
        self._line.sendall(text)
        self.pid = int.from_bytes(_exactly(self._line, 4))
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
        status = int.from_bytes(_exactly(self._line, 4))
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


def _exactly(line: socket.socket, count: int) -> bytes:
    said = b""
    while len(said) < count:
        more = line.recv(count - len(said))
        if not more:
            raise RuntimeError("the zygote is gone")
        said += more
    return said


class Zygote:
    """The process, as its owner sees it; it and all that it forked end with the owner, however that ends."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zygote")
        self.address = f"{self._folder.name}/socket"
        self.log = Path(self._folder.name) / "log"
        environment = {name: value for name, value in os.environ.items() if name != ADDRESS}
        with self.log.open("wb") as log:
            self._process = _REAL([sys.executable, __file__, self.address], stdin=subprocess.PIPE, stderr=log,
                                  stdout=subprocess.PIPE, env={**environment, "OMP_NUM_THREADS": "1"})
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError(self.log.read_text())

    def close(self) -> list[int]:
        """End it; the numbers of processes that a test had left behind, which are killed."""
        said, _ = self._process.communicate(timeout=30)
        self._folder.cleanup()
        return [int(word) for word in said.split()]


_zygotes: list[Zygote] = []
_making = threading.Lock()


def zygote() -> Zygote:
    """This process's own, made when the first is asked of it."""
    with _making:
        if not _zygotes:
            _zygotes.append(Zygote())
    return _zygotes[0]


def running() -> dict[int, dict[str, str]]:
    """Process id -> environment of what runs now: ``/proc`` would show the zygote's."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(zygote().address)
        text = json.dumps({}).encode()
        line.sendall(len(text).to_bytes(4) + text)
        with line.makefile() as said:
            return {int(pid): environment for pid, environment in json.load(said).items()}


def close() -> list[int]:
    """End it if there is one; as :meth:`Zygote.close`."""
    return _zygotes.pop().close() if _zygotes else []


# -- in the zygote ---------------------------------------------------------------------------------------------


def serve(address: str) -> Callable[[], None] | None:
    """Fork what is asked for until the owner is gone; in a process so made, returns what it has to do."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    waking, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    lines: dict[int, socket.socket] = {}
    asked: dict[int, Mapping[str, Any]] = {}
    os.write(1, b"ready\n")
    while True:
        ready, _, _ = select.select([0, listener, waking], [], [])
        if waking in ready:
            os.read(waking, 4096)
            with suppress(ChildProcessError):
                while True:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if pid == 0:
                        break
                    line = lines.pop(pid)
                    del asked[pid]
                    with suppress(OSError):  # who started it is gone
                        line.sendall(status.to_bytes(4))
                    line.close()
        if listener in ready:
            line, _ = listener.accept()
            head, files, _, _ = socket.recv_fds(line, 4, 64)
            request = json.loads(_exactly(line, int.from_bytes(head)))
            if not request:
                line.sendall(json.dumps({pid: asked[pid]["env"] for pid in lines}).encode())
                line.close()
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                return lambda: become(request, files)
            for file in files:
                os.close(file)
            lines[pid], asked[pid] = line, request
            with suppress(OSError):
                line.sendall(pid.to_bytes(4))
        if 0 in ready:
            for pid in lines:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.write(1, " ".join(map(str, lines)).encode())
            return None


def become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Be the process that was asked for, in place of a start of Python."""
    if request["session"]:
        os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    wanted = dict(zip([fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files], request["files"], strict=True))
    os.closerange(3, 500)
    for file, number in wanted.items():
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for entry in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if entry and entry not in sys.path:
            sys.path.insert(0, entry)
    subprocess.Popen = Popen  # type: ignore[misc]
    kind, what, *arguments = request["words"]
    sys.argv = [what, *arguments]
    if hook := os.environ.get(HOOK):
        module, _, function = hook.partition(":")
        getattr(importlib.import_module(module), function)(what, arguments)
    if kind == "script":
        sys.path.insert(0, str(Path(what).parent))
        runpy.run_path(what, run_name="__main__")
    elif what == "vpipe":
        from vpipe.cli import main

        sys.exit(main(arguments))
    elif what == "vpipe.launch.worker":
        from vpipe.launch.worker import main as work

        sys.exit(work(Path(arguments[0]), *arguments[1:]))
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def end(task: Callable[[], None]) -> NoReturn:
    """Do it, and end as Python does, but for taking the interpreter apart: that copies all memory shared with the
    zygote, which takes half a second."""
    status: Any = 0
    try:
        task()
    except SystemExit as wanted:
        status = wanted.code if wanted.code is not None else 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


HOOK = "VPIPE_TEST_HOOK"
"""Environment variable, ``module:function``: called in a forked process with its program and arguments before it
starts; tests of failures arm them so."""


def front() -> NoReturn:
    """Python's command line, for a program that can start nothing but programs: what it names comes from the zygote,
    and this process ends as that one does, or ends it when asked to end."""
    process = Popen([sys.executable, *sys.argv[1:]])
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    status = process.wait()
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    if ADDRESS in os.environ:
        front()
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all pages
    task = serve(sys.argv[1])
    if task is not None:
        end(task)
