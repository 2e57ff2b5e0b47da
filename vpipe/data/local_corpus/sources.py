"""Find and parse the Python sources of installed packages, without importing or executing them."""

from __future__ import annotations

import ast
import importlib.util
import sysconfig
import tokenize
import warnings
from pathlib import Path

STANDARD_LIBRARY = "stdlib"
_SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "lib2to3", "__pycache__"})


def sources(package: str) -> list[Path]:
    """Return the Python files of a package, sorted, without its tests; none when it is not installed.

    A package is named as in ``import``; ``"stdlib"`` stands for the whole standard library.
    """
    return [path for root in package_paths(package)
            for path in ([root] if root.is_file() else sorted(root.rglob("*.py")))
            if root.is_file() or _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)]


def package_paths(package: str) -> list[Path]:
    """Return the folders that hold a package, or its file when it is a single one; none when it is not installed."""
    if package == STANDARD_LIBRARY:
        return [Path(sysconfig.get_path("stdlib"))]
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    if not spec.submodule_search_locations:
        return [Path(spec.origin)] if spec.origin and spec.origin.endswith(".py") else []
    return [Path(location) for location in spec.submodule_search_locations]


def parse_source(source: Path) -> tuple[str, ast.Module] | None:
    """Return the text of a file and its syntax tree; None when it is not valid Python of this version."""
    try:
        with tokenize.open(source) as file:  # in the encoding that it declares
            text = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old sources hold escapes that newer Pythons warn about
            return text, ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
