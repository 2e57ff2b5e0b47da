"""Summarise a schedule: its timeline at given costs, and what every rank and stage holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from vpipe.app.visualize.repeating import Repeating
from vpipe.app.visualize.table import Number, number, percent, plain, table
from vpipe.errors import counted
from vpipe.schedules import Costs, Schedule, Timeline, check, simulate


@dataclass(frozen=True)
class RankCosts:
    """Costs of one microbatch on a whole rank; each of the stages that it passes there takes an equal share of each.

    Attributes:
        forward_s: F.
        input_s: I, the input half of a backward; a whole one takes ``input_s + weight_s``.
        weight_s: W, the weight half.
        transfer_s: of any transfer between ranks: activations, their gradients, and of a replicated stage every
            part of a sum of gradients.
        step_s: an optimizer step.
        activation_bytes: held from F until B or I; as much again from I until W.
        version_bytes: one version of the weights.
    """

    forward_s: Number = 1
    input_s: Number = 1
    weight_s: Number = 1
    transfer_s: Number = 0
    step_s: Number = 0
    activation_bytes: Number = 1
    version_bytes: Number = 0

    def of(self, placement: tuple[tuple[int, ...], ...], recomputing: Collection[int] = (), slices: int = 1) -> Costs:
        """Return the costs of every stage; those ``recomputing`` repeat their forward."""
        return Costs.of_ranks(placement, recomputing, slices=slices, **vars(self))

    def __str__(self) -> str:
        return (f"F {number(self.forward_s)}, I {number(self.input_s)}, W {number(self.weight_s)}, "
                f"transfer {number(self.transfer_s)}" + (f", step {number(self.step_s)}" if self.step_s else ""))


@dataclass(frozen=True)
class Summary:
    """A schedule of compute actions and steps that has passed every rule, its simulated run, and its peaks.

    Attributes:
        repeating: how it repeats, where it is too long to list; then the schedule has the programs of a shorter one,
            and the timeline only the first and the last events.
    """

    schedule: Schedule
    costs: RankCosts
    timeline: Timeline
    repeating: Repeating | None = None

    @classmethod
    def of(cls, schedule: Schedule, costs: RankCosts) -> Summary:
        """Check, simulate and count the compute actions of ``schedule``.

        Raises:
            CheckError: they break a rule.
        """
        computed = schedule.compute_only()
        check(computed)
        return cls(computed, costs, simulate(computed, costs.of(computed.placement, computed.recomputed_stages,
                                                                computed.slices)))

    @property
    def proved(self) -> Schedule | Repeating:
        """Return what has the peaks of every rank and stage, and the weight version of every forward."""
        return self.repeating or self.schedule

    @property
    def left_out(self) -> tuple[Number, Number] | None:
        """Return the times between which a picture has nothing, because the schedule is too long to list."""
        return None if self.repeating is None else self.repeating.left_out_s

    def said_left_out(self, begin_s: Number, end_s: Number) -> str:
        """Return what a picture without the times from ``begin_s`` to ``end_s`` leaves out as text."""
        assert self.repeating is not None
        return (f"times {number(begin_s)} to {number(end_s)} of {number(self.timeline.makespan_s)} are left out, in "
                f"which the ranks repeat {self.repeating.copies:,} times what they do for "
                f"{counted(self.repeating.step, 'microbatch')}")

    @property
    def versions_used(self) -> Mapping[tuple[int, int], int]:
        """Return the weight version of every (stage, microbatch), in forward and backward; nothing for a flush."""
        if self.schedule.flush:
            return {}
        return self.proved.versions_used

    @property
    def stages_per_rank(self) -> str:
        """Return the stages per rank that a microbatch passes, such as ``2`` or, of ranks that differ, ``1-2``."""
        counts = sorted({self.schedule.passes(rank) for rank in range(self.schedule.ranks)})
        return str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"

    @property
    def copies(self) -> bool:
        """Tell whether a rank holds stages that no one microbatch passes all."""
        schedule = self.schedule
        return any(len(schedule.stages_of(rank)) > schedule.passes(rank) for rank in range(schedule.ranks))

    @cached_property
    def chunk_of(self) -> Sequence[int]:
        """Return, by stage, which of its rank's stages it is, from 0."""
        schedule = self.schedule
        return [schedule.stages_of(ranks[0]).index(stage) for stage, ranks in enumerate(schedule.placement)]

    def per_rank(self, peak: str) -> list[str]:
        """Return for every rank a peak of each of its stages: ``versions`` or ``staleness``."""
        return [" ".join(str(getattr(self.proved.stage_peaks[stage], peak))
                         for stage in self.schedule.stages_of(rank)) for rank in range(self.schedule.ranks)]

    @property
    def peak(self) -> Number:
        """Return the most activations that a rank holds, in microbatches of the whole rank."""
        return max(Fraction(facts.peak_activations, self.schedule.passes(rank) * self.schedule.slices)
                   for rank, facts in enumerate(self.proved.rank_peaks))

    def times(self) -> str:
        """Return bubble and makespan as text."""
        return (f"bubble {number(self.timeline.bubble_s)} ({percent(self.timeline.bubble_share)}), "
                f"makespan {number(self.timeline.makespan_s)}")

    def as_json(self) -> Mapping[str, object]:
        """Return the object that ``--format json`` writes."""
        schedule = self.schedule
        return {
            "schedule": schedule.name,
            "placement": [list(ranks) for ranks in schedule.placement],
            "programs": [[str(action) for action in program] for program in schedule.programs],
            "makespan": plain(self.timeline.makespan_s),
            "bubble": plain(self.timeline.bubble_s),
            "period": plain(self.timeline.period_s),
            "peak_activations": [rank.peak_activations for rank in self.proved.rank_peaks],
            "versions": [stage.versions for stage in self.proved.stage_peaks],
            "staleness": [stage.staleness for stage in self.proved.stage_peaks],
            **({"warmup_depth": list(schedule.warmup)} if schedule.warmup else {}),
            **({"slices": schedule.slices} if schedule.slices > 1 else {}),
        }


def compare(found: Mapping[str, Summary | str]) -> str:
    """Return one line per schedule, the least bubble first; below them those that are impossible, with the reason.

    Args:
        found: by name, the summary or the reason.
    """
    summaries = sorted((one for one in found.values() if isinstance(one, Summary)),
                       key=lambda one: (one.timeline.bubble_s, one.peak, one.schedule.name))
    head = ["schedule", "stages/rank", "bubble", "share", "makespan", "peak activations", "versions", "staleness"]
    rows = [[one.schedule.name, one.stages_per_rank, number(one.timeline.bubble_s), share_text(one),
             number(one.timeline.makespan_s), _peak_text(one), *(
                 str(max(getattr(stage, peak) for stage in one.proved.stage_peaks))
                 for peak in ("versions", "staleness"))] for one in summaries]
    lines = table(head, rows, left=1)
    reasons = [(name, why) for name, why in sorted(found.items()) if isinstance(why, str)]
    longest = max(map(len, found), default=0)
    lines += [f"{name:{longest}}  not possible: {why}" for name, why in reasons]
    cut = "of one stage" + ", in slices" * any(one.schedule.slices > 1 for one in summaries)
    lines += ["", f"peak activations: of the rank that holds most, in microbatches of a whole rank ({cut});",
              "versions, staleness: of the stage with most"]
    if two := [one.schedule.name for one in summaries if one.copies]:
        lines.append(f"copies: {', '.join(two)} {'have' if len(two) > 1 else 'has'} two of every stage, so that a rank "
                     "holds twice the weights")
    if streams := [one.schedule.name for one in summaries if not one.schedule.flush]:
        lines.append(f"once: without a flush ({', '.join(streams)}) the bubble comes once in a run, not at every "
                     "update")
    return "\n".join(lines) + "\n"


def share_text(summary: Summary) -> str:
    """Return the bubble's share of an update; ``once`` where it comes only once in a run."""
    return percent(summary.timeline.bubble_share) if summary.schedule.flush else "once"


def _peak_text(summary: Summary) -> str:
    most = max(facts.peak_activations for facts in summary.proved.rank_peaks)
    return number(summary.peak) + (f" ({most})" if summary.peak != most else "")
