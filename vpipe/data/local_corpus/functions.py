"""Find functions with docstrings on any machine with vpipe: those in the sources of installed packages.

Chosen by the rule of CodeSearchNet (Husain et al. 2019, section 2): a docstring whose first paragraph has three words
or more; four lines or more; no ``test`` in the name, no method such as ``__init__``; of equal ones the first.
Nothing is downloaded, imported or executed.
"""

from __future__ import annotations

import ast
import json
import platform
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from vpipe.data.cache import CachedFolder, cached_folder
from vpipe.data.local_corpus.sources import STANDARD_LIBRARY, package_paths, parse_source, sources
from vpipe.errors import UserError
from vpipe.plugins import package_versions
from vpipe.progress import progress

PACKAGES = (STANDARD_LIBRARY, "torch")
_FORMAT = 1  # raised when the same packages come to mean other functions
_FEWEST_WORDS = 3
_FEWEST_LINES = 4
_HELD_OUT = 20  # one module in so many


@dataclass(frozen=True)
class Function:
    """A function as it stands in its file, without the indentation that all its lines share."""

    package: str
    path: str
    name: str
    code: str
    docstring: str

    @property
    def chosen(self) -> bool:
        """Return whether CodeSearchNet's rule takes it; the caller drops equal ones."""
        name = self.name.rpartition(".")[2]
        first_paragraph = re.split(r"\n\s*\n", self.docstring.strip(), maxsplit=1)[0]
        return (len(first_paragraph.split()) >= _FEWEST_WORDS and self.code.count("\n") + 1 >= _FEWEST_LINES
                and "test" not in name.lower() and not (name.startswith("__") and name.endswith("__")))


def machine_functions(cache_directory: Path | None = None, packages: Sequence[str] = PACKAGES) -> CachedFolder:
    """Return a folder of the cache with the functions of installed packages, in the public layout.

    It holds ``train.jsonl`` and ``test.jsonl``, which has the functions of a twentieth of the modules. They are
    gathered now if they are not there (about 15 s). Raises :class:`UserError` where no function is found.
    """
    facts = {"packages": packages, "versions": package_versions(packages), "python": platform.python_version(),
             "format": _FORMAT}
    return cached_folder("functions", facts, partial(_build, packages), cache_directory)


def _build(packages: Sequence[str], folder: Path) -> dict[str, Any]:
    seen: set[bytes] = set()
    found = 0
    chosen: dict[tuple[str, str], list[Function]] = {}  # by module
    for function in _functions(packages):
        found += 1
        digest = sha256(function.code.encode()).digest()
        if function.chosen and digest not in seen:
            seen.add(digest)
            chosen.setdefault((function.package, function.path), []).append(function)
    if len(chosen) < 2:
        raise UserError(f"{len(chosen)} modules with functions to learn from in the sources of {', '.join(packages)}",
                        hint="name a folder of *.jsonl files as dataset.path")
    held_out = set(sorted(chosen, key=_digest)[:max(1, len(chosen) // _HELD_OUT)])
    counts = {"functions_found": found, "functions": len(seen), "modules": len(chosen)}
    for split in ("train", "test"):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for module, functions in chosen.items():
                if (module in held_out) == (split == "test"):
                    file.writelines(_line(function, split) for function in functions)
    return {"packages": package_versions(packages), "counts": counts}


def _functions(packages: Sequence[str]) -> Iterator[Function]:
    """Yield every function and method with a docstring, in the order of packages, files and lines."""
    files = [(package, source) for package in packages for source in sources(package)]
    for package, source in progress(files, "gathering functions", unit="file"):
        module = parse_source(source)
        if module is None:
            continue
        text, tree = module
        lines = text.split("\n")  # as the syntax tree counts them
        root = next(root for root in package_paths(package) if source.is_relative_to(root))
        path = source.name if source == root else source.relative_to(root).as_posix()
        for name, node in _definitions(tree.body):
            docstring = ast.get_docstring(node)
            if docstring:
                code = textwrap.dedent("\n".join(lines[node.lineno - 1:node.end_lineno]))
                yield Function(package, path, name, code, docstring)


def _definitions(body: Iterable[ast.stmt], prefix: str = "",
                 ) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield functions and methods with their names, such as ``Thread.run``; nested functions belong to the outer
    ones.
    """
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + statement.name, statement
            case ast.ClassDef():
                yield from _definitions(statement.body, f"{prefix}{statement.name}.")
            case ast.If() | ast.Try():
                yield from _definitions([*statement.body, *statement.orelse], prefix)


def _line(function: Function, part: str) -> str:
    record = {"repo": function.package, "path": function.path, "func_name": function.name, "language": "python",
              "code": function.code, "docstring": function.docstring, "partition": part}
    return json.dumps(record, ensure_ascii=False) + "\n"


def _digest(module: tuple[str, str]) -> bytes:
    return sha256("/".join(module).encode()).digest()
