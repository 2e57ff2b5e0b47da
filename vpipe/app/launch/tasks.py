"""Find what the ranks that a command starts do: the tasks of :mod:`vpipe.app.launch.rank_main` but for ``train``.

An extra or a package adds one by an entry point of its name in the group ``vpipe.tasks``, which leads to a function as
:data:`Task`. The command that starts the ranks names it as ``task`` (:class:`~vpipe.app.launch.rank_env.HostRanks`)::

    [project.entry-points."vpipe.tasks"]
    census = "my_package.census:count_rank"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vpipe.app.config.config import load_resolved
from vpipe.app.launch.rank_env import keep_memory_for
from vpipe.app.train.job import Job
from vpipe.app.train.run_folder import CONFIG
from vpipe.plugins import PluginGroup

TASKS = PluginGroup("vpipe.tasks", "task")
"""The group of entry points."""

Task = Callable[[Path, int, Sequence[str]], None]
"""What a rank does: in the folder that the command has prepared, with its number and the command's arguments."""


def task_named(name: str) -> Task:
    """Return a task, of vpipe or of a package."""
    if name in _OWN:
        return _OWN[name]
    [found] = TASKS.added(name)  # which a command of its package has started
    task: Task = found
    return task


def job_in(folder: Path) -> Job:
    """Return the job of the config that a command has checked and written into a folder."""
    config = load_resolved(folder / CONFIG)
    keep_memory_for(config)
    return Job.from_config(config, checked=True)


def _verify(folder: Path, rank: int, arguments: Sequence[str]) -> None:
    from vpipe.app.verify import record_rank

    record_rank(job_in(folder), folder, int(arguments[0]))


def _profile(folder: Path, rank: int, arguments: Sequence[str]) -> None:
    from vpipe.app.train.planning import profile_rank

    profile_rank(job_in(folder), folder, arguments)


_OWN: dict[str, Task] = {"verify": _verify, "profile": _profile}
