"""A folder of prepared data in the cache directory: made once, whole or not there, found again by what it is made from.

    <cache directory>/<kind>-<key>/manifest.json ...        <kind>-<key>.lock

The key is a hash of facts: parameters, the Python version, the state of what is read. So other data are another folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vpipe.data.manifest import damage, read_manifest, write_manifest
from vpipe.data.tokenizer_file import LARGEST_VOCAB_SIZE
from vpipe.errors import UserError
from vpipe.files import count_of


@dataclass(frozen=True)
class Prepared:
    """A whole, checked folder, with the tokenizer that made what is in it."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        found = self.number("vocab_size")
        if not 0 < found <= LARGEST_VOCAB_SIZE:
            raise self.damaged(f"vocab_size: {found}")
        return found

    def number(self, *keys: str) -> int:
        """Return what the manifest counts under ``keys``. Raises :class:`UserError` where it does not."""
        found: Any = self.manifest
        try:
            for key in keys:
                found = found[key]
            return count_of(found)
        except (KeyError, TypeError, ValueError) as error:
            raise self.damaged(f"{'.'.join(keys)}: {type(error).__name__}: {error}") from None

    def damaged(self, why: str) -> UserError:
        """Return the error of a folder that is not what was prepared."""
        return UserError(f"the prepared data is damaged: {why}", hint="remove its folder, and it is made anew",
                         where=str(self.folder))

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"


def prepared(kind: str, facts: Mapping[str, Any], build: Callable[[Path], Mapping[str, Any]],
             cache_directory: Path | None) -> Prepared:
    """The folder of ``kind`` that ``facts`` decide, found in the cache or built now.

    Any number of processes may ask at once: one builds, the others wait. A folder that does not match its manifest
    is built again, and a line on stderr says so.

    Args:
        build: writes the files of an empty folder, and returns what the manifest says besides them.
        cache_directory: None = ``.cache/vpipe`` in the user's home.

    Raises:
        UserError: the cache directory cannot be written; and what ``build`` raises.
    """
    folder = _place(kind, facts, cache_directory)
    directory = folder.parent
    found, _ = _open(folder)
    if found is not None:
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / f"{folder.name}.lock"):
            found, trouble = _open(folder)  # another process may have built it while this one waited
            if found is None:
                if trouble:
                    print(f"vpipe: prepared data is built again: {trouble} ({folder})", file=sys.stderr)
                _build(build, folder)
                found, trouble = _open(folder)
                assert found is not None, f"the cache that was just built is damaged: {trouble}"
    except OSError as error:
        raise UserError(f"preparing data in {directory} failed: {error}",
                        hint="mend that, or name a folder that can be written as dataset.cache_directory") from error
    return found


def prepared_for_vocabulary(kind: str, facts: Mapping[str, Any], build: Callable[[Path], Mapping[str, Any]],
                            cache_directory: Path | None) -> Prepared:
    """As :func:`prepared`, for facts with a ``vocab_size``, which the manifest has as well.

    A launcher asks with -1 and its ranks with the number that came of it: what was prepared for -1 is theirs, since a
    tokenizer that stops at that number, or is given, is the same one.
    """
    if facts["vocab_size"] != -1:
        found, _ = _open(_place(kind, {**facts, "vocab_size": -1}, cache_directory))
        if found is not None and found.manifest["vocab_size"] == facts["vocab_size"]:
            return found
    return prepared(kind, facts, build, cache_directory)


def files_among(paths: Iterable[Path]) -> list[Path]:
    """Those that are files, sorted. Raises :class:`UserError` for a link that leads nowhere: its data is missing."""
    known = sorted(paths)
    for path in known:
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a link to {path.readlink()}, which is not there",
                            hint="mount or copy what it leads to, or remove the link")
    return [path for path in known if path.is_file()]


def states(paths: list[Path], root: Path) -> list[tuple[str, int, int]]:
    """Files as facts: name below ``root``, size and time of change, not the content."""
    return [(str(path.relative_to(root)), *state(path)) for path in paths]


def state(path: Path) -> tuple[int, int]:
    """The size of a file in bytes, and when it changed, in nanoseconds."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _open(folder: Path) -> tuple[Prepared | None, str | None]:
    """What is in ``folder`` if it is whole; otherwise what is wrong with it, None meaning that it is not there."""
    if not folder.exists():
        return None, None
    manifest = read_manifest(folder)
    trouble = "manifest.json cannot be read" if manifest is None else damage(folder, manifest)
    return (None, trouble) if manifest is None or trouble else (Prepared(folder, manifest), None)


def _build(build: Callable[[Path], Mapping[str, Any]], folder: Path) -> None:
    """Build beside ``folder`` and put the result in its place in one step. The caller holds the lock."""
    growing, old = folder.with_suffix(".new"), folder.with_suffix(".old")
    for leftover in (growing, old):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    growing.mkdir()
    try:
        write_manifest(growing, **build(growing))
    except BaseException:  # nothing of it will do, and it may be what filled the disk
        shutil.rmtree(growing, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)  # processes that have opened it keep what they have mapped
    growing.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _place(kind: str, facts: Mapping[str, Any], cache_directory: Path | None) -> Path:
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return (Path.home() / ".cache" / "vpipe" if cache_directory is None else cache_directory) / f"{kind}-{key}"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the system gives it back if this one dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
