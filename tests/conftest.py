"""What all tests share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
import torch
import zygote

torch.set_num_threads(1)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts need no import of torch: they come from a zygote, and are processes as ever."""
    monkeypatch.setattr(subprocess, "Popen", zygote.Popen)


@pytest.fixture(autouse=True, scope="session")
def nothing_is_left() -> Iterator[None]:
    """At the end, no process of those that came from the zygote runs."""
    yield
    assert not zygote.close(), "a test left processes behind"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the processes that share the tests take them file by file, but one of them all that need the gloo world.

    So only one builds it: four ranks take 12 s of processor time to start.
    """
    for item in items:
        shared = "world" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("world" if shared else item.nodeid.partition("::")[0]))
