"""All that a report is made from: the run, and beside it what was to be expected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vpipe.errors import CheckError, UserError, counted
from vpipe.plan.plan import Plan, Prediction
from vpipe.plan.predict import predict
from vpipe.plan.profile import Profile
from vpipe.report.causes import Producers
from vpipe.report.figures import Figures
from vpipe.report.history import History, read_history
from vpipe.report.planned import as_recording, in_a_row, planned_memory, replayed
from vpipe.report.recorded import Recording, read_recording
from vpipe.report.steady import step_ends
from vpipe.report.totals import Totals
from vpipe.schedules.simulator.timeline import Timeline

_IN_A_ROW, _FEWEST, _ACTIONS = 8, 4, 60_000  # simulated batches of a schedule with a flush; so many actions are quick


@dataclass(frozen=True)
class Expected:
    """What was to be expected of the run.

    Attributes:
        recording: a simulated run.
        producers: in it.
        figures: of it.
        prediction: of the plan; None where the run's own durations are all there is.
        memory: per rank the planned curve (second, bytes); empty without a prediction.
        basis: what it is made from, as a sentence.
    """

    recording: Recording
    producers: Producers
    figures: Figures
    prediction: Prediction | None
    memory: Sequence[Sequence[tuple[float, float]]]
    basis: str


@dataclass(frozen=True)
class Evidence:
    """See the top of the page.

    Attributes:
        name: of the run's folder.
        config: as it was resolved, as far as it was read.
        recording, producers, history: of the run.
        figures: of the steady part of the recording.
        totals: of the whole run.
        expected: None where nothing can be simulated.
        notes: what a reader has to know, as sentences.
    """

    name: str
    config: Mapping[str, Any]
    recording: Recording
    producers: Producers
    figures: Figures
    history: History
    totals: Totals
    expected: Expected | None
    notes: Sequence[str]


def gather(folder: Path, config: Mapping[str, Any], say: Callable[[str], None] = lambda text: None) -> Evidence:
    """Everything about the run in ``folder``.

    Args:
        config: of the run, as plain values; empty where it has none.
        say: told what is being done.

    Raises:
        UserError: there is no such run, it was not recorded, or a file is damaged.
    """
    recording, history = read_recording(folder, say), read_history(folder)
    notes = [*recording.notes, *history.notes, *_unwritten(recording, history)]
    say("working out why ranks were idle")
    producers = Producers.of(recording)
    figures = Figures.of(recording, producers)
    profile = Profile.load(path) if (path := folder / "profile.json").is_file() else None
    plan = Plan.load(path) if (path := folder / "plan.json").is_file() else None
    say("simulating what was to be expected")
    expected, said = _expected(recording, producers, profile, plan)
    totals = Totals.of(history, figures)
    if totals.doubt is not None:
        notes.append(f"{totals.doubt[0].upper()}{totals.doubt[1:]}.")
    return Evidence(folder.resolve().name, config, recording, producers, figures, history, totals, expected,
                    (*notes, *said))


def _unwritten(recording: Recording, history: History) -> Iterator[str]:
    """How much more the metrics know of a run that was ended: a rank writes its record down every few seconds."""
    if not (history.losses and any(track.broken_off for track in recording.tracks)):
        return
    recorded, logged = max(step_ends(recording), default=-1), max(step for step, _ in history.losses)
    if logged > recorded:
        reached = f"up to step {recorded:,}" if recorded >= 0 else "not one whole step"
        yield (f"The record holds {reached}, metrics.jsonl goes on to step {logged:,.0f}: what a rank did in its last "
               "seconds was not written down.")


def _expected(recording: Recording, producers: Producers, profile: Profile | None,
              plan: Plan | None) -> tuple[Expected | None, list[str]]:
    """What was to be expected, and what is to be said of it."""
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
        timeline = replayed(recording, producers)
    except CheckError:
        return None, [*notes, "The recorded order of actions cannot be simulated: actions are missing from it."]
    if timeline is None:
        return None, [*notes, "Nothing is planned beside the run: no whole step was recorded."]
    why = "There is no profile.json" if profile is None else "The profile does not serve"
    return _made(recording, timeline, None,
                 f"{why}, so what stands here as planned is the run's own order of actions with every action at its "
                 "median duration: it shows what waiting and stragglers cost, not how good a prediction was."), notes


def _of_profile(recording: Recording, profile: Profile, plan: Plan | None) -> Expected:
    basis = "As planned: plan.json, simulated at the costs in profile.json."
    if plan is None:
        basis = "As planned: the run's partition and schedule, simulated at the costs in profile.json."
        plan = Plan(recording.partition, stage_to_rank_map=recording.placement, schedule=recording.schedule,
                    recompute_layers=recording.recomputed)
    predicted = predict(profile, plan, schedule=recording.schedule, microbatches=recording.microbatches,
                        update_every=None if recording.flush else recording.update_every)
    return _made(recording, predicted.timeline, predicted.prediction, basis)


def _made(recording: Recording, timeline: Timeline, prediction: Prediction | None, basis: str) -> Expected:
    schedule = timeline.schedule
    if schedule.flush and schedule.microbatches == schedule.update_every:
        timeline = in_a_row(timeline, max(_FEWEST, min(_IN_A_ROW, _ACTIONS // sum(map(len, schedule.programs)))))
    simulated = as_recording(timeline, recording)
    producers = Producers.of(simulated, simulated=True)
    memory: list[list[tuple[float, float]]] = []
    if prediction is not None:
        static = [0.0] * schedule.ranks
        for stage in prediction.stages:
            for rank in stage.ranks:
                static[rank] += stage.memory.gradients + stage.memory.optimizer
        memory = planned_memory(timeline, static)
    return Expected(simulated, producers, Figures.of(simulated, producers), prediction, memory, basis)
