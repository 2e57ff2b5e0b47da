"""Find text on any machine with vpipe, in the sources of installed packages: English prose, functions with docstrings.

Nothing is downloaded, imported or executed.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import platform
import re
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from vpipe.app.data.cache import CachedFolder, cached_folder
from vpipe.app.data.plain_text import split_sentences
from vpipe.app.progress import progress
from vpipe.errors import UserError
from vpipe.plugins import PluginGroup

Sentences = list[str]
STANDARD_LIBRARY = "stdlib"
FUNCTION_PACKAGES = (STANDARD_LIBRARY, "torch")
PROSE_PACKAGES = (STANDARD_LIBRARY, "torch", "numpy", "sympy", "networkx", "mpmath", "jinja2", "fsspec")
_SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "lib2to3", "__pycache__"})
_FORMAT = 1  # raised when the same packages come to mean other functions
_FEWEST_DOCSTRING_WORDS = 3
_FEWEST_LINES = 4
_HELD_OUT = 20  # one module in so many


def sources(package: str) -> list[Path]:
    """Return the Python files of a package (``stdlib``: all of that), sorted, without tests; none if not installed."""
    return [path for root in package_paths(package)
            for path in ([root] if root.is_file() else sorted(root.rglob("*.py")))
            if root.is_file() or _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)]


def package_paths(package: str) -> list[Path]:
    """Return the folders that hold a package, or its file when it is a single one; none when it is not installed."""
    if package == STANDARD_LIBRARY:
        return [Path(sysconfig.get_path("stdlib"))]
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    if not spec.submodule_search_locations:
        return [Path(spec.origin)] if spec.origin and spec.origin.endswith(".py") else []
    return [Path(location) for location in spec.submodule_search_locations]


def parse_source(source: Path) -> tuple[str, ast.Module] | None:
    """Return the text of a file and its syntax tree; None when it is not valid Python of this version."""
    try:
        with tokenize.open(source) as file:  # in the encoding that it declares
            text = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old sources hold escapes that newer Pythons warn about
            return text, ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


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
        """Return whether CodeSearchNet takes it (Husain et al. 2019, section 2); the caller drops equal ones.

        Its docstring's first paragraph has three words or more; it has four lines or more; there is no ``test`` in its
        name; it is no method such as ``__init__``.
        """
        name = self.name.rpartition(".")[2]
        first_paragraph = re.split(r"\n\s*\n", self.docstring.strip(), maxsplit=1)[0]
        return (len(first_paragraph.split()) >= _FEWEST_DOCSTRING_WORDS and self.code.count("\n") + 1 >= _FEWEST_LINES
                and "test" not in name.lower() and not (name.startswith("__") and name.endswith("__")))

    def as_json(self, part: str) -> str:
        """Return a line in the layout of CodeSearchNet."""
        record = {"repo": self.package, "path": self.path, "func_name": self.name, "language": "python",
                  "code": self.code, "docstring": self.docstring, "partition": part}
        return json.dumps(record, ensure_ascii=False) + "\n"


def machine_functions(cache_directory: Path | None = None, packages: Sequence[str] = FUNCTION_PACKAGES) -> CachedFolder:
    """Return a folder of the cache with the functions of installed packages, gathered now if need be (about 15 s).

    It holds ``train.jsonl`` and ``test.jsonl``, which has the functions of a twentieth of the modules. Raises
    :class:`UserError` where no function is found.
    """
    facts = {"packages": packages, "versions": PluginGroup.versions_of(packages), "python": platform.python_version(),
             "format": _FORMAT}
    return cached_folder("functions", facts, partial(_build_functions, packages), cache_directory)


def _build_functions(packages: Sequence[str], folder: Path) -> dict[str, Any]:
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
    by_digest = sorted(chosen, key=lambda module: sha256("/".join(module).encode()).digest())
    held_out = set(by_digest[:max(1, len(chosen) // _HELD_OUT)])
    counts = {"functions_found": found, "functions": len(seen), "modules": len(chosen)}
    for split in ("train", "test"):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for module, functions in chosen.items():
                if (module in held_out) == (split == "test"):
                    file.writelines(function.as_json(split) for function in functions)
    return {"packages": PluginGroup.versions_of(packages), "counts": counts}


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
    """Yield functions and methods with their names, such as ``Thread.run``, but not functions within functions."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + statement.name, statement
            case ast.ClassDef():
                yield from _definitions(statement.body, f"{prefix}{statement.name}.")
            case ast.If() | ast.Try():
                yield from _definitions([*statement.body, *statement.orelse], prefix)


# Sections of the numpydoc style that hold code or names only. (Parameters, Returns, ... hold descriptions.)
_NOT_READ = frozenset({"examples", "example", "see also", "references", "methods", "signature", "usage"})
_UNDERLINE = re.compile(r"^([=\-~^*#\"'`])\1{2,}\s*$")
# "name (type): text", ":param name: text", "- text", "1. text": an item, whose text may go on below, further in.
_ITEM = re.compile(r"^(?:[-*+•]\s+|\(?\d{1,2}[.)]\s+|:\w[\w ,]*:\s+|[*`]{0,2}[\w.]+[*`]{0,2}(?:\s*\([^()]*\))?:\s+)")
_NOT_PROSE = re.compile(
    r"^(>>>|\.\.\.|[|+=$%#@]|-{1,2}\w|\w+\s*=)|\s:\s|::$|[=+|~^_]{3,}|-{3,}|\.{4,}|\\\w|\{\{|:math:|\$|\w\(\)?\w*\(|>>>"
)
_MARKUP = (
    (re.compile(r"^\.\.\s+\w+::\s*"), ""),                               # .. note:: text
    (re.compile(r"\s*\[[\w#*]+\]_"), ""),                                # footnotes and citations: [1]_
    (re.compile(r"`+([^`<>]+?)\s*<[^`<>]+>`+_*"), r"\1"),                # `text <target>`_
    (re.compile(r":[a-z]+(?::[a-z]+)*:\s?`[~!.]*([^`]+)`"), r"\1"),      # :class:`Name`
    (re.compile(r"`+([^`]+)`+_*"), r"\1"),                               # ``code``, `name`
    (re.compile(r"(?<![\w*])\*{1,2}([^\s*](?:[^*]*[^\s*])?)\*{1,2}(?![\w*])"), r"\1"),  # *stress*
)
_WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")
_OPENING = re.compile(r"[\"'(]*[A-Z]")
_ENDING = re.compile(r"[.!?][\"')]*$")
_FEWEST_PROSE_WORDS = 6
_LEAST_LETTERS = 0.88  # share of letters, spaces and common stops: below it, a line is code or a formula


def prose_paragraphs(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of running English in ``docstring``, each on one line and without reST markup.

    Kept are blocks that read as sentences, the descriptions of parameters among them (without name and type).
    Dropped are doctests, code, headings, tables, formulas, fragments, and the sections See Also, References, Examples.
    """
    is_read = True
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        lines = block.splitlines()
        if len(lines) >= 2 and _UNDERLINE.match(lines[1]):
            is_read = lines[0].strip().lower() not in _NOT_READ
            lines = lines[2:]
        if is_read:
            for paragraph in map(_without_markup, _runs(lines)):
                if is_prose(paragraph):
                    yield paragraph


def _runs(lines: list[str]) -> Iterator[str]:
    """Yield lines that belong together, joined: a run at one indentation, or an item with what is indented below it.

    A run with a line of code in it is left out whole.
    """
    run: list[str] = []
    margin, in_item = -1, False
    for line in [*lines, ""]:
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        item = _ITEM.match(text)
        belongs = text and not item and (indent > margin if in_item else indent == margin)
        if run and not belongs:
            if not any(map(_NOT_PROSE.search, run)):
                yield " ".join(run)
            run = []
        if not belongs:
            margin, in_item = indent, item is not None
        run.append(text[item.end():] if item else text)


def _without_markup(paragraph: str) -> str:
    for pattern, plain in _MARKUP:
        paragraph = pattern.sub(plain, paragraph)
    return " ".join(paragraph.split())


def is_prose(paragraph: str) -> bool:
    """Return whether a paragraph opens with a capital, ends as a sentence does, and is mostly words."""
    if not _OPENING.match(paragraph) or not _ENDING.search(paragraph):
        return False
    letters = sum(character.isalpha() or character in " ,.'’-" for character in paragraph)
    return letters >= _LEAST_LETTERS * len(paragraph) and len(_WORD.findall(paragraph)) >= _FEWEST_PROSE_WORDS


def machine_prose(packages: Sequence[str] = PROSE_PACKAGES) -> list[Sentences]:
    """Return the prose of installed ``packages``, in a fixed order; packages that are not installed are skipped.

    A document is a list of sentences in their order, from a docstring or an article of ``pydoc_data.topics`` (chapters
    of the Python manual). A repeated paragraph (licences, inherited docstrings) is dropped, and so is a document with
    fewer than two sentences. Raises :class:`UserError` when nothing at all is found.
    """
    files = [source for package in packages for source in sources(package)]
    documents: list[Sentences] = []
    seen: set[str] = set()
    for source in progress(files, "reading docstrings", unit="file"):
        for text in _texts(source):
            fresh = [paragraph for paragraph in prose_paragraphs(text) if paragraph not in seen]
            seen.update(fresh)
            document = [sentence for paragraph in fresh for sentence in split_sentences(paragraph)]
            if len(document) >= 2:
                documents.append(document)
    if not documents:
        raise UserError(f"no prose in the docstrings of {', '.join(packages) or 'no package'} ({len(files)} files)",
                        hint="name a folder of .txt files as dataset.path, or packages whose sources are installed")
    return documents


def _texts(source: Path) -> Iterator[str]:
    """Yield the docstrings (or articles) in one file; none when it is not valid Python of this version."""
    module = parse_source(source)
    if module is None:
        return
    _, tree = module
    if source.parts[-2:] == ("pydoc_data", "topics.py"):
        for statement in tree.body:
            match statement:
                case ast.Assign(targets=[ast.Name(id="topics")], value=ast.Dict() as table):
                    topics: dict[str, str] = ast.literal_eval(table)
                    yield from (topics[name] for name in sorted(topics))
    yield from _docstrings(tree)


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield docstrings of a module, its classes and functions, and texts in calls (``add_docstr(f, "...")``)."""
    text = ast.get_docstring(node, clean=False)
    if text:
        yield text
    bodies: list[list[ast.stmt]] = [node.body]
    while bodies:
        for statement in bodies.pop():
            if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings(statement)
            elif isinstance(statement, ast.If | ast.Try):
                bodies.append(statement.body)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                for argument in statement.value.args:
                    match argument:
                        case ast.Constant(value=str(attached)) if "\n\n" in attached:
                            yield attached
