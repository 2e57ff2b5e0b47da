"""Take what extras and packages add to configs: files in another form, keys of another name, settings, variables.

Each adds it by an entry point of its name in the group ``vpipe.config``, which leads to a subclass of
:class:`ConfigAddition`; options for the commands that take a config are added by functions in the group
``vpipe.config_options`` (:class:`~vpipe.app.command_line.OptionSetting`)::

    [project.entry-points."vpipe.config"]
    toml = "my_package.toml_configs:TomlConfig"
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vpipe.app.config.validation import Mistake, Section, field_at
from vpipe.app.config.yaml_tree import Tree
from vpipe.errors import UserError
from vpipe.plugins import PluginGroup

ADDITIONS = PluginGroup("vpipe.config", "addition to configs")
"""The group of entry points."""

FLAT = "vpipe_flat"
"""The name of VPipe's flat form there."""

MAIN_SECTIONS = ("model", "dataset", "training", "parallel")


class ConfigAddition:
    """What a package adds to configs. What it does not override does nothing.

    Attributes:
        keys: that a file in this form has at its top; ``--set`` of one changes the file before it is converted.
    """

    keys: frozenset[str] = frozenset()

    def recognises(self, tree: Tree) -> bool:
        """Return whether a file has this form."""
        return False

    def to_native(self, tree: Tree, folder: Path, *, shipped: bool) -> Tree:
        """Return the tree of a native config, whose values keep their places in the files that they are from.

        Args:
            tree: of a file in ``folder``, which this form recognises.
            shipped: the file came with a package: data and runs are not beside it but in the current folder.

        Raises:
            UserError: all mistakes in the file.
        """
        raise NotImplementedError

    def replace_keys(self, tree: Tree, given: Collection[str]) -> None:
        """Replace keys of other programs in a native config; mistakes in them are added to ``tree.problems``.

        Args:
            given: the keys that were set on the command line; they go before those of the file.
        """

    def settings(self) -> Iterable[str]:
        """Return values of ``--set`` for who trains, such as the environment asks for."""
        return ()

    def mistakes(self, parallel: Any) -> Iterator[Mistake]:
        """Yield mistakes in the section ``parallel``, of which this addition reads keys."""
        yield from ()

    def rank_variables(self, config: Any) -> Mapping[str, str]:
        """Return the environment variables that the ranks of a ``Config`` need."""
        return {}

    def note(self, path: Path, settings: Sequence[str], config: Any) -> str | None:
        """Return what those who train should know about the ``Config`` that came of ``path`` and ``settings``."""
        return None


def formats_of(tree: Tree, settings: Iterable[str], native: type[Section]) -> list[ConfigAddition]:
    """Return all that packages add; none where file and settings have native keys alone, as most have."""
    paths = [key.split(".") for key in settings]
    for key, value in tree.value.items():
        paths += [[key, str(own)] for own in value] if isinstance(value, dict) else [[key]]
    return [] if all(field_at(native, tuple(path[:2])) for path in paths) else [kind() for kind in ADDITIONS.added()]


def check_form(tree: Tree) -> None:
    """Refuse a file without any section of a native config, where VPipe's form is not installed."""
    if FLAT not in ADDITIONS.names and {*tree.value}.isdisjoint(MAIN_SECTIONS):
        raise UserError(f"the file has none of the sections {', '.join(MAIN_SECTIONS)}", where=tree.places[()].value,
                        hint="vpipe configs lists examples; the flat form of VPipe is read by vpipe/extras/legacy, "
                        "which is not installed here")
