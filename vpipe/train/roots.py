"""The folders that a run's checkpoints are in: where its config says, and where it did for earlier attempts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vpipe.checkpoint.directory import Checkpoints, step_of
from vpipe.checkpoint.manifest import Manifest
from vpipe.config.config import Config, load_config
from vpipe.errors import UserError
from vpipe.train.run_folder import CONFIG, EARLIER, checkpoints_root

RUN = "run"
"""Entry of a checkpoint's arrangement: the folder of the run that made it."""


def config_of(folder: Path) -> Config:
    """Return what an attempt of a run was told, with what was planned for it.

    Raises:
        UserError: its ``config.yaml`` cannot be read.
    """
    return load_config(folder / CONFIG, resolved=True)


def absolute(path: Path) -> Path:
    """The same path from anywhere, links as they are."""
    return Path(os.path.abspath(path))


def roots_of(run: Path) -> Iterator[Path]:
    """Where the checkpoints of a run may be, absolute: the latest attempt's folder first.

    Raises:
        UserError: its ``config.yaml`` cannot be read.
    """
    root = absolute(checkpoints_root(config_of(run), run))
    yield root
    texts, found = {(run / CONFIG).read_text(errors="replace")}, {root}
    earlier = [path for path in (run / EARLIER).glob("*") if path.name.isdecimal()]
    for path in sorted(earlier, key=lambda path: int(path.name), reverse=True):
        with suppress(OSError, UserError):  # that of another version
            text = (path / CONFIG).read_text(errors="replace")
            if text in texts:
                continue
            texts.add(text)
            root = absolute(checkpoints_root(config_of(path), run))
            if root not in found:
                found.add(root)
                yield root


def new_root(config: Config, run: Path) -> Path:
    """Where the checkpoints of a run go from now on.

    Raises:
        UserError: those of another run are there, which would be removed and overwritten.
    """
    root = absolute(checkpoints_root(config, run))
    said = None if root.is_relative_to(run) else _made_by(root)
    if said is not None and (said / CONFIG).is_file() and not said.samefile(run):
        raise UserError(f"the checkpoints in '{root}' are those of another run, '{said}'",
                        hint="go on with that one, or set checkpoint.directory to another folder")
    return root


def _made_by(root: Path) -> Path | None:
    """The run that made the checkpoints in a folder, as the newest one says that can be read."""
    for path in reversed(Checkpoints(root).all()):
        with suppress(UserError):
            said = Manifest.load(path).arrangement.get(RUN)
            return Path(said) if isinstance(said, str) else None
    return None


def put_away_later(root: Path, steps: int, attempt: str) -> list[str]:
    """Move checkpoints of later steps to ``earlier/<attempt>``, the newest first; remove what was cut short.

    However soon it is killed, the newest that is left is one that may be gone on from.

    Returns:
        The names of those that were moved, the oldest first.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = Checkpoints(root)
    if not root.is_dir():
        return []
    moved: list[str] = []
    try:
        folder.clear_leftovers()
        for path in reversed(folder.all()):
            if step_of(path) > steps:
                aside = root / EARLIER / attempt
                aside.mkdir(parents=True, exist_ok=True)
                path.rename(aside / path.name)
                moved.insert(0, path.name)
        folder.update_latest()
    except OSError as error:
        raise UserError(f"cannot tidy the folder of checkpoints '{root}': {error.strerror}",
                        hint="make it writable") from None
    return moved
