"""Find the checkpoints of a run's folder, and put one into it all at once.

A checkpoint is written as ``step-N.tmp`` and renamed when the disk has all of it, so that ``step-N`` is complete
whenever a process or a host dies.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from vpipe.checkpoint.manifest import MANIFEST
from vpipe.distributed.value_exchange import Exchange
from vpipe.errors import UserError
from vpipe.files import replace_text, sync

LATEST = "latest"
"""A file with the name of the newest checkpoint, for scripts and people."""

VISIBLE_S = 5.0
"""For a file of rank 0 to be seen by the others: a network's file system may take a moment."""

_POLL_S = 0.02

_NAME = re.compile(r"step-(\d+)(\.old)?", re.ASCII)
_PARTIAL = re.compile(r"step-\d+\.tmp", re.ASCII)


class Checkpoints:
    """The checkpoints of one run, in the folder ``root``, which need not exist."""

    FOLDER = "checkpoints"
    """Name of the folder within that of a run."""

    PROBE = "seen-by-all-"
    """Prefix of the file that shows whether all hosts see the folder; it exists for a moment."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def check_shared(self, exchange: Exchange, host: str) -> None:
        """Refuse on all ranks a folder that rank 0 cannot write to, or in which a rank does not see what it wrote.

        All ranks call it, with rank 0's absolute path and, for the message, their host.

        Raises:
            UserError: of what is wrong on any rank.
        """
        root = self.root
        hint = ("checkpoints need a folder that all hosts see, such as one on a network's file system: set "
                "checkpoint.directory")
        probe = root / f"{self.PROBE}{secrets.token_hex(8)}"
        try:
            with exchange.whole():
                if exchange.rank == 0:
                    try:
                        root.mkdir(parents=True, exist_ok=True)
                        probe.write_text("for a moment\n")
                    except OSError as error:
                        raise UserError(f"rank 0 ({host}) cannot write checkpoints to '{root}': {error.strerror}",
                                        hint=hint) from None
            name, folder = exchange.from_rank([probe.name, f"the folder for checkpoints '{root}' of rank 0 ({host})"])
            blind = exchange.all_gather("" if _appears(root / name) else f"rank {exchange.rank} ({host})")
            if ranks := ", ".join(filter(None, blind)):
                raise UserError(f"{folder} is not the one seen by {ranks}", hint=hint)
        finally:
            if exchange.rank == 0:
                with suppress(OSError):
                    probe.unlink()

    @staticmethod
    def find(path: Path, resume_hint: Callable[[Path], str] | None = None) -> Path:
        """Return the newest checkpoint in a run's folder or a folder of checkpoints, or the one that ``path`` is.

        Args:
            resume_hint: returns how to resume from another one; a command line when None.

        Raises:
            UserError: there is none.
        """
        try:
            found = _find(path)
        except OSError as error:
            raise UserError(f"cannot search for a checkpoint in '{path}': {error.strerror}",
                            hint="let this user read the folder and its files") from None
        if found is not None:
            return found
        if path.is_dir() and _PARTIAL.fullmatch(os.path.basename(os.path.abspath(path))):
            rest = Checkpoints(Path(os.path.abspath(path)).parent).newest()
            raise UserError(f"'{path}' is no checkpoint: its writing, or its removal, was cut short",
                            hint="there is no other beside it: start the run again" if rest is None else
                            f"the newest beside it: {(resume_hint or resume_command)(rest)}")
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise UserError(f"cannot resume from '{path}': it {what}",
                            hint="give the folder of a run, or one of its checkpoints: RUN/checkpoints/step-N")
        raise UserError(f"there is no checkpoint in '{path}': neither {MANIFEST}, nor step-N or "
                        f"{Checkpoints.FOLDER}/step-N with one",
                        hint="give the folder of a run that saved a checkpoint; a step-N.tmp is one whose writing was "
                             "cut short")

    @staticmethod
    def is_one(path: Path) -> bool:
        """Return whether a folder is a checkpoint."""
        return (path / MANIFEST).is_file()

    @staticmethod
    def step_of(path: Path) -> int:
        """Return after how many steps a checkpoint of a run was saved, by its name."""
        name = _NAME.fullmatch(path.name)
        assert name is not None
        return int(name[1])

    def all(self) -> list[Path]:
        """Return all with a final name, the oldest first; also those that lost files since, which reading finds."""
        found: dict[int, Path] = {}
        for path in sorted(_entries(self.root)):
            name = _NAME.fullmatch(path.name)
            if name and ((path / MANIFEST).is_file() if name[2] else path.is_dir()):
                # The old one counts where its successor was not renamed any more.
                found.setdefault(int(name[1]), path)
        return [found[step] for step in sorted(found)]

    def newest(self) -> Path | None:
        """Return the one after the most steps, or None."""
        return next(reversed(self.all()), None)

    def partial(self, step: int) -> Path:
        """Return the folder in which the checkpoint of a step is written, before it has its name."""
        return self.root / f"step-{step}.tmp"

    def commit(self, step: int) -> Path:
        """Rename a complete checkpoint to its final name, in place of one of the same step that a resumed run repeats.

        Raises OSError when that failed; what there was before is still there.
        """
        final = self.root / f"step-{step}"
        recover(final)
        replace_folder(self.partial(step), final)
        return final

    def abort(self, step: int) -> None:
        """Remove what was written of a checkpoint."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def update_latest(self) -> None:
        """Let ``latest`` name the newest with a manifest; without one the file is removed. Raises OSError."""
        if readable := self._with_manifest():
            replace_text(self.root / LATEST, readable[-1].name + "\n")
        else:
            (self.root / LATEST).unlink(missing_ok=True)

    def prune(self, keep: int | None, spare: Callable[[Sequence[Path]], Path | None] = lambda found: None) -> None:
        """Remove all but the newest ``keep`` with a manifest, None keeps all, and the one that ``spare`` chooses. A
        removal cut short leaves a ``.tmp``."""
        found = self._with_manifest()
        for path in found[:-keep] if keep else ():
            if path != spare(found):
                _remove(path, self.partial(Checkpoints.step_of(path)))

    def clear_leftovers(self) -> None:
        """Remove what interrupted saves have left, but no ``step-N.old`` without a successor. Raises OSError."""
        complete = self.all()
        for path in _entries(self.root):
            if path.name.startswith((f"{LATEST}.", self.PROBE)):
                path.unlink()
            elif path.name.startswith("step-") and path.suffix in (".tmp", ".old") and path not in complete:
                shutil.rmtree(path)
        self.update_latest()

    def _with_manifest(self) -> list[Path]:
        return [path for path in self.all() if (path / MANIFEST).is_file()]


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + VISIBLE_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def replace_folder(partial: Path, final: Path) -> None:
    """Rename a complete folder to ``final``, and remove an older one of that name.

    In between the older one is called ``<name>.old``, which is free, and counts. Raises OSError when that failed; what
    there was before is still there.
    """
    sync(partial)
    old = final.with_name(f"{final.name}.old")
    replaced = final.exists()
    if replaced:
        final.rename(old)
    try:
        partial.rename(final)
        sync(final.parent)
    except OSError:
        if replaced:
            recover(final)
        raise
    if replaced:
        with suppress(OSError):
            _remove(old, partial)


def recover(final: Path) -> None:
    """Undo or complete an interrupted :func:`replace_folder`: afterwards there is no ``<name>.old``."""
    old = final.with_name(f"{final.name}.old")
    if old.exists() and final.exists():
        shutil.rmtree(old)
    elif old.exists():
        old.rename(final)


def resume_command(folder: Path) -> str:
    """Return the command line that resumes from a checkpoint."""
    return f"vpipe train --resume {shlex.quote(str(folder))}"


def _find(path: Path) -> Path | None:
    name = os.path.basename(os.path.abspath(path))
    if _PARTIAL.fullmatch(name):
        return None
    for folder in (path, Path(f"{path}.old")):
        if (folder / MANIFEST).is_file():
            return folder
    if path.is_dir() and (_NAME.fullmatch(name) or any(path.glob("rank*.safetensors"))):
        return path  # it lost its manifest, which reading finds
    return Checkpoints(path / Checkpoints.FOLDER).newest() or Checkpoints(path).newest()


def previous(folder: Path) -> Path | None:
    """Return the next older checkpoint beside this one, or None."""
    name = _NAME.fullmatch(folder.name)
    if name is None:
        return None
    older = [path for path in Checkpoints(folder.parent).all() if Checkpoints.step_of(path) < int(name[1])]
    return older[-1] if older else None


def _entries(root: Path) -> list[Path]:
    try:
        return list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove(path: Path, partial: Path) -> None:
    """Remove a checkpoint, which is none any more from the first moment on."""
    if partial.exists():
        shutil.rmtree(partial)
    path.rename(partial)
    shutil.rmtree(partial)
