"""Parse the list ``machines``: the host and the device of each rank."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vpipe.app.config.validation import Mistake
from vpipe.distributed import Host

LOCAL = ("localhost", "127.0.0.1")
_MACHINE = re.compile(r"((?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.-]*):(\d{1,4})", re.ASCII)
"""``host:gpu``; never a word that ssh takes for an option."""


def parse_machine(text: str) -> tuple[str, int] | None:
    """Return the destination for ssh and the number of the GPU in ``me@hostB:0``; None if the text has another form."""
    found = _MACHINE.fullmatch(text)
    return None if found is None else (found[1], int(found[2]))


def machine_mistakes(machines: Sequence[str]) -> Iterator[Mistake]:
    """Yield the mistakes in the form of the list."""
    if not machines:
        yield Mistake(("machines",), "is empty", "give one host:gpu per rank, or leave it out")
    logins: dict[str, str] = {}
    for i, text in enumerate(machines):
        machine = parse_machine(text)
        if machine is None:
            yield Mistake(("machines", i), f"is '{text}'", "write host:gpu, such as localhost:0")
        elif (other := logins.setdefault(host_of(machine[0]), machine[0])) != machine[0]:
            yield Mistake(("machines", i), f"is '{text}', but another rank of that host is reached as '{other}'",
                          "write one login for a host")


@dataclass(frozen=True)
class Hosts:
    """The login and the device of every rank, and the logins that mean this host."""

    logins: tuple[str, ...]
    devices: tuple[int, ...]
    here: frozenset[str]

    @classmethod
    def from_machines(cls, machines: Sequence[str]) -> Hosts:
        """Return the hosts of a valid list."""
        entries = [machine for text in machines if (machine := parse_machine(text)) is not None]
        assert len(entries) == len(machines), "the config has checked the form"
        here = frozenset(login for login in {login for login, _ in entries}
                         if host_of(login) in LOCAL or Host(host_of(login)).is_this)
        return cls(tuple(login for login, _ in entries), tuple(gpu for _, gpu in entries), here)

    @property
    def others(self) -> list[str]:
        """Logins of the other hosts, in the order of their first ranks."""
        return [login for login in dict.fromkeys(self.logins) if login not in self.here]

    @property
    def first(self) -> str:
        """Name of this host, which has the first rank."""
        name = host_of(next(login for login in self.logins if login in self.here))
        return socket.gethostname() if name in LOCAL else name  # which others are not called, too

    def on(self, login: str | None) -> Mapping[int, int]:
        """Return the device of each rank on a host; None means this host."""
        return {rank: device for rank, (name, device) in enumerate(zip(self.logins, self.devices, strict=True))
                if (name in self.here if login is None else name == login)}

    def name(self, rank: int) -> str:
        """Return the host of a rank, for messages."""
        return self.first if self.logins[rank] in self.here else host_of(self.logins[rank])

    def described(self, rank: int, description: str) -> str:
        """Add the host to the description of a rank: ``rank 2 (stage 1) on hostB``; not if there is one host."""
        return f"{description} on {self.name(rank)}" if self.others else description


def host_of(login: str) -> str:
    """Return the host of a login: ``hostB`` of ``me@hostB``."""
    return login.rpartition("@")[2]
