"""The prose in a docstring: what remains without code, tables, lists of names and markup."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

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
    """The paragraphs of running English in ``docstring``, each on one line and without reST markup.

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
    """Lines that belong together, joined: a run at one indentation, or an item with what is indented below it.

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
    """Whether a paragraph reads as English: it opens with a capital, ends as a sentence does, and is mostly words."""
    if not _OPENING.match(paragraph) or not _ENDING.search(paragraph):
        return False
    letters = sum(character.isalpha() or character in " ,.'’-" for character in paragraph)
    return letters >= _LEAST_LETTERS * len(paragraph) and len(_WORD.findall(paragraph)) >= _FEWEST_WORDS
