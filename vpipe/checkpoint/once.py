"""A single checkpoint in a folder of any name, written while the caller waits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from vpipe.checkpoint.copies import HostCopies
from vpipe.checkpoint.folder import put_in_place
from vpipe.checkpoint.manifest import About
from vpipe.checkpoint.parts import Part, check_kinds, merge, words_of
from vpipe.checkpoint.votes import LocalVotes, Votes
from vpipe.errors import RunError


def save_at(folder: Path, about: About, tensors: Mapping[str, Tensor], rank: int = 0,
            votes: Votes | None = None) -> None:
    """Write a checkpoint at exactly ``folder``, all at once or not at all; one that is there makes way.

    All ranks call it.

    Args:
        about: the same on all ranks; rank 0's is written.
        tensors: of this rank, on any device; their names are unique among all ranks.
        votes: how the ranks agree; may be left out in one process.

    Raises:
        UserError: a tensor is of a kind that files cannot hold.
        RunError: some rank could not write; what there was before is still there.
    """
    check_kinds(tensors)
    folder = Path(os.path.abspath(folder))
    meeting = votes or LocalVotes()
    partial = folder.with_name(f"{folder.name}.tmp")

    def begin(_: list[str]) -> str:
        shutil.rmtree(partial, ignore_errors=True)
        return ""

    def decide(found: list[str]) -> str:
        parts = list(map(Part.of, found))
        errors = [f"{part.error} (rank {number})" for number, part in enumerate(parts) if part.error]
        if not errors:
            try:
                merge(about, parts, partial)
                put_in_place(partial, folder)
            except OSError as error:
                errors = [words_of(error)]
        if errors:
            shutil.rmtree(partial, ignore_errors=True)
        return ", ".join(errors)

    meeting.meet("", begin)
    try:
        part = Part.write(partial, rank, HostCopies().take(tensors))
    except OSError as error:
        part = Part({}, {}, words_of(error))
    error_text = meeting.meet(part.text(), decide)
    if error_text:
        raise RunError(f"could not save a checkpoint to '{folder}': {error_text}",
                       hint="what was there before is still there; make room, or give another folder")
