"""A single checkpoint in a folder of any name, written while the caller waits."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from vpipe.checkpoint.copies import HostCopies
from vpipe.checkpoint.folder import put_in_place, recover
from vpipe.checkpoint.manifest import MANIFEST, About
from vpipe.checkpoint.parts import Part, check_kinds, merge, words_of
from vpipe.checkpoint.votes import LocalVotes, Votes
from vpipe.errors import RunError, UserError

_OURS = re.compile(r"rank\d+(\.\d+)?\.safetensors", re.ASCII)
"""Files of a checkpoint beside its manifest."""


def save_at(folder: Path, about: About, tensors: Mapping[str, Tensor], rank: int = 0,
            votes: Votes | None = None) -> None:
    """Write a checkpoint at exactly ``folder``, all at once or not at all; one that is there makes way.

    All ranks call it. Nothing else makes way: neither in ``folder``, nor in ``<folder>.tmp``, where it is written, nor
    ``<folder>.old``, which is what the one that makes way is called for a moment.

    Args:
        about: the same on all ranks; rank 0's is written.
        tensors: of this rank, on any device; their names are unique among all ranks.
        votes: how the ranks agree; may be left out in one process.

    Raises:
        UserError: a tensor is of a kind that files cannot hold, or something that is no checkpoint is in the way.
        RunError: some rank could not write; what there was before is still there.
    """
    check_kinds(tensors)
    folder = Path(os.path.realpath(folder))
    meeting = votes or LocalVotes()
    partial = Path(f"{folder}.tmp")

    def begin(_: list[str]) -> str:
        try:
            found = _in_the_way(folder, partial)
            if not found:
                _make_ready(folder, partial)
        except OSError as error:
            found = f"cannot write to '{folder.parent}': {words_of(error)}"
        return found

    def decide(found: list[str]) -> str:
        parts = list(map(Part.of, found))
        errors = [f"{part.error} (rank {number})" for number, part in enumerate(parts) if part.error]
        if not errors:
            try:
                merge(about, parts, partial)
                put_in_place(partial, folder)
            except Exception as error:
                errors = [words_of(error)]
        if errors:
            shutil.rmtree(partial, ignore_errors=True)
        return ", ".join(errors)

    if found := meeting.meet("", begin):
        raise UserError(f"nothing was saved: {found}", hint="give a folder that does not exist yet, or move that away")
    try:
        part = Part.write(partial, rank, HostCopies().take(tensors))
    except Exception as error:  # whatever it is, the others wait for this rank's word
        part = Part({}, {}, words_of(error))
    error_text = meeting.meet(part.text(), decide)
    if error_text:
        with suppress(OSError):  # on a host that does not see rank 0's folder, which is why
            for name in part.files:
                (partial / name).unlink(missing_ok=True)
            partial.rmdir()
        raise RunError(f"could not save a checkpoint to '{folder}': {error_text}",
                       hint="what was there before is still there; make room, or give another folder")


def _in_the_way(folder: Path, partial: Path) -> str:
    """What a save would destroy though it is no checkpoint, or nothing."""
    for path in (folder, partial):
        if not path.exists():
            continue
        if not path.is_dir():
            return f"'{path}' is a file"
        names = {each.name for each in path.iterdir()}
        strange = sorted(name for name in names if name != MANIFEST and not _OURS.fullmatch(name))
        if strange:
            return f"'{path}' holds '{strange[0]}', which is no part of a checkpoint"
        if path == folder and names and MANIFEST not in names:
            return f"'{path}' holds '{min(names)}', but no {MANIFEST}"
    old = Path(f"{folder}.old")
    if os.path.lexists(old) and not _was_cut_short(folder, partial) and folder.exists():
        return f"'{old}' exists, which is what '{folder}' would be called while another takes its place"
    return ""


def _was_cut_short(folder: Path, partial: Path) -> bool:
    """Whether a save died after the one before had made way, and before the new one had the name."""
    return not folder.exists() and (partial / MANIFEST).is_file()


def _make_ready(folder: Path, partial: Path) -> None:
    if _was_cut_short(folder, partial):
        recover(folder)
    if partial.exists():
        shutil.rmtree(partial)
