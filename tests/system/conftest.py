"""Give the tests of whole systems hosts and clusters, or the reason why there are none, and failures of runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster import PROGRAMS, Cluster
from hosts import Hosts, missing

if TYPE_CHECKING:
    from bench import Bench, Outcome

pytest.register_assert_rewrite("bench", "failures")


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


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """With the failures of all chosen tests at work."""
    from bench import MOMENTS, Bench, whole
    from failures import Failure

    bench = Bench(tmp_path_factory.mktemp("failures"))
    for schedule in MOMENTS:
        bench.begin(schedule, partial(whole, Failure(schedule)))
    for item in request.session.items:
        for mark in item.iter_markers("failure"):
            bench.begin(item.nodeid, partial(*mark.args))
    yield bench
    bench.close()


@pytest.fixture
def outcome(bench: Bench, request: pytest.FixtureRequest) -> Outcome:
    """Of the test's failure."""
    return bench.result(request.node.nodeid)
