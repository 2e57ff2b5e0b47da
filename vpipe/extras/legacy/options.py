"""Add ``--scheduler``, as OurGPipe has it, to the commands that take a config."""

from __future__ import annotations

import argparse
from typing import Any

from vpipe.app.command_line import OptionSetting

OPTION = "--scheduler"


class _SetScheduler(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        namespace.settings = [*namespace.settings, OptionSetting(f"parallel.scheduler={values}", OPTION, str(values))]


def add_scheduler(parser: argparse.ArgumentParser) -> None:
    """Add the option, which overrides schedule and executor of the config."""
    parser.add_argument(OPTION, action=_SetScheduler, default=argparse.SUPPRESS,
                        help="override the schedule with an OurGPipe scheduler, such as naive")
