"""The figures of a comparison, its table and its picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace

import pytest

from vpipe.compare.outcome import Comparison, Outcome, smoothed
from vpipe.compare.picture import draw
from vpipe.compare.table import text
from vpipe.compare.turns import Turn
from vpipe.plan.memory import StageMemory
from vpipe.plan.prediction import Prediction, StagePrediction

MIB = 1 << 20


def prediction(peak: int) -> Prediction:
    stage = StagePrediction(0, 3, (0,), 0.1, 0.2, 0.0, 0.0, 0.0, 0.0, StageMemory(peak, 0, 0, 0, 0, 0))
    return Prediction(1.0, 8, 0.25, (stage,))


def outcome(name: str, losses: Sequence[float], update_s: Sequence[float], peak: int | None = None) -> Outcome:
    return Outcome(name, f"how {name} works", "1f1b", (2, 1), (1, 0), 2, 4, None if peak is None else prediction(peak),
                   tuple(losses), tuple(Turn(2, 2 * seconds) for seconds in update_s), ((1.0, 1.0), (1.0, 3.0)),
                   (MIB, 2 * MIB), 3.5)


FALLING = [10.0 - i / 10 for i in range(40)]
FAST, SLOW = outcome("fast", FALLING, (1.0, 1.25, 1.5, 1.75, 2.0), 3 * MIB), outcome("slow", FALLING, (3.0,))


def test_throughput_is_the_median_and_spread_half_the_quartiles_distance() -> None:
    assert FAST.update_s == 1.5
    assert FAST.samples_per_s == pytest.approx(8 / 1.5)
    assert FAST.spread == pytest.approx((1.75 - 1.25) / 2 / 1.5)
    assert SLOW.spread is None  # of one turn nobody knows
    assert FAST.bubble == 0.375
    assert (FAST.peak_bytes, FAST.predicted_bytes, SLOW.predicted_bytes) == (2 * MIB, 3 * MIB, None)


def test_a_loss_is_the_mean_of_the_latest_tenth() -> None:
    assert FAST.loss_after(40) == pytest.approx(sum(FALLING[36:]) / 4)
    assert FAST.loss_after(5) == FALLING[4]


def test_after_equal_time_the_slow_one_has_made_fewer_updates() -> None:
    comparison = Comparison("both", None, [SLOW, FAST], {})
    assert comparison.equal_updates == 40
    assert comparison.equal_time_s == 60
    assert (comparison.updates_by_then(FAST), comparison.updates_by_then(SLOW)) == (40, 20)
    content = json.loads(json.dumps(comparison.as_json()))
    assert content["outcomes"][0]["loss_after_equal_time"] == pytest.approx(SLOW.loss_after(20))
    assert content["outcomes"][0]["loss_after_equal_samples"] == pytest.approx(SLOW.loss_after(40))
    assert content["outcomes"][1]["samples_per_s"] == pytest.approx(8 / 1.5)


def test_equal_samples_are_those_of_the_one_that_made_fewest() -> None:
    short = outcome("short", FALLING[:7], (9.0,))
    assert Comparison("both", None, [FAST, short], {}).equal_updates == 7


def test_one_that_updates_twice_per_batch_is_asked_after_twice_the_updates() -> None:
    often = replace(FAST, microbatches=2, losses=tuple(FALLING))
    both = Comparison("both", None, [replace(SLOW, losses=tuple(FALLING[:10])), often], {})
    assert both.equal_samples == 80
    assert both.loss_after_equal_samples(often) == often.loss_after(20)
    assert both.loss_after_equal_samples(both.outcomes[0]) == FALLING[9]


def test_curves_have_few_points_and_the_same_mean() -> None:
    points = smoothed(FALLING, 10)
    assert [update for update, _ in points] == list(range(4, 41, 4))
    assert sum(loss for _, loss in points) / 10 == pytest.approx(sum(FALLING) / 40)
    assert smoothed([3.0, 1.0, 2.0], 2) == [(2, 2.0), (3, 2.0)]
    assert smoothed([1.0, 2.0, 3.0, 4.0], 2) == [(2, 1.5), (4, 3.5)]


def test_the_table_says_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    said = text(Comparison("bert: 3 layers", 8 * MIB, [FAST, SLOW], {"other": "stage 0 needs 9 MiB"}))
    assert "each rank may use 8 MiB" in said
    assert "other: does not take part: stage 0 needs 9 MiB" in said
    assert "fast: how fast works" in said
    assert "4 microbatches of 2 samples per update, layers [2, 1], recomputed [1, 0]" in said
    [fast] = [line.split() for line in said.splitlines() if line.startswith("fast ")]
    assert fast == ["fast", "5.3", "16.7", "%", "1.00x", "2", "MiB", "3", "MiB", "37.5", "%", "25.0", "%", "6.2500",
                    "6.2500", "3.5000"]
    [slow] = [line.split() for line in said.splitlines() if line.startswith("slow ")]
    assert slow[2:10] == ["-", "0.50x", "2", "MiB", "-", "37.5", "%", "-"]


def test_one_that_is_the_same_program_is_marked_and_has_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    twin = replace(FAST, name="twin", same_as="fast")
    lines = text(Comparison("both", None, [FAST, twin, SLOW], {})).splitlines()
    assert lines[lines.index("twin: how fast works") + 2] == "    (=) the same program as fast, which ran for both"
    rows = {name: [line.removeprefix(name).split() for line in lines if line.startswith(f"{name} ")]
            for name in ("fast", "twin (=)")}
    assert rows["fast"] == rows["twin (=)"]
    assert len(rows["fast"]) == 2  # the table in two parts, which fit
    assert max(len(line) for line in lines if not line.startswith("    schedule")) <= 80


def test_a_run_too_short_to_be_measured_is_said_so() -> None:
    none = outcome("none", FALLING[:2], ())
    short = Comparison("both", None, [none, outcome("one", FALLING[:3], (1.0,))], {})
    warning = "too short: 2 updates, 13 are needed for two counted turns"
    assert warning in text(short)
    assert warning in draw(short)
    [row] = [line.split() for line in text(short).splitlines() if line.startswith("none ")][:1]
    assert row[1:4] == ["-", "-", "-"]
    assert short.equal_time_s is None
    json.dumps(short.as_json())
    long = Comparison("fast", None, [FAST], {})
    assert "too short" not in text(long) + draw(long)


def test_the_largest_microbatch_that_fits_stands_beside_the_chosen_one() -> None:
    assert "2 samples (the largest that fits: 8) per update" in text(
        Comparison("one", None, [replace(FAST, largest_size=8)], {}))


def test_losses_that_are_no_numbers_are_null() -> None:
    diverged = replace(FAST, losses=(1.0, float("inf"), float("nan")), evaluation_loss=float("nan"))
    content = json.loads(json.dumps(Comparison("one", None, [diverged], {}).as_json(), allow_nan=False))
    [found] = content["outcomes"]
    assert found["losses"] == [1.0, None, None]
    assert found["evaluation_loss"] is found["loss_after_equal_samples"] is found["loss_after_equal_time"] is None


def bars(picture: str) -> dict[str, float]:
    """The width of each bar by what it says."""
    found = {}
    for rect in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}rect"):
        title = rect.find("{http://www.w3.org/2000/svg}title")
        if title is not None:
            found[title.text or ""] = float(rect.attrib["width"])
    return found


def test_the_pictures_bars_are_as_long_as_their_numbers() -> None:
    picture = draw(Comparison("a <model>", 4 * MIB, [FAST, SLOW], {"none": "too large & heavy"}))
    widths = bars(picture)
    [fast] = [width for says, width in widths.items() if says.startswith("fast: 5.33")]
    [slow] = [width for says, width in widths.items() if says.startswith("slow: 2.67")]
    assert fast == pytest.approx(2 * slow, rel=0.01)
    assert widths["fast, predicted: 3 MiB"] == pytest.approx(1.5 * widths["fast, counted: 2 MiB"], rel=0.01)
    assert "slow, predicted" not in str(widths)
    assert "limit 4 MiB" in picture
    assert "none does not take part: too large &amp; heavy" in picture
    assert "prefers-color-scheme:dark" in picture
    assert "http://" not in picture.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("losses", [[2.0], [2.0, 2.0, 2.0], [float("nan")] * 3, [float("nan"), 1.0, 2.0]])
def test_losses_that_stand_still_or_are_no_numbers_can_be_drawn(losses: list[float]) -> None:
    picture = draw(Comparison("one", None, [outcome("one", losses, (1.0,))], {}))
    ET.fromstring(picture)
    assert "nan" not in picture
