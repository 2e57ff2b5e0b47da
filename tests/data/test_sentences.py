import pytest

from vpipe.data.sentences import split_sentences


@pytest.mark.parametrize(("text", "sentences"), [
    ("One thing. Another thing! A third? Yes.", ["One thing.", "Another thing!", "A third?", "Yes."]),
    ("Use a list, e.g. Python's own. Then go on.", ["Use a list, e.g. Python's own.", "Then go on."]),
    ("That is i.e. This. Or cf. Knuth.", ["That is i.e. This.", "Or cf. Knuth."]),
    ("The value is 3.14 now. Version 2.0 follows.", ["The value is 3.14 now.", "Version 2.0 follows."]),
    ("Wait... Then go. And so on... to the end.", ["Wait...", "Then go.", "And so on... to the end."]),
    ("After D. Knuth it changed. See Fig. 3 there.", ["After D. Knuth it changed.", "See Fig. 3 there."]),
    ("So do I. Then sleep.", ["So do I.", "Then sleep."]),
    ("Lists, sets etc. Other things (see below.) Next.", ["Lists, sets etc.", "Other things (see below.)", "Next."]),
    ('He said "stop." Then\n   he   left', ['He said "stop."', "Then he left"]),
    ("no capital. follows here", ["no capital. follows here"]),
    ("", []),
    ("  \n ", []),
])
def test_splits_where_sentences_end(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


def test_no_word_is_lost() -> None:
    text = "A first one, e.g. this. Then 2.5 more... Or not? (Maybe.) Dr. Who knows! The end"
    assert " ".join(split_sentences(text)) == text
