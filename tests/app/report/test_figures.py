"""The figures of a run, the window they are of, and what stands beside them as planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_run import TIMES, make_run, write_metrics
from profile_by_hand import made_profile

from vpipe import Asynchronous, Cut, Order
from vpipe.app.report.figures import Figures, steady_window, step_ends, step_times, typical_window
from vpipe.app.report.idle_causes import Cause, Producers, time_slices
from vpipe.app.report.page import page
from vpipe.app.report.recording import Recording, read_recording
from vpipe.app.report.report_data import Totals, as_recording, load_report_data, repeat_batches, replay_medians
from vpipe.plan.plan import Plan
from vpipe.plan.prediction import predict
from vpipe.schedules.kinds import Action, Op


def even(rank: int, action: Action) -> float:
    return TIMES.get(action.op, 0.0)


def made(folder: Path, name: str = "1f1b", updates: int = 6, **options: object) -> Recording:
    return read_recording(make_run(folder / "run", name, updates=updates, **options))  # type: ignore[arg-type]


def test_steps_end_where_stage_0_steps(tmp_path: Path) -> None:
    run = made(tmp_path, updates=3)
    steps = [done.end_s for done in run.tracks[0].actions if done.op is Op.STEP]
    assert list(step_ends(run).values()) == steps
    assert list(step_ends(run)) == [0, 1, 2]


@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
def test_steps_end_where_the_first_stage_that_trains_steps(tmp_path: Path, name: str) -> None:
    run = made(tmp_path, name, updates=8, frozen=2)
    assert list(step_ends(run).values()) == [done.end_s for done in run.tracks[2].actions if done.op is Op.STEP]
    replayed = replay_medians(run, Producers.from_recording(run))
    assert replayed is not None
    assert {transfer.target for transfer in replayed.transfers if transfer.action.op is Op.SEND_B} == {2}


def test_the_first_steps_and_of_a_stream_the_last_are_not_measured(tmp_path: Path) -> None:
    run, stream = made(tmp_path / "a", updates=12), made(tmp_path / "b", "pipedream", updates=20)
    assert (steady_window(run).first, steady_window(run).steps) == (4, 8)
    assert (steady_window(stream).first, steady_window(stream).steps) == (5, 11)


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "pipedream_vertical_sync"])
@pytest.mark.parametrize("updates", [2, 12])
def test_a_run_that_goes_on_has_the_figures_of_one_that_began(tmp_path: Path, name: str, updates: int) -> None:
    """Only that its steps have the numbers of the whole run."""
    began, went_on = (made(tmp_path / str(done), name, updates, done=done, took=even) for done in (0, 36))
    assert list(step_ends(went_on)) == [36 + step for step in step_ends(began)]
    for window in (steady_window, lambda run: typical_window(run, 40)):
        assert window(went_on) == replace(window(began), first=window(began).first + 36)
    figures = [Figures.from_recording(run, Producers.from_recording(run)) for run in (began, went_on)]
    assert replace(figures[1], window=figures[0].window) == figures[0]
    plans = [replay_medians(run, Producers.from_recording(run)) for run in (began, went_on)]
    assert plans[0] is not None
    assert plans[1] == plans[0]


def test_a_window_of_usual_steps_is_drawn(tmp_path: Path) -> None:
    odd = {40: 0.3, 41: 0.3, 90: 0.3, **dict.fromkeys(range(48, 64), 0.001)}  # the sixth update slow, the next two fast
    run = made(tmp_path, updates=12, took=lambda rank, action: (
        odd.get(action.microbatch, 0.01) if action.op is Op.FORWARD else TIMES[action.op]))
    window = typical_window(run, 40)
    assert window.steps == 2
    assert window.span_s == pytest.approx(2 * steady_median(run), rel=0.01)


def steady_median(run: Recording) -> float:
    times = sorted(step_times(run))
    return times[len(times) // 2]


def test_a_step_of_very_many_actions_is_cut(tmp_path: Path) -> None:
    window = typical_window(made(tmp_path), 5)
    assert window.cut
    assert window.steps == 1


def test_steps_that_an_evaluation_interrupts_do_not_count(tmp_path: Path) -> None:
    run = made(tmp_path, updates=9, evaluation=True, took=even)
    assert max(step_times(run)) < 1
    assert not typical_window(run, 60).span_s > 4


@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_of_a_run_that_was_ended_only_what_all_ranks_recorded_is_measured(tmp_path: Path, kept: float) -> None:
    """Every record without an end, and one of them, of a rank that wrote earlier, shorter."""
    folder = make_run(tmp_path / "run", "pipedream", updates=60, took=even)
    whole = Figures.from_recording(read_recording(folder), Producers.from_recording(read_recording(folder)))
    for rank in range(4):
        file = folder / "trace" / f"rank{rank}.jsonl"
        lines = file.read_text().splitlines(keepends=True)[:-1]
        file.write_text("".join(lines[:int(len(lines) * (kept if rank == 2 else 1))]))
    run = read_recording(folder)
    ends = [track.actions[-1].end_s for track in run.tracks]
    figures = Figures.from_recording(run, Producers.from_recording(run))
    assert figures.window.end_s <= run.recorded_until_s == min(ends)
    assert figures.bubble == pytest.approx(whole.bubble, abs=0.02)
    for track, end_s in zip(run.tracks, ends, strict=True):
        assert list(time_slices(run, track, Producers.from_recording(run)))[-1].end_s == end_s
    first, second, *_ = load_report_data(folder, {}).notes
    assert first.startswith("The run did not end well, or is still going: the records of 4 of 4")
    last = 57 if kept == 1 else 27  # a step's end is on all ranks
    assert second == (f"The record holds up to step {last}, metrics.jsonl continues to step 59: the last seconds of a "
                      "rank were not recorded.")


def test_figures_of_even_stages(tmp_path: Path) -> None:
    run = made(tmp_path, took=even)
    figures = Figures.from_recording(run, Producers.from_recording(run))
    stage = figures.stages[1]
    assert (stage.forward_s, stage.backward_s, stage.weight_s, stage.update_s) == pytest.approx((0.01, 0.02, 0, 0.003))
    assert stage.kept_bytes == 3_000_000 + 8_000_000  # 3 microbatches in flight; weights, and the rest
    assert figures.samples_per_s == pytest.approx(32 / figures.step_s, rel=0.01)
    assert figures.bubble == pytest.approx(3 / 11, abs=0.03)  # (p - 1) / (m + p - 1)


def test_staleness_is_counted(tmp_path: Path) -> None:
    run = made(tmp_path, "pipedream", updates=12)
    figures = Figures.from_recording(run, Producers.from_recording(run))
    assert [stage.staleness for stage in figures.stages] == [3, 2, 1, 0]
    means = [stage.mean_delay for stage in figures.stages]
    assert means == [late - late * (late + 1) / 2 / 12 for late in (3, 2, 1, 0)]  # less while it fills


@pytest.mark.parametrize(("name", "slices"), [("1f1b", 1), ("pipedream", 1), ("zb_h1", 1), ("seq1f1b", 2)])
def test_a_run_without_noise_is_replayed_as_it_was(tmp_path: Path, name: str, slices: int) -> None:
    run = made(tmp_path, name, updates=12, took=even, slices=slices)
    assert len(step_ends(run)) == 12
    timeline = replay_medians(run, Producers.from_recording(run))
    assert timeline is not None
    again = as_recording(timeline, run)
    figures, replay = (Figures.from_recording(one, Producers.from_recording(one)) for one in (run, again))
    assert replay.step_s == pytest.approx(figures.step_s, rel=0.03)  # sending and gaps are not replayed
    assert replay.bubble == pytest.approx(figures.bubble, abs=0.02)


@pytest.mark.parametrize(("name", "stages"), [("1f1b", 4), ("zb_v", 8), ("pipedream", 4)])
def test_batches_in_a_row_take_what_was_predicted(tmp_path: Path, name: str, stages: int) -> None:
    plan = Plan(Cut((3,) * stages), Asynchronous(name, update_every=None if name != "pipedream" else 1), microbatches=8)
    predicted = predict(made_profile(3 * stages), plan)
    timeline = predicted.timeline if name == "pipedream" else repeat_batches(predicted.timeline, 6)
    run = as_recording(timeline, made(tmp_path, name))
    figures = Figures.from_recording(run, Producers.from_recording(run))
    assert figures.step_s == pytest.approx(predicted.prediction.step_s)


@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
def test_replicas_that_are_simulated_wait_for_known_causes(tmp_path: Path, name: str) -> None:
    placement = ((0, 1), (2,))
    plan = Plan(Cut((3, 3), ranks=placement), Asynchronous(name, update_every=1 if name == "pipedream" else None),
                microbatches=6)
    timeline = predict(made_profile(6), plan).timeline
    run = as_recording(timeline if name == "pipedream" else repeat_batches(timeline, 6), made(tmp_path, name))
    figures = Figures.from_recording(run, Producers.from_recording(run))
    assert run.placement == placement
    causes = {cause for rank in figures.ranks for cause, seconds in rank.idle.items() if seconds}
    assert Cause.UNKNOWN not in causes
    assert causes & {Cause.SCHEDULE, Cause.TRANSFER}


def test_without_a_profile_the_runs_own_medians_stand_there_and_it_is_said(tmp_path: Path) -> None:
    evidence = load_report_data(make_run(tmp_path / "run", updates=4), {})
    assert evidence.expected is not None
    assert evidence.expected.plan is None
    assert "there is no profile.json" in evidence.expected.basis


def test_a_profile_of_another_model_does_not_serve_and_it_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=4)
    made_profile(7).save(folder / "profile.json")
    evidence = load_report_data(folder, {})
    assert evidence.expected is not None
    assert evidence.expected.plan is None
    assert evidence.notes == ("The plan cannot be simulated: the plan is for 12 layers, but the profile is of a model "
                              "of 7.",)


def test_a_plan_for_other_ranks_is_left_aside_and_it_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=4)
    made_profile(12).save(folder / "profile.json")
    Plan(Cut((6, 6)), Order("1f1b"), microbatches=8).save(folder / "plan.json")
    evidence = load_report_data(folder, {})
    assert evidence.expected is not None
    assert evidence.expected.recording.placement == evidence.recording.placement
    assert evidence.notes == ("plan.json is for 2 stages on 2 ranks, the run had 4 stages on 4 ranks: it is left "
                              "aside.",)


@pytest.mark.parametrize(("name", "slices"), [("1f1b", 1), ("seq1f1b", 4)])
def test_a_profile_gives_the_plan(tmp_path: Path, name: str, slices: int) -> None:
    folder = make_run(tmp_path / "run", name, updates=4, took=even, slices=slices)
    made_profile(12).save(folder / "profile.json")
    evidence = load_report_data(folder, {})
    assert evidence.expected is not None
    assert evidence.expected.plan is not None
    assert evidence.expected.figures.step_s == pytest.approx(evidence.expected.plan.predicted.step_s)
    assert evidence.expected.figures.bubble == pytest.approx(evidence.expected.plan.predicted.bubble, abs=0.01)


def totals(folder: Path) -> Totals:
    evidence = load_report_data(folder, {})
    return evidence.totals


SUMMARY = {"samples_per_s": 7.5, "tokens_per_s": 75.0, "step_median_s": 0.25, "bubble": 0.375, "mfu": 1.25, "hfu": 1.5,
           "memory_bytes": 5 << 20, "peak_is": "2 devices x 1 TFLOP/s", "doubt": "the MFU of 125 % cannot be"}


def test_the_headline_is_what_the_run_said_at_its_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=6)
    write_metrics(folder, 6, SUMMARY)
    assert totals(folder) == Totals(7.5, 75.0, 0.25, 0.375, 1.25, 1.5, 5 << 20, "2 devices x 1 TFLOP/s",
                                    "the MFU of 125 % cannot be")
    assert load_report_data(folder, {}).notes == ("The MFU of 125 % cannot be.",)


def test_a_bubble_that_the_run_did_not_know_is_not_made_up(tmp_path: Path) -> None:
    """Over nccl the host does not see how long a rank waits."""
    folder = make_run(tmp_path / "run", updates=6)
    write_metrics(folder, 6, SUMMARY | {"bubble": None})
    assert totals(folder).bubble is None
    assert '<dt>bubble</dt><dd class="big">-</dd>' in page(load_report_data(folder, {}))


def test_the_headline_of_a_run_without_an_end_follows_from_its_updates(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=6)
    write_metrics(folder, 6, SUMMARY)
    with (folder / "metrics.jsonl").open("a") as file:  # an attempt that went on, and was ended
        file.writelines(json.dumps({"step": step, "loss": 1.0, "time_s": 1.0 + step, "step_s": seconds,
                                    "samples_per_s": 6 / seconds, "tokens_per_s": 60 / seconds, "mfu": 0.6 / seconds,
                                    "hfu": 0.6 / seconds}) + "\n" for step, seconds in ((6, 1.0), (7, 3.0)))
    found = totals(folder)
    # the four updates of 0.3 s that count, and these two
    assert found.samples_per_s == pytest.approx((4 * 0.3 * 20 + 2 * 6) / (4 * 0.3 + 4))
    assert found.mfu == found.hfu == pytest.approx((4 * 0.3 * 0.5 + 2 * 0.6) / (4 * 0.3 + 4))
    assert found.step_s == 0.3
    assert found.bubble == load_report_data(folder, {}).figures.bubble
    assert (found.memory_bytes, found.doubt) == (None, None)


def test_without_metrics_the_recording_says_what_it_can(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=6)
    (folder / "metrics.jsonl").unlink()
    found, figures = totals(folder), load_report_data(folder, {}).figures
    assert (found.samples_per_s, found.step_s, found.bubble) == (figures.samples_per_s, figures.step_s, figures.bubble)
    assert (found.tokens_per_s, found.mfu, found.hfu) == (None, None, None)


def test_a_summary_that_is_none_is_damage(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=6)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "evaluation_loss_averaged": 1.0, "time_s": 3.0}\n{"step": 9, "summary": [1]}\n')
    assert load_report_data(folder, {}).notes == (
        "Of metrics.jsonl 1 line is damaged and left out, the first is line 10.",)
