"""The package ``datasets`` is large, and not among those that the tests need: a stand-in of its name takes its place.

It has what vpipe calls of it, and no more: ``load_from_disk`` gives a table or a dict of tables, a table knows
``column_names`` and ``select_columns`` and iterates over rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vpipe.app.data.dataset import DatasetSettings
from vpipe.app.data.huggingface import huggingface
from vpipe.errors import UserError
from vpipe.extras.translation.pairs import pairs


@dataclass
class Table:
    rows: list[dict[str, Any]]

    @property
    def column_names(self) -> list[str]:
        return list(self.rows[0])

    def select_columns(self, names: list[str]) -> Table:
        return Table([{name: row[name] for name in names} for row in self.rows])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetSettings:
    """Of a folder whose rows the stand-in reads from a file of JSON."""
    def load_from_disk(path: str) -> Any:
        content = json.loads((Path(path) / "rows.json").read_text())
        return {name: Table(rows) for name, rows in content.items()} if isinstance(content, dict) else Table(content)

    module = ModuleType("datasets")
    module.__dict__["load_from_disk"] = load_from_disk
    monkeypatch.setitem(sys.modules, "datasets", module)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    return DatasetSettings(tmp_path / "saved", sequence_length=8, vocab_size=300, cache_directory=tmp_path / "cache",
                           fields=("input_ids", "labels"))


def rows(count: int, column: str = "text", first: int = 0) -> list[dict[str, Any]]:
    return [{"id": number, column: f"the {number}th row of all"} for number in range(first, first + count)]


def save(settings: DatasetSettings, content: Any) -> DatasetSettings:
    assert settings.path is not None
    (settings.path / "rows.json").write_text(json.dumps(content))
    return settings


def counts(settings: DatasetSettings) -> tuple[int, int]:
    path = huggingface(settings).tokenizer_path
    assert path is not None
    counted = json.loads((path.parent / "manifest.json").read_text())["counts"]
    return counted["train_documents"], counted["test_documents"]


def test_tables_by_split(settings: DatasetSettings) -> None:
    save(settings, {"train": rows(20, "func_code_string"), "validation": rows(5, "func_code_string", 20)})
    assert counts(settings) == (20, 5)
    assert huggingface(settings).samples("train") > 5


def test_rows_without_a_text_are_passed_over(settings: DatasetSettings) -> None:
    plain, gaps = (huggingface(save(settings, {"train": [*rows(9), *more], "test": rows(9)}))
                   for more in ([], [{"id": 9, "text": None}, {"id": 10, "text": " "}]))
    assert gaps.samples("train") == plain.samples("train")


def test_one_table_is_split_here(settings: DatasetSettings) -> None:
    save(settings, [*rows(40), {"id": 0, "text": " "}])
    assert counts(settings) == (38, 2)


def test_the_package_is_asked_for_only_where_it_is_needed(settings: DatasetSettings,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    save(settings, rows(40))
    huggingface(settings)
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    assert huggingface(settings).samples("train") > 5
    with pytest.raises(UserError, match="needs the package datasets, which cannot be imported") as caught:
        huggingface(replace(settings, vocab_size=290))
    assert "hint: install it: pip install datasets" in str(caught.value)


@pytest.mark.parametrize(("content", "what"), [
    (rows(9, "body"), r"has no column of texts \(its columns: id, body\)"),
    ({"train": rows(9), "unsupervised": rows(9)}, "has a split 'unsupervised'; known are train, "),
    ([*rows(9), {"id": 0, "text": 3}], "row 9 of the column 'text' is a int, not a text")])
def test_tables_at_fault(settings: DatasetSettings, content: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        huggingface(save(settings, content))


def test_folders_at_fault(settings: DatasetSettings) -> None:
    with pytest.raises(UserError, match="the data set 'huggingface' has no path"):
        huggingface(replace(settings, path=None))
    assert settings.path is not None
    (settings.path / "dataset_info.json").unlink()
    with pytest.raises(UserError, match="is no folder that save_to_disk wrote") as caught:
        huggingface(settings)
    assert "save_to_disk(FOLDER)" in str(caught.value)


def translations(count: int, *languages: str, first: int = 0) -> list[dict[str, Any]]:
    return [{"id": number, "translation": {language: f"{language} has the number {number}" for language in languages}}
            for number in range(first, first + count)]


def test_pairs_have_a_translation_per_language(settings: DatasetSettings) -> None:
    content = {"train": [*translations(30, "en", "de"), {"translation": {"en": "alone", "de": None}}],
               "validation": translations(2, "en", "de", first=40), "test": translations(5, "en", "de", first=50)}
    settings = replace(save(settings, content), sequence_length=40)
    dataset = pairs(settings)
    assert dataset.lines == (f"pairs: 37 of {settings.path} (en to de 37); 5 held out", "left out: 1 with an empty "
                             "side, 2 marked valid, as others are marked test")
    assert dataset.held_out == tuple((f"en has the number {n}", f"de has the number {n}") for n in range(50, 55))
    for keys in ({"target_language": "en"}, {"source_language": "de"}):
        assert pairs(replace(settings, **keys)).held_out[0] == ("de has the number 50", "en has the number 50")


@pytest.mark.parametrize(("content", "keys", "problem"), [
    (translations(9, "en", "de"), {"target_language": "fr"}, "the languages in .* are en, de"),
    (translations(9, "en", "de", "fr"), {"target_language": "fr"}, "has the languages en, de, fr\nhint: choose two"),
    (translations(9, "en", "de"), {"target_language": "de", "source_language": "de"}, "would be from de to de"),
    (translations(9, "en"), {}, "would be from en to no other language"),
    (rows(9), {}, r"has no column 'translation' \(its columns: id, text\)"),
    ([{"translation": "text"}], {}, "row 0 of the column 'translation' is no text per language"),
    ([{"translation": {"en": 1, "de": "eins"}}], {}, "row 0 of the column 'translation' is no text per language"),
    ({"train": translations(9, "en", "de"), "dreams": translations(9, "en", "de")}, {}, "has a split 'dreams'")])
def test_pairs_that_cannot_be_taken(settings: DatasetSettings, content: Any, keys: dict[str, str],
                                    problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        pairs(replace(save(settings, content), **keys))
