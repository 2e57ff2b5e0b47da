"""The tables of the page about old configs are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_docs import rows, table_below

from vpipe.app.config.validation import Section
from vpipe.extras.legacy.ourgpipe_keys import OldKeys
from vpipe.extras.legacy.vpipe_flat import FlatConfig, PartitionFile, RankFile

PAGE = Path(__file__).parents[1] / "docs" / "flat-configs.md"


@pytest.mark.parametrize(("heading", "section"), [
    ("The YAML file", FlatConfig), ("The file that `partition` names", PartitionFile),
    ("The file that `config_file` names", RankFile), ("`parallel`, old keys", OldKeys)])
def test_every_key_with_its_values_default_and_meaning(heading: str, section: type[Section]) -> None:
    assert [row[:4] for row in table_below(heading, PAGE)] == list(rows(section))
