"""The package ``datasets`` is large, and not among those that the tests need: a stand-in of its name takes its place.

It has what vpipe calls of it, and no more: ``load_from_disk`` gives a table or a dict of tables, a table knows
``column_names`` and ``select_columns`` and iterates over rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vpipe.app.data.dataset import DatasetSettings


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


def saved_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetSettings:
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
