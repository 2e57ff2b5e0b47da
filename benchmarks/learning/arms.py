"""The arms, and which runs they need, given the results so far.

An arm is a way to train: a schedule on p devices with an optimizer. Several arms share runs: all synchronous schedules
with the same batch have the same losses to the bit, and those of ``2bw`` do not depend on p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, log
from statistics import fmean

from task import SEQUENCES
from training import EVERY_MICROBATCH, FLUSH, PIPEDREAM, TWO_BW, VERTICAL_SYNC, Run

Losses = Mapping[Run, float]

DEPTHS = (8, 4)
SYNCHRONOUS = ("1f1b", "zb_v", "auto")
SEEDS = 11
CENTRE = {"adamw": 4e-3, "muon": 1e-2}
"""Of the grid of three learning rates, each twice the one before; half of that for a batch below 8."""
WIDEST = 5
"""Learning rates of a grid that is extended, for arms that decide, while the best one is at its edge."""
STEP, SHORTEST, LONGEST = 0.05, 0.5, 1.6
"""Of the lengths of runs, in N."""
NEAR = 0.05
"""In N: an arm has runs no further than this from the length with which it is said to reach L*."""
FEW, SOME = 3, 5
"""Seeds of an arm that may decide a gate. Those that do have :data:`SEEDS` at N and ``SOME`` at their length."""
CLOSE = 1.01
"""Synchronous arms whose mean is within this factor of the lowest one get all seeds, so that L* is known well."""
CLOSE_TIME = 1.1
"""Of two arms that may decide, the slower one gets more seeds at its length, too, if within this factor."""
EXPONENT = 0.12
"""The loss falls about as the length to the power of this, with the sign changed, until two lengths say more."""


@dataclass(frozen=True)
class Setting:
    """Runs that differ in learning rate, length and seed only; see :class:`Run`."""

    semantics: str
    stages: int
    batch: int
    optimizer: str
    correction: str = "none"

    def run(self, learning_rate: float, length: float = 1.0, seed: int = 0) -> Run:
        """One of them."""
        return Run(self.semantics, self.stages, self.batch, self.optimizer, self.correction, learning_rate,
                   round(length * SEQUENCES), seed)

    @property
    def core(self) -> bool:
        """Whether it can decide a gate, so that it gets all seeds and is run until it reaches L*."""
        return self.optimizer == "muon" and (
            self.semantics == FLUSH or (self.semantics == PIPEDREAM and self.correction == "extrapolate"))

    @property
    def family(self) -> Setting:
        """Of a setting that decides nothing, the one that chooses its learning rate, with 16 sequences on 8 devices."""
        return self if self.core else replace(self, batch=16, stages=8 if self.stages else 0)

    def grid(self, losses: Losses) -> list[Run]:
        """Return the runs that choose the learning rate: three; more as long as the best one is at the edge.

        A setting that decides nothing takes the rate of its family, half of it for a batch below 8; none before that
        one is chosen.
        """
        if self.family != self:
            chosen = self.family.rate(losses)
            return [] if chosen is None else [self.run(chosen * _rate_factor(self.batch))]
        centre = CENTRE[self.optimizer] * _rate_factor(self.batch)
        rates = [centre / 2, centre, 2 * centre]
        while self.core and len(rates) < WIDEST and all(self.run(rate) in losses for rate in rates):
            best = min(rates, key=lambda rate: losses[self.run(rate)])
            if best not in (rates[0], rates[-1]):
                break
            rates = [best / 2, *rates] if best == rates[0] else [*rates, 2 * best]
        return [self.run(rate) for rate in rates]

    def rate(self, losses: Losses) -> float | None:
        """Return the chosen learning rate; None before it is chosen."""
        runs = self.grid(losses)
        if not runs or any(run not in losses for run in runs):
            return None
        return min(runs, key=lambda run: losses[run]).learning_rate

    def seeds(self, losses: Losses, length: float = 1.0, count: int = SEEDS) -> list[Run]:
        """Return the runs of all seeds with the chosen learning rate; none before it is chosen."""
        rate = self.rate(losses)
        return [] if rate is None else [self.run(rate, length, seed) for seed in range(count)]

    def mean(self, losses: Losses, length: float = 1.0, least: int = 1, count: int = SEEDS) -> float | None:
        """Return the mean loss over those seeds that are done; None if they are fewer than ``least``."""
        done = [losses[run] for run in self.seeds(losses, length, count) if run in losses]
        return fmean(done) if len(done) >= least else None


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        schedule: vpipe's name.
        depth: p, the number of devices.
        batch: microbatches per update, each of one sequence: m or k.
        every: instead an update after every microbatch, of ``batch`` sequences: the former default without a flush.
    """

    schedule: str
    depth: int
    batch: int
    optimizer: str
    correction: str = "none"
    every: bool = False

    @property
    def synchronous(self) -> bool:
        """With a flush."""
        return self.schedule in SYNCHRONOUS

    @property
    def setting(self) -> Setting:
        """What its losses depend on."""
        semantics = FLUSH if self.synchronous else EVERY_MICROBATCH if self.every else self.schedule
        return Setting(semantics, 0 if semantics in (FLUSH, TWO_BW) else self.depth, self.batch, self.optimizer,
                      self.correction)

    @property
    def same_batch(self) -> Arm:
        """The synchronous arm with the same batch and optimizer."""
        return Arm("1f1b", self.depth, self.batch, self.optimizer)


UpdateTime = Callable[[Arm], float]
"""Seconds of an update of an arm."""


def arms() -> list[Arm]:
    """All of them; those that decide the gates first."""
    found = []
    for optimizer in ("muon", "adamw"):
        for depth in DEPTHS:
            for batch in (2 * depth, depth, depth // 2):
                found += [Arm(schedule, depth, batch, optimizer) for schedule in SYNCHRONOUS]
                for correction in ("extrapolate", "none"):
                    found.append(Arm(PIPEDREAM, depth, batch, optimizer, correction))
                    if batch >= depth:
                        found.append(Arm(TWO_BW, depth, batch, optimizer, correction))
                    if optimizer == "muon" and batch >= depth:
                        found.append(Arm(VERTICAL_SYNC, depth, batch, optimizer, correction))
    found += [Arm(PIPEDREAM, 8, 16, optimizer, correction, every=True) for optimizer in ("adamw", "muon")
              for correction in ("none", "extrapolate")]
    return found


def settings(chosen: list[Arm]) -> list[Setting]:
    """Without repetition, in the order of the arms: the synchronous setting before those with the same batch."""
    return list(dict.fromkeys(arm.setting for arm in chosen))


def best_synchronous(losses: Losses, depth: int) -> Setting | None:
    """Return the setting that sets L*: the lowest mean loss at N of a synchronous arm on ``depth`` devices, so far.

    Of all seeds, where any arm has them all; None before the first run.
    """
    own = settings([arm for arm in arms() if arm.synchronous and arm.depth == depth])
    for least in (SEEDS, FEW, 1):
        means = {setting: mean for setting in own if (mean := setting.mean(losses, 1.0, least)) is not None}
        if means:
            return min(means, key=means.__getitem__)
    return None


def reaching(losses: Losses, setting: Setting, best: Setting, count: int = FEW) -> tuple[float | None, list[Run]]:
    """Find the length of run of which the mean loss is that of ``best`` at N.

    The loss falls as a power of the length; the power comes from the two lengths whose losses are nearest to that one.

    Args:
        count: of seeds, the same at every length.

    Returns:
        The length in N, at most :data:`NEAR` from one that was run; None if it is not known or above :data:`LONGEST`.
        And the runs to do next; none when it is known.
    """
    if setting.rate(losses) is None:
        return None, setting.grid(losses)
    target = best.mean(losses, 1.0, count, count)
    if target is None:
        return None, best.seeds(losses, 1.0, count)
    means: dict[float, float] = {}
    length = 1.0
    while True:
        mean = setting.mean(losses, length, count, count)
        if mean is None:
            return None, setting.seeds(losses, length, count)
        means[length] = mean
        nearest = sorted(means, key=lambda each: abs(means[each] / target - 1))[:2]
        power = EXPONENT
        if len(nearest) == 2:
            fitted = -log(means[nearest[0]] / means[nearest[1]]) / log(nearest[0] / nearest[1])
            power = min(max(fitted, EXPONENT / 2), 2 * EXPONENT)  # noise at lengths so near must not decide
        reached = nearest[0] * (means[nearest[0]] / target) ** (1 / power)
        if abs(min(means, key=lambda each: abs(each - reached)) - reached) <= NEAR + 1e-9:
            return (reached, []) if reached <= LONGEST else (None, [])
        length = min(max(_round(reached), SHORTEST), LONGEST)
        if length in means:  # beyond the ends
            return (None, []) if length == LONGEST else (length, [])


def contenders(losses: Losses, depth: int, update_s: UpdateTime, within: float = inf) -> list[Arm]:
    """Return the arms that may decide the gates: the two that reach L* first under 1F1B, with a flush and without.

    Args:
        within: leave out the second of a group where it takes longer than the first by more than this factor.
    """
    best = best_synchronous(losses, depth)
    assert best is not None
    times: dict[Arm, float] = {}
    for arm in arms():
        if arm.depth == depth and arm.setting.core and (length := reaching(losses, arm.setting, best)[0]) is not None:
            times[arm] = arm.setting.run(0.0, length).updates * update_s(arm)
    groups = ([arm for arm in times if arm.schedule == "1f1b"], [arm for arm in times if arm.synchronous],
              [arm for arm in times if not arm.synchronous])
    firsts = [sorted(group, key=times.__getitem__)[:2] for group in groups]
    return list(dict.fromkeys(arm for first in firsts for arm in first if times[arm] <= within * times[first[0]]))


def _rate_factor(batch: int) -> float:
    return 1 if batch >= 8 else 0.5


def _round(length: float) -> float:
    return round(round(length / STEP) * STEP, 2)


def plan(losses: Losses, update_s: UpdateTime) -> Iterator[Run]:
    """Yield the runs that are still to do, the most important first, as far as the results so far tell."""
    for run in _wanted(losses, update_s):
        if run not in losses:
            yield run


def _wanted(losses: Losses, update_s: UpdateTime) -> Iterator[Run]:
    core = settings([arm for arm in arms() if arm.setting.core])
    for setting in core:
        yield setting.grid(losses)[1]
    for setting in core:
        yield from setting.grid(losses)
    for seed in range(FEW):  # all arms with the same seeds: pairs
        for setting in core:
            yield from setting.seeds(losses)[seed:seed + 1]
    if all(setting.mean(losses, 1.0, FEW, FEW) is not None for setting in core):
        yield from _decisive(losses, update_s)
    rest = sorted(settings(arms()), key=lambda setting: setting.family != setting)  # those that choose rates first
    for setting in rest:
        yield from setting.grid(losses)[1:2]
    for setting in rest:
        yield from setting.grid(losses)


def _decisive(losses: Losses, update_s: UpdateTime) -> Iterator[Run]:
    """Yield what decides the gates once all arms have a few seeds."""
    for depth in DEPTHS:
        mine = [arm for arm in arms() if arm.depth == depth and arm.setting.core]
        means = {arm.setting: arm.setting.mean(losses, 1.0, SEEDS) or arm.setting.mean(losses, 1.0, FEW, FEW) or 0.0
                 for arm in mine if arm.synchronous}
        for setting, mean in means.items():
            if mean <= CLOSE * min(means.values()):
                yield from setting.seeds(losses)
        best = best_synchronous(losses, depth)
        assert best is not None
        left = [run for arm in mine for run in reaching(losses, arm.setting, best)[1]]
        yield from left
        if all(run in losses for run in left):
            for arm in contenders(losses, depth, update_s):
                yield from arm.setting.seeds(losses)
                yield from arm.same_batch.setting.seeds(losses)
            for arm in contenders(losses, depth, update_s, CLOSE_TIME):
                yield from reaching(losses, arm.setting, best, SOME)[1]


def quick() -> list[Run]:
    """A quarter of N, the middle learning rates: the direction, in ten minutes."""
    return [Setting(semantics, stages, batch, optimizer, correction).run(CENTRE[optimizer] / (2 if batch < 8 else 1),
                                                                        0.25, seed)
            for seed in range(2) for semantics, stages, batch, optimizer, correction in (
                (FLUSH, 0, 16, "muon", "none"), (PIPEDREAM, 8, 16, "muon", "extrapolate"),
                (PIPEDREAM, 8, 8, "muon", "extrapolate"), (PIPEDREAM, 8, 16, "muon", "none"),
                (FLUSH, 0, 16, "adamw", "none"), (PIPEDREAM, 8, 16, "adamw", "none"),
                (EVERY_MICROBATCH, 8, 16, "adamw", "none"))]
