"""Hosts of one's own: Linux namespaces with a cable each, one switch between them, and an sshd on every one.

A host has its own network, host name, processes, mounts and home folder; it shares the rest of the file system
(as hosts with a network drive do), except for the folders that a test calls private. All of it lives in
namespaces whose first processes are children of this one: nothing is seen outside, several tests may use the same names
and addresses at once, and everything is gone when they end, however that happens. No file of the system changes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount", "ssh", "ssh-keygen", "/usr/sbin/sshd")

VPIPE = Path(sys.executable).with_name("vpipe")
"""The command, which all hosts have because they share the file system."""

SETTLE_S = 10.0
"""For what the kernel and sshd do in a few milliseconds."""

FIRST = ["setpriv", "--pdeathsig", "KILL", "unshare", "--kill-child=KILL", "--fork"]
"""The first process of a namespace ends with its parent, and everything in the namespace with it."""

IDLE = ["sh", "-c", "trap '' CHLD; exec sleep infinity"]
"""An init: with SIGCHLD ignored, the kernel buries the orphans that it adopts."""

SSHD_CONFIG = """\
HostKey {home}/host_key
AuthorizedKeysFile {home}/.ssh/authorized_keys
PidFile none
UsePAM no
UseDNS no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv TMPDIR={home}/tmp PYTHONPATH={python_path}
"""

SSH_CONFIG = """\
Host *
  IdentityFile {home}/.ssh/id_ed25519
  UserKnownHostsFile {home}/.ssh/known_hosts
  StrictHostKeyChecking yes
"""


def missing() -> str | None:
    """Why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "hosts of one's own need root"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    attempt = subprocess.run(["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"],
                             capture_output=True, text=True, timeout=SETTLE_S)
    return f"no namespaces here: {attempt.stderr.strip()}" if attempt.returncode else None


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


@dataclass
class Host:
    """One host. ``home`` is root's home folder there; its plain ``ssh host1`` reaches the others."""

    name: str
    address: str
    home: Path
    first: int = 0
    """Process id, outside, of the first process."""
    started: list[subprocess.Popen[Any]] = field(default_factory=list, repr=False)
    _sshd: subprocess.Popen[Any] | None = field(default=None, repr=False)

    def inside(self, command: Sequence[str | Path], cwd: Path | None = None) -> list[str]:
        """The command line that runs ``command`` on this host, in the folder ``cwd`` or root's home."""
        return ["nsenter", "--target", str(self.first), "--net", "--mount", "--uts", "--pid",
                f"--wdns={cwd or self.home}", *map(str, command)]

    def run(self, command: Sequence[str | Path], cwd: Path | None = None,
            **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command here; its output is text in the result. Options are those of ``subprocess.run``."""
        options = {"capture_output": True, "text": True, "timeout": 240.0, "env": self.environment(), **options}
        return subprocess.run(self.inside(command, cwd), **options)

    def popen(self, command: Sequence[str | Path], cwd: Path | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a command here, as a login there would: in a session of its own.

        What is returned is an ``nsenter`` that passes no signals on: signal :meth:`processes` instead.
        """
        options = {"env": self.environment(), "start_new_session": True, **options}
        process = subprocess.Popen(self.inside(command, cwd), **options)
        self.started.append(process)
        return process

    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "HOME": str(self.home), "HOSTNAME": self.name, "TMPDIR": str(self.home / "tmp")}

    def path(self, path: Path) -> Path:
        """What ``path`` is on this host, as seen from outside: for private folders."""
        return Path(f"/proc/{self.first}/root{path}")

    def processes(self) -> dict[int, str]:
        """Process ids, as seen outside, and command lines of what runs here: without init, sshd and zombies."""
        found = {}
        here = os.readlink(f"/proc/{self.first}/ns/pid")
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended meanwhile
                if os.readlink(folder / "ns/pid") == here and int(folder.name) != self.first:
                    words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and not words[0].startswith(("sshd:", "/usr/sbin/sshd")):
                        found[int(folder.name)] = " ".join(words).strip()
        return found

    def find(self, **environment: str) -> list[int]:
        """Process ids, outside, of what runs here with these environment variables, such as ``RANK="2"``."""
        wanted = {f"{name}={value}".encode() for name, value in environment.items()}
        found = []
        for pid in self.processes():
            with suppress(OSError):
                if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                    found.append(pid)
        return found

    def open_ssh(self) -> None:
        """Start the sshd."""
        assert self._sshd is None
        with (self.home / "sshd.log").open("ab") as log:
            self._sshd = self.popen(["/usr/sbin/sshd", "-D", "-e", "-f", self.home / "sshd_config"], stderr=log)
        until(lambda: b"Server listening" in (self.home / "sshd.log").read_bytes(), SETTLE_S, f"sshd on {self.name}")

    def close_ssh(self) -> None:
        """End the sshd that listens: connections are refused from now on, and those there are stay."""
        assert self._sshd is not None
        with suppress(FileNotFoundError, ProcessLookupError):
            children = Path(f"/proc/{self._sshd.pid}/task/{self._sshd.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGTERM)
        self._sshd.wait(SETTLE_S)
        (self.home / "sshd.log").unlink()
        self._sshd = None

    def bar(self) -> None:
        """No key opens this host any longer."""
        (self.home / ".ssh/authorized_keys").write_text("")

    def hide(self, folder: Path) -> None:
        """An empty folder of this host's own in place of ``folder``."""
        self.run(["mount", "-t", "tmpfs", "none", folder], check=True)

    def show(self, folder: Path) -> None:
        """Undo :meth:`hide` or :meth:`bind`."""
        self.run(["umount", folder], check=True)

    def bind(self, source: Path, target: Path) -> None:
        """``source`` in place of ``target`` on this host."""
        self.run(["mount", "--bind", source, target], check=True)


class Hosts(Sequence[Host]):
    """Some hosts around one switch; end them with :meth:`stop`, or use it as a context."""

    def __init__(self, count: int, folder: Path, private: Sequence[Path] = ()) -> None:
        """Start ``host0`` ... at 10.77.0.1 ...

        Args:
            folder: an empty one for homes, keys and logs.
            private: folders (made when missing) of which each host has an empty one of its own.
        """
        self._all = [Host(f"host{i}", f"10.77.0.{i + 1}", folder / f"host{i}") for i in range(count)]
        self._parents: list[subprocess.Popen[bytes]] = []
        self._firsts: list[int] = []
        try:
            self._start(folder, private)
        except BaseException:
            self.stop()
            raise

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._all)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def cut(self, host: Host) -> None:
        """Pull the host's cable out of the switch."""
        self._in_switch("ip", "link", "set", host.name, "down")

    def mend(self, host: Host) -> None:
        """Plug it in again."""
        self._in_switch("ip", "link", "set", host.name, "up")

    def stop(self) -> None:
        """End everything on all hosts; the kernel takes the networks and mounts away."""
        for first in self._firsts:
            with suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)  # and the kernel everything in its namespaces
        started = [process for host in self._all for process in host.started]
        for process in started:
            process.kill()  # an nsenter whose command was stopped is stopped as well, and keeps it from being buried
        for process in (*self._parents, *started):
            process.wait(SETTLE_S)

    def _start(self, folder: Path, private: Sequence[Path]) -> None:
        names = folder / "hosts"
        names.parent.mkdir(parents=True, exist_ok=True)
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in self._all))
        for place in private:
            place.mkdir(parents=True, exist_ok=True)
        for host in self._all:
            _write_home(host)
        known = "".join(f"{host.name} {(host.home / 'host_key.pub').read_text()}" for host in self._all)
        keys = "".join((host.home / ".ssh/id_ed25519.pub").read_text() for host in self._all)
        self._switch = self._first(["--net"])
        self._in_switch("ip", "link", "add", "switch", "type", "bridge")
        self._in_switch("ip", "link", "set", "switch", "up")
        for host in self._all:
            (host.home / ".ssh/known_hosts").write_text(known)
            (host.home / ".ssh/authorized_keys").write_text(keys)
            host.first = self._first(["--net", "--mount", "--uts", "--pid", "--mount-proc"])
            self._in_switch("ip", "link", "add", host.name, "type", "veth", "peer", "name", "eth0", "netns",
                            str(host.first))
            self._in_switch("ip", "link", "set", host.name, "master", "switch", "up")
            script = ["set -e", f"hostname {host.name}", "mount -t tmpfs none /run", "mkdir /run/sshd"]
            script += [f"mount --bind {file} /etc/{file.name}" for file in (names, host.home / "passwd",
                                                                            host.home / "shadow")]
            script += [f"mount -t tmpfs none {place}" for place in private]
            script += ["ip link set lo up", f"ip address add {host.address}/24 dev eth0", "ip link set eth0 up"]
            done = host.run(["sh", "-c", "\n".join(script)])
            assert done.returncode == 0, done.stderr
            host.open_ssh()

    def _first(self, namespaces: Sequence[str]) -> int:
        """The process id of a new first process."""
        process = subprocess.Popen([*FIRST, *namespaces, *IDLE], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._parents.append(process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(lambda: bool(children.read_text()), SETTLE_S, "a first process")
        first = int(children.read_text())
        self._firsts.append(first)
        until(lambda: b"infinity" in Path(f"/proc/{first}/cmdline").read_bytes(), SETTLE_S, "its namespaces")
        return first

    def _in_switch(self, *command: str) -> None:
        done = subprocess.run(["nsenter", "--target", str(self._switch), "--net", *command], capture_output=True,
                              text=True, timeout=SETTLE_S)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _write_home(host: Host) -> None:
    """Keys and settings of a host, and the accounts that make this folder root's home."""
    ssh = host.home / ".ssh"
    ssh.mkdir(parents=True)
    (host.home / "tmp").mkdir()
    for key in (host.home / "host_key", ssh / "id_ed25519"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", key], check=True,
                       timeout=SETTLE_S)
    (ssh / "config").write_text(SSH_CONFIG.format(home=host.home))
    (host.home / "sshd_config").write_text(SSHD_CONFIG.format(
        home=host.home, python_path=os.environ.get("PYTHONPATH") or "/nowhere"))
    others = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
    root = f"root:x:0:0:root:{host.home}:/bin/bash"
    (host.home / "passwd").write_text("\n".join([root, *others]) + "\n")
    (host.home / "shadow").write_text("root:*:19000:0:99999:7:::\n")  # a locked root could not log in
