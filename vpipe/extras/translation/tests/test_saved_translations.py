"""A folder that ``save_to_disk`` of the package ``datasets`` wrote, as pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from saved_by_datasets import rows, save, saved_settings

from vpipe.app.data.dataset import DatasetSettings
from vpipe.errors import UserError
from vpipe.extras.translation.pairs import pairs


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetSettings:
    return saved_settings(tmp_path, monkeypatch)


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
