"""Compare the files of a checkpoint with what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from vpipe.checkpoint.directory import previous, resume_command
from vpipe.checkpoint.manifest import FileEntry, Manifest
from vpipe.errors import UserError, counted

CHUNK_BYTES = 4 << 20
"""Hashed at a time, while other threads of the process can work."""

Progress = Callable[[int, int], None]
"""Called with how many bytes of how many were read."""


def sha256_of(path: Path, advance: Callable[[int], None] = lambda count: None) -> str:
    """Return the SHA-256 of a file's content; ``advance`` is called after each piece with its bytes. Raises OSError."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            advance(count)
    return digest.hexdigest()


def find_damage(folder: Path, progress: Progress | None = None, *, manifest: Manifest | None = None,
                only: Iterable[str] | None = None) -> list[str]:
    """Return what is wrong with the files of a checkpoint; every byte is read. Raises as :meth:`Manifest.load` does.

    ``manifest``: of the checkpoint, where it was read already. ``only``: the names of the files to check; None for all.
    """
    files = (manifest or Manifest.load(folder)).files
    chosen = {name: files[name] for name in (files if only is None else sorted(set(only)))}
    total, done = sum(file.bytes for file in chosen.values()), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return [f"{name} {what}" for name, entry in chosen.items() if (what := _damage(folder / name, entry, advance))]


def _damage(path: Path, entry: FileEntry, advance: Callable[[int], None]) -> str | None:
    try:
        if not path.is_file():
            return "is missing"
        size = path.stat().st_size
        if size != entry.bytes:
            return f"has {size:,} bytes instead of {entry.bytes:,}"
        found = sha256_of(path, advance)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if found == entry.sha256 else f"was changed: its SHA-256 is {found[:12]}..., not {entry.sha256[:12]}..."


def check_intact(folder: Path, progress: Progress | None = None, *, manifest: Manifest | None = None,
                 only: Iterable[str] | None = None, resume_hint: Callable[[Path], str] = resume_command) -> None:
    """Raise UserError for a damaged checkpoint, with a hint at the newest older one that is intact.

    The other arguments: see :func:`find_damage` and :func:`~vpipe.checkpoint.directory.find_checkpoint`.
    """
    if found := find_damage(folder, progress, manifest=manifest, only=only):
        raise UserError(f"the checkpoint '{folder}' is damaged: {'; '.join(found[:4])}"
                        + (f"; and {counted(len(found) - 4, 'more file')}" if len(found) > 4 else ""),
                        hint=older_intact_hint(folder, progress, resume_hint))


def older_intact_hint(folder: Path, progress: Progress | None = None,
                      resume_hint: Callable[[Path], str] = resume_command) -> str:
    """Return the hint to resume from the newest older checkpoint that is intact, if there is one."""
    older = newest_intact_before(folder, progress)
    if older is None:
        return "no older checkpoint beside it is intact: start the run again, or bring the folder back from a copy"
    return f"resume from step {Manifest.load(older).step} with: {resume_hint(older)}"


def newest_intact_before(folder: Path, progress: Progress | None = None) -> Path | None:
    """Return the newest older checkpoint of the same folder of which nothing is damaged, or None."""
    while (older := previous(folder)) is not None:
        with suppress(UserError):
            if not find_damage(older, progress):
                return older
        folder = older
    return None
