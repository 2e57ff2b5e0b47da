"""What the launchers of two hosts say to each other: a line of JSON each, over ssh's input and output.

To another host: ``run`` (what is to be run), ``start`` (the run's folder), ``stop`` (the ranks are to leave off in good
order, with the number of a signal), ``end``, and an empty message every second.
From it: ``hello`` (what it is), ``ready`` (the fingerprint of its data) or ``refused`` (what is wrong), ``file`` with
``data`` (more of a file), ``ended`` (a rank and its status), ``silent_s`` (it ends, because it heard nothing for so
long), and empty messages while it gets ready.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_MARK = b"vpipe: "
"""Before each message: what a login shell prints by itself must not be taken for one."""

BEAT_S = 1.0
"""Between the first host's messages; a host that hears none for the run's timeout ends its ranks."""


def encoded(**message: Any) -> bytes:
    """A message as its line."""
    return _MARK + json.dumps(message).encode() + b"\n"


def decoded(line: bytes) -> dict[str, Any] | None:
    """The message in a line; None when it is anything else."""
    if not line.startswith(_MARK):
        return None
    try:
        message = json.loads(line[len(_MARK):])
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def identity() -> dict[str, str]:
    """What must be the same on all hosts: vpipe, down to its files, and torch."""
    content = hashlib.sha256()
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        content.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return {"vpipe": f"{_version('vpipe')} (files {content.hexdigest()[:8]})",
            "torch": _version("torch").partition("+")[0]}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
