"""Describe commands: a parser whose errors have vpipe's form, and the options that several commands share.

A package adds a command by an entry point of its name in the group ``vpipe.commands``, whose function is given the
commands of the parser::

    [project.entry-points."vpipe.commands"]
    count = "my_package.count:describe"
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vpipe.errors import UserError, nearest
from vpipe.plugins import PluginGroup

COMMANDS = PluginGroup("vpipe.commands", "command")
"""The group of entry points."""

CONFIG_OPTIONS = PluginGroup("vpipe.config_options", "option")
"""The group of entry points for functions that add options to the parser of a command that takes a config. An option
adds a :class:`OptionSetting` to ``options.settings``."""


class OptionSetting(str):
    """A value of ``--set`` for which the user wrote another option.

    Args:
        text: as of ``--set``: ``key=value``.
        option: that was written, such as ``--scheduler``, with its value.
    """

    option: str
    words: tuple[str, ...]

    def __new__(cls, text: str, option: str, *values: str) -> OptionSetting:
        setting = super().__new__(cls, text)
        setting.option, setting.words = option, (option, *values)
        return setting


def setting_words(settings: Iterable[str]) -> list[str]:
    """Return settings as they are written on a command line."""
    return [word for setting in settings
            for word in (setting.words if isinstance(setting, OptionSetting) else ("--set", setting))]


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors have vpipe's form."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # --costs -1,1,1 is a value, and a wrong one

    def error(self, message: str) -> NoReturn:
        self._refuse(message, f"run {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if any(action.dest == "config" and not action.option_strings for action in self._actions):
            # As users of OurGPipe and VPipe write it.
            args = [rest for word in args if (rest := re.sub(r"^--config(_file)?(=|$)", "", word)) or not word]
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = unknown[0].partition("=")[0]
            if remedy := UserError.retired.get(f"{self.prog} {option}"):
                self._refuse(f"{self.prog} has no '{option}' any more", remedy)
            remedy = nearest(option, [name for name in self._option_string_actions if name.startswith("--") and
                                      name != "--help"])
            self._refuse(f"{self.prog} knows no '{option}'",
                         remedy if option.startswith("-") else f"run {self.prog} --help")
        return known, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            option = "/".join(action.option_strings)
            if remedy := UserError.retired.get(" ".join(filter(None, (self.prog, option, str(value))))):
                self._refuse(f"{self.prog} has no {option or 'command'} '{value}' any more", remedy)
            self._refuse(f"{self.prog} has no {option or 'command'} '{value}'",
                         nearest(str(value), list(action.choices)))

    def _refuse(self, what: str, hint: str) -> NoReturn:
        print(UserError(what, hint=hint), file=sys.stderr)
        sys.exit(UserError.exit_status)

    def commands(self) -> Any:
        return self.add_subparsers(required=True, metavar="COMMAND")


def add_command(commands: Any, name: str, run: str, text: str, new_output: bool = False,
                aliases: Sequence[str] = ()) -> Any:
    """Add a command.

    Args:
        run: the function that runs it, as ``package.module.function``; its module is imported then.
        new_output: whether ``--output`` must not exist yet; this is checked before torch is loaded.
    """
    parser = commands.add_parser(name, aliases=aliases, help=text, description=f"{text[0].upper()}{text[1:]}.")
    module, _, function = run.rpartition(".")
    parser.set_defaults(module=module, function=function, new_output=new_output)
    return parser


def add_config(parser: argparse.ArgumentParser, needed: bool = True) -> None:
    parser.add_argument("config", type=Path, nargs=None if needed else "?",
                        help="a YAML file, in vpipe's form or the flat form of VPipe and OurGPipe; or the name of a "
                        "config that comes with vpipe (vpipe configs lists them); also as --config or --config_file")
    add_overrides(parser)


def add_run(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("folder", nargs="?", type=Path, metavar="RUN", help=f"{text} (default: the newest in output)")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="override a key of the config, such as training.learning_rate=3e-4; may be repeated")
    for add_option in CONFIG_OPTIONS.added():
        add_option(parser)
    add_import(parser)


def add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--import", action="append", default=[], metavar="FILE.py", dest="imports",
                        help="import this file, which registers schedules, actions, models or data sets of your own; "
                        "may be repeated")
