"""The playground (site/playground) in a headless Chromium: its figures are those of the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from browser import CHROMIUM, Browser, served

from vpipe.app.cli import main

SITE = Path(__file__).parent.parent.parent / "site" / "playground"
WRONG = "0F0,0F1,,0B0,0B1\n,1F0,1B1,1F1,1B0\n"
RIGHT = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The built playground on a server of one's own."""
    if CHROMIUM is None:
        pytest.skip("not installed: chromium")
    if not (SITE / "node_modules").is_dir() and shutil.which("npm") is None:
        pytest.skip("not installed: npm, from which Pyodide comes")
    folder = tmp_path_factory.mktemp("playground")
    subprocess.run([sys.executable, SITE / "build.py", folder], check=True, stdout=subprocess.DEVNULL)
    with served(folder) as address:
        yield address


@pytest.fixture(scope="module")
def started(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(started: Browser, address: str) -> Iterator[Browser]:
    """The browser, which has asked no other host for anything, and whose scripts have not failed."""
    started.size(1366, 900)
    yield started
    assert [one for one in started.requests if not one.startswith((address, "data:", "about:"))] == []
    assert any(one.startswith(f"{address}pyodide/") for one in started.requests), "requests of the worker are seen, too"
    assert started.said == []


def show(page: Browser, address: str, **state: str | int) -> None:
    """Open the page with a state in its link, and wait until it shows it."""
    page.open("about:blank")
    page.open(f"{address}#{urlencode({'lang': 'en'} | state)}")
    page.until("document.body && document.body.dataset.state === 'ready'")
    assert page.value("document.getElementById('error').hidden"), text(page, "#error")


def text(page: Browser, selector: str) -> str:
    return str(page.value(f"document.querySelector({json.dumps(selector)}).innerText"))


def table(page: Browser, which: str) -> list[list[str]]:
    """The cells of a table's body."""
    return list(page.value(f"[...document.querySelectorAll('{which} tbody tr')].map(row => "
                           "[...row.cells].map(cell => cell.innerText.trim()))"))


def settled(page: Browser, action: str) -> None:
    """Do something that asks Python, and wait for the answer."""
    page.value(f"delete document.body.dataset.state; {action}")
    page.until("document.body.dataset.state === 'ready'")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    main(["schedule", *words])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "pipedream"])
def test_figures_are_those_of_the_command_line(name: str, page: Browser, address: str,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    show(page, address, schedule=name, transfer="0.25", step="0.5")
    size = ["--ranks", "4", "--microbatches", "8", "--costs", "1,1,1,0.25,0.5"]
    assert text(page, "#command") == " ".join(["vpipe schedule", name, *size])
    said = json.loads(printed(capsys, name, *size, "--format", "json"))
    shown = {key: float(text(page, f"#figure-{key}"))
             for key in ("bubble", "period", "makespan", "versions", "staleness")}
    assert shown == pytest.approx({"bubble": said["bubble"], "period": said["period"], "makespan": said["makespan"],
                                   "versions": max(said["versions"]), "staleness": max(said["staleness"])}, rel=1e-5)
    halves = name == "zb_v"
    for rank, (row, peak) in enumerate(zip(table(page, "#now"), said["peak_activations"], strict=True)):
        stages = [stage for stage, ranks in enumerate(said["placement"]) if rank in ranks]
        assert row[0] == f"rank {rank}"
        assert row[5] == str(peak)
        assert row[6 + halves:9 + halves] == [" ".join(map(str, (values[stage] for stage in stages)))
                                              for values in (range(8), said["versions"], said["staleness"])]
    svg = printed(capsys, name, *size, "--format", "svg")
    rects = 'document.querySelectorAll("#picture .cell rect").length'
    assert page.value(rects) == svg.count("<title>") - 1  # every action, and nothing else, has a title


def test_all_schedules_are_compared(page: Browser, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(page, address, microbatches=4, ranks=2)
    page.until("document.body.dataset.compared")
    lines = [line.split("  ") for line in printed(capsys, "--all", "--ranks", "2", "--microbatches", "4").splitlines()]
    said = [[cell.strip() for cell in line if cell.strip()] for line in lines[3:] if len(line) > 3]
    rows = [[row[0].split()[0], *row[1:5], *row[6:]] for row in table(page, "#compare")]
    assert rows == [[cell.split(" (")[0] for cell in row] for row in said]
    settled(page, "[...document.querySelectorAll('#compare button')].find(one => one.innerText === 'zb_h1').click()")
    assert text(page, "#name") == "zb_h1"


def test_the_checker_judges_edited_actions(page: Browser, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("edited.csv").write_text(WRONG)
    assert main(["check", "edited.csv"]) == 2
    message = capsys.readouterr().err
    show(page, address, text=WRONG)
    error = text(page, "#verdict")
    assert [line.strip() for line in f"error: {error}".splitlines() if line.strip()] == \
        [line.strip() for line in message.splitlines()]
    rows = "[...document.querySelectorAll('#marks .row')].map(row => row.textContent)"
    assert page.value(rows) == [",1F0,1B1,1F1,1B0"]
    assert text(page, "#marks mark") == "1B1"
    page.value("document.getElementById('goto').click()")
    chosen = "(one => one.value.slice(one.selectionStart, one.selectionEnd))(document.getElementById('text'))"
    assert page.value(chosen) == "1B1"

    page.value("document.getElementById('text').select(); delete document.body.dataset.state")
    page.call("Input.insertText", text=RIGHT)
    page.until("document.body.dataset.state === 'ready'")
    Path("edited.csv").write_text(RIGHT)
    main(["check", "edited.csv"])
    assert text(page, "#verdict").strip() == capsys.readouterr().out.strip()
    assert (text(page, "#name"), text(page, "#figure-bubble")) == ("edited.csv", "3")
    settled(page, "document.getElementById('revert').click()")
    assert text(page, "#name") == "1f1b"


def test_keys_step_through_time(page: Browser, address: str) -> None:
    show(page, address)
    for _ in range(40):
        if page.value("document.activeElement.id") == "scroll":
            break
        page.press("Tab")
    else:
        pytest.fail("the drawing cannot be reached by the tab key")
    at = "document.getElementById('clock').innerText"
    doing = "[...document.querySelectorAll('#now .doing')].map(one => one.innerText)"
    assert page.value(doing) == ["0F0", "idle", "idle", "idle"]
    for _ in range(3):
        page.press("ArrowRight")
    assert (page.value(at), page.value(doing)) == ("3 of 33", ["0F3", "1F2", "2F1", "3F0"])
    assert page.value("document.querySelectorAll('#picture .on').length") == 4
    assert "rank 2: 2F1" in page.value("document.getElementById('say').textContent")
    assert "t=3" in page.value("location.hash")
    page.press("ArrowLeft")
    assert page.value(at) == "2 of 33"
    page.press("End")
    assert (page.value(at), page.value(doing)[0]) == ("33 of 33", "0STEP0")
    page.press("Home")
    page.press(" ")
    page.until("Number(document.getElementById('time').value) >= 2")
    page.press(" ")
    stopped = page.value(at)
    assert page.value("new Promise(done => setTimeout(done, 1000))") is None
    assert page.value(at) == stopped


def test_the_link_holds_the_state(page: Browser, address: str) -> None:
    show(page, address)

    def choose(name: str, value: str, event: str) -> None:
        settled(page, f"(one => {{ one.value = '{value}'; "
                      f"one.dispatchEvent(new Event('{event}', {{bubbles: true}})); }})"
                      f"(document.querySelector('[name={name}]'))")

    for name, value, event in (("schedule", "pipedream", "change"), ("ranks", "3", "input"),
                               ("update_every", "2", "change"), ("warmup", "4,2,0", "input"),
                               ("transfer", "0.5", "change"), ("version", "2", "input")):
        choose(name, value, event)
    page.press("ArrowRight")
    page.value("document.getElementById('language').click()")
    link = page.value("location.href")
    figures = ("[...document.querySelectorAll('.big'), document.getElementById('command'), "
               "document.getElementById('clock')].map(one => one.innerText).join()")
    before = page.value(figures)
    assert "--ranks 3 --microbatches 8 --update-every 2 --warmup-depth 4,2,0 --costs 1,1,1,0.5" in before
    page.open("about:blank")
    page.open(link)
    page.until("document.body && document.body.dataset.state === 'ready'")
    assert page.value(figures) == before
    assert page.value("document.documentElement.lang") == "zh-CN"
    assert page.value("document.querySelector('[name=version]').value") == "2"


def test_mistakes_are_shown_with_a_hint(page: Browser, address: str) -> None:
    show(page, address)
    for name, value, what in (("ranks", "0", "--ranks is 0"), ("ranks", "99", "this page draws 16 at most")):
        settled(page, f"(one => {{ one.value = '{value}'; one.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
                      f"(document.querySelector('[name={name}]'))")
        assert what in text(page, "#error .what")
        assert text(page, "#error .hint").startswith("hint: ")
    assert "Traceback" not in text(page, "body")


def test_it_fits_a_phone(page: Browser, address: str) -> None:
    page.size(360, 780, mobile=True)
    for state in ({"schedule": "pipedream", "warmup": "6,4,2,0"}, {"lang": "zh", "ranks": "16", "schedule": "zb_v"},
                  {"text": WRONG}):
        show(page, address, **state)
        assert page.value("document.documentElement.scrollWidth") == 360


def test_every_control_has_a_name(page: Browser, address: str) -> None:
    show(page, address, schedule="interleaved")
    page.call("Accessibility.enable")
    nodes = [one for one in page.call("Accessibility.getFullAXTree")["nodes"] if not one["ignored"]]
    controls = {"button", "combobox", "spinbutton", "slider", "textbox", "image", "img"}
    found = [(one["role"]["value"], one["name"]["value"]) for one in nodes if one["role"]["value"] in controls]
    assert len(found) > 20
    assert [role for role, name in found if not name.strip()] == []


def test_it_is_light_and_dark(page: Browser, address: str) -> None:
    colours = ("[getComputedStyle(document.body).backgroundColor, "
               "getComputedStyle(document.querySelector('#picture .bg')).fill]")
    light, dark = ["rgb(255, 255, 255)"] * 2, ["rgb(13, 17, 23)"] * 2
    for scheme, first, then in (("light", light, dark), ("dark", dark, light)):
        page.value("location.protocol === 'http:' && localStorage.clear()")
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        show(page, address)
        assert page.value(colours) == first
        page.value("document.getElementById('theme').click()")
        assert page.value(colours) == then
    page.value("localStorage.clear()")
    page.call("Emulation.setEmulatedMedia", features=[])


def test_both_languages_have_the_same_texts(page: Browser, address: str) -> None:
    show(page, address, lang="zh")
    keys = "import('./strings.js').then(({Words}) => ['en', 'zh'].map(one => Object.keys(new Words(one).all).sort()))"
    english, chinese = page.value(keys)
    assert set(chinese) - set(english) == {"sizes", "with_flush", "without_flush"}  # English says Python's own words
    assert set(english) <= set(chinese)
    names = "[...document.querySelectorAll('#picture > svg > text')].map(one => one.textContent)"
    assert {"前向", "反向", "优化器更新", "空闲", "激活", "数字：微批次"} <= set(page.value(names))
