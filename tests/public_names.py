"""Find the public names of the library, and which of its insides the application, extras and pages import.

``python tests/public_names.py`` writes the tables of names in docs/library.md.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

NAMESPACES = {"vpipe.accelerator", "vpipe.files"}
"""Modules that are used by their own name, ``accelerator.memory``; each counts as a name."""

ABOUT_INSIDES = {"walk-through.md", "walk-through.zh.md"}
"""Pages that lead through the insides of the library."""

PAGES = (ROOT / "docs" / "library.md", ROOT / "docs" / "library.zh.md")
BEGIN, END = "<!-- names: python tests/public_names.py -->", "<!-- end of names -->"


def is_of_the_library(module: str) -> bool:
    first, *rest = module.split(".")
    return first == "vpipe" and rest[:1] not in (["app"], ["extras"], ["hugging_face"], ["testing"])


def file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def faces() -> dict[str, list[str]]:
    """What ``__all__`` lists in ``vpipe``, its rooms and ``vpipe.testing``, read from the sources."""
    found = {}
    for file in [*sorted((ROOT / "vpipe").glob("*.py")), *sorted((ROOT / "vpipe").glob("*/__init__.py"))]:
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[module] = ast.literal_eval(node.value)
    return found


def public_names() -> list[str]:
    """``vpipe.Pipeline``: all names of the library's faces, and its namespaces."""
    return sorted({*NAMESPACES, *(f"{face}.{name}" for face, names in faces().items() if is_of_the_library(face)
                                  for name in names)})


def summary(module: str, name: str) -> str:
    """The first sentence about a name, from where it is defined."""
    tree = ast.parse(file_of(module).read_text())
    after = dict(zip(tree.body, tree.body[1:], strict=False))
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name:
                return first_sentence(ast.get_docstring(node) or "")
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                text = after.get(node)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    return first_sentence(str(text.value.value))
            case ast.ImportFrom(module=str(source)) if any(name in (alias.asname, alias.name) for alias in node.names):
                [alias] = [alias for alias in node.names if name in (alias.asname, alias.name)]
                inner = f"{source}.{alias.name}"
                if file_of(inner).is_file():
                    return first_sentence(ast.get_docstring(ast.parse(file_of(inner).read_text())) or "")
                return summary(source, alias.name)
    return ""


def first_sentence(text: str) -> str:
    """Without the markup of docstrings and of tables."""
    sentence = re.split(r"(?<=[.:;])\s", " ".join(text.split()), maxsplit=1)[0].rstrip(".:;")
    return re.sub(r":\w+:`[~.]?([^`]+)`", r"`\1`", sentence.replace("``", "`")).replace("|", "\\|")


def tables() -> str:
    """Of the names by face, for docs/library.md."""
    text = ""
    for face, names in in_order():
        text += f"\n### `{face}`\n\n| name | |\n|---|---|\n"
        text += "".join(f"| `{name}` | {summary(face, name)} |\n" for name in sorted(names))
    return text


def lists() -> str:
    """Of the names by face, for docs/library.zh.md."""
    return "\n" + "".join(f"- `{face}`：{'、'.join(f'`{name}`' for name in sorted(names))}\n"
                          for face, names in in_order())


def in_order() -> list[tuple[str, list[str]]]:
    """The faces, those of the library first."""
    return sorted(faces().items(), key=lambda item: (not is_of_the_library(item[0]), item[0]))


def named_in(page: Path) -> dict[str, list[str]]:
    """The names by face that a page lists, in English in tables, in Chinese in lists."""
    found: dict[str, list[str]] = {}
    for line in between(page.read_text()).splitlines():
        if face := re.match(r"(?:### |- )`([\w.]+)`", line):
            names = found.setdefault(face[1], [])
            names += re.findall(r"`(\w+)`", line[face.end():])
        elif row := re.match(r"\| `(\w+)` \|", line):
            names.append(row[1])
    return found


def between(text: str) -> str:
    """The part of a page that is written here."""
    return text.partition(BEGIN)[2].partition(END)[0]


def standing_on_it() -> list[Path]:
    """The application, the extras, the examples and the documentation; a test may import what it looks into."""
    kinds = {"vpipe/app": "py", "vpipe/extras": "py", "examples": "py", "site": "py", "docs": "md",
             "site/pages": "md", "examples/notebooks": "ipynb"}
    files = [file for folder, kind in kinds.items() for file in sorted((ROOT / folder).rglob(f"*.{kind}"))]
    return [ROOT / "vpipe" / "__main__.py", ROOT / "vpipe" / "hugging_face.py", *sorted(ROOT.glob("*.md")),
            *ROOT.glob("vpipe/extras/*/docs/*.md"),
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
    for page, names in zip(PAGES, (tables, lists), strict=True):
        text = page.read_text()
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        page.write_text(before + BEGIN + "\n" + names() + "\n" + END + after)
