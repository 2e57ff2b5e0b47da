"""Parse the command line without torch: errors in vpipe's form, shared arguments, commands loaded when they run."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from vpipe.errors import UserError, nearest
from vpipe.progress import LOADING_TORCH, message_if_slow


def lazy(module: str, function: str, writes_output: bool = False) -> Callable[[argparse.Namespace], None]:
    """Return a command that loads its module of ``vpipe.commands`` when it runs: torch takes seconds to load.

    Args:
        writes_output: whether ``--output`` must not exist; that is checked before anything is loaded.
    """
    def run(options: argparse.Namespace) -> None:
        if writes_output:
            from vpipe.checkpoint.directory import check_free

            check_free(options.output)
        with message_if_slow(LOADING_TORCH) if writes_output else nullcontext():
            command = getattr(import_module(f"vpipe.commands.{module}"), function)
        command(options)

    return run


class Version(argparse.Action):
    """Print the version, which is looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from vpipe.plugins import package_versions

        print(f"vpipe {package_versions(['vpipe']).get('vpipe', 'not installed: its folder is on the path')}")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors have vpipe's form."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # --costs -1,1,1 is a value, and a wrong one

    def error(self, message: str) -> NoReturn:
        self._refuse(message, f"{self.prog} --help says how")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = unknown[0].partition("=")[0]
            remedy = nearest(option, [name for name in self._option_string_actions if name.startswith("--")])
            self._refuse(f"{self.prog} knows no '{option}'",
                         remedy if option.startswith("-") else f"{self.prog} --help says how")
        return known, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            option = "/".join(action.option_strings)
            self._refuse(f"{self.prog} has no {option or 'command'} '{value}'",
                         nearest(str(value), list(action.choices)))

    def _refuse(self, what: str, hint: str) -> NoReturn:
        print(UserError(what, hint=hint), file=sys.stderr)
        sys.exit(UserError.exit_status)


def add_config(parser: argparse.ArgumentParser, needed: bool = True) -> None:
    """Add a config, and the options that override its keys."""
    parser.add_argument("config", type=Path, nargs=None if needed else "?",
                        help="a YAML file, native or VPipe's flat form")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the options that override keys of a config."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="override a key of the config, such as training.learning_rate=3e-4; may be repeated")
    parser.add_argument("--scheduler", help="OurGPipe's scheduler, instead of the config's")


def add_models(parser: argparse.ArgumentParser, needed: bool = False) -> None:
    """Add the models and schedules to compare, and where the CSV goes."""
    parser.add_argument("--models", required=needed, metavar="NAME,...", help="several configs instead of one: "
                        "gpt_small is configs/gpt_small.yaml; or paths of YAML files")
    parser.add_argument("--schedules", metavar="NAME,...", help="schedules, with a config's partition and recompute; "
                        "of --models each config's own when left out")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of each; each config's when left out")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the CSV there, too")
