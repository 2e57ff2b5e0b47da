"""Attack a run as another user would, who has an account on a host and nothing else; report what was reached, as JSON.

It shares no code with vpipe, and is told nothing but addresses and the user whose sockets it is to try: Linux shows
every user the sockets of the others. On another host it is told ports. Usage: stranger.py REPORT USER[:PORT...]
SECONDS ADDRESS... [forge]: it goes on for so long, and until its standard input ends. With the last word it writes into
what listens at the end, as if these were stores of torch.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import TextIO

from torch.distributed import PrefixStore, TCPStore

NOBODY = 65534

SAID = [b"", b"\0" * 8, b"\1" + b"\0" * 7, b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1, "token": "x"}\n',
        b'{"rank": 1, "nonce": "1", "proof": "2"}\n', b'{"fault": {"ranks": [0], "what": "", "hint": ""}}\n',
        b"x" * 100_000, secrets.token_bytes(4096)]
"""What is sent to everything that listens: nothing, gloo's numbers of connections, what ranks might say, and noise."""

HELD = 40
"""Connections that stay open."""


def listeners(whom: str) -> tuple[set[int], set[str]]:
    """The TCP ports and UNIX names at which somebody of this user listens."""
    user, *given = map(int, whom.split(":"))
    ports, names = set(given), set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(table) as file:
            for line in file.readlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[7]) == user:
                    ports.add(int(words[1].rpartition(":")[2], 16))
    with open("/proc/net/unix") as file:
        for line in file.readlines()[1:]:
            words = line.split()
            if len(words) > 7 and int(words[3], 16) & 0x10000:  # __SO_ACCEPTCON
                names.add(words[7])
    return ports, names


def try_all(user: str, addresses: list[str], held: list[socket.socket], reached: dict[str, str]) -> None:
    """Connect to all that listens, say something, and keep what answers."""
    ports, names = listeners(user)
    targets: list[tuple[int, object, str]] = [
        (socket.AF_INET6 if ":" in address else socket.AF_INET, (address, port), str(port))
        for port in ports for address in addresses]
    targets += [(socket.AF_UNIX, name.replace("@", "\0", 1), name) for name in names]
    for family, where, name in targets:
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)[:1 + (family == socket.AF_UNIX)]:
            one = socket.socket(family, kind)
            one.settimeout(0.05)
            try:
                one.connect(where)
                one.settimeout(0.02)
                answer = b""
                with suppress(OSError):
                    one.sendall(secrets.choice(SAID))
                    answer = one.recv(200)
                reached[name] = repr(answer) if answer else reached.get(name, "")
                held.append(one)
            except OSError:
                one.close()
    while len(held) > HELD:
        held.pop(secrets.randbelow(len(held))).close()


def forge(address: str, port: int) -> int:
    """Write into a store of torch what a run might read there; return how many keys were written."""
    with suppress(RuntimeError):
        store = TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
        written = 0
        for prefix in ("", "world 0  0", "world 0 ", "checkpoints  0", "checkpoints "):
            one = PrefixStore(prefix, store)
            for key in ("watchdog", "run", *(f"verdict {n}" for n in range(50)), *(f"vote {n} 1" for n in range(50))):
                one.set(key, "forged by another user")
                written += 1
            one.delete_key("default_pg/0//0//cpu//0/0")
        for n in range(20):
            store.set(f"junk {n}", "x" * 1_000_000)
        return written
    return 0


def main(report: TextIO, user: str, seconds: float, addresses: list[str], forging: bool) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)  # not before: it may not even read this Python
    held: list[socket.socket] = []
    reached: dict[str, str] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end or not select.select([0], [], [], 0)[0]:
        try_all(user, addresses, held, reached)
        time.sleep(0.02)
    # At the end, when the run is at work: what can still be reached, and written?
    for one in held:
        one.close()
    held, now = [], dict[str, str]()
    try_all(user, addresses, held, now)
    forged = {port: forge(addresses[0], port) for port in listeners(user)[0] if str(port) in now} if forging else {}
    json.dump({"uid": os.getuid(), "during": reached, "now": now, "forged": forged}, report)


if __name__ == "__main__":
    with open(sys.argv[1], "w") as report:
        words = sys.argv[4:]
        main(report, sys.argv[2], float(sys.argv[3]), [word for word in words if word != "forge"], "forge" in words)
