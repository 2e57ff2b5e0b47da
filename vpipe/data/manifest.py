"""``manifest.json``: what a folder of prepared data holds, from what it was made, and whether it is whole."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vpipe.files import count_of, parse_json, read_bounded, text_of

NAME = "manifest.json"
_MOST_BYTES = 16 << 20
_SMALL_BYTES = 1 << 20  # files up to here are hashed whenever a folder is opened: a few milliseconds


def write_manifest(folder: Path, **facts: Any) -> None:
    """Write the manifest of a finished folder: ``facts``, this Python, size and SHA-256 of every file in it, and the
    SHA-256 of all this."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    manifest = {**facts, "python": platform.python_version(), "files": files}
    (folder / NAME).write_text(json.dumps({**manifest, "sha256": _digest(manifest)}, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of ``folder``, or None when there is none that can be read."""
    try:
        manifest = parse_json(read_bounded(folder / NAME, _MOST_BYTES, "a manifest"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def damage(folder: Path, manifest: dict[str, Any]) -> str | None:
    """What is wrong with a folder, or None: the manifest is checked, every size, and the content of the small files."""
    if manifest.get("sha256") != _digest({key: value for key, value in manifest.items() if key != "sha256"}):
        return f"{NAME} was changed, or is another version's (its SHA-256 differs)"
    try:
        files = {name: (count_of(fact["bytes"]), text_of(fact["sha256"])) for name, fact in manifest["files"].items()}
    except (KeyError, TypeError, ValueError) as error:
        return f"{NAME} does not say what its files are ({type(error).__name__}: {error})"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if size <= _SMALL_BYTES and _sha256(path) != digest:
            return f"{name} was changed (its SHA-256 differs)"
    return None


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed as distributions."""
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
