"""The learning path says what is so: code that it names, messages that it quotes, outputs; in both languages alike."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from vpipe.app.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ("guide", "cheat-sheet", "walk-through", "troubleshooting", "config", "planning", "python")
LANGUAGES = ("", ".zh")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def rows(text: str) -> list[list[str]]:
    """The cells of all tables, row by row."""
    lines = [line for line in FENCE.sub("", text).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def spans(text: str) -> list[str]:
    """The inline code, sorted: sentences of another language have another order."""
    return sorted(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text)))


@cache
def names_in(file: Path) -> frozenset[str]:
    """The functions, classes, methods and attributes of a module: ``name``, ``Class.name``."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef):
                    names.add(f"{node.name}.{inner.name}")
                elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    names.add(f"{node.name}.{inner.target.id}")
                elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    names.add(f"{node.name}.{inner.attr}")
    return frozenset(names)


@pytest.mark.extras("legacy", "orion")
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", ["cheat-sheet", "walk-through"])
def test_files_and_functions_that_are_named_exist(name: str, language: str) -> None:
    text, named = FENCE.sub("", text_of(name + language)), 0
    for file, listed in re.findall(r"`(vpipe/[\w/]+\.py)`((?:[:,：、]\s*`[\w.]+`)*)", text):
        assert (ROOT / file).exists(), file
        for function in re.findall(r"`([\w.]+)`", listed):
            named += 1
            assert function in names_in(ROOT / file), f"{file} has no {function}"
    assert named > 30


@pytest.mark.parametrize("language", LANGUAGES)
def test_methods_that_the_walk_names_without_a_file_exist(language: str) -> None:
    text = text_of("walk-through" + language)
    files = set(re.findall(r"`(vpipe/[\w/]+\.py)`", text))
    there = frozenset[str]().union(*(names_in(ROOT / file) for file in files))
    methods = re.findall(r"`([A-Z]\w+\.\w+)`", FENCE.sub("", text))
    assert not [method for method in methods if method not in there]
    assert len(re.findall(r"^\d+\. ", text, re.MULTILINE)) == 25


@cache
def source() -> str:
    """The source of the package, with strings that go on in the next line put together."""
    text = "\n".join(file.read_text() for file in (ROOT / "vpipe").rglob("*.py"))
    return re.sub(r'"\n\s*f?"', "", text)


@pytest.mark.extras("legacy")
@pytest.mark.parametrize("language", LANGUAGES)
def test_messages_that_are_quoted_are_in_the_source(language: str) -> None:
    messages = [row[1].strip("`") for row in rows(text_of("troubleshooting" + language)) if row[1].startswith("`")]
    assert len(messages) > 40
    for message in messages:
        for part in filter(None, (part.strip(" ';") for part in message.split("..."))):
            assert part in source(), f"vpipe never says '{part}'"


@pytest.mark.parametrize("name", PAGES)
def test_both_languages_have_the_same_structure(name: str) -> None:
    english, chinese = text_of(name), text_of(f"{name}.zh")
    for of in (lambda text: [len(marks) for marks in re.findall(r"^(#+) ", FENCE.sub("", text), re.MULTILINE)],
               FENCE.findall, lambda text: [len(row) for row in rows(text)], spans):
        assert of(english) == of(chinese)


def outputs() -> list[tuple[str, list[str]]]:
    """The commands of the guide that print the same everywhere, each with the lines that it shows."""
    found: list[tuple[str, list[str]]] = []
    for _, block in FENCE.findall(text_of("guide")):
        shown: list[str] | None = None
        for line in block.splitlines():
            if line.startswith("$ "):
                shown = []
                if line.startswith("$ vpipe schedule ") and ">" not in line:
                    found.append((line.removeprefix("$ "), shown))
            elif shown is not None and line != "...":
                shown.append(line)
    return found


@pytest.mark.parametrize(("command", "shown"), outputs())
def test_the_guide_shows_what_a_command_prints(command: str, shown: list[str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(shlex.split(command)[1:]) == 0
    printed = iter(out.getvalue().splitlines())
    assert shown
    for line in shown:
        assert line in printed, f"'{line}' is not there, or not in this order"


@pytest.mark.parametrize("name", ["guide", "walk-through"])
def test_python_blocks_print_what_the_page_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vpipe.runtime.worker import Worker  # the walk's example replaces a method

    monkeypatch.setattr(Worker, "execute", Worker.execute)
    names: dict[str, object] = {}
    for code, shown in re.findall(r"^```python\n(.*?)^```$(?:\n+```\n(.*?)^```$)?", text_of(name),
                                  re.MULTILINE | re.DOTALL):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, f"docs/{name}.md", "exec"), names)
        assert out.getvalue() == shown
