"""Every wait for a device in vpipe's sources, and vpipe without one of them."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

PACKAGE = Path(__file__).parents[2] / "vpipe"

WAITS = {"wait_stream", "wait_event", "record_event", "record_stream", "synchronize"}
"""Functions that wait for a device, let one of its streams wait, or keep memory for one."""


def is_wait(call: ast.Call) -> bool:
    """Whether a call is one of them, keeps memory by the function of async_threaded, or waits for a transfer."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in WAITS or ast.unparse(function) in ("_record", "work.wait")


def waits_of(tree: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.Call]]:
    """Each wait of a file with its place: the functions around it, and its text."""
    for node in ast.iter_child_nodes(tree):
        names = (*inside, node.name) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else inside
        if isinstance(node, ast.Call) and is_wait(node):
            yield f"{'.'.join(names)}: {ast.unparse(node)}", node
        yield from waits_of(node, names)


def places() -> list[str]:
    """The place of each wait of the package: ``file function: call``."""
    files = (file for file in sorted(PACKAGE.rglob("*.py")) if not {"tests", "testing"} & set(file.parts))
    return [f"{file.relative_to(PACKAGE).as_posix()} {place}" for file in files
            for place, _ in waits_of(ast.parse(file.read_text()))]


class _Removed(ast.NodeTransformer):
    """Put None in the place of a call; an event is recorded in the caller's stream instead."""

    def __init__(self, call: ast.Call) -> None:
        self._call = call

    def visit_Call(self, call: ast.Call) -> ast.AST:
        if call is not self._call:
            return self.generic_visit(call)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "record_event":
            call.func.value = ast.parse("accelerator.current_stream(self._device)", mode="eval").body
            return call
        return ast.Constant(value=None)


@contextmanager
def without(place: str) -> Iterator[None]:
    """Let the function at a place run without its wait."""
    file, _, wait = place.partition(" ")
    names = wait.partition(":")[0].split(".")
    module: Any = importlib.import_module("vpipe." + file.removesuffix(".py").replace("/", "."))
    tree = ast.parse((PACKAGE / file).read_text())
    [call] = [call for found, call in waits_of(tree) if found == wait]
    code = compile(ast.fix_missing_locations(_Removed(call).visit(tree)), file, "exec", dont_inherit=True)
    function = module
    for name in names:
        function, code = getattr(function, name), _inner(code, name)
        if not inspect.isclass(function):
            break
    function = inspect.unwrap(function)
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before


def _inner(code: CodeType, name: str) -> CodeType:
    return next(inner for inner in code.co_consts if isinstance(inner, CodeType) and inner.co_name == name)
