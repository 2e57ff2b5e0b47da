"""What users could ask 5332972d for is taken, or refused with what to do instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from surface import surface

from vpipe.errors import RETIRED, UserError

BEFORE = (Path(__file__).parent / "fixtures" / "surface_5332972d.txt").read_text().splitlines()


def has_remedy(name: str) -> bool:
    """Whether a name, or what it belongs to, is in the table."""
    longer = [name] + [name[:at.start()] for at in re.finditer(r"[ .(=]", name)]
    return any(part in RETIRED for part in longer)


@pytest.mark.extras("async_threaded", "bert_hdf5", "comparison", "generation", "legacy", "orion", "translation")
def test_whatever_5332972d_took_is_taken_or_in_the_table() -> None:
    assert [name for name in sorted({*BEFORE} - {*surface()}) if not has_remedy(name)] == []


@pytest.mark.extras("async_threaded", "bert_hdf5", "comparison", "generation", "legacy", "orion", "translation")
def test_the_table_is_short_and_names_only_what_is_gone() -> None:
    assert len(RETIRED) <= 40
    assert {*RETIRED} & {*surface()} == set()
    assert all(name in BEFORE for name in RETIRED if not name.startswith("vpipe.")), "it was never there"


def test_a_name_that_is_gone_says_what_to_do_instead() -> None:
    with pytest.raises(UserError, match=r"vpipe\.runtime has no 'Ring' any more"):
        from vpipe.runtime import Ring  # noqa: F401
