"""Run ``vpipe configs``: list the configs that come with vpipe, or print one."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

from vpipe.app.config.shipped import shipped_configs
from vpipe.app.visualize.table import PIPE_COLUMNS, terminal_columns
from vpipe.errors import UserError, nearest


def run_configs(options: argparse.Namespace) -> None:
    """List the configs with the first sentence of each, or print the text of one."""
    shipped = shipped_configs()
    if options.name is None:
        room = max(map(len, shipped), default=0) + 2
        for name, file in shipped.items():
            print(textwrap.fill(_first_sentence(file), min(terminal_columns(PIPE_COLUMNS), 120), break_long_words=False,
                                initial_indent=f"{name:{room}}", subsequent_indent=" " * room))
    elif options.name in shipped:
        sys.stdout.write(shipped[options.name].read_text(encoding="utf-8"))
    else:
        raise UserError(f"no config '{options.name}' comes with vpipe", hint=nearest(options.name, list(shipped)))


def _first_sentence(file: Path) -> str:
    """Return the first sentence of the comment that a config begins with."""
    comment = re.match(r"(?:# .*\n)*", file.read_text(encoding="utf-8"))
    text = " ".join(line[2:] for line in comment[0].splitlines()) if comment else ""
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]
