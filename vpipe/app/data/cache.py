"""Keep prepared data in the cache directory: a folder is built once, appears whole, and is found by its facts.

    <cache directory>/<kind>-<key>/manifest.json ...        <kind>-<key>.lock, while it is built

The key is a hash of facts: parameters, the Python version, the state of what is read. Other facts give another folder.
The manifest names every file with its size and SHA-256, so that damage is noticed.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from vpipe import files
from vpipe.app.data.tokenizers import LARGEST_VOCAB_SIZE
from vpipe.errors import UserError

MANIFEST = "manifest.json"
_MOST_BYTES = 16 << 20
_SMALL_BYTES = 1 << 20  # files up to here are hashed whenever a folder is opened: a few milliseconds


def write_manifest(folder: Path, **facts: Any) -> None:
    """Write the manifest of a finished folder: ``facts``, the Python version, every file's size and SHA-256."""
    content = {path.name: {"bytes": path.stat().st_size, "sha256": files.sha256_of(path)}
               for path in sorted(folder.iterdir())}
    manifest = {**facts, "python": platform.python_version(), "files": content}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "sha256": _digest(manifest)}, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of ``folder``, or None when there is none that can be read."""
    try:
        manifest = files.read_json(folder / MANIFEST, _MOST_BYTES, "a manifest", "the next run prepares the data again")
    except UserError:
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def damage(folder: Path, manifest: dict[str, Any]) -> str | None:
    """Return the first mismatch between a folder and its manifest, or None; of large files only the size counts."""
    if manifest.get("sha256") != _digest({key: value for key, value in manifest.items() if key != "sha256"}):
        return f"{MANIFEST} was changed, or is another version's (its SHA-256 differs)"
    try:
        listed = {name: (files.count_of(fact["bytes"]), str(fact["sha256"]))
                  for name, fact in manifest["files"].items()}
    except (KeyError, TypeError, ValueError) as error:
        return f"{MANIFEST} does not describe its files ({type(error).__name__}: {error})"
    for name, (size, digest) in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if size <= _SMALL_BYTES and files.sha256_of(path) != digest:
            return f"{name} was changed (its SHA-256 differs)"
    return None


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class CachedFolder(NamedTuple):
    """A complete, checked folder of the cache, with the tokenizer of the data in it."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def vocab_size(self) -> int:
        found = self.manifest_count("vocab_size")
        if not 0 < found <= LARGEST_VOCAB_SIZE:
            raise self.damaged(f"vocab_size: {found}")
        return found

    def manifest_count(self, *keys: str) -> int:
        """Return a count of the manifest, found under ``keys``. Raises :class:`UserError` where there is none."""
        found: Any = self.manifest
        try:
            for key in keys:
                found = found[key]
            return files.count_of(found)
        except (KeyError, TypeError, ValueError) as error:
            raise self.damaged(f"{'.'.join(keys)}: {type(error).__name__}: {error}") from None

    def damaged(self, why: str) -> UserError:
        """Return the error of a folder that was changed after it was prepared."""
        return UserError(f"the prepared data is damaged: {why}", where=str(self.folder),
                         hint="remove its folder: the next run prepares it again")


def cached_folder(kind: str, facts: Mapping[str, Any], build: Callable[[Path], Mapping[str, Any]],
                  cache_directory: Path | None) -> CachedFolder:
    """Return the folder of ``kind`` for these ``facts``, found in the cache or built now.

    Any number of processes may call it at once: one builds, the others wait. A folder that does not match its manifest
    is built again, and a line on stderr says so. Raises UserError when the cache directory cannot be written; and what
    ``build`` raises.

    Args:
        facts: all that decides the content. A launcher has a ``vocab_size`` of -1 in it and its ranks the resulting
            number: they get the folder that was prepared for -1 if its manifest has that number, since a tokenizer that
            stops there, or is given, is the same one.
        build: writes the files into an empty folder, and returns further entries of the manifest.
        cache_directory: None = ``.cache/vpipe`` in the user's home.
    """
    directory = cache_directory or default_directory()
    if facts.get("vocab_size", -1) != -1:
        found, _ = _open(directory / _name(kind, {**facts, "vocab_size": -1}))
        if found is not None and found.manifest["vocab_size"] == facts["vocab_size"]:
            return found
    folder = directory / _name(kind, facts)
    found, _ = _open(folder)
    if found is not None:
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(lock := directory / f"{folder.name}.lock"):  # the system gives it back if this process dies
            found, trouble = _open(folder)  # another process may have built it while this one waited
            if found is None:
                if trouble:
                    print(f"vpipe: prepared data is built again: {trouble} ({folder})", file=sys.stderr)
                _build(build, folder)
                found, trouble = _open(folder)
                assert found is not None, f"the cache that was just built is damaged: {trouble}"
            lock.unlink(missing_ok=True)  # who waits for it, or makes it anew, finds the folder
    except OSError as error:
        raise UserError(f"preparing data in {directory} failed: {error}",
                        hint="repair that, or name a folder that can be written as dataset.cache_directory") from error
    return found


def default_directory() -> Path:
    """Return the cache directory where nobody named another."""
    return Path.home() / ".cache" / "vpipe"


def entries(directory: Path) -> dict[str, list[Path]]:
    """Return what is in a cache directory, by entry: a folder, its lock and what is left of a build; or all profiles.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted([*directory.glob("*-*"), *directory.glob("profiles/*")]):
        entry = re.match(r"\w+-[0-9a-f]{16}(?=$|\.(lock|new|old)$)|profiles(?=/[0-9a-f]{12}\.json$)",
                         path.relative_to(directory).as_posix())
        if entry is not None:
            found.setdefault(entry[0], []).append(path)
    return found


def remove(directory: Path, name: str, paths: Iterable[Path]) -> bool:
    """Remove an entry with all of its ``paths``; return False where a process is preparing it. Raises OSError."""
    try:
        with FileLock(lock := directory / f"{name}.lock", timeout=0):
            for path in (*paths, lock):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
    except Timeout:
        return False
    return True


def file_states(paths: list[Path], root: Path) -> list[tuple[str, int, int]]:
    """Return files as facts: name below ``root``, size and time of change, not the content."""
    return [(str(path.relative_to(root)), *file_state(path)) for path in paths]


def file_state(path: Path) -> tuple[int, int]:
    """Return the size of a file in bytes, and its time of change in nanoseconds."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _open(folder: Path) -> tuple[CachedFolder | None, str | None]:
    """Return a complete folder; otherwise its damage, or None where there is no folder."""
    if not folder.exists():
        return None, None
    manifest = read_manifest(folder)
    trouble = "manifest.json cannot be read" if manifest is None else damage(folder, manifest)
    return (None, trouble) if manifest is None or trouble else (CachedFolder(folder, manifest), None)


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


def _name(kind: str, facts: Mapping[str, Any]) -> str:
    return f"{kind}-{hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]}"
