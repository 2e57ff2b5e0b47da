"""Commands that start their ranks themselves, and so may not be ranks of another program."""

from __future__ import annotations

from collections.abc import Mapping

from vpipe.errors import UserError, counted
from vpipe.launch.member import Member


def check_alone(command: str, environment: Mapping[str, str]) -> None:
    """Refuse to run once per process of torchrun or srun.

    Args:
        command: for the message.

    Raises:
        UserError: this is one of several processes.
    """
    # Where the first rank is does not matter here: an address at hand saves asking SLURM for it.
    member = Member.of({"MASTER_ADDR": "localhost", "MASTER_PORT": "0", **environment}, None)
    if member is not None and member.ranks > 1:
        raise UserError(f"{command} is one of {counted(member.ranks, 'process')} of {member.starter}, but it starts "
                        "its ranks itself", hint="run it alone, without torchrun or srun")
