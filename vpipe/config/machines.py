"""Which rank lives on which host: the list ``machines``."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vpipe.config.validation import Mistake
from vpipe.distributed.network import is_this_host

LOCAL = ("localhost", "127.0.0.1")
_MACHINE = re.compile(r"((?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.-]*):(\d{1,4})", re.ASCII)
"""``host:gpu``; never a word that ssh would take for an option."""


@dataclass(frozen=True)
class Machine:
    """One entry of ``machines``: where a rank lives.

    Attributes:
        login: what ssh is told: ``hostB`` or ``me@hostB``.
        gpu: the number of its device there.
    """

    login: str
    gpu: int

    @classmethod
    def of(cls, text: str) -> Machine | None:
        """``hostB:0`` taken apart; None when it is not of that form."""
        found = _MACHINE.fullmatch(text)
        return None if found is None else cls(found[1], int(found[2]))

    @property
    def host(self) -> str:
        """The host's name or address."""
        return self.login.rpartition("@")[2]


def machine_mistakes(machines: Sequence[str] | None) -> Iterator[Mistake]:
    """What is wrong with the form of the list."""
    if machines is not None and not machines:
        yield Mistake(("machines",), "is empty", "give one host:gpu per rank, or leave it out")
    logins: dict[str, str] = {}
    for i, text in enumerate(machines or ()):
        machine = Machine.of(text)
        if machine is None:
            yield Mistake(("machines", i), f"is '{text}'", "write host:gpu, such as localhost:0")
        elif logins.setdefault(machine.host, machine.login) != machine.login:
            yield Mistake(("machines", i), f"is '{text}', but another rank of that host is reached as "
                          f"'{logins[machine.host]}'", "write one login for a host")


@dataclass(frozen=True)
class Hosts:
    """The ranks of every host.

    Attributes:
        logins: per rank.
        devices: per rank.
        here: the logins that mean this host.
    """

    logins: tuple[str, ...]
    devices: tuple[int, ...]
    here: frozenset[str]

    @classmethod
    def of(cls, machines: Sequence[str]) -> Hosts:
        """The hosts of a checked list."""
        entries = [machine for text in machines if (machine := Machine.of(text)) is not None]
        assert len(entries) == len(machines), "the config has checked the form"
        here = frozenset(login for login, host in {entry.login: entry.host for entry in entries}.items()
                         if host in LOCAL or is_this_host(host))
        return cls(tuple(entry.login for entry in entries), tuple(entry.gpu for entry in entries), here)

    @property
    def others(self) -> list[str]:
        """The other hosts' logins, in the order of their first ranks."""
        return [login for login in dict.fromkeys(self.logins) if login not in self.here]

    @property
    def first(self) -> str:
        """The name of this host, which has the first rank."""
        name = host_of(next(login for login in self.logins if login in self.here))
        return socket.gethostname() if name in LOCAL else name  # which others are not called, too

    def on(self, login: str | None) -> Mapping[int, int]:
        """Rank -> device of the ranks of a host; None: of this one."""
        return {rank: device for rank, (name, device) in enumerate(zip(self.logins, self.devices, strict=True))
                if (name in self.here if login is None else name == login)}

    def name(self, rank: int) -> str:
        """The host of a rank, for messages."""
        return self.first if self.logins[rank] in self.here else host_of(self.logins[rank])

    def described(self, rank: int, description: str) -> str:
        """``rank 2 (stage 1, host hostB)``, from what it is without the host; as that is where there is one host."""
        return f"{description.removesuffix(')')}, host {self.name(rank)})" if self.others else description


def host_of(login: str) -> str:
    """``hostB`` of ``me@hostB``."""
    return login.rpartition("@")[2]
