"""Start the ranks of another host: ``python -m vpipe.app.launch.remote_agent``, run by a launcher over ssh.

The launcher sends over standard input what to run. The agent checks that this host reaches the first one, starts the
ranks when told, and sends back all that they write. They and it end when the launcher asks for it, and when the
connection is lost. The ranks' files are in a temporary folder, so that no file system need be shared; it is removed at
the end.

Each message is a line of JSON. To the agent: ``run`` (what is to be run), ``start`` (the run's folder), ``stop`` (the
ranks are to stop and save, with the number of a signal), ``end``; until ``start`` the launcher also sends ``alive``, so
that an agent whose connection was cut ends after :data:`SILENT_S`. From it: ``hello`` (its versions), ``ready`` or
``refused`` (what is wrong), ``file`` with ``data`` (more of a file), ``ended`` (a rank and its status).
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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from vpipe.app.config.config import load_config
from vpipe.app.imports import file_digests, import_files
from vpipe.app.launch.container import Container
from vpipe.app.launch.local import GRACE_S, POLL_S, Interrupted, Processes, Signals
from vpipe.app.launch.network import check_reachable, interface_towards
from vpipe.app.launch.rank_env import HostRanks, variables_of_packages
from vpipe.app.train.run_folder import CONFIG, failure_path
from vpipe.errors import UserError
from vpipe.plugins import PluginGroup

REACH_S = 20.0
"""Time for a connection to the first host. Each packet that is lost on the way, or on a host that strangers connect to
as well, takes twice as long as the one before: 1 s, 2 s, 4 s."""

CHUNK_BYTES = 1 << 20

ALIVE_S = 15
"""Time between two signs of life of a connection."""

SILENT_S = 4 * ALIVE_S
"""Silence before the ranks start, after which the agent ends: sshd here does not notice a cut for hours."""

_MARK = b"vpipe: "
"""Before each message: what a login shell prints by itself must not be taken for one."""


def encoded(**message: Any) -> bytes:
    """Return a message as its line."""
    return _MARK + json.dumps(message).encode() + b"\n"


def decoded(line: bytes) -> dict[str, Any] | None:
    """Return the message in a line; None when it is anything else."""
    if not line.startswith(_MARK):
        return None
    try:
        message = json.loads(line[len(_MARK):])
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def identity() -> dict[str, str]:
    """Return the versions that must be the same on all hosts: of vpipe, down to its files, and of torch."""
    content = hashlib.sha256()
    package = Path(__file__).parents[2]
    for file in sorted(package.rglob("*.py")):
        content.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    versions = {"vpipe": "none", "torch": "none", **PluginGroup.versions_of(("vpipe", "torch"))}
    return {"vpipe": f"{versions['vpipe']} (files {content.hexdigest()[:8]})",
            "torch": versions["torch"].partition("+")[0]}


class Gone(Exception):  # noqa: N818 - it is no error of this host
    """The launcher asks for the end, or the connection to it is lost."""


class Launcher:
    """The launcher on the first host, over standard input and output.

    Attributes:
        gone: whether it asks for the end, or the connection is lost: the ranks must end.
        stop_signal: for which the ranks are to stop and save; None as long as they are not.
        finished: whether no rank runs any more. This process then ends soon, even if it hangs in a write because the
            network is cut.
    """

    def __init__(self, folder: Path) -> None:
        self.gone = self.finished = False
        self.stop_signal: int | None = None
        self._folder = folder
        self._sent: dict[Path, int] = {}
        self._sent_at = self._heard_at = time.monotonic()
        self._messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
        Thread(target=self._read, daemon=True).start()
        Thread(target=self._end_late, daemon=True).start()

    def send(self, **message: Any) -> None:
        """Send a message at once. Raises Gone if the connection is lost."""
        try:
            sys.stdout.buffer.write(encoded(**message))
            sys.stdout.buffer.flush()
        except OSError:
            raise Gone from None
        self._sent_at = time.monotonic()

    def send_files(self, run_folder: str, pattern: str) -> None:
        """Send what is new in the files that match; a report's paths become those of the run's folder."""
        for path in sorted(self._folder.rglob(pattern)):
            if path.is_file() and path.name != CONFIG:
                with path.open("rb") as file:
                    file.seek(self._sent.get(path, 0))
                    while data := file.read(CHUNK_BYTES):
                        if path.name.endswith(".failure.json"):
                            data = data.replace(str(self._folder).encode(), run_folder.encode())
                        self.send(file=str(path.relative_to(self._folder)), data=base64.b64encode(data).decode())
                    self._sent[path] = file.tell()

    def receive(self, key: str) -> Any:
        """Wait for the message ``key``. Raises Gone if it never comes."""
        while not self.gone and time.monotonic() - self._heard_at < SILENT_S:
            with suppress(Empty):
                message = self._messages.get(timeout=POLL_S)
                if key in message:
                    return message[key]
        raise Gone

    def _read(self) -> None:
        partial = b""
        try:
            # Not through sys.stdin: its lock, held by a thread that waits, aborts a Python that ends.
            while more := os.read(0, CHUNK_BYTES):
                self._heard_at = time.monotonic()
                *lines, partial = (partial + more).split(b"\n")
                for message in filter(None, map(decoded, lines)):
                    self._messages.put(message)
                    self.stop_signal = self.stop_signal or message.get("stop")
                    self.gone = self.gone or "end" in message
        finally:
            self.gone = True

    def _end_late(self) -> None:
        while not (self.gone or self.finished):
            time.sleep(POLL_S)
        since = time.monotonic()
        while time.monotonic() - max(since, self._sent_at) < 3 * GRACE_S:
            time.sleep(POLL_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)  # the ranks see it, and end as well


def main() -> int:
    """Serve one run; return the exit status."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of the input tells it
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
    launcher = Launcher(folder)
    launcher.send(hello=identity())
    try:
        ranks = _ranks_here(launcher.receive("run"), folder)
    except UserError as error:  # places in the config, which is the first host's, are left out
        launcher.send(refused=[[problem.what, problem.hint,
                                None if (problem.where or "").startswith(str(folder)) else problem.where]
                               for problem in error.problems])
        return 2
    except OSError as error:
        launcher.send(refused=[[f"cannot start a rank there: {error}",
                                "look whether there is room in its temporary folder (TMPDIR)", None]])
        return 2
    launcher.send(ready=True)
    run_folder = str(launcher.receive("start"))
    processes = Processes(ranks, folder)
    try:
        processes.start()
        _serve(processes, launcher, folder, run_folder)
    finally:
        signals.ignore()
        processes.close()
        launcher.finished = True
    launcher.send_files(run_folder, "*")
    return 0


def _ranks_here(run: dict[str, Any], folder: Path) -> HostRanks:
    """Return the ranks to start, once it is sure that they will reach the first host.

    Raises:
        UserError: this host cannot take part, and why.
        OSError: the config cannot be written.
    """
    _import_files(run["imports"])
    (folder / CONFIG).write_text(run["config"])
    config = load_config(folder / CONFIG, resolved=True)
    address, port = str(run["address"]), int(run["port"])
    interface = config.parallel.interface or interface_towards(address)
    check_reachable(address, port, REACH_S)
    return HostRanks({int(rank): int(device) for rank, device in run["devices"].items()}, int(run["world"]), address,
                     port, interface, config.training.threads, tuple(map(str, run["task"])), str(run["host"]),
                     Container.from_config(config),
                     interface_found=config.parallel.interface is None, run=str(run["run"]),
                     secret=str(run["secret"]), variables=variables_of_packages(config))


def _import_files(digests: Mapping[str, str]) -> None:
    """Import the files of ``--import``, and name them to the ranks; refuse one that is another on the first host."""
    import_files(list(digests))
    for path, digest in file_digests(digests).items():
        if digest != digests[path]:
            raise UserError(f"'{os.path.abspath(path)}' of --import differs from that of the first host",
                            hint="copy the first host's file to the same path")


def _serve(processes: Processes, launcher: Launcher, folder: Path, run_folder: str) -> None:
    """Send what the ranks write, until all have ended or must."""
    reported: set[int] = set()
    stopped = False
    while not launcher.gone:
        if launcher.stop_signal is not None and not stopped:
            processes.stop(launcher.stop_signal)
            stopped = True
        ended = {rank: status for rank, status in processes.statuses.items() if status is not None}
        launcher.finished = len(ended) == len(processes.statuses)
        launcher.send_files(run_folder, "rank*.log")
        for rank in ended.keys() - reported:
            launcher.send_files(run_folder, failure_path(folder, rank).name)
            launcher.send(ended=rank, status=ended[rank])
            reported.add(rank)
        if launcher.finished:
            return
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
