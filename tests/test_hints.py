"""What remedies name exists: keys of the config, options of the command line."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import vpipe
from vpipe.app.cli import _parser
from vpipe.app.config.config import Config
from vpipe.app.config.validation import section_of

OF_OTHERS = {"--master-port", "--max-restarts", "--nnodes", "--nproc-per-node",  # torchrun
             "--ntasks"}  # srun


def hints() -> Iterator[tuple[str, str]]:
    """Where a remedy is written, and the texts in it."""
    for file in sorted(Path(vpipe.__file__).parent.rglob("*.py")):
        source = file.read_text()
        for node in ast.walk(ast.parse(source)) if "hint=" in source or "Problem(" in source else ():
            if not isinstance(node, ast.Call):
                continue
            parts = [keyword.value for keyword in node.keywords if keyword.arg == "hint"]
            if isinstance(node.func, ast.Name) and node.func.id == "Problem":
                parts += node.args[1:2]
            for part in parts:
                for text in ast.walk(part):
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        yield f"{file}:{text.lineno}", text.value


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        for below in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from options(below)


@pytest.mark.extras("legacy")
def test_remedies_name_keys_and_options_that_exist() -> None:
    sections = {info.alias or name: section for name, info in Config.model_fields.items()
                if (section := section_of(info)) is not None}
    keys = {f"{name}.{info.alias or key}" for name, section in sections.items()
            for key, info in section.model_fields.items()} | {"parallel.scheduler"}  # of the extra legacy
    known, found = {*options(_parser()), *OF_OTHERS}, 0
    for where, text in hints():
        named = re.findall(rf"(?<![\w/])(?:{'|'.join(sections)})\.[a-z_]+\b", text)
        found += len(named)
        assert set(named) <= keys, where
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known, where
    assert found > 50
