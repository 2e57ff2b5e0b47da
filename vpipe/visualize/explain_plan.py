"""Explain a plan in words and tables: its costs, its limits, and how other plans compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vpipe.errors import counted
from vpipe.plan.plan import Plan, StagePrediction
from vpipe.plan.profile import Profile
from vpipe.plan.solver.request import Alternative
from vpipe.schedules.registry import recipe_named
from vpipe.units import size_text
from vpipe.visualize.plan_tables import (
    alternatives_table,
    cut_text,
    difference,
    memory_table,
    predicted,
    rank_memory,
    rate_text,
    stages_by_ranks,
    times_table,
)
from vpipe.visualize.table import filled

SATURATED = 0.9
"""Share of the time from which on the cores that ranks share limit a plan."""

EVEN = 0.05
"""Share by which a rank may work more than the average one before it is the bottleneck."""

_KINDS = {"weights": "weights", "stashed": "older versions of the weights", "gradients": "gradients of the weights",
          "optimizer": "what the optimizer keeps", "activations": "activations",
          "working": "what a backward needs for a while"}


@dataclass(frozen=True)
class PlanExplanation:
    """A plan with all that its explanation needs.

    Attributes:
        plan: with predictions.
        profile: that it was made from.
        limit_bytes: that a rank may hold; None without a limit.
        limit_from: the origin of the limit, such as ``--memory``.
        solver: a text on how good the plan is.
        others: plans to compare with.
        limit_without_recompute: bytes per rank with which nothing is recomputed, and the plan for them; None where
            nothing is recomputed.
    """

    plan: Plan
    profile: Profile
    limit_bytes: int | None
    limit_from: str
    solver: str
    others: Sequence[Alternative]
    limit_without_recompute: tuple[int, Plan] | None = None

    def text(self, width: int) -> str:
        """Return the explanation in lines of ``width``; a table without columns to spare may be wider."""
        parts = [self._headline(),
                 [*times_table(self.plan, width),
                  *filled("in ms: forward, backward and recompute of one microbatch; step of the optimizer; comm "
                          f"(transfers, mostly while it computes) and idle of a rank per {self._step_name}", width)],
                 memory_table(self.plan, self.limit_bytes, width),
                 [line for text in (self._bottleneck(), self._memory(), self._recompute(),
                                        f"solver: {self.solver}") for line in filled(text, width)],
                 alternatives_table(self.plan, self.others, width)]
        return "\n\n".join("\n".join(lines) for lines in parts) + "\n"

    def _headline(self) -> list[str]:
        plan, identity, found = self.plan, self.profile.identity, predicted(self.plan)
        limit = "" if self.limit_bytes is None else f" of {size_text(self.limit_bytes)} ({self.limit_from})"
        return [f"{identity.model_name}: {counted(identity.layers, 'layer')} on {counted(plan.ranks, 'rank')}{limit}",
                f"plan: {plan.schedule}, {counted(len(plan.partition), 'stage')} {cut_text(plan.partition, 60)}, "
                f"{counted(self._microbatches, 'microbatch')} of {counted(identity.microbatch_size, 'sample')} per "
                f"{self._step_name}",
                f"predicted: {_time(found.step_s)} per {self._step_name}, "
                f"{rate_text(1 / found.seconds_per_sample)} samples/s, bubble {100 * found.bubble:.0f} %"]

    @property
    def _microbatches(self) -> int:
        return predicted(self.plan).samples_per_step // self.profile.identity.microbatch_size

    @property
    def _step_name(self) -> str:
        widths = {len(stage.ranks) for stage in predicted(self.plan).stages}
        return "update" if len(widths) == 1 or recipe_named(self.plan.schedule or "").flush else "step"

    def _bottleneck(self) -> str:
        found = predicted(self.plan)
        if self.plan.ranks == 1:
            return "bottleneck: none, there is one rank"
        if (shared := self._shared_cores()) is not None:
            return shared
        number, stage = found.bottleneck, found.stages[found.bottleneck]
        busy, average = 1 - stage.idle_s / found.step_s, 1 - found.bubble
        where = f"stage {number} ({_layers(stage)}, {_ranks(stage.ranks)})"
        together = next(group for group in stages_by_ranks(self.plan) if number in group)
        if len(together) > 1:
            where = f"{_ranks(stage.ranks)} ({_stages(together)})"
        if busy <= (1 + EVEN) * average:
            return (f"bottleneck: none, the ranks are even, busy {100 * average:.0f} % of the time; most {where}")
        return (f"bottleneck: {where}, busy {_time(busy * found.step_s)} of {_time(found.step_s)}, "
                f"{100 * (busy / average - 1):.0f} % more than the average rank")

    def _shared_cores(self) -> str | None:
        """Return the text for ranks whose computing fills the cores that they share; None for others."""
        found, cores, ranks = predicted(self.plan), self.profile.cores, self.profile.identity.ranks_per_host
        ranks = min(ranks, self.plan.ranks)
        if cores is None or cores >= ranks:
            return None
        hosts = self.plan.ranks / ranks
        used = sum(len(stage.ranks) * self._work_s(stage) for stage in found.stages) / (cores * hosts * found.step_s)
        if used < SATURATED:
            return None
        left = max(0.0, 1 - used)
        return (f"bottleneck: the {counted(cores, 'core')} that {ranks} ranks of a host share, which compute "
                f"{100 * (1 - left):.0f} % of the time: " +
                (f"no cut and no schedule gains more than the other {100 * left:.0f} %" if left >= 0.005 else
                 "no cut and no schedule gains anything"))

    def _work_s(self, stage: StagePrediction) -> float:
        """Return the seconds that one of the stage's ranks works in a step, with a core to itself."""
        share = self._microbatches / len(stage.ranks)
        updates = 1.0 if recipe_named(self.plan.schedule or "").flush else share / (self.plan.update_every or 1)
        return share * (stage.forward_s + stage.backward_s + stage.recompute_s) + updates * stage.step_s

    def _memory(self) -> str:
        groups = stages_by_ranks(self.plan)
        held = [rank_memory(self.plan, group) for group in groups]
        most = max(range(len(groups)), key=lambda number: held[number].peak)
        peak, kind = held[most].peak, max(_KINDS, key=lambda name: int(getattr(held[most], name)))
        return (f"memory: {_stages(groups[most])} hold{'s' * (len(groups[most]) == 1)} most, {size_text(peak)}"
                + ("" if self.limit_bytes is None else f" of {size_text(self.limit_bytes)}") + " on a rank, "
                f"{100 * getattr(held[most], kind) / peak:.0f} % of it "
                f"{_KINDS[kind]}")

    def _recompute(self) -> str:
        count, found = sum(map(len, self.plan.recomputed)), predicted(self.plan)
        if not count:
            return "recompute: none, all activations fit"
        again = sum(stage.recompute_s for stage in found.stages)
        work = again + sum(stage.forward_s + stage.backward_s for stage in found.stages)
        text = f"recompute: {count} of {sum(self.plan.partition)} layers, {100 * again / work:.0f} % of the computing"
        if self.limit_without_recompute is None:
            return text
        limit, plan = self.limit_without_recompute
        rate, new_rate = (1 / predicted(each).seconds_per_sample for each in (self.plan, plan))
        return (f"{text}; none from {size_text(limit, up=True)} per rank on, which would give "
                f"{rate_text(new_rate)} samples/s ({difference(new_rate, rate)})")


def _layers(stage: StagePrediction) -> str:
    last = stage.first_layer + stage.layers - 1
    return f"layers {stage.first_layer}-{last}" if stage.layers > 1 else f"layer {last}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _stages(stages: Sequence[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _time(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{seconds:,.2f} s" if value >= 9999.5 else f"{value:,.0f} ms" if value >= 99.95 else f"{value:.3g} ms"
