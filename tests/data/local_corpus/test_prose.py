from pathlib import Path

import pytest

from vpipe.data.local_corpus.prose import is_prose, machine_prose, prose_paragraphs
from vpipe.errors import UserError

DOCSTRING = """Return the sorted keys of the mapping.

    The keys are compared by :meth:`~object.__lt__`, so they must be of *one* kind
    [1]_. See `the manual <http://example.org>`_ for more about ``sorted`` lists.

    Parameters
    ----------
    mapping : dict
        The mapping whose keys are wanted, which is not changed by this.
    reverse : bool, optional
        Short.

    Args:
        limit (int): The largest number of keys that are returned, all of them
            when it is not given.

    >>> Here is a doctest that should never be taken for prose.

    Use it like this::

        keys = sorted_keys(mapping)

    +-------+-------+
    | The cells of a table are not prose. |
    +-------+-------+

    :math:`x^2` is a formula that the reader of prose should not see here.

    See Also
    --------
    This reference to other functions is not read as prose at all.
    """


def test_keeps_the_prose_and_drops_the_rest() -> None:
    assert list(prose_paragraphs(DOCSTRING)) == [
        "Return the sorted keys of the mapping.",
        "The keys are compared by object.__lt__, so they must be of one kind. "
        "See the manual for more about sorted lists.",
        "The mapping whose keys are wanted, which is not changed by this.",
        "The largest number of keys that are returned, all of them when it is not given.",
    ]


@pytest.mark.parametrize(("paragraph", "expected"), [
    ("The function returns the number of its arguments.", True),
    ("too short to say.", False),
    ("The function returns the number of its arguments", False),
    ("lower case opens the middle of some longer sentence.", False),
    ("F(x) = [0](1, 2) + {3: 4} / 5 * {6} - (7 | 8) ** a b c d e f g.", False),
    ("", False),
])
def test_prose_opens_and_ends_like_a_sentence_and_is_mostly_words(paragraph: str, expected: bool) -> None:
    assert is_prose(paragraph) is expected


def test_docstrings_of_packages_become_documents_of_sentences() -> None:
    documents = machine_prose(("json", "argparse"))
    assert len(documents) >= 5
    assert all(len(document) >= 2 for document in documents)
    assert all(sentence == " ".join(sentence.split()) for document in documents for sentence in document)
    paragraphs = [tuple(document) for document in documents]
    assert len(set(paragraphs)) == len(paragraphs)
    assert documents == machine_prose(("json", "argparse"))


def test_articles_of_the_manual_are_long_documents() -> None:
    documents = machine_prose(("pydoc_data",))
    assert max(map(len, documents)) > 20


def test_modules_are_read_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "explosive"
    (package / "tests").mkdir(parents=True)
    text = '"""The first sentence of this module is here. The second sentence of it follows."""\nraise SystemExit\n'
    (package / "__init__.py").write_text(text)
    (package / "copied.py").write_text(text)
    (package / "broken.py").write_text("def (:\n")
    (package / "tests" / "test_it.py").write_text('"""Tests are not read for their prose. Not for two sentences."""')
    (package / "attached.py").write_text(
        'add(f, """\nf(x)\n\nThis text is attached by a call to a helper. It reads as two sentences.\n""")\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert machine_prose(("explosive",)) == [
        ["The first sentence of this module is here.", "The second sentence of it follows."],
        ["This text is attached by a call to a helper.", "It reads as two sentences."],
    ]


def test_nothing_found_is_an_error() -> None:
    with pytest.raises(UserError) as caught:
        machine_prose(("no_such_package",))
    assert "no prose in the docstrings of no_such_package (0 files)" in str(caught.value)
    assert "dataset.path" in str(caught.value)
