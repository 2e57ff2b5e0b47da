



import json
from pathlib import Path

import pytest

from vpipe.data.local_corpus.functions import Function, machine_functions
from vpipe.data.local_corpus.sources import parse_source
from vpipe.errors import UserError

SOURCE = '''
"""A module that is read and not run."""
raise SystemExit

def kept(x):
    """Give it back, as it is."""
    y = x
    return y

def copied(x):
    """Not the same name."""
    y = x
    return y

def short(x):
    """One line too few here."""
    return x

def terse(x):
    """Too terse.

    The second paragraph does not count.
    """
    return x

def no_docstring(x):
    y = x
    z = y
    return z

def test_it(x):
    """This is a test of it."""
    y = x
    return y

class Box:
    def __len__(self):
        """Give its length, an integer."""
        length = 3
        return length

    if True:
        @property
        def lid(self):
            """Open it with care,
            always."""
            def inner(x):
                """Belongs to the one outside."""
                y = x
                return y
            return "\x0c"  # a form feed does not end a line
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """``gathered``: four modules with the same functions, two of them in a way of their own, and one that is broken."""
    folder = tmp_path / "gathered"
    (folder / "tests").mkdir(parents=True)
    (folder / "__init__.py").write_text(SOURCE)
    (folder / "again.py").write_text(SOURCE)
    (folder / "broken.py").write_text("def (:\n")
    (folder / "other.py").write_text(SOURCE.replace("y", "why"))
    (folder / "tests" / "other.py").write_text(SOURCE.replace("y", "ypsilon"))
    monkeypatch.syspath_prepend(tmp_path)
    return "gathered"


def test_functions_are_chosen_by_the_rule_and_split_by_module(package: str, tmp_path: Path) -> None:
    found = machine_functions(tmp_path / "cache", (package,))
    records = {split: [json.loads(line) for line in (found.folder / f"{split}.jsonl").read_text().splitlines()]
               for split in ("train", "test")}
    assert sorted(len(part) for part in records.values()) == [3, 3]
    assert found.manifest["counts"] == {"functions_found": 21, "functions": 6, "modules": 2}
    by_path = {record["path"]: [r["func_name"] for r in part] for part in records.values() for record in part}
    assert by_path == {path: ["kept", "copied", "Box.lid"] for path in ("__init__.py", "other.py")}
    assert all(record["partition"] == split for split, part in records.items() for record in part)
    kept, _, lid = next(part for part in records.values() if part[0]["path"] == "__init__.py")
    assert kept["code"] == 'def kept(x):\n    """Give it back, as it is."""\n    y = x\n    return y'
    assert (kept["docstring"], kept["language"], kept["repo"]) == ("Give it back, as it is.", "python", package)
    assert lid["code"].startswith('def lid(self):\n    """Open it with care,\n')
    assert lid["code"].endswith('    return "\x0c"  # a form feed does not end a line')


def test_what_was_gathered_is_found_again(package: str, tmp_path: Path) -> None:
    found = machine_functions(tmp_path / "cache", (package,))
    written = (found.folder / "manifest.json").stat().st_mtime_ns
    assert machine_functions(tmp_path / "cache", (package,)) == found
    assert (found.folder / "manifest.json").stat().st_mtime_ns == written


@pytest.mark.parametrize(("name", "lines", "docstring", "chosen"), [
    ("f", 4, "One two three", True), ("f", 3, "One two three", False), ("f", 4, "One two", False),
    ("latest", 4, "One two three", False), ("C.__init__", 4, "One two three", False),
    ("C.__enter", 4, "One two three", True), ("testing.f", 4, "\n\nOne\ntwo three", True),
    ("f", 4, "One.\n  \nTwo three", False)])
def test_the_rule(name: str, lines: int, docstring: str, chosen: bool) -> None:
    assert Function("package", "path.py", name, "\n".join("x" * lines), docstring).chosen is chosen


def test_packages_without_functions_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="0 modules with functions to learn from in the sources of no_such_package"):
        machine_functions(tmp_path, ("no_such_package",))
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_sources_are_read_in_the_encoding_that_they_declare(tmp_path: Path) -> None:
    path = tmp_path / "old.py"
    path.write_bytes("# coding: latin-1\nname = 'é'\r\n".encode("latin-1"))
    module = parse_source(path)
    assert module is not None
    assert module[0] == "# coding: latin-1\nname = 'é'\n"
    path.write_bytes(b"# coding: no-such\n")
    assert parse_source(path) is None
