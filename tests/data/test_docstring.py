import pytest

from vpipe.data.docstring import is_prose, prose_paragraphs

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
