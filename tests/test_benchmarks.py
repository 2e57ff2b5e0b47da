"""Benchmarks, examples and notebooks import what vpipe has; in few of them would a name that moved be found soon."""

from __future__ import annotations

import ast
import json
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py"),
                *(ROOT / "examples").rglob("*.ipynb")])


def source_of(file: Path) -> str:
    if file.suffix == ".py":
        return file.read_text()
    cells = json.loads(file.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.extras("comparison", "orion")
def test_names_of_vpipe_exist() -> None:
    missing = []
    for file in FILES:
        for node in ast.walk(ast.parse(source_of(file))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vpipe":
                try:
                    module = import_module(node.module or "")
                    missing += [f"{file}: {node.module}.{alias.name}" for alias in node.names
                                if not hasattr(module, alias.name)]
                except ModuleNotFoundError as error:
                    missing.append(f"{file}: {error}")
    assert not missing
