"""English prose that every machine with vpipe has: the documentation inside installed packages.

Nothing is downloaded, imported or executed. Docstrings are read from the sources' syntax trees; the articles of
``pydoc_data.topics`` (chapters of the Python manual, the longest connected text here) from a dict literal.
A document is a list of sentences in their order, taken from one docstring or one article.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from vpipe.data.docstring import prose_paragraphs
from vpipe.data.installed import STANDARD_LIBRARY, parsed, sources
from vpipe.data.progress import progress
from vpipe.data.sentences import split_sentences
from vpipe.errors import UserError

Document = list[str]

PACKAGES = (STANDARD_LIBRARY, "torch", "numpy", "sympy", "networkx", "mpmath", "jinja2", "fsspec")


def machine_prose(packages: Sequence[str] = PACKAGES) -> list[Document]:
    """The prose of installed ``packages``, in a fixed order; packages that are not installed are passed over.

    A package is named as in ``import``; ``"stdlib"`` stands for the whole standard library. A paragraph that was
    seen before (licences, inherited docstrings) is dropped, as is a document left with fewer than two sentences.
    Raises :class:`UserError` when nothing at all is found.
    """
    files = [source for package in packages for source in sources(package)]
    documents: list[Document] = []
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
    """The docstrings (or articles) in one file; none when it is not valid Python of this version."""
    module = parsed(source)
    if module is None:
        return
    _, tree = module
    if source.parts[-2:] == ("pydoc_data", "topics.py"):
        yield from _articles(tree)
    yield from _docstrings(tree)


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Docstrings of a module, its classes and functions, and texts attached by calls (``add_docstr(f, "...")``)."""
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


def _articles(tree: ast.Module) -> Iterator[str]:
    """The values of the module's dict ``topics``, by name."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="topics")], value=ast.Dict() as table):
                topics: dict[str, str] = ast.literal_eval(table)
                yield from (topics[name] for name in sorted(topics))
