"""The whole site (site/build.py), built, crawled, and looked at in a headless Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from browser import CHROMIUM, Browser, served

ROOT = Path(__file__).parent.parent.parent
HOST = "http://site"
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
RUNS = {"1f1b", "zb_v", "pipedream", "unbalanced", "straggler", "recompute"}


class _Page(HTMLParser):
    """The anchors of a page, and the addresses that it names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()  # without a click
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if "href" in given:
            self.links.add(given["href"])
        loaded = [given["src"]] if "src" in given else []
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect"):
            loaded.append(given["href"])
        self.links.update(loaded)
        self.loaded.update(loaded)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    if find_spec("mkdocs") is None:
        pytest.skip("not installed: the extra 'site'")
    if not (ROOT / "site" / "playground" / "node_modules").is_dir() and shutil.which("npm") is None:
        pytest.skip("not installed: npm, from which Pyodide comes")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "site/build.py", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, _Page]:
    """Every page by its address."""
    return {f"{HOST}/{file.relative_to(site).as_posix()}": _Page(file.read_text()) for file in site.rglob("*.html")}


def test_no_link_is_dead(site: Path, pages: dict[str, _Page]) -> None:
    dead = []
    for address, page in pages.items():
        for link in page.links if not address.endswith("/404.html") else ():
            target = urlsplit(urljoin(address, link))
            if f"{target.scheme}://{target.netloc}" != HOST:
                continue
            file = site / unquote(target.path).lstrip("/")
            file = file / "index.html" if file.is_dir() else file
            there = pages.get(f"{HOST}/{file.relative_to(site).as_posix()}")
            anchor = unquote(target.fragment)
            if not file.is_file():
                dead.append(f"{address}: {link}")
            elif anchor and there is not None and "=" not in anchor and anchor not in there.anchors:
                dead.append(f"{address}: {link} (no such anchor)")
    assert dead == []
    assert len(pages) > 200


def test_pages_load_nothing_from_another_host(pages: dict[str, _Page]) -> None:
    assert [(address, link) for address, page in pages.items() for link in page.loaded
            if urlsplit(link).netloc or link.startswith("//")] == []


def test_reports_of_the_gallery(site: Path, pages: dict[str, _Page]) -> None:
    for language in ("", "zh/"):
        linked = {link for link in pages[f"{HOST}/{language}gallery/index.html"].links if link.endswith(".html")}
        assert {Path(link).stem for link in linked} == RUNS
    table = (site / "gallery" / "index.html").read_text().split("<tbody>")[1].split("</tbody>")[0]
    rows = [[float(cell.split()[0].rstrip("%")) for cell in re.findall(r">([\d.]+(?:%| MiB)?)</td>", row)]
            for row in table.split("</tr>")[:-1]]
    one_f_one_b, _, pipedream, unbalanced, straggler, recompute = rows
    bubble, straggling, kept, versions = 1, 3, 5, 6
    assert one_f_one_b[bubble] < unbalanced[bubble]
    assert straggler[straggling] > 0
    assert recompute[kept] < one_f_one_b[kept]
    assert pipedream[versions] > one_f_one_b[versions] == 1


def test_the_straggler_is_paused() -> None:
    rank = ("import sys, time\nlast = time.monotonic()\nend, longest = last + 2, 0.0\nwhile last < end:\n"
            "    now = time.monotonic()\n    longest, last = max(longest, now - last), now\nsys.exit(longest < 0.09)")
    launcher = ("import os, subprocess, sys\nenvironment = os.environ | {'RANK': '1'}\n"
                f"sys.exit(subprocess.run([sys.executable, '-c', {rank!r}], env=environment).returncode)")
    done = subprocess.run([sys.executable, "site/pause_rank.py", "1", sys.executable, "-c", launcher], cwd=ROOT)
    assert done.returncode == 0


@pytest.fixture(scope="module")
def browser(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, str]]:
    """A browser, and the address of the site."""
    if CHROMIUM is None:
        pytest.skip("not installed: chromium")
    with served(site) as address, Browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started, address


PAGES = ("", "guide/", "schedules/", "config/", "api/pipeline/", "gallery/", "play/",
         "source/vpipe/app/families/gpt.py/")


@pytest.mark.parametrize("page", [f"{language}{page}" for language in ("", "zh/") for page in PAGES])
def test_pages_fit_a_phone_and_ask_no_other_host(browser: tuple[Browser, str], page: str) -> None:
    chromium, address = browser
    chromium.size(390, 844, mobile=True)
    chromium.requests.clear()
    chromium.open(address + page)
    chromium.until(f"location.href === '{address}{page}' && document.readyState === 'complete'")
    assert chromium.value("document.documentElement.scrollWidth") == 390
    assert [one for one in chromium.requests if not one.startswith((address, "data:", "about:"))] == []


@pytest.mark.parametrize(("page", "words", "found"), [
    ("", "weight stashing", "concepts/"), ("zh/", "气泡", "zh/guide/")])
def test_search_finds(browser: tuple[Browser, str], page: str, words: str, found: str) -> None:
    chromium, address = browser
    chromium.size(1280, 900)
    chromium.open("about:blank")
    chromium.open(f"{address}{page}?q={words}")
    links = "[...document.querySelectorAll('.md-search-result__link')].map(one => one.href.split(/[?#]/)[0])"
    chromium.until(f"{links}.length > 0")
    assert f"{address}{found}" in chromium.value(links)
