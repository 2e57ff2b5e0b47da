"""Sentences of English prose: a small splitter that knows where a full stop is not an end."""

from __future__ import annotations

import re

_ABBREVIATIONS = frozenset({
    "e.g", "i.e", "cf", "vs", "viz", "resp", "approx", "ca", "al", "fig", "figs", "eq", "eqs", "sec", "no", "nos",
    "vol", "pp", "p", "ch", "ref", "refs", "dr", "mr", "mrs", "ms", "prof", "st", "jr", "sr", "inc", "ltd", "dept",
    "est", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec",
})
# A closing mark, perhaps quotes or brackets after it, space, and something that can open a sentence.
_BOUNDARY = re.compile(r"""(?P<mark>[.!?]+)["')\]]*\s+(?=["'(\[]*[A-Z0-9])""")
_LAST_WORD = re.compile(r"""[^\s"'(\[]*$""")


def split_sentences(text: str) -> list[str]:
    """The sentences of ``text``, in order, with every run of white space made one space.

    A boundary is ``.``, ``!`` or ``?`` (or several, as in an ellipsis) followed by white space and a capital letter
    or a digit. It is not one after an abbreviation (``e.g. Python``), after a single capital (``D. Knuth``),
    or within a number (``3.14``: no white space). ``etc.`` may end a sentence, so it does when a capital follows.
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
    """Whether the full stop after ``before`` belongs to its last word."""
    last = _LAST_WORD.search(before)
    assert last is not None, "the pattern matches the empty string too"
    word = last.group()
    return word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper() and word != "I")
