"""Run the code cells of a notebook in order, in one namespace, and print what Jupyter would show as text.

    python tests/system/run_notebook.py examples/notebooks/1_four_stages_in_one_process.ipynb
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path


def run_notebook(path: Path) -> None:
    """Run a notebook; the value of a cell's last expression is shown, a picture as its first characters."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        name = f"{path.name}, cell {number}"
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if hasattr(value, "_repr_svg_"):
                print(f"[picture: {value._repr_svg_()[:60]}...]")
            elif value is not None:
                print(repr(value))


if __name__ == "__main__":
    run_notebook(Path(sys.argv[1]))
