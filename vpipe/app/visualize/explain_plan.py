"""Explain a plan in words and tables: its times, memory and limits, and how other plans compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from vpipe import Plan
from vpipe.app.visualize.advice import Advice
from vpipe.app.visualize.table import Column, columns, compact, filled, listed, milliseconds, ms_text
from vpipe.errors import counted
from vpipe.plan import Profile
from vpipe.schedules import RegisteredSchedule, build
from vpipe.units import size_text

BAR = 20
"""Columns of a bar."""

SATURATED = 0.9
"""Share of the time from which on the cores that ranks share limit a plan."""

EVEN = 0.05
"""Share by which a rank may work more than the average one before it is the bottleneck."""

_KINDS = ("weights", "stashed", "gradients", "optimizer", "activations", "working", "peak")
"""Columns of the memory's table: fields of :class:`~vpipe.plan.stage_costs.StageMemory`."""

_TIMES = {"forward": "forward_s", "backward": "backward_s", "step": "step_s", "comm": "communication_s",
          "idle": "idle_s"}
"""Columns of the times' table, and their fields of :class:`~vpipe.plan.plan.StagePrediction`."""

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class OtherPlan:
    """A plan to compare with.

    Attributes:
        what: distinguishes it, such as ``schedule gpipe``.
        plan: None where none is possible.
        seconds_per_sample: predicted.
        simulated: whether that was simulated, or is the solver's formula, which is coarser.
        why: none is possible.
    """

    what: str
    plan: Plan | None = None
    seconds_per_sample: float | None = None
    simulated: bool = True
    why: str = ""

    @classmethod
    def simulated_one(cls, what: str, plan: Plan) -> OtherPlan:
        """Return a plan with predictions."""
        return cls(what, plan, plan.predicted.seconds_per_sample)


@dataclass(frozen=True)
class PlanExplanation:
    """A plan with predictions, the profile that it was made from, and all else that its explanation needs.

    Attributes:
        limit_bytes: that a rank may hold; None without a limit.
        limit_from: the origin of the limit, such as ``--memory``.
        solver: a text on how good the plan is.
        others: plans to compare with.
    """

    plan: Plan
    profile: Profile
    limit_bytes: int | None
    limit_from: str
    solver: str
    others: Sequence[OtherPlan]

    def text(self, width: int) -> str:
        """Return the explanation in lines of ``width``; a table without columns to spare may be wider."""
        parts = [self._headline(),
                 [*times_table(self.plan, width),
                  *filled("in ms: forward, backward and recompute of one microbatch; step of the optimizer; comm "
                          f"(transfers, mostly while it computes) and idle of a rank per {self._step_name}"
                          + (f"; a rank here is {self._tensor} that split its layers" if self._tensor > 1 else ""),
                          width)],
                 memory_table(self.plan, self.limit_bytes, width),
                 [line for text in (self._bottleneck(), *self._cuts(), *self._delay(), *self._zero1(),
                                    f"solver: {self.solver}")
                  for line in filled(text, width)],
                 alternatives_table(self.plan, self.others, width)]
        return "\n\n".join("\n".join(lines) for lines in parts) + "\n"

    def _headline(self) -> list[str]:
        plan, identity, found = self.plan, self.profile.identity, self.plan.predicted
        limit = "" if self.limit_bytes is None else f" of {size_text(self.limit_bytes)} ({self.limit_from})"
        slices = f" in {plan.order.slices} slices" * (plan.order.slices > 1)
        return [f"{identity.model_name}: {counted(identity.layers, 'layer')} on "
                f"{counted(plan.ranks * self._tensor, 'rank')}{limit}",
                f"plan: {plan.schedule}, {counted(len(plan.partition), 'stage')} {cut_text(plan.partition, 60)}, "
                + (f"tensor {self._tensor}, " if self._tensor > 1 else "") + ("zero1, " if self._shares else "")
                + (f"{depths_text(plan)} forwards before the first backward, " if plan.warmup else "")
                + f"{counted(self._microbatches, 'microbatch')}{slices} of "
                f"{counted(identity.microbatch_size, 'sample')} per {self._step_name}",
                f"predicted: {milliseconds(found.step_s)} per {self._step_name}, "
                f"{compact(1 / found.seconds_per_sample)} samples/s, bubble {100 * found.bubble:.0f} %"]

    @property
    def _tensor(self) -> int:
        """Ranks that split every layer."""
        return self.profile.identity.tensor

    @property
    def _shares(self) -> bool:
        """Replicas share the optimizer's state."""
        return bool(self.plan.zero1) and any(len(ranks) > 1 for ranks in self.plan.groups)

    @property
    def _microbatches(self) -> int:
        return self.plan.predicted.samples_per_step // self.profile.identity.microbatch_size

    @property
    def _step_name(self) -> str:
        widths = {len(stage.ranks) for stage in self.plan.predicted.stages}
        return "update" if len(widths) == 1 or RegisteredSchedule.named(self.plan.schedule or "").flush else "step"

    def _bottleneck(self) -> str:
        found = self.plan.predicted
        if self.plan.ranks == 1:
            return f"bottleneck: none, there is one {'rank' if self._tensor == 1 else 'stage'}"
        if (shared := self._shared_cores()) is not None:
            return shared
        number, stage = found.bottleneck, found.stages[found.bottleneck]
        busy, average = 1 - stage.idle_s / found.step_s, 1 - found.bubble
        ranks = _numbered("rank", stage.ranks)
        where = f"stage {number} (layer{'s' * (stage.layers > 1)} {_layer_range(self.plan, number)}, {ranks})"
        together = next(group for group in stages_by_ranks(self.plan) if number in group)
        if len(together) > 1:
            where = f"{ranks} ({_numbered('stage', together)})"
        if busy <= (1 + EVEN) * average:
            return (f"bottleneck: none, the ranks are even, busy {100 * average:.0f} % of the time; most {where}")
        return (f"bottleneck: {where}, busy {milliseconds(busy * found.step_s)} of {milliseconds(found.step_s)}, "
                f"{100 * (busy / average - 1):.0f} % more than the average rank")

    def _shared_cores(self) -> str | None:
        """Return the text for ranks whose computing fills the cores that they share; None for others."""
        found, cores, ranks = self.plan.predicted, self.profile.cores, self.profile.identity.ranks_per_host
        ranks = min(ranks, self.plan.ranks)
        if cores is None or cores >= ranks:
            return None
        hosts = self.plan.ranks / ranks
        work_s = sum(len(stage.ranks) * self._work_s(number) for number, stage in enumerate(found.stages))
        used = work_s / (cores * hosts * found.step_s)
        if used < SATURATED:
            return None
        left = max(0.0, 1 - used)
        gain = f"more than the other {100 * left:.0f} %" if left >= 0.005 else "anything"
        cores, ranks = cores * self._tensor, ranks * self._tensor
        return (f"bottleneck: the {counted(cores, 'core')} that {ranks} ranks of a host share, which compute "
                f"{100 * (1 - left):.0f} % of the time: no cut and no schedule gains {gain}")

    def _work_s(self, number: int) -> float:
        """Return the seconds that one of a stage's ranks works in a step, with a core to itself."""
        stage = self.plan.predicted.stages[number]
        share = self._microbatches / len(stage.ranks)
        flush = RegisteredSchedule.named(self.plan.schedule or "").flush
        updates = 1.0 if flush else share / (self.plan.update_every or 1)
        return share * stage.microbatch_s + updates * stage.step_s

    def _cuts(self) -> Iterator[str]:
        """Yield what one microbatch sends through the cuts between stages; equal cuts in a row together."""
        activations, cuts = self.profile.activations, list(accumulate(self.plan.partition))[:-1]
        groups = [list(group) for _, group in groupby(enumerate(cuts), lambda cut: activations.crossing(cut[1]))]
        said = []
        for group in groups:
            cut = group[0][1]
            tensors = [f"{tensor.name} {size_text(tensor.bytes)}" for tensor in activations.crossing(cut)]
            forward, back = activations.output_bytes(cut), activations.gradient_bytes(cut)
            said.append(f"{size_text(forward)} forward" + (" and back" if back == forward else
                                                           f", {size_text(back)} back")
                        + f" after {_numbered('stage', [stage for stage, _ in group])}"
                        + (f" ({', '.join(tensors)})" if len(tensors) > 1 else f" ({tensors[0].split()[0]})"))
        if said:
            yield f"sent by one microbatch: {'; '.join(said)}"

    def _delay(self) -> Iterator[str]:
        """Yield the delay of gradients without a flush, and a warning where it costs much."""
        name, microbatches = self.plan.schedule or "", self._microbatches
        if RegisteredSchedule.named(name).flush:
            return
        schedule = build(name, self.plan.groups, microbatches, self.plan.update_every, warmup=self.plan.warmup)
        count = self.plan.microbatches or microbatches
        advice = Advice(schedule, count, count * self.profile.identity.microbatch_size,
                        ("training.num_microbatches", "parallel.update_every"))
        if advice.delays is None:
            return
        better, warning = advice.fewer_updates, advice.late_gradients()
        yield f"{advice.delays}; less with {better}" if better and not warning else advice.delays
        if warning:
            yield f"warning: {warning}"


    def _zero1(self) -> Iterator[str]:
        """Yield why replicas share the optimizer's state, where they do."""
        if not self._shares:
            return
        found, without = self.plan.predicted, next((one for one in self.others if one.what == "no zero1"), None)
        why = "as the config says"
        if without is not None:
            why = "without it no plan fits" if without.seconds_per_sample is None else \
                f"without it a sample takes {without.seconds_per_sample / found.seconds_per_sample:.2f} times as long"
        yield f"zero1: each replica of a stage keeps the optimizer's state of a part of its parameters; {why}"


def depths_text(plan: Plan) -> str:
    """Return the forwards of every stage before its first backward: ``6 4 2 0``."""
    return " ".join(map(str, plan.warmup or ()))


def _layer_range(plan: Plan, number: int) -> str:
    stage = plan.predicted.stages[number]
    first = stage.first_layer
    return f"{first}-{first + stage.layers - 1}" if stage.layers > 1 else str(first)


def _numbered(word: str, numbers: Sequence[int]) -> str:
    return f"{word}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def times_table(plan: Plan, width: int) -> list[str]:
    """Return a row per stage: milliseconds of one microbatch, then of one rank in a step."""
    found = plan.predicted
    stages = found.stages
    again = [len(layers) for layers in plan.recomputed]
    times = [Column(head, [ms_text(getattr(stage, field)) for stage in stages]) for head, field in _TIMES.items()]
    busy = [1 - stage.idle_s / found.step_s for stage in stages]
    return columns([
        Column("stage", [str(number) for number in range(len(stages))]),
        Column("layers", [_layer_range(plan, number) for number in range(len(stages))]),
        Column("ranks" if any(len(stage.ranks) > 1 for stage in stages) else "rank",
               [_span(stage.ranks) for stage in stages]),
        *times[:2],
        Column("recompute", [f"{ms_text(stage.recompute_s)} ({count} of {stage.layers})" if count else "-"
                             for stage, count in zip(stages, again, strict=True)]),
        *times[2:],
        Column("busy", [f"{100 * share:.0f} %" for share in busy], spare=True),
        Column("", [bar(share) for share in busy], spare=True)], width)


def memory_table(plan: Plan, limit_bytes: int | None, width: int) -> list[str]:
    """Return a row per stage, or per group of stages that share ranks: the memory of one of its ranks at its peak.

    A rank with several stages works on one at a time.
    """
    groups = stages_by_ranks(plan)
    sums = [plan.predicted.held_by(group) for group in groups]
    peaks = [memory.peak for memory in sums]
    unit = next((name for name in reversed(_UNITS) if max(peaks) >= 10 * _UNITS[name]), "KiB")
    shares = [peak / (limit_bytes or max(peaks)) for peak in peaks]
    of_limit = Column("of limit", [f"{100 * share:.0f} %" for share in shares], spare=True)
    lines = columns([
        Column("stage" if all(len(group) == 1 for group in groups) else "stages",
               [listed(group) for group in groups]),
        *(Column(kind, [_in_unit(getattr(memory, kind) / _UNITS[unit]) for memory in sums]) for kind in _KINDS),
        *([] if limit_bytes is None else [of_limit]), Column("", [bar(share) for share in shares], spare=True)], width)
    return [f"memory of a rank when it holds most, in {unit}", *lines]


def _in_unit(value: float) -> str:
    return "0" if not value else f"{value:,.0f}" if value >= 999.5 else f"{value:.1f}"


def stages_by_ranks(plan: Plan) -> list[list[int]]:
    """Group stages by the ranks that hold them, in order of the first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, stage in enumerate(plan.predicted.stages):
        groups.setdefault(tuple(sorted(stage.ranks)), []).append(number)
    return list(groups.values())


def alternatives_table(best: Plan, others: Sequence[OtherPlan], width: int) -> list[str]:
    """Return the plan and others, by samples per second; below them those that are impossible, with the reason."""
    rate = 1 / best.predicted.seconds_per_sample
    rows = [("this plan", best, rate, True)]
    rows += [(other.what, other.plan, 1 / other.seconds_per_sample, other.simulated) for other in others
             if other.plan is not None and other.seconds_per_sample is not None]
    plans = [plan for _, plan, _, _ in rows]
    replicas = [_replicas_text(plan) for plan in plans]
    lines = columns([
        Column("", [what for what, _, _, _ in rows], left=True),
        Column("schedule", [plan.schedule or "" for plan in plans], left=True),
        Column("layers per stage", [cut_text(plan.partition, 24) for plan in plans], left=True),
        *([Column("replicas", replicas)] if set(replicas) != {"-"} else []),
        Column("m", [str(plan.microbatches) for plan in plans]),
        Column("recompute", [f"{count} of {sum(plan.partition)}" if (count := sum(map(len, plan.recomputed))) else "-"
                             for plan in plans]),
        Column("samples/s", [("" if simulated else "~") + compact(value) for _, _, value, simulated in rows]),
        Column("", ["" if plan is best else difference(value, rate) for _, plan, value, _ in rows]),
        Column("peak", [size_text(plan.predictions.fullest_rank[1]) if plan.predictions else "" for plan in plans],
               spare=True)], width)
    if not all(simulated for _, _, _, simulated in rows):
        lines.append("~ by the solver's formula, not simulated")
    reasons: dict[str, list[str]] = {}
    for other in others:
        if other.plan is None:
            reasons.setdefault(other.why, []).append(other.what)
    return lines + [line for why, names in reasons.items() for line in filled(f"{', '.join(names)}: {why}", width)]


def cut_text(partition: Sequence[int], room: int) -> str:
    """Return ``[2, 2, 2, 3]``; a long one in words."""
    text = str(list(partition))
    if len(text) <= room:
        return text
    low, high = min(partition), max(partition)
    return f"{len(partition)} stages of {low}" + (f"-{high}" if low < high else "")


def _replicas_text(plan: Plan) -> str:
    """Return ``-``, ``2 each``, or, where the schedule places copies of every stage by itself, ``2 copies``."""
    widths = list(map(len, plan.groups))
    copies = plan.copies
    text = _widths_text([width // copies for width in widths])
    return text if copies < 2 else f"{text}, {copies} copies".removeprefix("-, ")


def _widths_text(widths: Sequence[int]) -> str:
    if len(set(widths)) == 1:
        return "-" if widths[0] == 1 else f"{widths[0]} each" if len(widths) > 1 else str(widths[0])
    return "-".join(map(str, widths)) if len(widths) <= 8 else f"{min(widths)} to {max(widths)}"


def difference(value: float, of: float) -> str:
    """Return ``+4.2 %``."""
    percent = 100 * (value / of - 1)
    return "same" if abs(percent) < 0.05 else f"{percent:+.1f} %" if abs(percent) < 10 else f"{percent:+.0f} %"


def bar(share: float) -> str:
    """Return ``##########..........``."""
    full = round(BAR * min(1.0, max(0.0, share)))
    return "#" * full + "." * (BAR - full)


def _span(numbers: Sequence[int]) -> str:
    """Return ``0-3`` for ranks in a row."""
    first, last = numbers[0], numbers[-1]
    in_a_row = list(numbers) == list(range(first, last + 1)) and last > first + 1
    return f"{first}-{last}" if in_a_row else " ".join(map(str, numbers))
