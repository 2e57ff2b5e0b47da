"""Import torch and vpipe, and fork the processes that are asked for; see :mod:`fork_server`.

It has one thread and never trains: what is forked has seen neither gloo nor the threads of autograd.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

from fork_server import HOOK, Popen, exactly

IMPORTED = ("torch", "torch._dynamo", "torch.distributed", "numpy", "numpy.random", "h5py", "vpipe", "vpipe.app.cli",
            "vpipe.app.launch.rank_main", "vpipe.app.train.loop", "vpipe.app.verify",
            "vpipe.app.train.planning", "vpipe.profiling.rank_group",
            "vpipe.extras.bert_hdf5.shards", "vpipe.app.data.synthetic", "vpipe.app.families.bert")


def serve(listener: socket.socket) -> Callable[[], None] | None:
    """Fork what is asked for until the owner is gone; in a process so made, returns what it has to do."""
    waking, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    lines: dict[int, socket.socket] = {}
    asked: dict[int, Mapping[str, Any]] = {}
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
            request = json.loads(exactly(line, int.from_bytes(head)))
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
    tempfile.tempdir = None  # asked for anew, of this environment
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
        from vpipe.app.cli import main

        sys.exit(main(arguments))
    elif what == "vpipe.app.launch.rank_main":
        # As runpy does it, but for its warning that the module has been imported.
        spec = importlib.util.find_spec(what)
        exec(spec.loader.get_code(what), {"__name__": "__main__", "__spec__": spec, "__file__": spec.origin})
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def end(task: Callable[[], None]) -> NoReturn:
    """Do it, and end as Python does, but for taking the interpreter apart: that copies all memory shared with the
    fork server, which takes half a second."""
    try:
        try:
            task()
        except SystemExit:
            raise
        except BaseException as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            sys.last_value = error.with_traceback(trace)
            sys.excepthook(type(error), error, error.__traceback__)
            raise SystemExit(1) from None
        status: Any = 0
    except SystemExit as wanted:
        status = wanted.code if wanted.code is not None else 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    for name in IMPORTED:
        with suppress(ModuleNotFoundError) if name.startswith("vpipe.extras.") else nullcontext():  # deleted
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    assert threading.active_count() == 1
    # A thread of gloo that is woken in place of the one that holds a connection's lock spins for its whole share of the
    # processor: a message then takes twenty times the time of one. As batch jobs, processes are not woken so.
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all pages
    task = serve(socket.socket(fileno=int(sys.argv[1])))
    if task is not None:
        end(task)
