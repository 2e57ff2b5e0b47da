"""The SVG picture: well-formed, self-contained, with everything that happens in it."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_terminal import made

from vpipe.app.visualize.summary import RankCosts, Summary
from vpipe.app.visualize.svg import draw_svg
from vpipe.errors import UserError
from vpipe.schedules import kinds
from vpipe.schedules.builder import build
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.registry import RegisteredSchedule

SVG = "{http://www.w3.org/2000/svg}"


def drawn(summary: Summary) -> ElementTree.Element:
    return ElementTree.fromstring(draw_svg(summary))


def said(root: ElementTree.Element) -> str:
    return " | ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))


@pytest.mark.parametrize("name", RegisteredSchedule.names())
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (1, 1)])
def test_every_action_is_drawn_inside_the_picture(name: str, ranks: int, microbatches: int) -> None:
    try:
        summary = made(name, ranks, microbatches)
    except UserError:  # not of this size
        return
    root = drawn(summary)
    events = [event for rank in summary.timeline.events for event in rank]
    titles = [title.text or "" for rect in root.iter(f"{SVG}rect") for title in rect.iter(f"{SVG}title")]
    assert sorted(re.split(r",| at", title)[0] for title in titles) == sorted(str(event.action) for event in events)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert root.attrib["viewBox"] == f"0 0 {root.attrib['width']} {root.attrib['height']}"
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert 0 <= x <= x + float(rect.attrib["width"]) <= width
        assert 0 <= y <= y + float(rect.attrib["height"]) <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.attrib["x"]) <= width
        assert 0 <= float(text.attrib["y"]) <= height


def test_every_replica_has_its_row_and_room_for_its_name() -> None:
    root = drawn(Summary.of(build("pipedream", ((0, 1), (2,)), 8), RankCosts()))
    names = [text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("rank ")]
    assert [text.text for text in names] == ["rank 0 (stage 0, 1 of 2)", "rank 1 (stage 0, 2 of 2)", "rank 2"]
    left = min(float(rect.attrib["x"]) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "idle")
    assert left - float(names[0].attrib["x"]) >= 6 * len(names[0].text or "")
    assert "3 ranks, 2 stages with 2, 1 replicas" in said(root)


def test_numbers_and_legend() -> None:
    text = said(drawn(made("zb_h2", 4, 8)))
    for part in ("zb_h2", "4 ranks, 8 microbatches, flush", "bubble 0 (0 %), makespan 27 (F 1, I 1, W 1, transfer 0)",
                 "rank 3", "activations", "W halves", "idle", "forward", "input half of backward", "weight half",
                 "optimizer step", "numbers: microbatches",
                 "the most that the rank holds at once, in microbatches"):
        assert part in text
    assert "shades" not in text
    assert "versions" not in text


def test_a_stream_shows_its_versions() -> None:
    root = drawn(made("pipedream", 3, 4))
    text = said(root)
    assert "v: the weight version in use" in text
    assert "staleness" in text
    assert [text.count(f"| v{version} ") for version in range(5)] == [12, 6, 4, 2, 0]
    titles = {title.text for title in root.iter(f"{SVG}title")}
    assert "2F3, 11 to 12, weight version 3" in titles
    assert "2STEP3 at 14" in titles


def test_stages_of_a_rank_have_shades() -> None:
    summary = made("interleaved", 2, 4)
    root = drawn(summary)
    assert "shades: the rank's stages, from its first to its last, the palest" in said(root)
    assert "in microbatches of one stage" in said(root)
    style = next(root.iter(f"{SVG}style")).text or ""
    fills = dict(re.findall(r"\.([FB]\d)\{fill:(#\w+)\}", style))
    assert len(set(fills.values())) == len(fills) == 4
    classes = {rect.get("class") for rect in root.iter(f"{SVG}rect")}
    assert classes == {"bg", "idle", "STEP0", *fills}


def test_it_is_self_contained_and_has_a_dark_side() -> None:
    text = draw_svg(made("zb_h1", 4, 8))
    assert "prefers-color-scheme:dark" in text
    assert re.findall(r"(?:href|src|url|@import|script)", text) == []
    assert re.findall(r"http[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert draw_svg(made("zb_h1", 4, 8)) == text


def luminance(colour: str) -> float:
    parts = [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_numbers_are_legible_on_every_shade(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("0F0,1F0,2F0,2R0,2B0,1I0,1W0,0B0\n")
    for summary in (Summary.of(CsvFile.read(tmp_path / "a.csv").schedule, RankCosts()), made("looped_bfs", 2, 4)):
        style = draw_svg(summary).split("</style>")[0]
        assert style.count(".cell text{fill:#0b1320") == style.count(".cell text{") == 1  # on either background
        for name, fill in re.findall(r"\.([FBIWR]\d)\{fill:(#\w+)\}", style):
            bright, dim = sorted((luminance("#0b1320"), luminance(fill)), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (name, fill)
    drawn = re.findall(r"\.([FBIWR])0\{", draw_svg(Summary.of(CsvFile.read(tmp_path / "a.csv").schedule, RankCosts())))
    assert set(drawn) == {op for op in kinds.known() if op.computes}


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), [
    ("1f1b", 8, 64, 1), ("interleaved", 4, 16, 4), ("1f1b", 4, 300, 1)])
def test_narrow_actions_have_some_numbers(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    """... which stand apart."""
    placement = RegisteredSchedule.named(name).layout(ranks, chunks)
    root = drawn(Summary.of(build(name, placement, microbatches), RankCosts()))
    for row in [group for group in root.iter(f"{SVG}g") if group.get("class") == "cell"]:
        labels = [(float(text.attrib["x"]), len(text.text or "") * (5.0 if text.get("class") else 6.8))
                  for text in row.iter(f"{SVG}text")]
        assert len(labels) >= microbatches // 5
        assert all(x + width / 2 <= other_x - other / 2 + 0.1
                   for (x, width), (other_x, other) in pairwise(sorted(labels)))


@pytest.mark.parametrize("costs", [RankCosts(Fraction(1, 1000)), RankCosts(1, Fraction(1, 10**9), Fraction(1, 10**9))])
def test_short_actions_do_not_make_it_wide(costs: RankCosts) -> None:
    assert float(drawn(made("1f1b", 4, 8, costs)).attrib["width"]) < 1500


def test_names_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "<a>&.csv").write_text("0F0,0B0\n")
    assert "<a>&.csv" in said(drawn(Summary.of(CsvFile.read(tmp_path / "<a>&.csv").schedule, RankCosts())))
