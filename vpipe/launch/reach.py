"""The other hosts of a run, all reached at the same time, and told what to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vpipe.config.machines import Hosts
from vpipe.config.sections import LaunchSection
from vpipe.errors import Problem, UserError
from vpipe.launch.local import close_all
from vpipe.launch.network import listening
from vpipe.launch.ranks import HostRanks
from vpipe.launch.ssh import Remote, hello_s

PREPARE_S, SILENT_S = 3600.0, 30.0
"""For a host to look at the config, where it may prepare a large text; and without a sign of life from its launcher
meanwhile."""


class UnreachableError(UserError):
    """Hosts that cannot take part.

    Attributes:
        by_login: what is wrong with each.
    """

    by_login: Mapping[str, Sequence[Problem]]

    @classmethod
    def because(cls, by_login: Mapping[str, Sequence[Problem]]) -> UserError:
        """All that is wrong, as one error."""
        error = cls.all_of([problem for problems in by_login.values() for problem in problems])
        assert isinstance(error, cls)
        error.by_login = by_login
        return error


def connect(hosts: Hosts, settings: LaunchSection, *, container: bool) -> list[Remote]:
    """The launchers of other hosts, all reached at the same time.

    Raises:
        UnreachableError: all that keeps any of them from it.
        UserError: there is no ssh here.
    """
    remotes: list[Remote] = []
    try:
        for login in hosts.others:
            remotes.append(Remote(login, hosts.on(login), settings))
        found = {remote.login: remote.problems("hello", hello_s(settings)) or remote.differs(container)
                 for remote in remotes}
        if any(found.values()):
            raise UnreachableError.because({login: problems for login, problems in found.items() if problems})
    except BaseException:
        close_all(remotes)
        raise
    return remotes


def prepare(remotes: Sequence[Remote], config: str, here: HostRanks, silence_s: float, fingerprint: str) -> None:
    """Tell other hosts what is to be run, and wait until all can.

    Args:
        fingerprint: of this host's data.

    Raises:
        UnreachableError: all that keeps any of them from it, other data among it.
    """
    with listening(here.port):
        for remote in remotes:
            remote.tell(config, here, silence_s)
        found = {remote.login: remote.problems("ready", PREPARE_S, SILENT_S) or remote.other_data(fingerprint)
                 for remote in remotes}
    if any(found.values()):
        raise UnreachableError.because({login: problems for login, problems in found.items() if problems})
