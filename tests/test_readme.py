"""README.md and README.zh.md: the same structure, a script that runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def outline(page: Path) -> list[str]:
    """What stands in a page, line by line: headings, blocks of code, pictures, rows of tables."""
    text = page.read_text()
    for number, block in enumerate(BLOCK.findall(text)):
        text = text.replace(block, f"code {number}")
    return [line.split(" ")[0] if line.startswith("#") else line if line.startswith("code ") else
            line[line.index("]("):] if line.startswith("!") else f"row of {line.count('|')}"
            for line in text.splitlines() if re.match(r"#|!|\||code ", line)]


def links(page: Path) -> list[str]:
    """Where a page leads to; a page in Chinese counts as the English one, since that is its twin."""
    return sorted(re.findall(r"\]\(([^)]+)\)", BLOCK.sub("", page.read_text()).replace(".zh.md", ".md")))


def test_both_languages_say_the_same_in_the_same_order() -> None:
    assert outline(CHINESE) == outline(ENGLISH)
    assert BLOCK.findall(CHINESE.read_text()) == BLOCK.findall(ENGLISH.read_text())
    assert links(CHINESE) == links(ENGLISH)


def test_the_script_runs_as_it_stands(tmp_path: Path, forked: None) -> None:
    script = re.search(r"^```python\n(.*?)^```$", ENGLISH.read_text(), re.MULTILINE | re.DOTALL)
    assert script is not None
    (tmp_path / "script.py").write_text(script[1].replace("count=300", "count=100"))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          check=True)
    said = re.fullmatch(r"update 50: loss (\S+)\nupdate 100: loss (\S+)\nheld out: loss (\S+)\n", done.stdout)
    assert said is not None, done.stdout
    assert max(map(float, said.groups())) < 2.0  # 2.3 before training
    assert (tmp_path / "checkpoint").is_dir()
