"""A process that is killed at any moment of a save leaves the checkpoint before or the new one, and nothing in the way.

A child process, forked and so ready in milliseconds, is ended as by kill -9 right before its n-th change in the folder,
for every n until it gets through.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from saved_state import about, names, read_all, same, tensors

from vpipe.checkpoint import Checkpoint, shards
from vpipe.checkpoint.directory import LATEST, Checkpoints
from vpipe.checkpoint.save import Saver
from vpipe.distributed.value_exchange import Exchange

pytestmark = pytest.mark.jobs

KILLED = 9
WRITES = os.O_WRONLY | os.O_RDWR
CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}
"""What Python tells of a process that alters files; to open one may be to read it, too."""


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process wrote is seen by others without; that a save does wait is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def killed(work: Callable[[], None], at: int) -> bool:
    """Whether ``work`` was ended before its change number ``at``, or got to its end."""
    child = os.fork()
    if not child:
        seen = count(1)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in CHANGES and (event != "open" or arguments[2] & WRITES) and next(seen) == at:
                os._exit(KILLED)

        sys.addaudithook(hook)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED


def save(root: Path, step: int, fill: float, keep: int = 2) -> None:
    saver = Saver(root, keep, Exchange())
    saver.save(about(step), tensors(fill))
    saver.wait()
    assert saver.results[-1].error is None


def state_of(folder: Path) -> float:
    """Which of the states a whole checkpoint has."""
    assert Checkpoint.open(folder).damage() == []
    found = read_all(folder)
    fill = found["model.a.repeated"][0].item()
    assert same(found, tensors(fill))
    return fill


@pytest.mark.parametrize("step", [30, 20], ids=["a new step", "the same step again"])
def test_after_a_kill_there_is_one_whole_checkpoint_and_the_next_is_made(tmp_path: Path, step: int) -> None:
    found = []
    for fill in (1.0, 2.0):
        save(tmp_path / "before", int(10 * fill), fill)
    for at in count(1):
        root = tmp_path / str(at)
        shutil.copytree(tmp_path / "before", root)
        was_killed = killed(lambda: save(root, step, 3.0), at)  # noqa: B023
        newest = Checkpoints.find(root)
        found.append(state_of(newest))
        folder = Checkpoints(root)
        folder.clear_leftovers()
        assert folder.newest() == newest
        assert [path for path in root.iterdir() if path.suffix] == [newest] * (newest.suffix == ".old")
        assert (root / LATEST).read_text() == f"{folder.all()[-1].name}\n"
        save(root, 40, 4.0)
        assert state_of(Checkpoints.find(root)) == 4.0
        assert len(folder.all()) == 2
        if not was_killed:
            break
    assert found == sorted(found)  # first the one before, and from some moment on the new one
    assert found[0] == 2.0
    assert found[-1] == 3.0
    assert len(found) > 8
    assert shards.FILE_BYTES  # imported before the forks, which so need not


def test_a_file_that_may_not_grow_so_large_gives_the_save_up(tmp_path: Path) -> None:
    """The kernel's own refusal in the middle of a file, as of a disk that is full."""
    import resource

    save(tmp_path, 10, 1.0)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
        saver = Saver(tmp_path, 2, Exchange())
        saver.save(about(20), tensors(2.0))
        saver.wait()
        assert saver.results[-1].error == "File too large (rank 0)"

    assert not killed(limited, 0)
    assert names(tmp_path) == {"step-10", LATEST}
    assert state_of(Checkpoints.find(tmp_path)) == 1.0
