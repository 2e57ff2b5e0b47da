"""Ctrl-C a thousand times, at random instructions: 40 of them are in ``tests/runtime/test_interrupts.py``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from interrupted import Interrupted
from models import norm_model, rich_model

SEEDS = 500


@pytest.fixture(autouse=True)
def _handler_of_python() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
@pytest.mark.parametrize(("model", "arguments"), [
    (lambda: rich_model(tied=False), {"schedule": "1f1b", "stages": 3}),
    (norm_model, {"schedule": "gpipe", "recompute": 0.5})])
def test_any_instruction(model: Any, arguments: dict[str, Any], tmp_path: Path) -> None:
    pipe = Interrupted(model, 3 * SEEDS, tmp_path / "saved", **arguments)
    for seed in range(SEEDS):
        pipe.press(seed)
    assert pipe.interrupted > 0.9 * SEEDS
    pipe.compare()
