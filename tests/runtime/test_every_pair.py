"""Any two features together are as their oracle, or refused with the reason: a fourteenth of all pairs every day."""

from __future__ import annotations

from collections import Counter
from datetime import date
from pathlib import Path

import pytest
from features import DAYS, FILE, KEYS, PAIRS, ROWS, check, drawn, drawn_for_two, together, wanted
from pipelines import WORDS
from world import World

from vpipe.app.config.config import Config
from vpipe.app.config.validation import section_of

TODAY = date.today().toordinal()


def named(pair: tuple[str, ...]) -> str:
    return "+".join(pair)


def test_every_feature_has_a_row() -> None:
    """What is added to a part, a method or its arguments, a kind of action, a schedule, a codec, an executor."""
    covered = [name for row, feature in ROWS.items() for name in (row, *feature.covers)]
    assert wanted() - {*covered} == set()
    assert {name.partition("=")[0] for name in covered} <= wanted() | {"Model", "Plan", "buckets", "lengths", "reads"}


def test_every_key_of_a_config_that_reaches_a_pipeline_has_a_row() -> None:
    sections = [section_of(Config.model_fields[name]) for name in ("training", "parallel")]
    keys = {key for section in sections for key in section.model_fields}
    assert keys - {*WORDS} == {key for own in KEYS.values() for key in own.split()}
    assert {*KEYS} - {""} <= {name for row, feature in ROWS.items() for name in (row, *feature.covers)}


def test_every_feature_is_drawn_twice_a_day_and_all_pairs_in_two_weeks() -> None:
    weeks = [drawn(TODAY + day) for day in range(DAYS)]
    for pairs in weeks:
        found = Counter(name for pair in pairs for name in pair)
        assert {name for name, feature in ROWS.items() if not feature.two and found[name] < 2} == set()
    alone = {name for name, feature in ROWS.items() if feature.two}
    assert {pair for pair in PAIRS if not alone & {*pair}} <= {pair for pairs in weeks for pair in pairs}


@pytest.mark.parametrize("pair", drawn(TODAY), ids=named)
def test_features_together(pair: tuple[str, ...], tmp_path: Path) -> None:
    check(pair, tmp_path)


@pytest.mark.jobs
@pytest.mark.parametrize("pair", drawn_for_two(TODAY), ids=named)
def test_two_features_over_two_processes(two: World, pair: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text(FILE)
    first, second = two.run(together, names=pair, folder=str(tmp_path))
    assert first == second
