"""What all tests share: those of tests/, and those that each extra has beside it."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fork_server
import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from world import World

pytest.register_assert_rewrite("golden")
torch.set_num_threads(1)
hypothesis.settings.register_profile("tests", deadline=None, max_examples=20,  # others in every run
                                     suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")

HIDDEN = "VPIPE_TESTS_HIDDEN_GPUS"
if HIDDEN in os.environ:  # by the process that has started this one to share the tests
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[HIDDEN]
GPUS = torch.cuda.device_count()
if GPUS:
    torch.cuda.init()  # type: ignore[no-untyped-call] # so that it keeps those that this hides from the tests' processes
    torch.cuda.device_count()  # which torch keeps from then on
    os.environ[HIDDEN] = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=GPUS > 0)
def on_processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests expect the numbers of a processor, to the last bit; those marked ``gpu`` are about GPUs."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out tests of the whole, its documentation and its configs, that say something of an extra that is gone."""
    extras = Path(__file__).parent / "vpipe" / "extras"
    said = [extra for mark in item.iter_markers("extras") for extra in mark.args]
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    said += ["compression" for each in given if isinstance(each, dict) and "compress" in each]
    if absent := [extra for extra in said if not (extras / extra / "__init__.py").is_file()]:
        pytest.skip(f"deleted: {', '.join(absent)}")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the test's processes forked by a process that has imported torch; else they are processes as ever."""
    monkeypatch.setattr(subprocess, "Popen", fork_server.Popen)


def ranks_for_the_session(count: int, folder: Path) -> Iterator[World]:
    """Ranks over gloo that end in good order when the session ends."""
    from world import World

    ranks = World(count, folder)
    yield ranks
    statuses = ranks.close()
    assert not any(statuses), f"ranks ended with {statuses}"


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from ranks_for_the_session(4, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from ranks_for_the_session(2, tmp_path_factory.mktemp("two"))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[World]:
    """Two ranks over gloo, for one test that makes them fail."""
    from world import World

    two = World(2, tmp_path)
    yield two
    two.kill()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give the processes that share the tests one fork server: it imports torch while they collect the tests."""
    node.workerinput["fork_server"] = fork_server.own().address


def pytest_configure(config: pytest.Config) -> None:
    """Take the fork server that is shared, if there is one."""
    if shared := getattr(config, "workerinput", {}).get("fork_server"):
        os.environ[fork_server.ADDRESS] = shared


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """See that no process of those that came from the fork server is left."""
    if left := fork_server.close(patience_s=10):
        print(f"error: tests left processes behind: {left}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name what is long by its start: names go between processes several times, and some texts have megabytes."""
    if isinstance(val, str | bytes) and len(val) > 200:
        return ascii(val[:60])
    return None


def pytest_collection_finish() -> None:
    """What is there before the first test stays: a collection of garbage that looks at all of torch takes a third of a
    second, and some tests ask for one."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the processes that share the tests take them file by file, but one of them all that need the same gloo world,
    the bench of failures or the late device, so that only one builds it."""
    for item in items:
        shared = {"world", "two", "bench", "ended"}.intersection(getattr(item, "fixturenames", ()))
        item.add_marker(pytest.mark.xdist_group("".join(sorted(shared)) or item.nodeid.partition("::")[0]))
