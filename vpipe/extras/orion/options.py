"""Describe ``vpipe orion profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vpipe.app.command_line import add_command, add_config


def describe(commands: Any) -> None:
    orion = add_command(commands, "orion", "", "prepare files for the Orion library").commands()
    kernels = add_command(orion, "profile", "vpipe.extras.orion.command.run_profile",
                          "write the kernels of an update, by name, for "
                          "ORION_KERNEL_INFO: what bounds them and how many multiprocessors they need; on a GPU, or "
                          "from the folder of a run with training.profile_iteration")
    add_config(kernels)
    kernels.add_argument("-o", "--output", type=Path, metavar="FILE", default=Path("kernels.csv"),
                         help="write to this file (default: kernels.csv)")
