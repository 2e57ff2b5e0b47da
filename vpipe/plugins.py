"""Load models, data sets, schedules and commands: of packages, by entry points, and of files, by ``--import``.

vpipe's own extras announce theirs in the form of a package, in ``vpipe/extras/<name>/entry_points.txt``: what one kind
of user wants is added as a stranger adds it, and is gone with its folder.

The entry points of packages are read without an import. A package is imported when its name is used, so that a broken
one fails only then. A file is imported at the start of a command, and by the ranks that it starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from configparser import ConfigParser
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, entry_points, version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

from vpipe.errors import UserError, nearest

Item = TypeVar("Item")

EXTRAS = Path(__file__).with_name("extras")

IMPORTS = "VPIPE_IMPORT"
"""The environment variable by which the ranks that a command starts are given the files of ``--import``, as JSON."""


def import_files(paths: Sequence[str | Path]) -> None:
    """Import Python files, and name them to the ranks that this process starts.

    The paths stay as they are written: ranks start in the same folder, on another host in ``launch.directory``.

    Raises:
        UserError: a file cannot be imported.
    """
    os.environ.pop(IMPORTS, None)  # the command line alone names them
    for path in paths:
        _import_file(Path(path))
    if paths:
        os.environ[IMPORTS] = json.dumps([str(path) for path in paths])


def imported_files() -> list[str]:
    """Return the files that this process was told to import: by :func:`import_files`, here or where it was started."""
    return list(json.loads(os.environ.get(IMPORTS, "[]")))


def file_digests(paths: Iterable[str]) -> dict[str, str]:
    """Return a hash of the content of each file, to compare those of several hosts."""
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths}


def _import_file(path: Path) -> None:
    """Import a file as the module of its name, once."""
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UserError(f"--import is given '{path}', which cannot be the name of a Python module",
                        hint="name a file such as my_models.py: letters, digits and _, and .py at the end")
    if not path.is_file():
        raise UserError(f"--import is given '{path}', but there is no such file",
                        hint="check the path; it is taken from the current folder")
    name, file = path.stem, Path(os.path.abspath(path))
    known = sys.modules.get(name)
    other = getattr(known, "__file__", None) if known is not None else getattr(find_spec(name), "origin", None)
    if known is not None or other is not None:
        if other is None or not os.path.exists(other) or not file.samefile(other):
            raise UserError(f"--import is given '{path}', but there is another module '{name}': {other or 'built in'}",
                            hint="give the file another name")
        if known is not None:
            return
    spec = spec_from_file_location(name, file)
    assert spec is not None, "it ends in .py"
    assert spec.loader is not None, "it ends in .py"
    sys.modules[name] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too: of a script that is no module
        del sys.modules[name]
        place = _place(error, path, file)
        if isinstance(error, UserError):
            raise UserError.all_of([replace(problem, where=problem.where or place)
                                    for problem in error.problems]) from None
        raise UserError(f"'{path}' cannot be imported: {type(error).__name__}: "
                        f"{error.msg if isinstance(error, SyntaxError) else error}",
                        hint=_remedy(error, path), where=place) from None


def _place(error: BaseException, path: Path, file: Path) -> str:
    """Return the line of a file at which its import failed."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{path if error.filename == str(file) else error.filename}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _remedy(error: BaseException, path: Path) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        if error.name.startswith("vpipe."):
            return "change its import"
        beside = path.parent / f"{error.name.partition('.')[0]}.py"
        return f"import that file before it: --import {beside} --import {path}" if beside.is_file() else \
            f"install {error.name.partition('.')[0]} for this Python: {sys.executable}"
    if isinstance(error, SystemExit):
        return "put what runs the script below: if __name__ == '__main__':"
    return f"mend the file; python {path} shows the whole traceback"


def is_own(module: str) -> bool:
    """Return whether a module is vpipe's, and none of an extra, which is as any package."""
    return module.startswith("vpipe.") and not module.startswith("vpipe.extras.")


def added(group: str, *names: str) -> list[Any]:
    """Import and return what packages and extras add to a group: under these names, else under all, sorted.

    Raises:
        UserError: one cannot be imported.
    """
    found = (load(group, group, name, own=False) for name in names or announced(group))
    return [entry.load() for entry in found if entry is not None]


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


def registered(group: str, kind: str, name: str, known: Mapping[str, Item], *, own: bool,
               names: Callable[[], list[str]]) -> Item:
    """Return what is registered under a name, after an import of the package that announces it.

    Args:
        known: what is registered; the import adds to it.
        names: returns all names, for the nearest.

    Raises:
        UserError: none has that name, or as :func:`load` does.
    """
    entry = load(group, kind, name, own=own)
    if name in known:
        return known[name]
    if entry is None:
        raise UserError(f"no {kind} is called '{name}'", hint=nearest(name, names(), open_list=True))
    raise UserError(f"the package '{_package(entry)}' announces a {kind} '{name}', but importing {entry.value} "
                    "registers none of that name", hint="use the same name in its entry point and in the decorator")


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


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed; vpipe is not where its folder is on the path."""
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
