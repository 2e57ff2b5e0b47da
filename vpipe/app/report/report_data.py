"""Gather the data of a report: the run, and beside it the expected run, by its plan or by the run's own medians.

The expected run is simulated and has the form of a recording, so that the same code computes the figures of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

from vpipe import Cut, Order, Plan
from vpipe.app.metric_formulas import counted_updates
from vpipe.app.report.figures import Figures, Points, step_ends
from vpipe.app.report.idle_causes import Cause, Producers, medians, time_slices
from vpipe.app.report.line_chart import is_drawable
from vpipe.app.report.recording import Recording, Track, is_number, read_recording
from vpipe.app.run_log import METRICS, Line, RunLog, mean_figure, number
from vpipe.errors import CheckError, UserError, counted
from vpipe.plan import Profile, predict
from vpipe.schedules import Action, Costs, RecordedAction, Schedule, Timeline, kinds, simulate


@dataclass(frozen=True)
class History:
    """The content of ``metrics.jsonl``.

    Attributes:
        losses: (step, loss) in training; of a run that diverged some are no numbers.
        evaluations: (step, loss).
        lines: of the steps, as they are in the file.
        summary: the run's summary; None where the last attempt did not end.
        notes: sentences for the reader of the report.
    """

    losses: Points = ()
    evaluations: Points = ()
    lines: Sequence[Line] = ()
    summary: Line | None = None
    notes: tuple[str, ...] = ()


def read_history(folder: Path) -> History:
    """Return the metrics of the run in ``folder``; empty where there is no such file.

    Raises:
        UserError: the file cannot be read.
    """
    losses, evaluations, updates, notes = [], [], list[Line](), list[str]()
    summary, damaged, broken_off = None, list[int](), False
    for at, (text, entry) in enumerate(RunLog(folder).entries(), 1):
        if entry is None or not _is_whole(entry):
            damaged.append(at)
            broken_off = not text.endswith("\n")
            continue
        summary = entry.get("summary")  # the last line, where the run has ended
        if "loss" in entry:
            losses.append((entry["step"], number(entry, "loss")))
            updates.append(entry)
        elif "evaluation_loss" in entry:
            evaluations.append((entry["step"], number(entry, "evaluation_loss")))
    if not (folder / METRICS).exists():
        notes.append("There is no metrics.jsonl, so no losses and no tokens per second.")
    if damaged and broken_off:
        notes.append(f"metrics.jsonl breaks off in line {damaged.pop()}: the run was ended, or is still going.")
    if damaged:
        notes.append(f"Of metrics.jsonl {counted(len(damaged), 'line')} {'is' if len(damaged) == 1 else 'are'} damaged "
                     f"and left out, the first is line {damaged[0]}.")
    if wrong := [step for step, loss in (*losses, *evaluations) if not is_drawable(loss)]:
        notes.append(f"Of {counted(len(losses) + len(evaluations), 'loss')} {len(wrong):,} "
                     f"{'is no number' if len(wrong) == 1 else 'are no numbers'} (infinite or NaN), the first in "
                     f"step {min(wrong):,.0f}. The charts leave them out.")
    return History(losses, evaluations, updates, summary, tuple(notes))


def _is_whole(entry: Line) -> bool:
    """Return whether a line has what charts need of it; a loss that was not finite is null."""
    needed = ["step"] + ["time_s"] * ("evaluation_loss" in entry) + ["time_s", "tokens_per_s"] * ("loss" in entry)
    return all(is_number(entry.get(key)) for key in needed) and isinstance(entry.get("summary"), dict | None)


@dataclass(frozen=True)
class Totals:
    """The figures that docs/metrics.md defines, as far as they are known.

    Attributes:
        samples_per_s, tokens_per_s: over all counted updates.
        step_s: median of one.
        bubble, mfu, hfu: shares; None where they are unknown, such as the bubble over nccl, or in one process.
        memory_bytes: of the fullest rank.
        peak: the peak that ``mfu`` and ``hfu`` are shares of, as text.
        doubt: the reason why they cannot be right, if there is one.
    """

    samples_per_s: float
    tokens_per_s: float | None
    step_s: float
    bubble: float | None
    mfu: float | None
    hfu: float | None
    memory_bytes: float | None
    peak: str | None
    doubt: str | None

    @classmethod
    def from_history(cls, history: History, figures: Figures) -> Totals:
        """Take the figures of the run's summary, else of its updates' lines, else of the recording."""
        summary = history.summary or {}
        lines = [line for line in history.lines if is_number(line.get("step_s")) and line["step_s"] > 0]
        update_s = counted_updates([line["step_s"] for line in lines])
        lines = lines[len(lines) - len(update_s):]

        def figure(key: str, otherwise: float | None = None) -> float | None:
            if key in summary:
                return float(summary[key]) if is_number(summary[key]) else None
            return otherwise if isnan(of_lines := mean_figure(lines, key)) else of_lines

        samples_per_s, bubble = figure("samples_per_s", figures.samples_per_s), figure("bubble", figures.bubble)
        step_s = figure("step_median_s", median(update_s) if update_s else figures.step_s)
        assert samples_per_s is not None, "the recording has one"
        assert step_s is not None, "the recording has one"
        return cls(samples_per_s, figure("tokens_per_s"), step_s, bubble, figure("mfu"), figure("hfu"),
                   figure("memory_bytes"), *(text if isinstance(text := summary.get(key), str) else None
                                             for key in ("peak_is", "doubt")))


_LONGEST = 24  # steps that are simulated
_IN_A_ROW, _FEWEST, _ACTIONS = 8, 4, 60_000  # simulated batches of a schedule with a flush; so many actions are quick


def as_recording(timeline: Timeline, like: Recording) -> Recording:
    """Return a simulated timeline as a recording with the sizes of another; idle ranks wait for their next action."""
    schedule, tracks = timeline.schedule, []
    for rank, events in enumerate(timeline.events):
        ends = pairwise([0.0, *(float(event.end_s) for event in events)])
        tracks.append(Track(rank, "", [
            RecordedAction(*event.action, before, end, max(0.0, float(event.start_s) - before), 0, 0)
            for event, (before, end) in zip(events, ends, strict=True)]))
    return replace(like, schedule=schedule.name, placement=schedule.placement, flush=schedule.flush,
                   microbatches=schedule.update_every // schedule.slices if schedule.flush else like.microbatches,
                   update_every=schedule.update_every, tracks=tuple(tracks), notes=(), slices=schedule.slices)


def repeat_batches(timeline: Timeline, batches: int) -> Timeline:
    """Return the timeline of so many batches of a schedule with a flush, where ``timeline`` is of one."""
    schedule = timeline.schedule
    count = schedule.microbatches
    programs = [[action._replace(index=action.index + batch * (count if action.op.per_microbatch else 1))
                 for batch in range(batches) for action in program] for program in schedule.programs]
    return simulate(replace(schedule.with_programs(programs), microbatches=batches * count), timeline.costs)


def replay_medians(recording: Recording, producers: Producers) -> Timeline | None:
    """Simulate the recorded order of actions at the run's own medians: the run without stragglers.

    None where not even one step was recorded whole.
    """
    ends, assignment = step_ends(recording), recording.dependencies.assignment
    first = min(ends, default=0)
    steps = next((number for number in range(len(ends)) if first + number not in ends), len(ends))
    steps = min(steps, max(_LONGEST, 3 * len(recording.placement)))
    if not steps:
        return None
    before = first * assignment.per_step  # microbatches, or slices, of earlier attempts of the run
    last = steps * assignment.per_step

    def taken(done: RecordedAction) -> int:
        return 1 if done.op.per_microbatch else assignment.per_update(done.stage)

    programs = [[Action(done.op, done.stage, done.number - before // taken(done)) for done in track.actions
                 if done.op.takes_time and (done.number + 1) * taken(done) <= before + last]
                for track in recording.tracks]
    ranks, stages = len(programs), len(recording.placement)
    schedule = Schedule(recording.schedule, recording.placement, tuple(map(tuple, programs)), last,
                        assignment.update_every, recording.flush, (last * stages,) * ranks, (last + 1,) * stages, {},
                        frozen=recording.frozen, slices=recording.slices)
    return simulate(schedule, _median_costs(recording, producers, schedule.recomputed_stages))


def _median_costs(recording: Recording, producers: Producers, early: set[int]) -> Costs:
    usual = medians(recording)

    def stage(number: int) -> dict[str, float]:
        def of(trait: str) -> float:
            return usual.get((number, kinds.having(trait)), 0.0)

        whole, split = of("whole_backward"), (number, kinds.having("first_half")) in usual
        halves = (of("first_half"), of("second_half")) if split else (whole, 0.0)
        return {"forward_s": of("uses_version"), "input_s": halves[0], "weight_s": halves[1],
                "recompute_s": of("recomputation") if number in early else 0.0, "step_s": of("makes_version")}

    waits = [piece.end_s - piece.start_s for track in recording.tracks
             for piece in time_slices(recording, track, producers) if piece.cause is Cause.TRANSFER]
    costs = Costs.of_stages(map(stage, range(len(recording.placement))), {
        (kind, number): seconds for (number, kind), seconds in usual.items() if kind.host_bytes or not kind.is_own})
    return costs.with_transfers(median(waits) if waits else 0.0)


@dataclass(frozen=True)
class ExpectedRun:
    """The run as it was expected.

    Attributes:
        recording, producers, figures: of the simulated run.
        plan: with the prediction of it; None where the simulation uses the run's own durations.
        memory: per rank the planned curve (second, bytes); empty without a plan.
        basis: a sentence on what was simulated.
    """

    recording: Recording
    producers: Producers
    figures: Figures
    plan: Plan | None
    memory: Sequence[Points]
    basis: str


@dataclass(frozen=True)
class ReportData:
    """The data of a report.

    Attributes:
        name: of the run's folder.
        config: the resolved config; empty where the run has none.
        recording, producers, history: of the run.
        figures: of the steady part of the recording.
        totals: of the whole run.
        expected: None where nothing can be simulated.
        notes: sentences for the reader of the report.
    """

    name: str
    config: Mapping[str, Any]
    recording: Recording
    producers: Producers
    figures: Figures
    history: History
    totals: Totals
    expected: ExpectedRun | None
    notes: Sequence[str]


def load_report_data(folder: Path, config: Mapping[str, Any], say: Callable[[str], None] = lambda text: None,
                     lane: int = 0) -> ReportData:
    """Read the run in ``folder``, and simulate what was expected of it.

    Args:
        config: of the run, as plain values; empty where it has none.
        say: called with lines of progress.
        lane: of those of the run, whose timeline it is.

    Raises:
        UserError: there is no such run, it was not recorded, or a file is damaged.
    """
    recording, history = read_recording(folder, say, lane), read_history(folder)
    notes = [*recording.notes, *history.notes, *_unwritten(recording, history)]
    say("working out why ranks were idle")
    producers = Producers.from_recording(recording)
    figures = Figures.from_recording(recording, producers)
    profile = Profile.load(path) if (path := folder / "profile.json").is_file() else None
    plan = Plan.load(path) if (path := folder / "plan.json").is_file() else None
    say("simulating what was to be expected")
    expected, expected_notes = _expected(recording, producers, profile, plan)
    totals = Totals.from_history(history, figures)
    if totals.doubt is not None:
        notes.append(f"{totals.doubt[0].upper()}{totals.doubt[1:]}.")
    return ReportData(folder.resolve().name, config, recording, producers, figures, history, totals, expected,
                      (*notes, *expected_notes))


def _unwritten(recording: Recording, history: History) -> Iterator[str]:
    """Yield a note on steps of an ended run that only the metrics have: a rank writes its record every few seconds."""
    if not (history.losses and any(track.broken_off for track in recording.tracks)):
        return
    recorded, logged = max(step_ends(recording), default=-1), max(step for step, _ in history.losses)
    if logged > recorded:
        reached = f"up to step {recorded:,}" if recorded >= 0 else "not one whole step"
        yield (f"The record holds {reached}, metrics.jsonl continues to step {logged:,.0f}: the last seconds of a rank "
               "were not recorded.")


def _expected(recording: Recording, producers: Producers, profile: Profile | None,
              plan: Plan | None) -> tuple[ExpectedRun | None, list[str]]:
    """Return the expected run, and notes on it."""
    notes: list[str] = []
    stages, ranks = len(recording.placement), len(recording.tracks)
    if plan is not None and (len(plan.partition) != stages or plan.ranks != ranks):
        notes.append(f"plan.json is for {counted(len(plan.partition), 'stage')} on {counted(plan.ranks, 'rank')}, the "
                     f"run had {counted(stages, 'stage')} on {counted(ranks, 'rank')}: it is left aside.")
        plan = None
    if profile is not None:
        try:
            return _of_profile(recording, profile, plan), notes
        except UserError as error:
            notes.append(f"The plan cannot be simulated: {error.problems[0].what}.")
    try:
        timeline = replay_medians(recording, producers)
    except CheckError:
        return None, [*notes, "The recorded order of actions cannot be simulated: actions are missing from it."]
    if timeline is None:
        return None, [*notes, "There is no expected run to compare with: no whole step was recorded."]
    why = "there is no profile.json to simulate" if profile is None else "its profile.json does not serve"
    return _made(recording, timeline, None,
                 "At medians: the run's own order of actions, each at its median duration. It shows what waiting and "
                 f"stragglers cost, not how good a prediction was ({why})."), notes


def _of_profile(recording: Recording, profile: Profile, plan: Plan | None) -> ExpectedRun:
    basis = "As planned: plan.json, simulated at the costs in profile.json."
    if plan is None:
        basis = "As planned: the run's partition and schedule, simulated at the costs in profile.json."
        plan = Plan(Cut(recording.partition, recording.recomputed, recording.placement),
                    Order(recording.schedule, slices=recording.slices))
    predicted = predict(profile, plan, schedule=recording.schedule, microbatches=recording.microbatches,
                        update_every=None if recording.flush else recording.update_every)
    return _made(recording, predicted.timeline, replace(plan, predictions=predicted.prediction), basis)


def _made(recording: Recording, timeline: Timeline, plan: Plan | None, basis: str) -> ExpectedRun:
    schedule = timeline.schedule
    if schedule.flush and schedule.microbatches == schedule.update_every:
        timeline = repeat_batches(timeline, max(_FEWEST, min(_IN_A_ROW, _ACTIONS // sum(map(len, schedule.programs)))))
    simulated = as_recording(timeline, recording)
    producers = Producers.from_recording(simulated, simulated=True)
    memory: list[Points] = []
    if plan is not None:
        static = Counter[int]()
        for stage in plan.predicted.stages:
            for rank in stage.ranks:
                static[rank] += stage.memory.gradients + stage.memory.optimizer
        for rank, curve in enumerate(timeline.memory):  # of equal seconds the last
            memory.append(sorted({float(second): float(held) + static[rank] for second, held in curve}.items()))
    return ExpectedRun(simulated, producers, Figures.from_recording(simulated, producers), plan, memory, basis)
