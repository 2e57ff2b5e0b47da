from pathlib import Path

import pytest

from vpipe.data.prose import machine_prose
from vpipe.errors import UserError


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
