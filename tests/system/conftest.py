"""Hosts and clusters of one's own, or a reason why there are none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import PROGRAMS, Cluster
from hosts import Hosts, missing

pytest.register_assert_rewrite("cells")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="session")
def possible() -> None:
    """Skips the test where there can be no hosts."""
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture
def hosts(possible: None, tmp_path: Path) -> Iterator[Hosts]:
    """Three hosts, for a test of its own; each has a folder ``own`` to itself."""
    with Hosts(3, tmp_path / "hosts", private=[tmp_path / "own"]) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def cluster(possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes, shared by the tests of a file."""
    if lacking := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(lacking)}")
    folder = tmp_path_factory.mktemp("slurm")
    with Hosts(4, folder / "hosts") as hosts:
        yield Cluster(hosts, folder / "cluster")
