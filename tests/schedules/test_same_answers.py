"""The checker, lowering, orders, simulator and peaks answer as before they read one table of kinds.

Digests of the old answers, of the code at f60ed1a, are in ``answers.json``; ``answers.py`` tells of what. All of them
are compared in ``tests/system/test_all_answers.py``.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from answers import digest, of_random, of_registered, verdict
from test_checker import BROKEN

OLD = json.loads(Path(__file__).with_name("answers.json").read_text())


def test_the_texts_of_schedules_broken_by_hand() -> None:
    cases = [case for cases in BROKEN.values() for case in cases]
    assert len(cases) >= len(OLD["broken by hand"])
    assert [digest(iter([verdict(case[0]())])) for case in cases[:len(OLD["broken by hand"])]] == OLD["broken by hand"]


def test_some_registered_schedules() -> None:
    """The first ones, and so every kind of question."""
    found = list(islice(of_registered(), 12))
    assert [each for pair in found for each in pair] == OLD["registered"][:24]


def test_some_random_schedules() -> None:
    assert of_random(0) == OLD["at random"][0]
