"""Load the models, data sets and schedules of installed packages, each an entry point in the group of its kind.

Names are read without an import. A package is imported when its name is used, so that a broken one fails only then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

from vpipe.errors import UserError


def announced(group: str) -> list[str]:
    """Return the names in a group, such as ``vpipe.models``, sorted."""
    return sorted(_found(group, tuple(sys.path)))


def load(group: str, kind: str, name: str, *, own: bool) -> EntryPoint | None:
    """Import the package that adds this name, so that it registers itself.

    Args:
        kind: for messages, such as ``model``.
        own: whether vpipe itself has one of that name.

    Returns:
        The entry point; None when no package has one of that name.

    Raises:
        UserError: several have, or a package and vpipe; or it cannot be imported.
    """
    entries = _found(group, tuple(sys.path)).get(name, ())
    if not entries:
        return None
    holders = [*(["vpipe itself"] if own else []), *(f"the package '{_package(entry)}' ({entry.value})"
                                                     for entry in entries)]
    if len(holders) > 1:
        raise UserError(f"{' and '.join(holders)} have a {kind} called '{name}'",
                        hint="uninstall one of them, or give one another name")
    try:
        entries[0].load()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the {kind} '{name}' is in {holders[0]}, which cannot be imported: "
                        f"{type(error).__name__}: {error}",
                        hint=f"install what it lacks, or uninstall it: pip uninstall {_package(entries[0])}") from error
    return entries[0]


def unregistered(entry: EntryPoint, kind: str) -> UserError:
    """Return the error of a package whose import registered nothing of the announced name."""
    return UserError(f"the package '{_package(entry)}' announces a {kind} '{entry.name}', but importing {entry.value} "
                     "registers none of that name",
                     hint="use the same name in its entry point and in the decorator")


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.module


@lru_cache(maxsize=16)
def _found(group: str, path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name, for this ``sys.path``; reading them takes milliseconds."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=group):
        others = found.get(entry.name, ())
        if not any((_package(other), other.value) == (_package(entry), entry.value) for other in others):
            found[entry.name] = tuple(sorted((*others, entry), key=lambda each: (_package(each), each.value)))
    return found


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed; vpipe is not where its folder is on the path."""
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
