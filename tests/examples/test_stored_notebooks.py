"""The notebooks as they are stored: nbformat 4, without outputs, with links that lead somewhere.

tests/system/test_notebooks.py runs them.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_six_the_last_in_two_languages() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["1_", "2_", "3_", "4_", "5_", "6_", "6_"]
    one, other = ([(cell["id"], cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
                   if cell["cell_type"] == "code"] for path in NOTEBOOKS[5:])
    assert one == other


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_form(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert cells[0]["cell_type"] == "markdown"
    assert cells[0]["source"][0].startswith("# ")
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert set(cell) == {"cell_type", "execution_count", "id", "metadata", "outputs", "source"}
            assert (cell["outputs"], cell["execution_count"], cell["metadata"]) == ([], None, {})
            ast.parse(text)
        else:
            assert set(cell) == {"cell_type", "id", "metadata", "source"}
            assert len(text) < 500, "a text cell has one idea"
            for target in re.findall(r"\]\(([^)\s#]+)", text):
                assert (FOLDER / target).exists(), target
