"""Count the lines of vpipe by tier, with statements, docstrings and the length of a line beside them.

    python tests/tier_sizes.py [CHECKOUT] [--rooms]

The library is counted by reach, too: the files that ``Pipeline``, schedules, plan, profiling, checkpoint and runtime
import, imports inside functions included. Lines can be made fewer by making them denser; the other columns show it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
ENTRIES = ("schedules", "plan", "profiling", "checkpoint", "runtime")


@dataclass(frozen=True)
class Size:
    """Of some files; ``docstrings`` and ``blank`` are shares of lines, ``median`` is of characters of the others."""

    files: int
    lines: int
    statements: int
    docstrings: float
    blank: float
    median: float

    def __str__(self) -> str:
        return (f"{self.files:5} files {self.lines:7,} lines {self.statements:7,} statements "
                f"{self.docstrings:5.1%} docstrings {self.blank:5.1%} blank {self.median:4.0f} characters")


def size_of(files: Iterable[Path]) -> Size:
    """Empty files do not count."""
    texts = [text for file in files if (text := file.read_text()).strip()]
    statements = documented = 0
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            statements += isinstance(node, ast.stmt)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and type(node.value.value) is str:
                documented += (node.end_lineno or 0) - node.lineno + 1
    lines = [line for text in texts for line in text.splitlines()]
    return Size(len(texts), sum(text.count("\n") for text in texts), statements, documented / max(1, len(lines)),
                sum(not line.strip() for line in lines) / max(1, len(lines)),
                median([len(line) for line in lines if line.strip()] or [0]))


def tier_of(path: Path) -> str:
    """Of a file of ``vpipe/``, by its path there; the tests of an extra are tests."""
    if "tests" in path.parts:
        return "tests"
    return {"app": "application", "__main__.py": "application", "hugging_face.py": "application", "extras": "extras",
            "testing": "testing"}.get(path.parts[0], "library")


def room_of(path: Path) -> str:
    """``vpipe/schedules``, ``vpipe/app/train``."""
    return "/".join(("vpipe", *path.parts[:2 if path.parts[0] in ("app", "extras") else 1]))


def grouped(root: Path, key: Callable[[Path], str]) -> dict[str, list[Path]]:
    groups: dict[str, list[Path]] = {}
    for file in sorted((root / "vpipe").rglob("*.py")):
        groups.setdefault(key(file.relative_to(root / "vpipe")), []).append(file)
    return groups


def reached(root: Path) -> list[Path]:
    """The files of the library by reach."""
    modules = {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
               for file in sorted((root / "vpipe").rglob("*.py")) if "tests" not in file.parts}
    found: set[str] = set()
    todo = [name for name in modules if name in ("vpipe", "vpipe.pipeline") or (name.split(".")[1:2]
            and name.split(".")[1] in ENTRIES)]
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            for node in ast.walk(ast.parse(modules[name].read_text())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    todo += [other for alias in node.names for other in (node.module, f"{node.module}.{alias.name}")
                             if other in modules]
                elif isinstance(node, ast.Import):
                    todo += [alias.name for alias in node.names if alias.name in modules]
    return [modules[name] for name in sorted(found)]


def files_of_tiers(root: Path = ROOT) -> dict[str, list[Path]]:
    tiers = grouped(root, tier_of)
    return tiers | {"tests": [*sorted((root / "tests").rglob("*.py")), *tiers.get("tests", [])]}


def lines_of_tiers() -> dict[str, int]:
    return {tier: sum(file.read_text().count("\n") for file in files) for tier, files in files_of_tiers().items()}


def sizes(root: Path = ROOT) -> dict[str, Size]:
    """Of every tier, of all of ``vpipe/``, and of the tests."""
    tiers = files_of_tiers(root)
    tests = tiers.pop("tests")
    return {"library by reach": size_of(reached(root)), **{tier: size_of(files) for tier, files in tiers.items()},
            "vpipe": size_of(file for files in tiers.values() for file in files), "tests": size_of(tests)}


if __name__ == "__main__":
    checkout = Path(next((word for word in sys.argv[1:] if not word.startswith("-")), ROOT))
    for title, size in sizes(checkout).items():
        print(f"{title:20} {size}")
    if "--rooms" in sys.argv:
        for title, files in sorted(grouped(checkout, room_of).items()):
            print(f"{title:28} {size_of(files)}")
