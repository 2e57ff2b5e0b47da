"""Whole texts of refusals, in a file beside the tests that make them: ``VPIPE_GOLDEN=write pytest FILE`` writes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from vpipe.errors import UserError

MARK = "### "


def refusal(call: Callable[..., object], *given: Any, kind: type[Exception] = UserError, **words: Any) -> str:
    """Return what a call with these arguments is refused with."""
    with pytest.raises(kind) as caught:
        call(*given, **words)
    return str(caught.value)


def assert_golden(tests: str, table: str, texts: Mapping[str, str] | Iterable[str]) -> None:
    """Assert that the texts of a table are those in the file beside ``tests``, the file of a test module.

    Args:
        texts: by case, or in the order of the cases.
    """
    path, title = Path(tests).with_suffix(".txt"), f"{table}: "
    texts = texts if isinstance(texts, Mapping) else {str(number): text for number, text in enumerate(texts)}
    found = {f"{title}{case}": f"{text.rstrip()}\n\n" for case, text in texts.items()}
    known = dict(part.split("\n", 1) for part in path.read_text("utf-8").split(MARK)[1:]) if path.exists() else {}
    if os.environ.get("VPIPE_GOLDEN") == "write":
        known = {name: text for name, text in known.items() if not name.startswith(title)} | found
        path.write_text("".join(f"{MARK}{name}\n{text}" for name, text in known.items()), "utf-8")
    assert found == {name: text for name, text in known.items() if name.startswith(title)}
