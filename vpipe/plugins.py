"""Load what packages add by entry points: models, data sets, schedules, kinds of actions and commands.

vpipe's own extras announce theirs in the form of a package, in ``vpipe/extras/<name>/entry_points.txt``: what one kind
of user wants is added as a stranger adds it, and is gone with its folder.

The entry points of packages are read without an import. A package is imported when its name is used, so that a broken
one fails only then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from configparser import ConfigParser
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, TypeVar

from vpipe.errors import UserError, nearest

__all__ = ["PluginGroup"]

T = TypeVar("T")

EXTRAS = Path(__file__).with_name("extras")

@dataclass(frozen=True)
class PluginGroup:
    """What packages and extras add to a table: of models, data sets, schedules, commands.

    Attributes:
        group: of entry points, such as ``vpipe.models``.
        kind: for messages, such as ``model``.
    """

    group: str
    kind: str

    @staticmethod
    def is_own(module: str) -> bool:
        """Return whether a module is vpipe's, and none of an extra, which is as any package."""
        return module.startswith("vpipe.") and not module.startswith("vpipe.extras.")

    @staticmethod
    def versions_of(packages: Iterable[str]) -> dict[str, str]:
        """Return the versions of those packages that are installed; vpipe is not where its folder is on the path."""
        versions = {}
        for name in packages:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
        return versions

    @property
    def names(self) -> list[str]:
        """Return the names that are announced, sorted."""
        return sorted(_found(self.group, tuple(sys.path)))

    def added(self, *names: str) -> list[Any]:
        """Import and return what is announced under these names, else under all, sorted.

        Raises:
            UserError: one cannot be imported.
        """
        return [entry.load() for name in names or self.names if (entry := self._load(name, own=False)) is not None]

    def named(self, name: str, table: Mapping[str, T], module_of: Callable[[T], str],
              known: Callable[[], Sequence[str]]) -> T:
        """Return the entry of a table, once the package that announces its name is imported, and has registered it.

        Args:
            module_of: of an entry.
            known: returns all names, for the hint.

        Raises:
            UserError: nobody has one of that name, or several have; or the package cannot be imported.
        """
        entry = self._load(name, own=name in table and self.is_own(module_of(table[name])))
        if name in table:
            return table[name]
        if entry is not None:
            raise UserError(f"the package '{_package(entry)}' announces {self._one} '{name}', but importing "
                            f"{entry.value} registers none of that name",
                            hint="use the same name in its entry point and in the decorator")
        raise UserError(f"no {self.kind} is called '{name}'", hint=nearest(name, known(), open_list=True))

    @property
    def _one(self) -> str:
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"

    def _load(self, name: str, *, own: bool) -> EntryPoint | None:
        """Import the package that announces this name; return its entry point, None when there is none.

        Args:
            own: whether vpipe itself has one of that name.
        """
        entries = _found(self.group, tuple(sys.path)).get(name, ())
        if not entries:
            return None
        holders = [*(["vpipe itself"] if own else []), *(f"the package '{_package(entry)}' ({entry.value})"
                                                         for entry in entries)]
        if len(holders) > 1:
            raise UserError(f"{' and '.join(holders)} have {self._one} called '{name}'",
                            hint="uninstall one of them, or give one another name")
        try:
            entries[0].load()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the {self.kind} '{name}' is in {holders[0]}, which cannot be imported: "
                            f"{type(error).__name__}: {error}", hint="install what it lacks, or uninstall it: pip "
                            f"uninstall {_package(entries[0])}") from error
        return entries[0]


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.module


@lru_cache(maxsize=1)
def _of_extras() -> EntryPoints:
    entries = []
    for file in sorted(EXTRAS.glob("*/entry_points.txt")):
        groups = ConfigParser(delimiters=("=",))
        groups.read(file)
        entries += [EntryPoint(name, value, group) for group in groups.sections()
                    for name, value in groups[group].items()]
    return EntryPoints(entries)


@lru_cache(maxsize=16)
def _found(group: str, path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name, for this ``sys.path``; reading them takes milliseconds."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in (*_of_extras().select(group=group), *entry_points(group=group)):
        others = found.get(entry.name, ())
        if not any((_package(other), other.value) == (_package(entry), entry.value) for other in others):
            found[entry.name] = tuple(sorted((*others, entry), key=lambda each: (_package(each), each.value)))
    return found
