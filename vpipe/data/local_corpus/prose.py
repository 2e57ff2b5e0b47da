"""Find English prose on any machine with vpipe: the documentation inside installed packages.

Nothing is downloaded, imported or executed. Docstrings are read from the sources' syntax trees; the articles of
``pydoc_data.topics`` (chapters of the Python manual, the longest connected text here) from a dict literal.
A document is a list of sentences in their order, taken from one docstring or one article. Of a docstring only prose
is taken, not code, tables, lists of names or markup.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from vpipe.data.local_corpus.sources import STANDARD_LIBRARY, parse_source, sources
from vpipe.data.plain_text import split_sentences
from vpipe.errors import UserError
from vpipe.progress import progress

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
_FEWEST_WORDS = 6
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
    """Return whether a paragraph reads as English: it opens with a capital, ends as a sentence does, and is mostly
    words.
    """
    if not _OPENING.match(paragraph) or not _ENDING.search(paragraph):
        return False
    letters = sum(character.isalpha() or character in " ,.'’-" for character in paragraph)
    return letters >= _LEAST_LETTERS * len(paragraph) and len(_WORD.findall(paragraph)) >= _FEWEST_WORDS


Document = list[str]

PACKAGES = (STANDARD_LIBRARY, "torch", "numpy", "sympy", "networkx", "mpmath", "jinja2", "fsspec")


def machine_prose(packages: Sequence[str] = PACKAGES) -> list[Document]:
    """Return the prose of installed ``packages``, in a fixed order; packages that are not installed are skipped.

    A package is named as in ``import``; ``"stdlib"`` stands for the whole standard library. A repeated paragraph
    (licences, inherited docstrings) is dropped, as is a document left with fewer than two sentences.
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
    """Yield the docstrings (or articles) in one file; none when it is not valid Python of this version."""
    module = parse_source(source)
    if module is None:
        return
    _, tree = module
    if source.parts[-2:] == ("pydoc_data", "topics.py"):
        yield from _articles(tree)
    yield from _docstrings(tree)


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield docstrings of a module, its classes and functions, and texts attached by calls (``add_docstr(f,
    "...")``).
    """
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
    """Yield the values of the module's dict ``topics``, by name."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="topics")], value=ast.Dict() as table):
                topics: dict[str, str] = ast.literal_eval(table)
                yield from (topics[name] for name in sorted(topics))
