"""A folder that ``save_to_disk`` of the package ``datasets`` wrote, as the text of a language model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from saved_by_datasets import rows, save, saved_settings

from vpipe.app.data.dataset import DatasetSettings
from vpipe.app.data.huggingface import huggingface
from vpipe.errors import UserError


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetSettings:
    return saved_settings(tmp_path, monkeypatch)


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
