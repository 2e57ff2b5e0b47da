"""Run ``vpipe configs``: list the configs that come with vpipe, or print or copy one."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path
from shlex import quote

from vpipe.app.config.shipped import shipped_configs
from vpipe.app.visualize.table import PIPE_COLUMNS, terminal_columns
from vpipe.errors import UserError, nearest


def run_configs(options: argparse.Namespace) -> None:
    """List the configs with the first sentence of each, or print the text of one, or copy one with its JSON files."""
    shipped = shipped_configs()
    if options.name is None and options.output is not None:
        raise UserError("-o copies one config, but none is named", hint="write vpipe configs NAME -o FOLDER")
    if options.name is None:
        room = max(map(len, shipped), default=0) + 2
        for name, file in shipped.items():
            print(textwrap.fill(_first_sentence(file), min(terminal_columns(PIPE_COLUMNS), 120), break_long_words=False,
                                initial_indent=f"{name:{room}}", subsequent_indent=" " * room))
    elif options.name not in shipped:
        raise UserError(f"no config '{options.name}' comes with vpipe", hint=nearest(options.name, list(shipped)))
    elif options.output is not None:
        _copy(shipped[options.name], options.output)
    else:
        sys.stdout.write(shipped[options.name].read_text(encoding="utf-8"))


def _copy(config: Path, folder: Path) -> None:
    """Copy a config into a folder; of a flat one also the files in its ``directory``."""
    named = re.search(r"""^['"]?directory['"]?: *['"]?([^'"\s]+)""", config.read_text(encoding="utf-8"), re.MULTILINE)
    files = [config, *(sorted((config.parent / named[1]).rglob("*.json")) if named else ())]
    targets = {folder / file.relative_to(config.parent): file.read_bytes() for file in files}
    try:
        for target, content in targets.items():
            if target.exists() and target.read_bytes() != content:
                raise UserError(f"'{target}' exists, with another content", hint="name another folder as --output")
        for target, content in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write '{error.filename}': {error.strerror}",
                        hint="name a folder that can be written as --output") from None
    print("\n".join(map(str, targets)), f"\ntrain it: vpipe train {quote(str(folder / config.name))}", sep="")


def _first_sentence(file: Path) -> str:
    """Return the first sentence of the comment that a config begins with."""
    comment = re.match(r"(?:# .*\n)*", file.read_text(encoding="utf-8"))
    text = " ".join(line[2:] for line in comment[0].splitlines()) if comment else ""
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]
