"""``report.html`` and the command that writes it."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_run import make_run, write_metrics
from profile_by_hand import made_profile

from vpipe.app.cli import main
from vpipe.app.report.line_chart import Line, chart, thinned
from vpipe.app.report.page import binary_unit, page
from vpipe.app.report.report_data import load_report_data


class Outline(HTMLParser):
    """Finds elements that are not closed, and what is loaded from elsewhere."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    assert found.open == []
    return found


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = make_run(tmp_path_factory.mktemp("page") / "run", updates=6)
    made_profile(12, peak_flops_per_s=1e9).save(folder / "profile.json")
    config = {"model": {"name": "bert", "preset": "tiny"}, "parallel": {"memory": 14 << 20}}
    return page(load_report_data(folder, config))


def test_the_page_needs_nothing_beside_it(planned: str) -> None:
    found = outline(planned)
    assert not {"link", "img", "iframe", "object", "image", "use"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name in ("src", "href", "xlink:href", "action")]
    assert not re.search(r"https?:|@import|@font-face|url\((?!#)", planned)


def test_plan_and_run_stand_on_one_scale(planned: str) -> None:
    at_planned, at_run = planned.index(">As planned<"), planned.index(">As run<")
    assert at_planned < at_run
    # One picture and one axis: the planned steps of 337 ms end earlier than the run's of some 440 ms.
    found = re.findall(r'width="([\d.]+)%" height="26" fill="var\(--idle\)"/>', planned)
    backgrounds = [float(width) for width in found]
    assert len(backgrounds) == 8
    assert len(set(backgrounds[:4])) == 1
    assert backgrounds[0] < backgrounds[-1] <= 100
    assert backgrounds[-1] > 99


def test_the_page_says_what_was_measured(planned: str) -> None:
    text = outline(planned).text
    for words in ("bert tiny, schedule 1f1b (flush), 4 stages on 4 ranks", "predicted 337 ms", "MFU", "HFU",
                  "staleness", "bubble", "evaluation loss", "As planned: the run's partition and schedule",
                  "of 14 MiB allowed"):
        assert words in text, words


def test_pictures_have_titles_and_tables_heads(planned: str) -> None:
    found = outline(planned)
    assert re.findall(r'<svg[^>]*role="img"[^>]*>(?!<title)', planned) == []
    assert found.tags.count("thead") == 2
    assert ("scope", "col") in found.attributes
    assert "prefers-color-scheme:dark" in planned
    assert 'name="viewport"' in planned


def test_text_from_files_is_no_markup(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    folder = make_run(tmp_path / "<b>run", updates=4)
    for file in (folder / "trace").iterdir():
        file.write_text(file.read_text().replace('"host-a"', f'"{bad}"').replace('"1f1b"', f'"{bad}"'))
    text = page(load_report_data(folder, {"model": {"name": bad}}))
    assert bad not in text
    assert "&lt;script&gt;" in text
    assert "<b>" not in text
    outline(text)


def test_a_long_run_makes_no_long_page(tmp_path: Path, planned: str) -> None:
    text = page(load_report_data(make_run(tmp_path / "run", "pipedream", updates=250), {}))
    assert len(text) < 400_000


def test_a_page_has_the_perplexity_that_the_lines_have(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ranks=1, updates=1)
    assert "perplexity" not in page(load_report_data(run, {}))
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": 4.0', '"loss": 4.0, "perplexity": 54.6'))
    assert "from 4.000, perplexity 54.6; evaluation 3.960, perplexity 52.5" in page(load_report_data(run, {}))


@pytest.mark.parametrize(("ranks", "updates", "evaluation"), [(1, 1, False), (2, 1, False), (2, 2, False),
                                                             (3, 4, True)])
def test_small_runs_make_a_page_too(tmp_path: Path, ranks: int, updates: int, evaluation: bool) -> None:
    outline(page(load_report_data(make_run(tmp_path / "run", ranks=ranks, updates=updates, evaluation=evaluation), {})))


def test_a_page_of_slices_names_them(tmp_path: Path) -> None:
    text = page(load_report_data(make_run(tmp_path / "run", "seq1f1b", microbatches=4, updates=4, slices=2), {}))
    for said in ("4 microbatches in 2 slices each per update", "the numbers are slices of microbatches",
                 "per slice"):
        assert said in text
    assert re.search(r"1B\d+: backward, microbatch \d+, slice 1, stage 1", text)
    assert 'pointer-events="none">7</text>' in text
    assert 'pointer-events="none">8</text>' not in text


def test_without_a_whole_step_the_first_actions_are_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ranks=2, updates=1)
    for file in (folder / "trace").iterdir():
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:5]))
    text = outline(page(load_report_data(folder, {}))).text
    assert "There is no expected run to compare with: no whole step was recorded." in text
    assert "No whole step was recorded; these are the first actions." in text


@pytest.mark.parametrize(("updates", "first", "bad"), [
    (6, 3, "NaN"), (6, 0, "NaN"), (6, 2, "Infinity"), (150, 6, "NaN"), (150, 90, "-Infinity")])
def test_losses_that_are_no_numbers_are_left_out_and_counted(tmp_path: Path, updates: int, first: int,
                                                             bad: str) -> None:
    folder = make_run(tmp_path / "run", ranks=2, updates=6)
    write_metrics(folder, updates)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines[:first], *(re.sub(r'loss": [^,]*', f'loss": {bad}', line)
                                                  for line in lines[first:])]))
    text = page(load_report_data(folder, {}))
    assert not re.search(r"[^A-Za-z](nan|inf)[^a-z]", text)
    said = outline(text).text
    assert (f"Of {updates + 1} losses {updates + 1 - first} are no numbers (infinite or NaN), the first in step "
            f"{first}.") in said
    assert "training lossno number" in said
    assert ("There is no number to draw." in said) == (first == 0)


def test_a_line_breaks_where_a_value_is_no_number() -> None:
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, 2.0), (4, math.inf), (5, 1.0), (6, 1.0)]
    drawn = re.findall(r'<path d="([^"]*)"', chart("Loss", [Line("a", points, "red")], "", "step", str))
    assert [path.count("M") + path.count("L") for path in drawn] == [2, 1, 2]
    assert thinned(points, 1) == [(3, pytest.approx(7 / 5))]
    means = thinned(points, 5)
    assert [math.isnan(y) for _, y in means] == [False, False, False, True, False]
    assert means[2] == (2.5, 2.0), "of its neighbours the one that is a number"


def test_memory_is_counted_in_round_binary_numbers() -> None:
    assert [binary_unit(size) for size in (5, 3000, 1.5 * 2**20, 3 * 2**30)] == [1, 2**10, 2**10, 2**30]


# The command

def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", ranks=2, updates=2)
    (folder / "config.yaml").write_text("model: {name: bert, preset: mini}\n")
    assert main(["trace", str(folder)]) == 0
    output = capsys.readouterr()
    assert (folder / "trace.json").is_file()
    assert "bert mini" in (folder / "report.html").read_text()
    assert output.err == ""
    assert "open it in Perfetto" in output.out
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize(("spoil", "said"), [
    ("no run", "there is no run folder"), ("no trace", "hint: train with --set trace=true"),
    ("rank", "the record of rank 1 is missing"), ("line", r"line 3 of the record is damaged: oops \(.*rank0.jsonl:3\)"),
    ("profile", "the profile is not JSON"), ("plan", "the plan is not JSON"), ("config", "config.yaml")])
def test_mistakes_end_the_command_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: str,
                                                said: str) -> None:
    folder = make_run(tmp_path / "run", ranks=2, updates=2)
    record = folder / "trace" / "rank0.jsonl"
    if spoil == "no run":
        folder = tmp_path / "other"
    elif spoil == "no trace":
        for file in (folder / "trace").iterdir():
            file.unlink()
    elif spoil == "rank":
        (folder / "trace" / "rank1.jsonl").unlink()
    elif spoil == "line":
        lines = record.read_text().splitlines(keepends=True)
        record.write_text("".join([*lines[:2], "oops\n", *lines[2:]]))
    elif spoil == "config":
        (folder / "config.yaml").write_text("a: [\n")
    else:
        (folder / f"{spoil}.json").write_text("{")
    assert main(["trace", str(folder)]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert "hint: " in error
    assert "Traceback" not in error


def test_the_command_shows_one_lane_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, other = make_run(tmp_path / "run", ranks=2, updates=2), make_run(tmp_path / "other", ranks=2, updates=3)
    (other / "trace").rename(folder / "trace" / "lane1")
    for lane, own in enumerate((folder / "trace", folder / "trace" / "lane1")):
        for file in own.glob("*.jsonl"):
            file.write_text(file.read_text().replace('"rank":', f'"lane": {lane}, "lanes": 2, "rank":', 1))
    assert main(["trace", str(folder)]) == 0
    assert "note: Lane 0 of 2: rank r here is process 2 r of the job" in capsys.readouterr().out
    assert main(["trace", str(folder), "--lane", "1"]) == 0
    assert "note: Lane 1 of 2: rank r here is process 2 r + 1 of the job" in capsys.readouterr().out
    assert ["0STEP2" in (folder / f"trace{behind}.json").read_text() for behind in ("", "-lane1")] == [False, True]
    assert (folder / "report-lane1.html").is_file()
    assert main(["trace", str(folder), "--lane", "2"]) == 2
    assert "has records of 2 lanes, and none of lane 2" in capsys.readouterr().err


def test_metrics_that_break_off_or_lack_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", ranks=2, updates=3)
    metrics = folder / "metrics.jsonl"
    metrics.write_text("oops\n" + metrics.read_text()[:-9])
    assert main(["trace", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "note: metrics.jsonl breaks off in line 6" in said
    assert "note: Of metrics.jsonl 1 line is damaged and left out, the first is line 1." in said
    metrics.unlink()
    assert main(["trace", str(folder)]) == 0
    assert "note: There is no metrics.jsonl" in capsys.readouterr().out
