"""The picture in the terminal."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest

from vpipe.app.visualize.summary import RankCosts, Summary
from vpipe.app.visualize.terminal import draw_text
from vpipe.errors import UserError
from vpipe.schedules.builder import build
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.registry import RegisteredSchedule

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@cache
def made(name: str, ranks: int, microbatches: int, costs: RankCosts | None = None) -> Summary:
    recipe = RegisteredSchedule.named(name)
    return Summary.of(build(name, recipe.layout(ranks, recipe.chunks), microbatches), costs or RankCosts())


def picture(text: str) -> list[str]:
    """The rows of the ranks, and of the versions below them."""
    return text.split("\n\n")[1].splitlines()


def test_1f1b() -> None:
    assert draw_text(made("1f1b", 3, 4), 80, colour=False) == """\
1f1b: 3 ranks, 4 microbatches, flush
bubble 6 (33 %), makespan 18  (F 1, I 1, W 1, transfer 0)

rank 0  F0 F1 F2 ............B0----F3 B1----...B2----...B3---S
rank 1  ...F0 F1 ......B0----F2 B1----F3 B2----...B3---S
rank 2  ......F0 B0----F1 B1----F2 B2----F3 B3---S

F forward  B backward  S optimizer step  . idle
a unit of time is 3 columns

rank  stages  peak activations  versions  staleness  idle
   0       0                 3         1          0     6
   1       1                 2         1          0     3
   2       2                 1         1          0     0
(activations in microbatches)
"""


def test_a_stream_shows_the_versions_in_use_and_its_steps() -> None:
    text = draw_text(made("pipedream", 2, 3), 80, colour=False)
    assert picture(text) == [
        "rank 0  F0 F1 ......B0---SF2 B1---S...B2---S",
        "        v0 v0       v0    v1 v0       v1",
        "rank 1  ...F0 B0---SF1 B1---SF2 B2---S",
        "           v0 v0    v1 v1    v2 v2"]
    assert "v: the weight version that a forward or a backward uses" in text
    assert "2 ranks, 3 microbatches, no flush, an update every microbatch" in text


def test_every_replica_has_its_row_and_waits_before_its_step() -> None:
    summary = Summary.of(build("pipedream", ((0, 1), (2,)), 4), RankCosts())
    assert draw_text(summary, 120, colour=False) == """\
pipedream: 3 ranks, 2 stages with 2, 1 replicas, 4 microbatches, no flush, an update every microbatch of each replica
bubble 3 (20 %), makespan 15  (F 1, I 1, W 1, transfer 0)

rank 0 (stage 0, 1 of 2)  F0 F2 ......B0----........S...B2----........S
                          v0 v0       v0                v0
rank 1 (stage 0, 2 of 2)  F1 F3 ...............B1---S............B3---S
                          v0 v0                v0                v0
rank 2                    ...F0 B0---SF1 B1---SF2 B2---SF3 B3---S
                             v0 v0    v1 v1    v2 v2    v3 v3

F forward  B backward  S optimizer step  . idle
v: the weight version that a forward or a backward uses
a unit of time is 3 columns

rank  stages  replica  peak activations  versions  staleness  idle
   0       0   1 of 2                 2         2          1     9
   1       0   2 of 2                 2         2          1     9
   2       1                          1         1          0     0
(activations in microbatches)
"""


def test_replicas_of_several_stages() -> None:
    summary = Summary.of(build("looped_bfs", ((0, 1), (2, 3), (0, 1), (2, 3)), 4), RankCosts(transfer_s=1))
    text = draw_text(summary, 120, colour=False)
    assert "4 ranks, 4 stages with 2 replicas each, 4 microbatches, flush" in text
    assert picture(text)[3].startswith("rank 3 (stages 1 3, 2 of 2)  ")
    assert "   3     1 3   2 of 2                 4       1 1        0 0" in text


def test_the_halves_of_a_backward() -> None:
    assert picture(draw_text(made("zb_h1", 2, 2), 80, colour=False)) == [
        "rank 0  F0 F1 ...I0 W0 I1 W1S", "rank 1  ...F0 I0 F1 I1 W0 W1S"]


def test_later_stages_of_a_rank_are_lower_case() -> None:
    text = draw_text(made("looped_bfs", 2, 2), 80, colour=False)
    assert picture(text)[0].startswith("rank 0  F0 F1 f0 f1 ")
    assert "lower case: not the first of the rank's stages" in text
    assert "(activations in microbatches of one stage)" in text


@pytest.mark.parametrize(("ranks", "microbatches", "costs"), [
    (4, 8, RankCosts()), (6, 12, RankCosts(18.5, 18.1, 9.3)), (2, 20, RankCosts(1, 2, 1, 0.25)), (1, 1, RankCosts())])
def test_no_line_of_the_picture_is_longer_than_the_terminal(ranks: int, microbatches: int,
                                                            costs: RankCosts) -> None:
    for name in RegisteredSchedule.names():
        try:
            summary = made(name, ranks, microbatches, costs)
        except UserError:  # not of this size
            continue
        events = sum(event.end_s > event.start_s and event.action.op != "STEP"
                     for rank in summary.timeline.events for event in rank)
        for width in (80, 200):
            text = draw_text(summary, width, colour=False)
            rows = picture(text)
            assert max(map(len, rows)) <= width, name
            labels = [label for row in rows for label in re.findall(r"[FBIW]\d+", row, re.IGNORECASE)]
            if "cut at time" in text or "a letter alone" in text:
                assert len(labels) <= events
            else:
                assert len(labels) == events, name


def test_a_cut_picture_says_so() -> None:
    text = draw_text(made("gpipe", 2, 50), 80, colour=False)
    assert "cut at time 24 of 153: a wider terminal shows more, --format svg all" in text
    assert max(map(len, picture(text))) == 80


def test_scale_is_chosen_so_that_all_fits() -> None:
    assert "a unit of time is 3 columns" in draw_text(made("1f1b", 4, 8), 120, colour=False)
    assert "a unit of time is 2 columns" in draw_text(made("1f1b", 4, 8), 80, colour=False)
    coarse = draw_text(made("1f1b", 2, 2, RankCosts(10, 5, 5)), 28, colour=False)
    assert picture(coarse)[0] == "rank 0  F0 F1 ...B0-...B1S"
    assert "a column is 3.33333 units of time" in coarse


def test_narrow_actions_lose_their_numbers_before_anything_is_cut() -> None:
    text = draw_text(made("interleaved", 4, 8), 80, colour=False)
    assert picture(text)[0] == "rank 0  FFFFffffFFF...b0Fb1.fb2fb3fB0fB1B2.B3.b4.b5.b6.b7B4B5B6B7S"
    assert "a letter alone: too narrow for its microbatch" in text
    assert "cut" not in text


def test_the_unit_of_time_does_not_matter() -> None:
    pictures = {tuple(picture(draw_text(made("zb_h1", 4, 8, RankCosts(unit, unit, unit)), 120, colour=False)))
                for unit in (1, Fraction(1, 10**9), 10**9, Fraction(1, 3))}
    assert len(pictures) == 1


def test_colours_only_add_escapes() -> None:
    for name in ("interleaved", "zb_h2", "pipedream"):
        plain, coloured = (draw_text(made(name, 4, 8), 100, colour=colour) for colour in (False, True))
        assert ESCAPE.sub("", coloured).replace(" and lighter", "") == plain
        assert ESCAPE.search(coloured)
        assert not ESCAPE.search(plain)
        rows = picture(coloured)
        assert all(row.count("\x1b[0m") and row.endswith("\x1b[0m") for row in rows)


def test_stages_of_a_rank_and_operations_have_colours_of_their_own() -> None:
    text = draw_text(made("interleaved", 2, 4), 200, colour=True)
    styles = set(re.findall(r"\x1b\[([^m]+)m[FfBb]\d", text))
    assert len(styles) == 4


def test_an_uneven_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    summary = Summary.of(CsvFile.read(tmp_path / "a.csv").schedule, RankCosts())
    assert summary.stages_per_rank == "1-2"
    assert (summary.timeline.makespan_s, summary.timeline.bubble_s) == (6, 3)
    text = draw_text(summary, 80, colour=False)
    assert picture(text) == ["rank 0  F0 ......f0 b0----............B0---S", "rank 1  ...F0    .........B0---------S"]
    assert "   0     0 2                 2       1 1        0 0     3" in text


def test_a_stage_that_recomputes_repeats_its_forward(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("0F0,0R0,0B0\n")
    text = draw_text(Summary.of(CsvFile.read(tmp_path / "a.csv").schedule, RankCosts(3)), 80, colour=False)
    assert picture(text) == ["rank 0  F0    R0    B0-S"]
    assert "R recompute" in text
