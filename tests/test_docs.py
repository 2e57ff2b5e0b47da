"""What the documentation says is so: keys and defaults, figures, links, commands, files, refusals.

``python tests/test_docs.py`` writes the tables of docs/config.md anew, draws the pictures of docs/schedules.md and
writes its comparison.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import pytest
from pydantic.fields import FieldInfo

from vpipe.app.cli import _parser, main
from vpipe.app.config.config import Config
from vpipe.app.config.validation import Section, section_of
from vpipe.app.visualize.summary import RankCosts, Summary
from vpipe.errors import UserError
from vpipe.schedules import registry
from vpipe.schedules.assignment import Layout
from vpipe.schedules.builder import build
from vpipe.schedules.delays import mean_delay
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.simulator.timeline import simulate

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")),
         *sorted(ROOT.glob("vpipe/extras/*/docs/*.md"))]
CONFIG_PAGE = ROOT / "docs" / "config.md"
KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# -- the tables of keys --------------------------------------------------------------------------------


def kind(annotation: Any) -> str:
    """The values that a key takes, in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(kind(part) for part in inner if part is not type(None)))
    if hasattr(annotation, "__metadata__"):
        return ", ".join(filter(None, [kind(inner[0]), *(bounds(one) for one in annotation.__metadata__
                                                          if isinstance(one, FieldInfo))]))
    if origin is tuple:
        return "list"
    if origin is dict:
        return "keys with values"
    return KINDS[annotation]


def bounds(info: FieldInfo) -> str:
    """The limits of a number, in words."""
    words = {annotated_types.Ge: ("at least", "ge"), annotated_types.Gt: ("above", "gt"),
             annotated_types.Lt: ("below", "lt"), annotated_types.Le: ("at most", "le")}
    limits = sorted((one for one in info.metadata if type(one) in words), key=lambda one: list(words).index(type(one)))
    texts = [f"{words[type(one)][0]} {int(getattr(one, words[type(one)][1])):,}" for one in limits]
    return ", ".join(text for text in texts if text != f"at most {2**63 - 1:,}")


def default(info: FieldInfo) -> str:
    """A key's default as one writes it in YAML."""
    if info.is_required():
        return "required"
    value = str(info.default) if isinstance(info.default, Path) else info.default
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def rows(section: type[Section]) -> Iterator[list[str]]:
    """Key, values, default, meaning."""
    for key, info in section.model_fields.items():
        if section_of(info) is None:
            values = ", ".join(filter(None, [kind(info.annotation), bounds(info)]))
            yield [f"`{key}`", values, default(info), info.description or ""]


def sections() -> dict[str, type[Section]]:
    """Heading in docs/config.md -> the keys below it."""
    native = {name: found for name, info in Config.model_fields.items() if (found := section_of(info)) is not None}
    inner = {f"{name}.{key}": found for name, section in native.items() for key, info in section.model_fields.items()
             if (found := section_of(info)) is not None}
    return {**{f"`{name}`": found for name, found in (native | inner).items()}, "Top level": Config}


def table_below(heading: str, page: Path = CONFIG_PAGE) -> list[list[str]]:
    """The first table under a heading of docs/config.md, without its head."""
    text = page.read_text()
    assert f"### {heading}\n" in text, f"{page} has no heading '### {heading}'"
    below = text.split(f"### {heading}\n")[1]
    lines = re.search(r"(?:^\|.*\|\n)+", below, re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[0].splitlines()[2:]]


@pytest.mark.parametrize("heading", sections())
def test_every_key_with_its_values_default_and_meaning(heading: str) -> None:
    assert [row[:4] for row in table_below(heading)] == list(rows(sections()[heading]))


def test_defaults_of_the_page_are_those_of_the_code() -> None:
    said = {row[0].strip("`"): row[2] for row in table_below("`training`")}
    assert said["learning_rate"] == "required"
    assert said["momentum"] == "`0.9`"
    assert said["warmup_steps"] == "`0`"


# -- docs/schedules.md ---------------------------------------------------------------------------------

SCHEDULES_PAGE = ROOT / "docs" / "schedules.md"
MORE = {"replicas": ["pipedream", "--widths", "2,1", "--microbatches", "8"],
        "warmup": ["pipedream", "--ranks", "4", "--microbatches", "8", "--warmup-depth", "6,4,2,0", "--costs",
                   "1,1,1,0.5"],
        "update_every": ["pipedream", "--ranks", "4", "--microbatches", "12", "--update-every", "4"]}
"""Pictures beside those of the schedules."""

COMPARED = ["schedule", "--all", "--ranks", "4", "--microbatches", "8"]


def drawing(name: str) -> list[str]:
    """The command that draws a schedule of the page."""
    size = [name, "--ranks", "4", "--microbatches", "16" if name == "2bw" else "8",
            *(["--slices", "2"] if name == "seq1f1b" else [])]
    return ["schedule", *MORE.get(name, size), "--format", "svg"]


def printed(arguments: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(arguments) == 0
    return out.getvalue()


@pytest.mark.parametrize("name", [*RegisteredSchedule.names(), *MORE])
def test_every_schedule_has_its_picture_of_today(name: str) -> None:
    picture = ROOT / "docs" / "schedules" / f"{name}.svg"
    assert (" ".join(MORE[name]) if name in MORE else f"### {name}\n") in SCHEDULES_PAGE.read_text()
    assert f"![{name}](schedules/{name}.svg)" in SCHEDULES_PAGE.read_text()
    assert picture.read_text() == printed(drawing(name)), "python tests/test_docs.py draws it anew"


def test_the_comparison_is_what_the_command_prints_today() -> None:
    page = SCHEDULES_PAGE.read_text()
    assert f"```\n{printed(COMPARED)}```" in page, "python tests/test_docs.py writes it anew"


def formulas() -> dict[str, list[str]]:
    """The cells of the table of formulas, by schedule."""
    lines = SCHEDULES_PAGE.read_text().split("## Formulas\n")[1].strip().split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


def value(text: str, symbols: dict[str, Fraction]) -> Any:
    """A formula of the page, calculated."""
    for sign, python in (("·", "*"), ("≥", ">="), ("≤", "<="), (" = ", " == ")):
        text = text.replace(sign, python)
    return eval(text, {"min": min, "max": max, "ceil": math.ceil}, dict(symbols))


@pytest.mark.parametrize("name", RegisteredSchedule.names())
def test_formulas_are_exact_where_they_hold(name: str) -> None:
    recipe, (*cells, condition) = RegisteredSchedule.named(name), formulas()[name]
    held = 0
    for p, m, v in ((1, 3, 2), (2, 6, 2), (2, 8, 4), (3, 6, 6), (4, 4, 2), (4, 8, 3), (4, 16, 2), (5, 15, 2)):
        n = v if recipe.sliced else 1
        v = v if recipe.any_chunks and name != "auto" else recipe.chunks
        try:
            schedule = build(name, recipe.layout(p, v), m, slices=n)
        except UserError:  # not of this size
            continue
        checked = Summary.of(schedule, RankCosts())
        for f, i, w in ((1, 1, 1), (7, 6, 5), (2, 3, 1), (2, 8, 5), (3, 1, 2)):
            costs = RankCosts(f, i, w)
            summary = replace(checked, costs=costs, timeline=simulate(
                checked.schedule, costs.of(schedule.placement, slices=n)))
            for r in range(p):
                symbols = {name: Fraction(number) for name, number in {
                    "p": p, "m": m, "v": v, "n": n, "r": r, "k": summary.schedule.update_every, "F": f, "I": i, "W": w,
                    "B": i + w}.items()}
                if condition and not value(condition.strip("`"), symbols):
                    continue
                held += 1
                stages = [stage for stage, ranks in enumerate(summary.schedule.placement) if r in ranks]
                actual = (summary.timeline.bubble_s, Fraction(summary.proved.rank_peaks[r].peak_activations, v * n),
                          max(summary.proved.stage_peaks[stage].versions for stage in stages))
                for cell, is_ in zip(cells, actual, strict=True):
                    if cell.startswith("`"):
                        assert is_ == value(cell.strip("`"), symbols), (cell, symbols)
                    elif cell.startswith("at most `"):
                        assert is_ <= value(cell.removeprefix("at most ").strip("`"), symbols), (cell, symbols)
    assert held > 5


# -- docs/asynchronous.md ------------------------------------------------------------------------------

DELAYS = ROOT / "docs" / "delays.svg"
PANELS = [("pipedream", 1), ("pipedream", 8), ("pipedream_vertical_sync", 8), ("2bw", 8)]
"""Schedules and microbatches per update."""


def drawn_delays(stages: int = 8) -> str:
    """A bar per stage and schedule: the mean delay of its gradients, all on one scale."""
    unit, width, bottom = 22, 150, 216
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{50 + 4 * width + 30}" height="270" font-size="11">',
             "<title>mean delay of the gradients of 8 stages, in updates</title><style>",
             "text{font-family:system-ui,sans-serif;fill:#1f2328;text-anchor:middle}.soft{fill:#59636e}",
             ".bg{fill:#fff}.line{stroke:#d1d9e0}.bar{fill:#6ea8fe}",
             "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.bg{fill:#0d1117}"
             ".line{stroke:#3d444d}}</style>", '<rect class="bg" width="100%" height="100%"/>',
             '<text x="340" y="20" font-size="13">mean delay of the gradients of 8 stages, in updates</text>']
    for panel, (name, every) in enumerate(PANELS):
        left = 40 + panel * (width + 5)
        schedule = build(name, Layout.LOOP(stages), every, every)
        lines += [f'<line class="line" x1="{left}" x2="{left + width - 12}" y1="{bottom}" y2="{bottom}"/>',
                  f'<text x="{left + 68}" y="{bottom + 30}">{name}</text>',
                  f'<text x="{left + 68}" y="{bottom + 44}">k = {every}</text>']
        for stage in range(stages):
            delay, x = mean_delay(schedule, stage), left + 4 + 17 * stage
            top = round(bottom - unit * delay, 1)
            lines += [f'<rect class="bar" x="{x}" y="{top}" width="14" height="{round(bottom - top, 1)}"/>',
                      f'<text x="{x + 7}" y="{top - 4}" font-size="8">{f"{delay:.2g}".lstrip("0") or "0"}</text>',
                      f'<text class="soft" x="{x + 7}" y="{bottom + 13}" font-size="9">{stage}</text>']
    lines += [f'<text class="soft" x="24" y="{bottom + 13}" font-size="9">stage</text>', "</svg>\n"]
    return "\n".join(lines)


def test_the_bubbles_and_delays_beside_one_another_are_those_of_the_code() -> None:
    page, p = (ROOT / "docs" / "asynchronous.md").read_text(), 8
    found = re.findall(r"^\| (\d+) \| (\d+) % \| (\d+) % \| 0 \| ([\d.]+) updates \|$", page, re.MULTILINE)
    assert [int(m) for m, *_ in found] == [p // 2, p, 2 * p, 4 * p]
    for m, *said, delay in found:
        for name, percent in zip(("1f1b", "zb_v"), said, strict=True):
            recipe = RegisteredSchedule.named(name)
            made = build(name, recipe.layout(p, recipe.chunks), int(m))
            assert round(100 * Summary.of(made, RankCosts(1, 1, 1)).timeline.bubble_share) == int(percent)
        stream = build("pipedream", Layout.LOOP(p), int(m), int(m))
        assert f"{mean_delay(stream, 0):.3g}" == delay


def test_the_picture_of_delays_is_of_today() -> None:
    assert DELAYS.read_text() == drawn_delays(), "python tests/test_docs.py draws it anew"


def test_the_page_that_adds_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code runs as it stands, one block after the other, and shows what it says."""
    RegisteredSchedule.names()
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    page = (ROOT / "docs" / "add-a-schedule.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$(?:\n+prints\n+```\n(.*?)^```$)?", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    assert len(blocks[0][0].splitlines()) <= 30
    names: dict[str, Any] = {}
    for code, output in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, "docs/add-a-schedule.md", "exec"), names)
        if output:
            assert out.getvalue() == output


# -- figures, links, commands, files -------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page: those that headings get (lower case, no punctuation, dashes for spaces), and those set."""
    text = FENCE.sub("", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)} | {*re.findall(r'<a id="([\w-]+)">', text)}


def test_exactness_has_the_same_rows_in_both_languages() -> None:
    texts = [(ROOT / "docs" / f"exactness{language}.md").read_text() for language in ("", ".zh")]
    tests, targets, rows = ([sorted(re.findall(found, text.replace(".zh.md", ".md"), re.MULTILINE)) for text in texts]
                            for found in (r"`([\w/]*\w\.py)`", r"\]\(([^#)]+)", r"^(\|).*\|$"))
    assert tests[0] == tests[1]
    assert targets[0] == targets[1]
    assert rows[0] == rows[1]


def removed(file: Path) -> bool:
    """Whether a file is gone with its extra."""
    path = Path(os.path.normpath(file))
    parts = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ()
    return parts[:2] == ("vpipe", "extras") and not ROOT.joinpath(*parts[:3]).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        if removed(there):
            continue
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}: no such heading"


@pytest.mark.parametrize("page", [page for page in (*PAGES, *ROOT.glob("site/pages/**/*.md"))
                                  if page.name.endswith(".zh.md")], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_chinese_page_leads_to_chinese_ones_or_says_that_a_page_is_in_english(page: Path) -> None:
    found = re.findall(r"\[([^\]]*)\]\(([^):#\s]+\.md)[)#]", FENCE.sub("", page.read_text()))
    for text, name in found:
        if not (page.parent / name).with_suffix(".zh.md").exists() and not name.endswith(".zh.md"):
            assert text.endswith("（英文）"), f"[{text}]({name})"
        elif "site" not in page.parts:  # on the site a page leads to that of its own language
            assert name.endswith(".zh.md") or text in ("English", "英文页"), f"[{text}]({name})"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    # Not examples of what a reader would add, which hold <...>.
    named = re.findall(r"`((?:tests|vpipe|configs|docs)/[\w./=-]+)`", page.read_text())
    assert not [name for name in named if not (ROOT / name).exists() and not removed(ROOT / name)]


def commands() -> Iterator[tuple[str, str]]:
    """The ``vpipe`` commands in code blocks, and the page each stands on."""
    for page in PAGES:
        for block in FENCE.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
                if command.startswith("vpipe "):
                    yield str(page.relative_to(ROOT)), command


@pytest.mark.extras("catalogues", "comparison", "generation", "legacy", "orion", "translation")
def test_commands_parse() -> None:
    parser, found = _parser(), list(commands())
    for page, command in found:
        words = shlex.split(command, comments=True)[1:]
        try:
            options = parser.parse_args(words[:words.index(">")] if ">" in words else words)
        except SystemExit:
            pytest.fail(f"{page}: {command}")
        config = getattr(options, "config", None)
        if config is not None and config.parts[0] == "configs":
            assert (ROOT / config).exists(), f"{page}: {command}"
    assert len(found) > 150


if __name__ == "__main__":
    for title, keys in sections().items():
        old, new = ("".join(f"| {' | '.join(row)} |\n" for row in table) for table in (table_below(title), rows(keys)))
        CONFIG_PAGE.write_text(CONFIG_PAGE.read_text().replace(old, new))
    for schedule in [*RegisteredSchedule.names(), *MORE]:
        (ROOT / "docs" / "schedules" / f"{schedule}.svg").write_text(printed(drawing(schedule)))
    DELAYS.write_text(drawn_delays())
    compared = printed(COMPARED)
    SCHEDULES_PAGE.write_text(re.sub(r"(## Compared\n.*?```\n).*?```", lambda found: f"{found[1]}{compared}```",
                                     SCHEDULES_PAGE.read_text(), count=1, flags=re.DOTALL))
