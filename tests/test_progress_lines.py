"""What is said of silent work."""

from __future__ import annotations

import time

import pytest

from vpipe import progress as slow
from vpipe.progress import message_if_slow


def test_it_is_said_once_it_takes_long(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "SLOW_S", 0.0)
    said, deadline = "", time.monotonic() + 20
    with message_if_slow("reading"):
        while not said and time.monotonic() < deadline:
            said = capsys.readouterr().err
    assert said == "reading\n"


def test_not_otherwise(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "SLOW_S", 0.05)
    with message_if_slow("reading", show=False):
        time.sleep(0.1)
    with pytest.raises(ZeroDivisionError), message_if_slow("reading"):
        raise ZeroDivisionError
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
