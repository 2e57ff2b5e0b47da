"""The arms, and which runs they need, given the results so far.

An arm is a way to train: a schedule on p devices with an optimizer. Several arms share runs, since all synchronous
schedules with the same batch have the same losses, and those of ``2bw`` do not depend on p.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from task import SEQUENCES
from training import FLUSH, PIPEDREAM, TWO_BW, VERTICAL_SYNC, Run

Losses = Mapping[Run, float]

DEPTHS = (8, 4)
SYNCHRONOUS = ("1f1b", "zb_v", "auto")
SEEDS = 11
CENTRE = {"adamw": 4e-3, "muon": 1e-2}
"""Of the grid of learning rates, which is a power of 2 apart; for a batch below 8 it is half of that."""
WIDEST = 5
"""Learning rates of a grid of 3 that is extended because the best one is at its edge."""
LENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 1.8, 2.0)
"""Of runs, in N."""
NEAR = 1.04
"""An arm whose loss at N, of seed 0, is within this factor of the best synchronous one is tried at other lengths."""


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        schedule: vpipe's name.
        depth: p, the number of devices.
        batch: microbatches per update, each of one sequence: m or k.
    """

    schedule: str
    depth: int
    batch: int
    optimizer: str
    correction: str = "none"

    @property
    def synchronous(self) -> bool:
        """With a flush."""
        return self.schedule in SYNCHRONOUS

    @property
    def course(self) -> Course:
        """What its losses depend on."""
        semantics = FLUSH if self.synchronous else self.schedule
        return Course(semantics, 0 if semantics in (FLUSH, TWO_BW) else self.depth, self.batch, self.optimizer,
                      self.correction)

    def __str__(self) -> str:
        word = "m" if self.synchronous else "k"
        return (f"{self.schedule}, {word} = {self.batch}, {self.optimizer}"
                f"{' + extrapolation' if self.correction != 'none' else ''}")


@dataclass(frozen=True)
class Course:
    """Runs that differ in learning rate, length and seed only."""

    semantics: str
    stages: int
    batch: int
    optimizer: str
    correction: str

    def run(self, learning_rate: float, length: float = 1.0, seed: int = 0) -> Run:
        """One of them."""
        return Run(self.semantics, self.stages, self.batch, self.optimizer, self.correction, learning_rate,
                   round(length * SEQUENCES), seed)

    def grid(self, losses: Losses) -> tuple[list[Run], float | None]:
        """Return the runs that choose the learning rate, and the chosen one when all are done."""
        centre = CENTRE[self.optimizer] * (1 if self.batch >= 8 else 0.5)
        rates = [centre / 2, centre, 2 * centre]
        while True:
            runs = [self.run(rate) for rate in rates]
            if any(run not in losses for run in runs):
                return runs, None
            best = min(rates, key=lambda rate: losses[self.run(rate)])
            if len(rates) == WIDEST or best not in (rates[0], rates[-1]):
                return runs, best
            rates = [best / 2, *rates] if best == rates[0] else [*rates, 2 * best]


def arms() -> list[Arm]:
    """All of them; those that decide the gates first."""
    found = []
    for depth in DEPTHS:
        batches = (2 * depth, depth, depth // 2)
        for optimizer in ("muon", "adamw"):
            for batch in batches:
                found += [Arm(schedule, depth, batch, optimizer) for schedule in SYNCHRONOUS]
                for correction in ("extrapolate", "none"):
                    found.append(Arm(PIPEDREAM, depth, batch, optimizer, correction))
                    if batch >= depth:
                        found.append(Arm(TWO_BW, depth, batch, optimizer, correction))
                    found.append(Arm(VERTICAL_SYNC, depth, batch, optimizer, correction))
    # Today's default without a flush, an update per microbatch.
    found += [Arm(PIPEDREAM, 8, 1, optimizer, correction) for optimizer in ("adamw", "muon")
              for correction in ("none", "extrapolate")]
    return found


def courses(among: list[Arm]) -> list[Course]:
    """Without repetition, in the order of the arms: the synchronous ones first."""
    ordered = sorted(among, key=lambda arm: (not arm.synchronous, arm.schedule != PIPEDREAM, arm.batch < 2))
    return list(dict.fromkeys(arm.course for arm in ordered))


def best_synchronous(losses: Losses, depth: int, seeds: int = SEEDS) -> float | None:
    """Return L* for ``depth`` devices: the lowest mean loss at N of a synchronous arm; None before there is one."""
    means = []
    for course in courses([arm for arm in arms() if arm.synchronous and arm.depth == depth]):
        rate = course.grid(losses)[1]
        if rate is not None:
            values = [losses[run] for seed in range(seeds) if (run := course.run(rate, 1.0, seed)) in losses]
            means.append(sum(values) / len(values))
    return min(means, default=None)


