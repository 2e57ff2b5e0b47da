"""Build the site: ``python site/build.py OUT_FOLDER``, which any static web server can then serve.

The pages are those of ``docs/``, of each extra's ``docs/`` and of ``site/pages/``, the gallery, and under ``source/``
whatever files of the repository they link to. All are gathered in a folder that MkDocs reads (``site/mkdocs.yml``),
with the playground.
It needs ``pip install -c constraints.txt -e ".[site]"``, npm, and a git clone.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from vpipe.schedules import RegisteredSchedule

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[([^][]*)\])\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
PAGES = ("docs/", "site/pages/", *(f"{docs.relative_to(ROOT)}/" for docs in sorted(ROOT.glob("vpipe/extras/*/docs"))))
IMAGES = (".svg", ".png")
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
GENERATORS = "<!-- every generator -->"
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}


class Pages:
    """The folder that MkDocs reads.

    Args:
        folder: to be filled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                                capture_output=True, text=True, check=True).stdout.splitlines()
        self._files = sorted(name for name in listed if (ROOT / name).is_file())
        self._wanted: list[str] = []

    def gather(self) -> None:
        """Copy docs/ and site/pages/, then what they link to, then what that links to."""
        for name in self._files:
            if name.startswith(PAGES):
                self._add(name)
        for name in self._wanted:  # grows while pages are added
            self._add(name)

    def _add(self, name: str) -> None:
        """Write the page of a file or folder of the repository."""
        target, file = self.folder / place(name), ROOT / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir() and (file / "README.md").is_file():
            name, file = f"{name}/README.md", file / "README.md"
        if file.is_dir():
            target.write_text(self._linked(name, listing(name, self._files)))
        elif file.suffix in (".md", ".ipynb"):
            text = notebook(file) if file.suffix == ".ipynb" else file.read_text().replace(GENERATORS, generators())
            target.write_text(self._linked(name, text))
        elif name.startswith(PAGES) or file.suffix in IMAGES:
            shutil.copyfile(file, target)
        else:
            target.write_text(f"{UNSEARCHED}# {name}\n\n" + block(file.read_text(), LANGUAGES.get(file.suffix, "text")))

    def _linked(self, name: str, text: str) -> str:
        """Point the links of the page of a file at the pages of the site."""
        folder = name if (ROOT / name).is_dir() else os.path.dirname(name)
        here = place(name).parent

        def link(found: re.Match[str]) -> str:
            other = os.path.normpath(os.path.join(folder, found[3]))
            if not (ROOT / other).exists():
                return found[0]  # MkDocs reports it
            if other not in self._wanted and not (other.startswith(PAGES) and (ROOT / other).is_file()):
                self._wanted.append(other)
            words = f"[{title(ROOT / other, name)}]" if found[2] == found[3] and found[2].endswith(".md") else found[1]
            return f"{words}({os.path.relpath(place(other), here)}{found[4] or ''})"

        parts = FENCE.split(text)
        return "".join(part if number % 2 else LINK.sub(link, part) for number, part in enumerate(parts))


def place(name: str) -> PurePosixPath:
    """Return where the page of a file or folder of the repository is, in the folder that MkDocs reads."""
    path = PurePosixPath(name)
    inside = next((path.relative_to(root) for root in PAGES if f"{name}/".startswith(root)), "source" / path)
    if (ROOT / name).is_dir():
        return inside / ("README.md" if (ROOT / name / "README.md").is_file() else "index.md")
    # A folder per file: MkDocs would read the "py" of gpt.py.md as a language.
    return inside if path.suffix in (".md", *IMAGES) or name.startswith(PAGES) else inside / "index.md"


def title(page: Path, linked_from: str) -> str:
    """Return the heading of a page, in Chinese for a Chinese page where there is one."""
    chinese = page.with_suffix(".zh.md")
    page = chinese if linked_from.endswith(".zh.md") and chinese.is_file() else page
    return page.read_text().partition("# ")[2].partition("\n")[0]


def generators() -> str:
    """Return the generators of the schedules in docs/schedules.md, in its order, for a page of the API."""
    names = re.findall(r"^### (\w+)$", (ROOT / "docs" / "schedules.md").read_text(), re.MULTILINE)
    found = [RegisteredSchedule.named(name).program for name in names]
    return "\n\n".join(f"::: {program.__module__}.{program.__name__}" for program in found)


def listing(folder: str, files: list[str]) -> str:
    """Return a page of links to the files of a folder."""
    inside = [name.removeprefix(f"{folder}/") for name in files if name.startswith(f"{folder}/")]
    items = [f"- [{name}]({name})\n" for name in inside if not name.endswith(".zh.md")]
    return f"{UNSEARCHED}# {folder}/\n\n{''.join(items)}"


def notebook(file: Path) -> str:
    """Return a notebook as a page; it is stored without outputs."""
    def cells() -> Iterator[str]:
        for cell in json.loads(file.read_text())["cells"]:
            text = "".join(cell["source"])
            yield text if cell["cell_type"] == "markdown" else block(text, "python")

    return "\n\n".join(cells())


def block(text: str, language: str) -> str:
    """Return text as a block of code, which may hold blocks of code itself."""
    return f"``````{language}\n{text.rstrip()}\n``````\n"


def build(out: Path) -> None:
    """Write the site into ``out``."""
    if not (ROOT / ".git").exists():
        sys.exit(f"error: {ROOT} is no git clone, which tells what belongs to the repository\nhint: clone it")
    sys.path.insert(0, str(HERE))
    import gallery
    from mkdocs.commands.build import build as build_pages
    from mkdocs.config import load_config

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Pages(folder).gather()
        gallery.fill(folder / "gallery")
        subprocess.run([sys.executable, HERE / "playground" / "build.py", folder / "playground"], check=True,
                       stdout=subprocess.DEVNULL)
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        build_pages(load_config(str(HERE / "mkdocs.yml"), docs_dir=name, site_dir=str(out.resolve())))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: no folder\nhint: python site/build.py OUT_FOLDER")
    build(Path(sys.argv[1]))
    print(f"built; to look at it: python -m http.server --directory {sys.argv[1]}")
