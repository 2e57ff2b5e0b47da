"""Starting a run again after a failure: from which checkpoint, and when that is given up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from vpipe.checkpoint.folder import Checkpoints
from vpipe.checkpoint.integrity import damages
from vpipe.checkpoint.manifest import Manifest
from vpipe.errors import UserError
from vpipe.launch.folder import METRICS

SLOW_S = 2.0
"""From when on reading a checkpoint is shown."""

TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Failure:
    """How an attempt ended.

    Attributes:
        what: was said of it.
        step: the last one that was recorded; None without one.
        checkpoint: the name of the one that it went on from; empty for the beginning.
    """

    what: str
    step: int | None
    checkpoint: str

    @property
    def as_json(self) -> dict[str, Any]:
        return {"what": self.what, "step": self.step, "checkpoint": self.checkpoint}

    def repeats(self, other: Failure) -> bool:
        """Whether the other one was the same, from the same checkpoint and at the same step: then it would come again.

        What the rank that speaks was at meanwhile, after a semicolon, does not count.
        """
        return (self.what.partition(";")[0], self.step, self.checkpoint) == (
            other.what.partition(";")[0], other.step, other.checkpoint)


def over(failures: Sequence[Failure], restarts: int | None) -> str | None:
    """Why nothing is started after these failures of a run, the last one of which is new; None when it is.

    Args:
        restarts: how many there may be; None leaves that to who starts it.
    """
    if len(failures) > 1 and failures[-1].repeats(failures[-2]):
        step = failures[-1].step
        return "the same failure came twice in a row " + ("before the first step" if step is None else
                                                         f"after step {step}") + ", so it would come again"
    if restarts is not None and len(failures) > restarts:
        return f"it was attempt {len(failures)} of {restarts + 1}"
    return None


def last_step(folder: Path) -> int | None:
    """The last step that a run recorded."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut short
        if isinstance(entry, dict) and "loss" in entry:
            return int(entry["step"])
    return None


def newest_intact(root: Path) -> Path | None:
    """The newest checkpoint of a run of which nothing is damaged; one that is passed over is named on stderr."""
    for checkpoint in reversed(Checkpoints(root).all()):
        try:
            found = list(map(str, damages(checkpoint, _shown(f"looking at {checkpoint.name}"))))
        except UserError as error:
            found = [error.problems[0].what]
        if not found:
            return checkpoint.absolute()
        print(f"{checkpoint.name} is passed over: {found[0]}", file=sys.stderr, flush=True)
    return None


def _shown(what: str) -> Callable[[int, int], None]:
    """Shows how far something is, when it takes long."""
    said_at = monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said_at
        if monotonic() - said_at > SLOW_S:
            said_at = monotonic()
            print(f"{what}: {100 * done // total} %", file=sys.stderr, flush=True)

    return progress


def announced(attempt: str, what: str, checkpoint: Path | None) -> str:
    """``attempt 2 of 4: rank 2 ended without a word; going on from step 40``."""
    from_where = "beginning anew, since there is no checkpoint yet" if checkpoint is None else \
        f"going on from step {Manifest.load(checkpoint).step}"
    return f"{attempt}: {what}; {from_where}"
