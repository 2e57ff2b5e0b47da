import json
from pathlib import Path

import pytest

from vpipe.app.data.local_corpus import (
    Function,
    is_prose,
    machine_functions,
    machine_prose,
    parse_source,
    prose_paragraphs,
)
from vpipe.errors import UserError

SOURCE = '''
"""A module that is read and not run."""
raise SystemExit

def kept(x):
    """Give it back, as it is."""
    y = x
    return y

def copied(x):
    """Not the same name."""
    y = x
    return y

def short(x):
    """One line too few here."""
    return x

def terse(x):
    """Too terse.

    The second paragraph does not count.
    """
    return x

def no_docstring(x):
    y = x
    z = y
    return z

def test_it(x):
    """This is a test of it."""
    y = x
    return y

class Box:
    def __len__(self):
        """Give its length, an integer."""
        length = 3
        return length

    if True:
        @property
        def lid(self):
            """Open it with care,
            always."""
            def inner(x):
                """Belongs to the one outside."""
                y = x
                return y
            return "\x0c"  # a form feed does not end a line
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """``gathered``: four modules with the same functions, two of them in a way of their own, and one that is broken."""
    folder = tmp_path / "gathered"
    (folder / "tests").mkdir(parents=True)
    (folder / "__init__.py").write_text(SOURCE)
    (folder / "again.py").write_text(SOURCE)
    (folder / "broken.py").write_text("def (:\n")
    (folder / "other.py").write_text(SOURCE.replace("y", "why"))
    (folder / "tests" / "other.py").write_text(SOURCE.replace("y", "ypsilon"))
    monkeypatch.syspath_prepend(tmp_path)
    return "gathered"


def test_functions_are_chosen_by_the_rule_and_split_by_module(package: str, tmp_path: Path) -> None:
    found = machine_functions(tmp_path / "cache", (package,))
    records = {split: [json.loads(line) for line in (found.folder / f"{split}.jsonl").read_text().splitlines()]
               for split in ("train", "test")}
    assert sorted(len(part) for part in records.values()) == [3, 3]
    assert found.manifest["counts"] == {"functions_found": 21, "functions": 6, "modules": 2}
    by_path = {record["path"]: [r["func_name"] for r in part] for part in records.values() for record in part}
    assert by_path == {path: ["kept", "copied", "Box.lid"] for path in ("__init__.py", "other.py")}
    assert all(record["partition"] == split for split, part in records.items() for record in part)
    kept, _, lid = next(part for part in records.values() if part[0]["path"] == "__init__.py")
    assert kept["code"] == 'def kept(x):\n    """Give it back, as it is."""\n    y = x\n    return y'
    assert (kept["docstring"], kept["language"], kept["repo"]) == ("Give it back, as it is.", "python", package)
    assert lid["code"].startswith('def lid(self):\n    """Open it with care,\n')
    assert lid["code"].endswith('    return "\x0c"  # a form feed does not end a line')


def test_gathered_files_are_found_again(package: str, tmp_path: Path) -> None:
    found = machine_functions(tmp_path / "cache", (package,))
    written = (found.folder / "manifest.json").stat().st_mtime_ns
    assert machine_functions(tmp_path / "cache", (package,)) == found
    assert (found.folder / "manifest.json").stat().st_mtime_ns == written


@pytest.mark.parametrize(("name", "lines", "docstring", "chosen"), [
    ("f", 4, "One two three", True), ("f", 3, "One two three", False), ("f", 4, "One two", False),
    ("latest", 4, "One two three", False), ("C.__init__", 4, "One two three", False),
    ("C.__enter", 4, "One two three", True), ("testing.f", 4, "\n\nOne\ntwo three", True),
    ("f", 4, "One.\n  \nTwo three", False)])
def test_the_rule(name: str, lines: int, docstring: str, chosen: bool) -> None:
    assert Function("package", "path.py", name, "\n".join("x" * lines), docstring).chosen is chosen


def test_packages_without_functions_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="0 modules with functions to learn from in the sources of no_such_package"):
        machine_functions(tmp_path, ("no_such_package",))
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_sources_are_read_in_the_encoding_that_they_declare(tmp_path: Path) -> None:
    path = tmp_path / "old.py"
    path.write_bytes("# coding: latin-1\nname = 'é'\r\n".encode("latin-1"))
    module = parse_source(path)
    assert module is not None
    assert module[0] == "# coding: latin-1\nname = 'é'\n"
    path.write_bytes(b"# coding: no-such\n")
    assert parse_source(path) is None


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
