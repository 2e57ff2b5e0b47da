"""Hosts and clusters of one's own, or a reason why there are none."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import PROGRAMS, Cluster
from hosts import Hosts, missing

VPIPE = Path(sys.executable).with_name("vpipe")
"""The command, which all hosts have because they share the file system."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="session")
def _possible() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture
def hosts(_possible: None, tmp_path: Path) -> Iterator[Hosts]:
    """Three hosts, for a test of its own; each has a folder ``own`` to itself."""
    with Hosts(3, tmp_path / "hosts", private=[tmp_path / "own"]) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def cluster(_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes, shared by the tests of a file."""
    if lacking := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(lacking)}")
    folder = tmp_path_factory.mktemp("slurm")
    with Hosts(4, folder / "hosts") as hosts:
        yield Cluster(hosts, folder / "cluster")
