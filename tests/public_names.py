"""Find the public names of the library, and which of its insides the application, extras and pages import.

``python tests/public_names.py`` writes the list of the latter, tests/fixtures/insides_imported.txt.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

NAMESPACES = {"vpipe.accelerator"}
"""Modules that are used by their own name, ``accelerator.memory``; each counts as a name."""

ABOUT_INSIDES = {"walk-through.md", "walk-through.zh.md"}
"""Pages that lead through the insides of the library."""

INSIDES_IMPORTED = ROOT / "tests" / "fixtures" / "insides_imported.txt"
"""Names inside the library that something outside it imports, to be counted down to none."""


def is_of_the_library(module: str) -> bool:
    first, *rest = module.split(".")
    return first == "vpipe" and rest[:1] not in (["app"], ["extras"], ["testing"])


def public_names() -> list[str]:
    """``vpipe.Pipeline``: what ``__all__`` lists in ``vpipe`` and its rooms, read from the sources, and namespaces."""
    names = []
    for file in [*sorted((ROOT / "vpipe").glob("*.py")), *sorted((ROOT / "vpipe").glob("*/__init__.py"))]:
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text()).body if is_of_the_library(module) else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names += [f"{module}.{name}" for name in ast.literal_eval(node.value)]
    return sorted({*names, *NAMESPACES})


def standing_on_it() -> list[Path]:
    """The application, the extras, the examples and the documentation; a test may import what it looks into."""
    kinds = {"vpipe/app": "py", "vpipe/extras": "py", "examples": "py", "site": "py", "docs": "md",
             "site/pages": "md", "examples/notebooks": "ipynb"}
    files = [file for folder, kind in kinds.items() for file in sorted((ROOT / folder).rglob(f"*.{kind}"))]
    return [ROOT / "vpipe" / "__main__.py", *sorted(ROOT.glob("*.md")), *ROOT.glob("vpipe/extras/*/docs/*.md"),
            *(file for file in files if "tests" not in file.parts and file.name not in ABOUT_INSIDES)]


def sources(file: Path) -> Iterator[str]:
    """The Python in a file: a program's text, a page's blocks, a notebook's cells."""
    text = file.read_text()
    if file.suffix == ".ipynb":
        yield from ("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    elif file.suffix == ".md":
        yield from re.findall(r"^ *```py\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    else:
        yield text


def names_imported(source: str) -> set[str]:
    """``vpipe.schedules.Schedule``; blocks of pages need not be whole programs, so this reads lines."""
    found = re.findall(r"^ *from (vpipe[\w.]*) import (\([^)]*\)|[^#\n]*)|^ *import (vpipe[\w.]*)", source,
                       re.MULTILINE)
    return {f"{module}.{name.split()[0]}" if module else plain for module, names, plain in found
            for name in names.strip("()").split(",") if plain or name.strip()}


def insides_imported() -> list[str]:
    allowed = {*public_names(), "vpipe"}
    return sorted({name for file in standing_on_it() for source in sources(file) for name in names_imported(source)
                   if is_of_the_library(name) and name not in allowed})


if __name__ == "__main__":
    INSIDES_IMPORTED.write_text("".join(f"{name}\n" for name in insides_imported()))
