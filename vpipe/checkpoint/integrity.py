"""Whether the files of a checkpoint still are what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from vpipe.checkpoint.folder import before, resume_command
from vpipe.checkpoint.manifest import FileFacts, Manifest
from vpipe.errors import UserError, counted

CHUNK_BYTES = 4 << 20
"""Hashed at a time, while other threads of the process can work."""

Progress = Callable[[int, int], None]
"""Told how many bytes of how many were looked at."""


@dataclass(frozen=True)
class Damage:
    """A file, and what is wrong with it, with both numbers."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


def sha256_of(path: Path, heard: Callable[[int], None] = lambda count: None) -> str:
    """Of a file's content.

    Args:
        heard: told after each piece how many bytes it had.

    Raises:
        OSError: it cannot be read.
    """
    digest, piece = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            heard(count)
    return digest.hexdigest()


def damages(folder: Path, progress: Progress | None = None, *, manifest: Manifest | None = None,
            only: Iterable[str] | None = None) -> list[Damage]:
    """What is wrong with the files of a checkpoint; every byte is read.

    Args:
        progress: told how far it is.
        manifest: of the checkpoint, where it was read already.
        only: the names of the files to look at; all when left out.

    Raises:
        UserError: see :meth:`Manifest.load`.
    """
    facts = (manifest or Manifest.load(folder)).files
    chosen = {name: facts[name] for name in (facts if only is None else sorted(set(only)))}
    total, done, found = sum(file.bytes for file in chosen.values()), 0, []

    def heard(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    for name, fact in chosen.items():
        what = _damage(folder / name, fact, heard)
        if what:
            found.append(Damage(name, what))
    return found


def _damage(path: Path, fact: FileFacts, heard: Callable[[int], None]) -> str | None:
    try:
        if not path.is_file():
            return "is missing"
        size = path.stat().st_size
        if size != fact.bytes:
            return f"has {size:,} bytes instead of {fact.bytes:,}"
        found = sha256_of(path, heard)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if found == fact.sha256 else f"was changed: its SHA-256 is {found[:12]}..., not {fact.sha256[:12]}..."


def check_intact(folder: Path, progress: Progress | None = None, *, manifest: Manifest | None = None,
                 only: Iterable[str] | None = None, to_go_on: Callable[[Path], str] = resume_command) -> None:
    """Refuse a damaged checkpoint, and offer the newest older one that is intact.

    Args:
        progress, manifest, only: see :func:`damages`.
        to_go_on: see :func:`~vpipe.checkpoint.folder.find`.

    Raises:
        UserError: a file is missing or not what was written; or see :meth:`Manifest.load`.
    """
    found = damages(folder, progress, manifest=manifest, only=only)
    if found:
        raise UserError(f"the checkpoint '{folder}' is damaged: {'; '.join(map(str, found[:4]))}"
                        + (f"; and {counted(len(found) - 4, 'more file')}" if len(found) > 4 else ""),
                        hint=instead_of(folder, progress, to_go_on))


def instead_of(folder: Path, progress: Progress | None = None,
               to_go_on: Callable[[Path], str] = resume_command) -> str:
    """A hint: the newest older checkpoint that is intact, if there is one."""
    older = newest_intact_before(folder, progress)
    if older is None:
        return "no older checkpoint beside it is intact: start the run anew, or bring the folder back from a copy"
    step = Manifest.load(older).step
    return f"resume from step {step} with: {to_go_on(older)}"


def newest_intact_before(folder: Path, progress: Progress | None = None) -> Path | None:
    """The newest older checkpoint of the same folder of which nothing is damaged, or None."""
    older = before(folder)
    while older is not None:
        try:
            if not damages(older, progress):
                return older
        except UserError:
            pass
        older = before(older)
    return None
