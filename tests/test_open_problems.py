"""docs/open-problems.md and docs/coming-from.md: their code prints what they show; their Chinese pages, and that of
docs/jobs.md, are alike.

``python tests/test_open_problems.py`` writes the outputs anew, in both languages.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vpipe.app.cli import main
from vpipe.app.config.config import load_config

pytestmark = pytest.mark.jobs

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / "open-problems.md", DOCS / "coming-from.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTS = re.compile(r"\n+(?:prints|输出)[:：]?\n+")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def in_chinese(page: Path) -> Path:
    return page.with_suffix(".zh.md")


def executed(page: Path) -> Iterator[tuple[re.Match[str], str]]:
    """Run the page's blocks of Python one after the other, and yield what each shows and what it prints."""
    text, names = page.read_text(), dict[str, Any]()
    fences = list(FENCE.finditer(text))
    for fence, after in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] != "python":
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(fence[2], page.name, "exec"), names)
        if after is not None and PRINTS.fullmatch(text[fence.end():after.start()]):
            yield after, out.getvalue()
        else:
            assert not out.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_code_prints_what_the_page_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        blocks = list(executed(page))
    assert len(blocks) >= {"open-problems": 16, "coming-from": 1}[page.stem]
    for shown, printed in blocks:
        assert printed == shown[2]
    for language, block in FENCE.findall(page.read_text()):
        if language == "shell":
            command, _, shown = block.partition("\n")
            capfd.readouterr()
            main(shlex.split(command.removeprefix("$ vpipe ")))
            assert "".join(capfd.readouterr()) == shown


def structure(page: Path) -> dict[str, list[Any]]:
    """What the two languages have in common."""
    text = page.read_text()
    prose = FENCE.sub("", text)
    return {"headings": [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)],
            "blocks": FENCE.findall(text),
            "rows": [row.count(" | ") for row in re.findall(r"^\|.*\|$", prose, re.MULTILINE)],
            "links": sorted(re.sub(r"#.*|\.zh\.md", "", link) for link in LINK.findall(prose) if link[:4] == "http")}


@pytest.mark.parametrize("page", [*PAGES, DOCS / "jobs.md"], ids=lambda page: str(page.stem))
def test_the_chinese_page_has_the_same_parts(page: Path) -> None:
    english, chinese = structure(page), structure(in_chinese(page))
    for part, found in english.items():
        assert chinese[part] == found, part


def test_problems_each_with_a_thread() -> None:
    text = FENCE.sub("", PAGES[0].read_text())
    sections = re.split(r"^## (\d+)\. ", text, flags=re.MULTILINE)[1:]
    assert sections[::2] == [str(number) for number in range(1, 22)]
    for section in sections[1::2]:
        assert re.search(r"^\*\*Elsewhere\.\*\*.*^\*\*Here\.\*\*", section, re.MULTILINE | re.DOTALL)
        assert re.search(r"https://github.com/[\w./-]+/(issues|pull)/\d+", section)
    rows = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    assert rows == sections[::2]


def test_the_config_beside_megatron_is_one(tmp_path: Path) -> None:
    file = tmp_path / "gpt.yaml"
    file.write_text(next(block for language, block in FENCE.findall(PAGES[1].read_text()) if language == "yaml"))
    assert load_config(file).parallel.chunks == 2


if __name__ == "__main__":
    for written in PAGES:
        for language in filter(Path.exists, (written, in_chinese(written))):
            text = language.read_text()
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                for shown, printed in reversed(list(executed(language))):
                    text = text[:shown.start(2)] + printed + text[shown.end(2):]
            language.write_text(text)
