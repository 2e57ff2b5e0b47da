"""Check the figures of a comparison, its table, its rows of CSV and its picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vpipe.app.train.metrics import Efficiency
from vpipe.app.train.peak_flops import PeakFlops
from vpipe.app.train.summary import OWN, PEAK
from vpipe.extras.comparison import results
from vpipe.extras.comparison.chart import draw
from vpipe.extras.comparison.planning import Contender
from vpipe.extras.comparison.results import Comparison, Outcome
from vpipe.plan.plan import Prediction, StagePrediction
from vpipe.plan.stage_costs import StageMemory
from vpipe.runtime.stage_usage import StageUsage

MIB = 1 << 20


def prediction(peak: int) -> Prediction:
    stage = StagePrediction(0, 3, (0,), 0.1, 0.2, 0.0, 0.0, 0.0, 0.0, StageMemory(peak, 0, 0, 0, 0, 0))
    return Prediction(1.0, 8, 0.25, (stage,))


def outcome(name: str, losses: Sequence[float], update_s: Sequence[float], peak: int | None = None,
            microbatches: int = 4) -> Outcome:
    """One of 3 layers that trains on ``microbatches`` of 2 samples of 16 tokens per update."""
    config = SimpleNamespace(microbatch_size=2, parallel=SimpleNamespace(standing_in=SimpleNamespace(schedule="1f1b")))
    job: Any = SimpleNamespace(
        config=config, partition=(2, 1), recomputed=((0,), ()), samples_per_update=2 * microbatches,
        tokens_per_update=32 * microbatches,
        schedule=SimpleNamespace(assignment=SimpleNamespace(step_microbatches=microbatches)), mean_delay=0.0,
        plan=None if peak is None else SimpleNamespace(predictions=prediction(peak),
                                                                predicted=prediction(peak)))
    usage = tuple(StageUsage(work, 0.0, 0.0, 0.0, 1.0, 100, 2, 1, 3, 4) for work in (1.0, 3.0))
    return Outcome(Contender(name, "", f"how {name} works"), job, tuple(losses),
                   tuple((seconds / 2, seconds * 1.5) for seconds in update_s), 99.0, usage, 50.0, (MIB, 2 * MIB), 3.5)


FALLING = [10.0 - i / 10 for i in range(40)]
FAST, SLOW = outcome("fast", FALLING, (1.0, 1.25, 1.5, 1.75, 2.0), 3 * MIB), outcome("slow", FALLING, (3.0,))


def test_throughput_is_the_median_and_spread_half_the_quartiles_distance() -> None:
    assert FAST.update_s == 1.5
    assert FAST.samples_per_s == pytest.approx(8 / 1.5)
    assert FAST.spread == pytest.approx((1.75 - 1.25) / 2 / 1.5)
    assert SLOW.spread is None  # of one turn nobody knows
    assert FAST.bubble == 0.375
    assert (FAST.peak_bytes, FAST.predicted_bytes, SLOW.predicted_bytes) == (2 * MIB, 3 * MIB, None)


def test_the_95th_percentile_is_of_single_updates() -> None:
    assert SLOW.p95_s == pytest.approx(1.5 + 0.95 * 3.0)
    assert outcome("none", FALLING[:2], ()).p95_s is None


def test_a_loss_is_the_mean_of_the_latest_tenth() -> None:
    assert FAST.loss_after(40) == pytest.approx(sum(FALLING[36:]) / 4)
    assert FAST.loss_after(5) == FALLING[4]


def test_after_equal_time_the_slow_one_has_made_fewer_updates() -> None:
    comparison = Comparison("both", None, [SLOW, FAST], {})
    assert comparison.equal_updates == 40
    assert comparison.equal_time_s == 60
    assert comparison.loss_after_equal_time(SLOW) == SLOW.loss_after(20)
    assert comparison.loss_after_equal_time(FAST) == FAST.loss_after(40)
    content = json.loads(json.dumps(comparison.as_json()))
    assert content["outcomes"][0]["loss_after_equal_time"] == pytest.approx(SLOW.loss_after(20))
    assert content["outcomes"][0]["loss_after_equal_samples"] == pytest.approx(SLOW.loss_after(40))
    assert content["outcomes"][1]["samples_per_s"] == pytest.approx(8 / 1.5)


def test_equal_samples_are_those_of_the_one_that_made_fewest() -> None:
    short = outcome("short", FALLING[:7], (9.0,))
    assert Comparison("both", None, [FAST, short], {}).equal_updates == 7


def test_one_that_updates_twice_per_batch_is_asked_after_twice_the_updates() -> None:
    often = outcome("often", FALLING, (1.0,), microbatches=2)
    both = Comparison("both", None, [replace(SLOW, losses=tuple(FALLING[:10])), often], {})
    assert both.equal_samples == 80
    assert both.loss_after_equal_samples(often) == often.loss_after(20)
    assert both.loss_after_equal_samples(both.outcomes[0]) == FALLING[9]


def test_the_table_says_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    said = Comparison("bert: 3 layers", 8 * MIB, [FAST, SLOW], {"other": "stage 0 needs 9 MiB"}).as_text()
    assert "each rank may use 8 MiB" in said
    assert "other: does not take part: stage 0 needs 9 MiB" in said
    assert "fast: how fast works" in said
    assert "4 microbatches of 2 samples per update, layers [2, 1], recomputed [1, 0]" in said
    [fast] = [line.split() for line in said.splitlines() if line.startswith("fast ")]
    assert fast == ["fast", "5.3", "16.7", "%", "1.00x", "85", "1500", "ms", "2831", "ms", "2", "MiB", "3", "MiB",
                    "37.5", "%", "25.0", "%", "50", "B", "6.2500", "6.2500", "3.5000"]
    [slow] = [line.split() for line in said.splitlines() if line.startswith("slow ")]
    assert slow[2:] == ["-", "0.50x", "43", "3000", "ms", "4350", "ms", "2", "MiB", "-", "37.5", "%", "-", "50", "B",
                        "6.2500", "8.1500", "3.5000"]
    assert "MFU" not in said  # which nobody knows
    assert "pred. kept" not in Comparison("slow", None, [SLOW], {}).as_text()


def test_utilization_is_shown_where_it_is_known_and_doubted_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    peak = PeakFlops(tflops=1e-9, devices=2, kind="fp32", source="measured")  # 2,000 operations per second
    known = replace(FAST, efficiency=Efficiency((1.0, 1.0), 1.0, peak))
    tokens = 16 * 8 / 1.5
    assert known.utilization is not None
    assert known.utilization.model == pytest.approx(3 * 2 * tokens / 2000)
    assert known.utilization.hardware == pytest.approx((3 * 2 + 1) * tokens / 2000)
    said = Comparison("one", None, [known], {}).as_text()
    assert " 25.6 %  29.9 % " in said
    assert "warning" not in said
    doubted = replace(FAST, efficiency=Efficiency((10.0, 10.0), 0.0, peak))
    assert "warning: fast: the MFU of 256 % cannot be" in Comparison("one", None, [doubted], {}).as_text()


def test_a_row_has_the_config_and_the_figures_that_runs_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "config_row", lambda config: {"training.seed": 3})
    row, refused = Comparison("both", None, [FAST], {"other": "too large"}).as_rows()
    assert list(row)[:6] == ["contender", "model", "schedule", "failed", "same_as", "training.seed"]
    assert refused == {"contender": "other", "failed": "too large"}
    assert {name for name in OWN + PEAK if name not in row} == {"steps_done", "skipped", "memory_bytes", "first_loss"}
    assert (row["ranks"], row["steps"], row["samples_per_step"], row["counted_steps"]) == (2, 40, 8, 10)
    assert (row["held_bytes"], row["sent_bytes"], row["versions"], row["staleness"]) == (2 * MIB, 50.0, 2, 1)
    assert (row["last_loss"], row["loss_after"]) == (FAST.loss_after(40), 320)


def test_one_that_is_the_same_program_is_marked_and_has_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    twin = replace(FAST, contender=replace(FAST.contender, name="twin"), same_as="fast")
    lines = Comparison("both", None, [FAST, twin, SLOW], {}).as_text().splitlines()
    assert lines[lines.index("slow: how slow works") - 1] == "    (=) the same program as fast, which ran for both"
    rows = {name: [line.removeprefix(name).split() for line in lines if line.startswith(f"{name} ")]
            for name in ("fast", "twin (=)")}
    assert rows["fast"] == rows["twin (=)"]
    assert len(rows["fast"]) == 3  # the table in parts, which fit
    assert max(map(len, lines)) <= 80


def test_a_run_too_short_to_be_measured_is_said_so() -> None:
    none = outcome("none", FALLING[:2], ())
    short = Comparison("both", None, [none, outcome("one", FALLING[:3], (1.0,))], {})
    warning = "too short: 2 updates, 13 are needed for two counted turns"
    assert warning in short.as_text()
    assert warning in draw(short)
    [row] = [line.split() for line in short.as_text().splitlines() if line.startswith("none ")][:1]
    assert row[1:4] == ["-", "-", "-"]
    assert short.equal_time_s is None
    json.dumps(short.as_json())
    long = Comparison("fast", None, [FAST], {})
    assert "too short" not in long.as_text() + draw(long)


def test_the_largest_microbatch_that_fits_stands_beside_the_chosen_one() -> None:
    comparison = Comparison("one", None, [replace(FAST, contender=replace(FAST.contender, largest_size=8))], {})
    assert "2 samples (the largest that fits: 8) per update" in " ".join(comparison.as_text().split())


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
