"""The rows of results.jsonl, one per run, and what they say about the arms."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arms import CLOSE_TIME, DEPTHS, FEW, SOME, Arm, best_synchronous, contenders, reaching
from times import update_s
from training import Run

RESULTS = Path(__file__).parent / "results.jsonl"


def read(path: Path) -> dict[Run, dict[str, Any]]:
    """Return the rows by run; those of another text are refused, since they cannot be compared."""
    rows = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        rows[Run(**row["run"])] = row
    return rows


def append(path: Path, row: dict[str, Any]) -> None:
    """Write a row in one piece."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(row) + "\n").encode())
        os.fsync(file)
    finally:
        os.close(file)


class Results:
    """What the rows say about the arms."""

    def __init__(self, rows: Mapping[Run, Mapping[str, Any]]) -> None:
        self.rows = rows
        self.losses = {run: row["loss"] for run, row in rows.items()}
        self._lengths: dict[Arm, float | None] = {}
        self.best = {depth: best_synchronous(self.losses, depth) for depth in DEPTHS}
        self.targets = {depth: best and best.mean(self.losses) for depth, best in self.best.items()}
        self.contenders = {arm for depth in DEPTHS if self.best[depth] is not None
                           for arm in contenders(self.losses, depth, update_s, CLOSE_TIME)}

    def seeds(self, arm: Arm) -> int:
        """How many are done at N."""
        return sum(run in self.losses for run in arm.setting.seeds(self.losses))

    def loss(self, arm: Arm) -> float | None:
        """Mean loss at N of the seeds that are done; of the best learning rate so far, while it is not chosen."""
        tried = [self.losses[run] for run in arm.setting.grid(self.losses) if run in self.losses]
        return arm.setting.mean(self.losses) or min(tried, default=None)

    def _count(self, arm: Arm) -> int:
        return SOME if arm in self.contenders else FEW

    def time_s(self, arm: Arm, length: float = 1.0, step: float = 1.0) -> float:
        """Simulated seconds of a run, where an optimizer's step takes ``step`` times S."""
        return arm.setting.run(0.0, length).updates * update_s(arm, step)

    def length(self, arm: Arm) -> float | None:
        """The length of run that reaches L*, in N: of more seeds for a contender."""
        best = self.best[arm.depth]
        if best is None or not arm.setting.core:
            return None
        if arm not in self._lengths:
            length, left = reaching(self.losses, arm.setting, best, self._count(arm))
            self._lengths[arm] = None if left else length
        return self._lengths[arm]

    def open(self, arm: Arm) -> bool:
        """Whether that is not known yet."""
        best = self.best[arm.depth]
        return best is None or bool(reaching(self.losses, arm.setting, best, self._count(arm))[1])

    def to_target_s(self, arm: Arm, step: float = 1.0) -> float | None:
        """Simulated seconds of that run, where an optimizer's step takes ``step`` times S."""
        length = self.length(arm)
        return None if length is None else self.time_s(arm, length, step)

    def gaps(self, arm: Arm) -> list[float]:
        """Relative differences to the synchronous arm with the same batch and optimizer at N, by seed."""
        own = arm.setting.seeds(self.losses)
        other = arm.same_batch.setting.seeds(self.losses)
        return [self.losses[mine] / self.losses[its] - 1 for mine, its in zip(own, other, strict=False)
                if mine in self.losses and its in self.losses]
