"""The launcher of another host: ``python -m vpipe.launch.remote_agent``, started over ssh by the first host's.

It is told over standard input what to run, looks whether this host can, starts the ranks when told, and sends back
all they write. They and it end when the first host says so, when it falls silent, and when the connection is lost.
The ranks' files are in a temporary folder, so that no file system need be shared; it is removed at the end.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from vpipe.config.config import load_config
from vpipe.distributed.network import interface_towards, reach
from vpipe.errors import Problem, UserError
from vpipe.launch.container import Container
from vpipe.launch.failure_report import as_error, read_report, signal_name
from vpipe.launch.local import GRACE_S, POLL_S, Interrupted, Processes, Signals
from vpipe.launch.rank_env import HostRanks
from vpipe.train.run_folder import CONFIG, FINGERPRINT, failure_path, log_path

SILENCE_S = 60.0
"""Until the first host says how long it may be silent."""

REACH_S = 5.0
CHUNK_BYTES = 1 << 20


class Gone(Exception):  # noqa: N818 - it is no error of this host
    """The first host wants no more, or cannot be heard."""


class Outbox:
    """What is said to the first host: messages, and the ranks' files as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent: dict[Path, int] = {}
        self.said_at = time.monotonic()

    def say(self, **message: Any) -> None:
        """Say it at once.

        Raises:
            Gone: nobody listens.
        """
        try:
            sys.stdout.buffer.write(encoded(**message))
            sys.stdout.buffer.flush()
        except OSError:
            raise Gone from None
        self.said_at = time.monotonic()

    def beat(self) -> None:
        """Say that this launcher is there, from time to time."""
        if time.monotonic() - self.said_at > BEAT_S:
            self.say()

    def copy(self, run_folder: str, pattern: str) -> None:
        """Send what is new in the files that match; a report's paths become those of the run's folder."""
        for path in sorted(self._folder.rglob(pattern)):
            if path.is_file() and path.name != CONFIG:
                with path.open("rb") as file:
                    file.seek(self._sent.get(path, 0))
                    while data := file.read(CHUNK_BYTES):
                        if path.name.endswith(".failure.json"):
                            data = data.replace(str(self._folder).encode(), run_folder.encode())
                        self.say(file=str(path.relative_to(self._folder)), data=base64.b64encode(data).decode())
                    self._sent[path] = file.tell()


class Inbox:
    """What the first host says. When it is gone, so is this process soon, even if it hangs in a write.

    Attributes:
        silence_s: how long the first host may say nothing.
        stop_asked: the signal for which the ranks are to leave off in good order; None as long as they are not.
    """

    def __init__(self, outbox: Outbox, folder: Path) -> None:
        self.silence_s = SILENCE_S
        self.stop_asked: int | None = None
        self._outbox, self._folder = outbox, folder
        self._messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._heard = time.monotonic()
        self._ended = False
        Thread(target=self._read, daemon=True).start()
        Thread(target=self._end_late, daemon=True).start()

    def _read(self) -> None:
        unended = b""
        try:
            # Not through sys.stdin: its lock, held by a thread that waits, aborts a Python that ends.
            while more := os.read(0, CHUNK_BYTES):
                self._heard = time.monotonic()
                *lines, unended = (unended + more).split(b"\n")
                for line in lines:
                    if message := decoded(line):
                        self._messages.put(message)
                        self.stop_asked = self.stop_asked or message.get("stop")
                        self._ended = self._ended or "end" in message
        finally:
            self._ended = True

    def _end_late(self) -> None:
        while not self.gone:
            time.sleep(POLL_S)
        gone = time.monotonic()
        while time.monotonic() - max(gone, self._outbox.said_at) < 3 * GRACE_S:
            time.sleep(POLL_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)  # the ranks see it, and end as well

    @property
    def silent(self) -> bool:
        """Whether the first host says nothing, not even that it ends."""
        return not self._ended and time.monotonic() - self._heard > self.silence_s

    @property
    def gone(self) -> bool:
        """Whether the ranks must end."""
        return self._ended or self.silent

    def take(self, key: str) -> Any:
        """Wait for the message ``key``.

        Raises:
            Gone: it never comes.
        """
        while not self.gone:
            with suppress(Empty):
                message = self._messages.get(timeout=POLL_S)
                if key in message:
                    return message[key]
        raise Gone


def main() -> int:
    """Serve one run; returns the exit status."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of the input says it
    try:
        with tempfile.TemporaryDirectory(prefix="vpipe-", ignore_cleanup_errors=True) as name, \
                Signals(passed_on=False) as signals:
            return _run(Path(name), signals)
    except OSError as error:
        print(error, file=sys.stderr)  # whose last line the first host shows
    except (Gone, Interrupted):
        pass
    return 1


def _run(folder: Path, signals: Signals) -> int:
    outbox = Outbox(folder)
    inbox = Inbox(outbox, folder)
    outbox.say(hello=identity())
    try:
        ranks, fingerprint = _prepared(inbox.take("run"), folder, inbox, outbox)
    except UserError as error:
        outbox.say(refused=[[problem.what, problem.hint, _place(problem, str(folder))] for problem in error.problems])
        return 2
    except OSError as error:
        outbox.say(refused=[[f"cannot start a rank there: {error}",
                             "look whether there is room in its temporary folder (TMPDIR)", None]])
        return 2
    outbox.say(ready=fingerprint)
    run_folder = str(inbox.take("start"))
    processes = Processes(ranks, folder)
    try:
        processes.start()
        _serve(processes, inbox, outbox, run_folder)
    finally:
        signals.ignore()
        processes.close()
    outbox.copy(run_folder, "*")
    if inbox.silent:
        outbox.say(silent_s=inbox.silence_s)
    return 0


def _place(problem: Problem, folder: str) -> str | None:
    """Where a problem is, unless it is in the config, which is the first host's."""
    return None if problem.where is None or problem.where.startswith(folder) else problem.where


def _prepared(told: dict[str, Any], folder: Path, inbox: Inbox, outbox: Outbox) -> tuple[HostRanks, str]:
    """What to start, once it is sure that this host can; and the fingerprint of its data.

    Raises:
        UserError: it cannot, and why.
        OSError: not even a rank that would look can be started.
    """
    inbox.silence_s = float(told["silence_s"])
    (folder / CONFIG).write_text(told["config"])
    config = load_config(folder / CONFIG)
    address, port = str(told["address"]), int(told["port"])
    chosen = config.parallel.interface
    interface = chosen or interface_towards(address)
    reach(address, port, REACH_S)
    devices = {int(rank): int(device) for rank, device in told["devices"].items()}
    container = Container.of(config)

    def ranks(*task: str) -> HostRanks:
        return HostRanks(devices, int(told["world"]), address, port, interface, config.training.threads, task,
                         str(told["host"]), container, interface_found=chosen is None, run=str(told["run"]))

    first = min(devices)
    trial = Processes(ranks("prepare", *map(str, devices.values())), folder)
    try:
        trial.start([first])
        while (status := trial.statuses[first]) is None:
            if inbox.gone:
                raise Gone
            outbox.beat()
            time.sleep(POLL_S)
    finally:
        trial.close()
    if status:
        raise _unprepared(status, folder, first)
    log_path(folder, first).unlink(missing_ok=True)
    fingerprint = (folder / FINGERPRINT).read_text()
    (folder / FINGERPRINT).unlink()
    return ranks(*map(str, told["task"])), fingerprint


def _unprepared(status: int, folder: Path, rank: int) -> UserError:
    report = read_report(folder, rank)
    if report is not None:
        if report["user"]:
            return UserError.all_of([Problem(*problem) for problem in report["problems"]])
        return UserError(as_error(report, str).what, hint="look there")
    said = log_path(folder, rank).read_text(errors="replace").strip().splitlines()
    how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with exit status {status}"
    return UserError(f"a rank's process {how} before it could look at the config: {said[-1] if said else 'in silence'}",
                     hint="the Python of the ranks must have vpipe and what it needs, in the container where there is "
                          "one")


def _serve(processes: Processes, inbox: Inbox, outbox: Outbox, run_folder: str) -> None:
    """Send what the ranks write, until all have ended or must."""
    told: set[int] = set()
    stopped = False
    while not inbox.gone:
        if inbox.stop_asked is not None and not stopped:
            processes.stop(inbox.stop_asked)
            stopped = True
        ended = {rank: status for rank, status in processes.statuses.items() if status is not None}
        outbox.copy(run_folder, "rank*.log")
        for rank, status in ended.items():
            if rank not in told:
                if failure_path(Path(processes.folder), rank).exists():
                    outbox.copy(run_folder, failure_path(Path(), rank).name)
                outbox.say(ended=rank, status=status)
                told.add(rank)
        if len(told) == len(processes.statuses):
            return
        time.sleep(POLL_S)


_MARK = b"vpipe: "
"""Before each message: what a login shell prints by itself must not be taken for one."""

BEAT_S = 1.0
"""Between the first host's messages; a host that hears none for the run's timeout ends its ranks."""


def encoded(**message: Any) -> bytes:
    """A message as its line."""
    return _MARK + json.dumps(message).encode() + b"\n"


def decoded(line: bytes) -> dict[str, Any] | None:
    """The message in a line; None when it is anything else."""
    if not line.startswith(_MARK):
        return None
    try:
        message = json.loads(line[len(_MARK):])
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def identity() -> dict[str, str]:
    """What must be the same on all hosts: vpipe, down to its files, and torch."""
    content = hashlib.sha256()
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        content.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return {"vpipe": f"{_version('vpipe')} (files {content.hexdigest()[:8]})",
            "torch": _version("torch").partition("+")[0]}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main())
