"""The folder of a run."""

from __future__ import annotations

from datetime import datetime
from itertools import count
from pathlib import Path

from vpipe.errors import UserError

CONFIG = "config.yaml"

PLAN = "plan.json"
"""The plan that a run follows."""

PROFILE = "profile.json"
"""The profile that it was made from."""

FINGERPRINT = "fingerprint"
"""Where a rank that looked at its host's data says which they are."""


def make_run_folder(log_directory: Path, resolved_config: str) -> Path:
    """``<log_directory>/<timestamp>/`` with the resolved config in it.

    Raises:
        UserError: the folder cannot be made or written.
    """
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    try:
        for attempt in count():
            folder = log_directory / (stamp if attempt == 0 else f"{stamp}.{attempt}")
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                if log_directory.is_dir():
                    continue  # two runs in one second
                raise
            (folder / CONFIG).write_text(resolved_config)
            return folder
    except OSError as error:
        raise UserError(f"cannot make the run's folder in '{log_directory}': {error.strerror}",
                        hint="set log_directory to a folder that can be written") from None
    raise AssertionError("count() does not end")


def log_path(folder: Path, rank: int) -> Path:
    """The log of a rank."""
    return folder / f"rank{rank}.log"


def failure_path(folder: Path, rank: int) -> Path:
    """Where a rank that fails says why, for its launcher."""
    return folder / f"rank{rank}.failure.json"
