"""The pages of the site (site/), gathered but not built: links, anchors, navigation, in both languages."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from public_names import file_of
from test_docs import FENCE, anchors

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"
MADE = r"gallery/\w+\.html|playground/"  # by runs, and from npm


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
CONFIG = yaml.load((SITE / "mkdocs.yml").read_text(), _Loader)


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    load("build").Pages(folder).gather()
    return folder


@pytest.mark.extras("catalogues", "comparison", "generation", "legacy", "orion", "translation")
def test_links_and_anchors_of_the_gathered_pages(gathered: Path) -> None:
    count = 0
    for page in gathered.rglob("*.md"):
        if "``````" in page.read_text():  # a file's source
            continue
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", FENCE.sub("", page.read_text()))):
            name, _, anchor = target.partition("#")
            there = (page.parent / name).resolve() if name else page
            if re.match(r"[a-z]+:", target) or re.match(MADE, str(there.relative_to(gathered))):
                continue
            count += 1
            assert there.is_file(), f"{page.relative_to(gathered)} links to {target}"
            assert not anchor or anchor in anchors(there), f"{page.relative_to(gathered)} links to {target}"
            chinese = there.with_suffix(".zh.md")  # to which it leads on the Chinese site
            if anchor and chinese.is_file() and not page.name.endswith(".zh.md") \
                    and not page.with_suffix(".zh.md").is_file():
                assert anchor in anchors(chinese), f"{page.relative_to(gathered)} links to {target}"
    assert count > 500


def entries(nav: list[dict[str, Any]]) -> Iterator[tuple[str, str | None]]:
    for entry in nav:
        for title, inside in entry.items():
            yield title, inside if isinstance(inside, str) else None
            if not isinstance(inside, str):
                yield from entries(inside)


@pytest.mark.extras("catalogues", "comparison", "generation", "legacy", "orion", "translation")
def test_every_page_is_in_the_navigation(gathered: Path) -> None:
    pages = {str(page.relative_to(gathered)) for page in gathered.rglob("*.md") if not page.name.endswith(".zh.md")}
    listed = [page for _, page in entries(CONFIG["nav"]) if page is not None]
    left_out = {page for page in pages if page.startswith(("source/", "decisions/0"))}
    assert sorted([*listed, *left_out]) == sorted(pages), "site/mkdocs.yml: nav"


def test_titles_are_translated() -> None:
    [plugin] = [one["i18n"] for one in CONFIG["plugins"] if "i18n" in one]
    chinese = plugin["languages"][1]["nav_translations"]
    assert set(chinese) == {title for title, _ in entries(CONFIG["nav"])}


def test_objects_of_the_api_exist() -> None:
    for page in (SITE / "pages" / "api").glob("*.md"):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            module, _, attribute = name.rpartition(".")
            source = file_of(module).read_text()
            assert re.search(rf"^(?:class |def |from .* import .*|){attribute}\b", source, re.MULTILINE), name


def test_schedules_of_the_api_are_all_that_are_registered(gathered: Path) -> None:
    page = (gathered / "api" / "generators.md").read_text()
    files = (ROOT / "vpipe" / "schedules" / "generators").glob("*.py")
    made = {f"{file.stem}.{name}" for file in files
            for name in re.findall(r"^@register_schedule\([^@]*?^def (\w+)", file.read_text(), re.MULTILINE)}
    assert set(re.findall(r"^::: vpipe\.schedules\.generators\.([\w.]+)$", page, re.MULTILINE)) == made


def test_requirements_of_the_site_are_pinned() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["site"]
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {re.split(r"[\[>]", one)[0] for one in extra} <= set(pinned)
