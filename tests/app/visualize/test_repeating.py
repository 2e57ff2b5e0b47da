"""What is proved and simulated by a short schedule is the listed one, action by action and to the last digit."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from vpipe.app.cli import main
from vpipe.app.visualize.repeating import Repeating
from vpipe.app.visualize.summary import RankCosts
from vpipe.errors import CheckError, UserError
from vpipe.schedules import registry
from vpipe.schedules.assignment import Placement, widened
from vpipe.schedules.builder import build
from vpipe.schedules.checker import check
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.timeline import simulate

FIXED = [recipe for recipe in RegisteredSchedule.imported() if recipe.search is None]
TIMES = st.sampled_from([1, 2, 3, Fraction(1, 2), Fraction(7, 3)])
COSTS = st.builds(RankCosts, TIMES, TIMES, TIMES, st.sampled_from([0, 0, Fraction(1, 3), 1, 2]),
                  st.sampled_from([0, 0, 1]))


def same_as_listed(recipe: RegisteredSchedule, placement: Placement, microbatches: int, costs: RankCosts,
                   update_every: int | None = None) -> bool:
    """Compare a schedule that repeats with the listed one; return whether it is seen to repeat."""
    found = Repeating.find(recipe.name, placement, microbatches, costs.of(placement), update_every)
    if found is None:
        return False
    whole = build(recipe.name, placement, microbatches, update_every)
    check(whole)
    timeline, own = simulate(whole, costs.of(placement)), found.timeline
    assert [tuple(pattern.repeated(found.copies)) for pattern in found.patterns] == list(whole.programs)
    assert (own.makespan_s, own.bubble_s, own.bubble_share, own.idle_s, own.work_s) == (
        timeline.makespan_s, timeline.bubble_s, timeline.bubble_share, timeline.idle_s, timeline.work_s)
    assert (found.rank_peaks, found.stage_peaks) == (whole.rank_peaks, whole.stage_peaks)
    begin, end = found.left_out_s
    for shown, listed in zip(own.events, timeline.events, strict=True):
        later = [event for event in listed if event.start_s >= end or event.end_s > end]
        assert list(shown) == [*(event for event in listed if event.start_s < begin), *later]
    mine, theirs = found.schedule, whole
    assert (mine.microbatches, mine.update_every, mine.peak_activations, mine.versions, mine.warmup) == (
        theirs.microbatches, theirs.update_every, theirs.peak_activations, theirs.versions, theirs.warmup)
    return True


@given(st.sampled_from(FIXED), st.integers(1, 5), st.integers(1, 3), st.integers(1, 60), COSTS, st.integers(1, 3),
       st.sampled_from([None, 2, 4, 6]))
@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_a_repeating_schedule_equals_the_listed_one(recipe: RegisteredSchedule, ranks: int, chunks: int,
                                                    microbatches: int,
                                                    costs: RankCosts, replicas: int, update_every: int | None) -> None:
    if not recipe.any_chunks:
        chunks = recipe.chunks
    placement = widened(recipe.layout(ranks, chunks), replicas)
    with suppress(UserError):  # of sizes that the schedule cannot have
        build(recipe.name, placement, microbatches, None if recipe.flush else update_every)
        same_as_listed(recipe, placement, microbatches, costs, None if recipe.flush else update_every)
        return
    assume(False)


@pytest.mark.parametrize(("name", "bubble"), [
    ("1f1b", 9), ("zb_h1", 3), ("interleaved", Fraction(9, 2)), ("pipedream", 9)])
def test_a_bubble_has_its_closed_form_at_any_number_of_microbatches(name: str, bubble: Fraction) -> None:
    recipe = RegisteredSchedule.named(name)
    placement = recipe.layout(4, recipe.chunks)
    found = Repeating.find(name, placement, 3_000, RankCosts().of(placement))
    assert found is not None
    assert (found.timeline.bubble_s, found.schedule.microbatches) == (bubble, 3_000)
    assert found.timeline.work_s == (9_000,) * 4
    assert found.short.microbatches < 150


def test_times_that_drift_apart_do_not_repeat() -> None:
    placement = RegisteredSchedule.named("gpipe").layout(3)
    assert Repeating.find("gpipe", placement, 500, RankCosts(transfer_s=1).of(placement)) is not None
    # the link falls behind
    assert Repeating.find("gpipe", placement, 500, RankCosts(transfer_s=2).of(placement)) is None


def registered(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> None:
    """Change a recipe, for a test."""
    monkeypatch.setitem(registry._REGISTERED, name, replace(RegisteredSchedule.named(name), **changes))


def test_a_pattern_that_changes_at_some_size_is_not_taken_for_one_that_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule may be 1F1B for few microbatches and GPipe for many: the wanted size is compared."""
    one, other = RegisteredSchedule.named("1f1b").program, RegisteredSchedule.named("gpipe").program
    placement = RegisteredSchedule.named("1f1b").layout(3)
    registered(monkeypatch, "1f1b", peak_activations=lambda rank, size: size.microbatches,
               program=lambda rank, ranks, microbatches: (other if microbatches > 100 and rank == 1 else one)(
                   rank, ranks, microbatches))
    assert Repeating.find("1f1b", placement, 100, RankCosts().of(placement)) is not None
    assert Repeating.find("1f1b", placement, 101, RankCosts().of(placement)) is None


def test_a_peak_above_what_is_stated_for_the_wanted_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = RegisteredSchedule.named("gpipe").layout(3)
    registered(monkeypatch, "gpipe", peak_activations=lambda rank, size: min(size.microbatches, 50))
    with pytest.raises(CheckError, match="rank 0 holds the activations of 60 microbatch-stages; the schedule states at "
                                         "most 50"):
        Repeating.find("gpipe", placement, 60, RankCosts().of(placement))


def test_versions_above_what_is_stated_for_the_wanted_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = RegisteredSchedule.named("pipedream").layout(3)
    registered(monkeypatch, "pipedream", versions=lambda rank, size: 3 if size.microbatches < 60 else 2)
    with pytest.raises(CheckError, match="stage 0 holds 3 weight versions; the schedule states at most 2"):
        Repeating.find("pipedream", placement, 60, RankCosts().of(placement))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a schedule of 2,500 forwards and backwards be too long to list."""
    monkeypatch.setattr(Schedule, "MOST_ACTIONS", 2_500)


def test_the_beginning_and_the_end_are_printed(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "pipedream", "--ranks", "3", "--microbatches", "5000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pipedream: 3 ranks, 5000 microbatches, no flush, an update every microbatch"
    assert lines[1].startswith("bubble 6 (0.0 %), makespan 15006")
    assert re.fullmatch(r"rank 0  F0 +F1 +F2 .* ~ .*B4999-*S", lines[3])
    assert lines[4].endswith("v4997")
    assert re.fullmatch(r"rank 2  \.+F0 +B0-+SF1 .* ~ .*B4999-*S", lines[7])
    assert any("are left out, in which the ranks repeat 4,962 times what they do for 1 microbatch" in line
               for line in lines)
    assert [line.split() for line in lines[-4:-1]] == [
        ["0", "0", "3", "3", "2", "6"], ["1", "1", "2", "2", "1", "3"], ["2", "2", "1", "1", "0", "0"]]


def test_the_beginning_and_the_end_are_drawn(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", "--ranks", "3", "--microbatches", "5000", "--format", "svg"]) == 0
    root = ElementTree.fromstring(capsys.readouterr().out)
    said = [text for text in root.itertext() if text.strip()]
    assert {"F0, 0 to 1", "0F0, 0 to 1"} & set(said)
    assert "2STEP0 at 15002" in said
    assert any(re.fullmatch(r"\.\.\.: times \S+ to \S+ of 15006 are left out, .*", text) for text in said)
    width = float(root.attrib["width"])
    assert all(0 <= float(each.get("x", "0")) <= width for each in root.iter() if each.tag.endswith("rect"))


@pytest.mark.parametrize(("arguments", "what"), [
    (["1f1b", "--format", "csv"], "which --format csv lists one by one,"),
    (["1f1b", "--format", "json"], "which --format json lists one by one,"),
    (["auto"], "which 'auto' searches one by one,"),
    (["1f1b", "--ranks", "2000"], "in no short part of which '1f1b' is seen to repeat itself at these costs,")])
def test_listed_schedules_keep_their_limit_of_actions(arguments: list[str], what: str,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--ranks", "4", "--microbatches", "60000", *arguments]) == 2
    told = capsys.readouterr().err
    assert re.search(rf"error: \d+ ranks and 60000 microbatches, {re.escape(what)} are [\d,]+ forwards and backwards\n"
                     "hint: stay below 250,000: use fewer microbatches, stages or replicas", told)
