"""The SVG picture: well-formed, self-contained, with everything that happens in it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_text import made

from vpipe.draw.summary import RankCosts, Summary
from vpipe.draw.svg import draw_svg
from vpipe.errors import UserError
from vpipe.schedules.action import Op
from vpipe.schedules.csv_file import read_csv
from vpipe.schedules.registry import schedule_names

SVG = "{http://www.w3.org/2000/svg}"


def drawn(summary: Summary) -> ElementTree.Element:
    return ElementTree.fromstring(draw_svg(summary))


def said(root: ElementTree.Element) -> str:
    return " | ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 24), (1, 1)])
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


def test_numbers_and_legend() -> None:
    text = said(drawn(made("zb_h2", 4, 8)))
    for part in ("zb_h2", "4 ranks, 8 microbatches, flush", "bubble 0 (0 %), makespan 27 (F 1, I 1, W 1, transfer 0)",
                 "rank 3", "peak act.", "W halves", "forward", "input half of backward", "weight half",
                 "optimizer step", "numbers: microbatches"):
        assert part in text
    assert "paler" not in text
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
    assert "paler: not the first of the rank's stages" in said(root)
    style = next(root.iter(f"{SVG}style")).text or ""
    fills = dict(re.findall(r"\.([FB]\d)\{fill:(#\w+)\}", style.split("@media")[0]))
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
    light, dark = draw_svg(Summary.of(read_csv(tmp_path / "a.csv"), RankCosts())).split("@media")
    for style, ink in ((light, "#0b1320"), (dark, "#ffffff")):
        assert f".cell text{{fill:{ink}" in style
        fills = re.findall(r"\.([FBIWR]\d)\{fill:(#\w+)\}", style)
        assert {fill[0][0] for fill in fills} == {op.value for op in (Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT,
                                                                       Op.RECOMPUTE)}
        for name, fill in fills:
            bright, dim = sorted((luminance(ink), luminance(fill)), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (name, fill)


def test_names_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "<a>&.csv").write_text("0F0,0B0\n")
    assert "<a>&.csv" in said(drawn(Summary.of(read_csv(tmp_path / "<a>&.csv"), RankCosts())))
