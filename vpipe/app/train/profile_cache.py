"""Save measured profiles in the cache directory, and find them by their identity."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from vpipe.app.errors import os_errors
from vpipe.errors import UserError
from vpipe.plan import Profile


def to_stderr(line: str) -> None:
    """Print a line that is no result."""
    print(line, file=sys.stderr, flush=True)


def profile_path(digest: str, directory: Path | None = None) -> Path:
    """Return the path of a profile in the directory for prepared data, by default ``~/.cache/vpipe``.

    Args:
        digest: of its identity.
    """
    return (Path.home() / ".cache" / "vpipe" if directory is None else directory) / "profiles" / f"{digest}.json"


def cached(digest: str | None, directory: Path | None = None, say: Callable[[str], None] = to_stderr) -> Profile | None:
    """Return the profile whose identity has this digest, if it was measured before and is kept; None without one.

    A damaged one is reported and not used.
    """
    if digest is None or re.fullmatch("[0-9a-f]{12}", digest) is None or not (
            path := profile_path(digest, directory)).exists():
        return None
    try:
        profile = Profile.load(path)
        if profile.identity.digest == digest and profile.process_bytes:
            return profile
        why = ("an older version wrote it" if profile.identity.digest == digest else
               "the file holds the profile of something else")
    except UserError as error:
        why = error.problems[0].what
    say(f"measured again: {why} ({path})")
    return None


def store(profile: Profile, directory: Path | None = None) -> None:
    """Save a profile for later runs.

    Raises:
        UserError: it cannot be written, or its layers have no digest by which equal ones could be known.
    """
    if (digest := profile.identity.kept_as) is None:
        raise UserError(f"the profile of {profile.identity.model_name} is not kept: its layers hold objects or "
                        "functions whose content cannot be read", hint="each run measures anew")
    path = profile_path(digest, directory)
    with os_errors(f"the profile cannot be kept in {path.parent}",
                   "name a folder that can be written as dataset.cache_directory"):
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(path)
