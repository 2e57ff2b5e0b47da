"""What is said of silent work."""

from __future__ import annotations

import sys
import time
from io import BytesIO, TextIOWrapper

import pytest

from vpipe.app import progress as slow
from vpipe.app.progress import accept_any_text, message_if_slow


def test_an_encoding_without_a_character_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, "latin-1"))
    accept_any_text()
    print("é中", flush=True)
    assert written.getvalue() == b"\xe9\\u4e2d\n"


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
