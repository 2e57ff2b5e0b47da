"""What all tests share."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the processes that share the tests take them file by file, but one of them all that need the gloo world.

    So only one builds it: four ranks take 12 s of processor time to start.
    """
    for item in items:
        shared = "world" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("world" if shared else item.nodeid.partition("::")[0]))
