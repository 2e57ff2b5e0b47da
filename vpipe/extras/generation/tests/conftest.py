"""The command ``vpipe sample``, as its tests call it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vpipe.app.cli import main

Sample = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sample(capsys: pytest.CaptureFixture[str]) -> Sample:
    """Runs the command: its status, what it prints, what it says beside that."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        return main(["sample", *map(str, words)]), *capsys.readouterr()

    return run
