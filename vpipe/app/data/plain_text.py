"""Read documents from a folder of plain text files, and split English prose into sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from vpipe.app.data.line_files import line_files
from vpipe.errors import UserError

_ABBREVIATIONS = frozenset({
    "e.g", "i.e", "cf", "vs", "viz", "resp", "approx", "ca", "al", "fig", "figs", "eq", "eqs", "sec", "no", "nos",
    "vol", "pp", "p", "ch", "ref", "refs", "dr", "mr", "mrs", "ms", "prof", "st", "jr", "sr", "inc", "ltd", "dept",
    "est", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec",
})
# A closing mark, perhaps quotes or brackets after it, space, and something that can open a sentence; or a closing mark
# of Chinese and Japanese, after which no space stands.
_BOUNDARY = re.compile(r"""(?P<mark>[.!?]+)["')\]]*\s+(?=["'(\[]*[A-Z0-9])|[。！？]+[”’」』）】]*\s*(?=.)""")
_LAST_WORD = re.compile(r"""[^\s"'(\[]*$""")


def split_sentences(text: str) -> list[str]:
    """Return the sentences of ``text``, in order, with every run of white space made one space.

    A boundary is ``.``, ``!`` or ``?`` (or several, as in an ellipsis) followed by white space and a capital letter
    or a digit. It is not one after an abbreviation (``e.g. Python``), after a single capital (``D. Knuth``),
    or within a number (``3.14``: no white space). ``etc.`` may end a sentence, so it does when a capital follows.
    Of Chinese and Japanese, ``。``, ``！`` and ``？`` are boundaries.
    """
    text = " ".join(text.split())
    sentences, start = [], 0
    for boundary in _BOUNDARY.finditer(text):
        if boundary["mark"] == "." and _is_abbreviated(text[start:boundary.start()]):
            continue
        sentences.append(text[start:boundary.end()].rstrip())
        start = boundary.end()
    if start < len(text):
        sentences.append(text[start:])
    return sentences


def _is_abbreviated(before: str) -> bool:
    """Return whether the full stop after ``before`` belongs to its last word."""
    last = _LAST_WORD.search(before)
    assert last is not None, "the pattern matches the empty string too"
    word = last.group()
    return word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper() and word != "I")


BYTE_ORDER_MARK = "\ufeff"
"""The first character of some files; it is no text of theirs, nor of a file that they were joined to."""


def text_files(folder: Path) -> list[Path]:
    """Return the .txt files in ``folder`` and below, sorted, or the one that it is.

    Raises :class:`UserError` without any.
    """
    return line_files(folder, (".txt",), "text, documents separated by blank lines")


def read_documents(folder: Path) -> list[list[str]]:
    """Return documents of at least two sentences, in the order of the files' names. Lines may be wrapped."""
    documents = (split_sentences(" ".join(block)) for block in read_blocks(folder))
    return [document for document in documents if len(document) >= 2]


def read_blocks(folder: Path) -> Iterator[list[str]]:
    """Yield the lines of every document, in the order of the files' names.

    Blank lines separate documents; the end of a file does too. Raises :class:`UserError` for a folder without text, a
    file that cannot be read, or text that is not UTF-8.
    """
    for path in text_files(folder):
        try:
            text = decoded(path.read_bytes())
        except UnicodeDecodeError as error:
            raise not_utf8(path.name, error, str(path)) from error
        except OSError as error:
            raise UserError(f"{path.name} cannot be read: {error.strerror}", hint="repair it, or remove it",
                            where=str(path)) from error
        block: list[str] = []
        for line in [*re.split("\r\n?|\n", text), ""]:  # other characters that end a line are text
            if line.strip():
                block.append(line)
            elif block:
                yield block
                block = []


def decoded(content: bytes) -> str:
    """Return a text in UTF-8 without byte order marks, which also begin files that were joined to others.

    Raises:
        UnicodeDecodeError: it is not, or it has a byte 0, as ASCII in UTF-16 does.
    """
    text = content.decode()
    if (place := content.find(0)) >= 0:
        raise UnicodeDecodeError("utf-8", content, place, place + 1, "is 0")
    return text.replace(BYTE_ORDER_MARK, "")


def not_utf8(what: str, error: UnicodeDecodeError, where: str | None = None) -> UserError:
    """Return the error of a text that :func:`decoded` refused; nobody can tell for sure how the text is encoded."""
    return UserError(f"{what} is not UTF-8 (byte {error.start})", where=where, hint="convert it: iconv -f ENCODING -t "
                     "UTF-8, where ENCODING may be GB18030, BIG5, LATIN1 or UTF-16")
